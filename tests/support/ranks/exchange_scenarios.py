"""What a rank does in the tests of messages from rank to rank; run by `collective_scenarios`."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from fireflyer.base.errors import FireflyerError
from fireflyer.collectives import Communicator

__all__ = ["SCENARIOS"]


def say(event: str, **fields: Any) -> None:
    os.write(1, (json.dumps({"event": event} | fields) + "\n").encode())


def endless_exchange(comm: Communicator, params: dict[str, Any]) -> None:
    """Exchanges until one fails; a rank named in `late` stops calling after `late_after` of them, but lives on.

    `how` is "all_to_all", or "ring": a message to the next rank, one from the previous one."""
    size, world, me = params["size"], comm.world_size, comm.rank
    array, out = np.ones(size * world, "f4"), np.empty(size * world, "f4")
    if params.get("forks") and os.fork() == 0:
        os.read(0, 1)  # ends with the test, not with its parent
        os._exit(0)

    def exchange() -> None:
        if params["how"] == "all_to_all":
            comm.all_to_all(out, array)
            return
        work = comm.send(array[:size], to=(me + 1) % world, async_op=True)
        comm.recv(out[:size], source=(me - 1) % world)
        work.wait()

    step = 0
    while True:
        if me in params.get("late", ()) and step == params["late_after"]:
            say("late")
            sys.stdin.read()
        try:
            exchange()
        except FireflyerError as error:
            fail("failed", error, step)
            break
        step += 1
        if step in (1, 20):
            say("step", step=step)
    try:
        comm.barrier()
    except FireflyerError as error:
        fail("failed again", error, step)
    say("gave up")
    sys.stdin.read()


def everyone_sends(comm: Communicator, params: dict[str, Any]) -> None:
    """A deadlock of the program: all send large messages in a ring, and nobody receives."""
    try:
        comm.send(np.ones(params["size"], "f4"), to=(comm.rank + 1) % comm.world_size)
    except FireflyerError as error:
        fail("failed", error, 0)


def message_beside_sum(comm: Communicator, params: dict[str, Any]) -> None:
    """Rank 0 waits for a message of rank 1, which hangs; the others wait in an allreduce for rank 0 and 1."""
    try:
        if comm.rank == 1:
            say("late")
            sys.stdin.read()
        elif comm.rank == 0:
            comm.recv(np.empty(5), source=1)
        comm.allreduce(np.ones(5))
    except FireflyerError as error:
        fail("failed", error, 0)
    sys.stdin.read()


def fail(event: str, error: FireflyerError, step: int) -> None:
    culprit = getattr(error, "rank", None)
    say(event, type=type(error).__name__, culprit=culprit, message=str(error), step=step)


SCENARIOS: dict[str, Callable[[Communicator, dict[str, Any]], None]] = {
    function.__name__: function for function in (endless_exchange, everyone_sends, message_beside_sum)
}
