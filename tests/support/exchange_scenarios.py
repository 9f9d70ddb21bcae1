"""What a rank does in the tests of messages from rank to rank; run by `collective_scenarios`."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from fireflyer.base.errors import FireflyerError
from fireflyer.collectives import Communicator

__all__ = ["SCENARIOS"]

Array = npt.NDArray[Any]


def say(event: str, **fields: Any) -> None:
    print(json.dumps({"event": event} | fields), flush=True)


def filled(source: int, target: int, number: int, size: int, dtype: str) -> Array:
    """What `source` has for `target`; every rank can compute it."""
    rng = np.random.default_rng([source, target, number])
    return rng.integers(0, 256, size * np.dtype(dtype).itemsize, dtype="u1").view(dtype)


def exchange_correctness(comm: Communicator, params: dict[str, Any]) -> None:
    """Every operation, element type and size, with uneven parts too."""
    me, ranks = comm.rank, range(comm.world_size)
    for number, (dtype, size) in enumerate((d, n) for d in params["dtypes"] for n in params["sizes"]):
        sizes = [[(size * (1 + (3 * a + b) % 4)) // 2 for b in ranks] for a in ranks]
        outgoing = np.concatenate([filled(me, b, number, sizes[me][b], dtype) for b in ranks])
        expected = np.concatenate([filled(a, me, number, sizes[a][me], dtype) for a in ranks])
        got = np.empty_like(expected)
        comm.all_to_all(got, outgoing, in_splits=sizes[me], out_splits=[sizes[a][me] for a in ranks])
        assert got.tobytes() == expected.tobytes(), f"all_to_all of {size} {dtype}"
        root = number % comm.world_size
        mine = filled(me, root, number, size, dtype)
        whole = np.empty(size * comm.world_size, dtype) if me == root else None
        comm.gather(mine, root=root, out=whole)
        if whole is not None:
            assert whole.tobytes() == b"".join(filled(a, root, number, size, dtype).tobytes() for a in ranks)
        back = np.empty_like(mine)
        comm.scatter(back, root=root, array=whole)
        assert back.tobytes() == mine.tobytes()
        works = [
            comm.send(filled(me, b, number, size, dtype), to=b, tag=number, async_op=True) for b in ranks if b != me
        ]
        for a in reversed(ranks):
            if a != me:
                comm.recv(mine, source=a, tag=number)
                assert mine.tobytes() == filled(a, me, number, size, dtype).tobytes(), f"message of {size} {dtype}"
        for work in works:
            work.wait()
    say("result", digest=hashlib.sha256(b"same").hexdigest(), descriptors=len(os.listdir("/proc/self/fd")))


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
    function.__name__: function
    for function in (exchange_correctness, endless_exchange, everyone_sends, message_beside_sum)
}
