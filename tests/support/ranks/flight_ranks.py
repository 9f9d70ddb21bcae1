"""Ranks that make the same calls, but for one that does something else; each leaves a dump when its group fails.

Run as `python -m tests.support.ranks.flight_ranks JSON`, by `processes`.
"""

from __future__ import annotations

import json
import sys
import threading
from typing import Any

import numpy as np
from tests.support.jobs.launching import wait_until
from tests.support.patience import allowed_s
from tests.support.ranks.collective_scenarios import say
from tests.support.ranks.joining import joined

from fireflyer.base.errors import FireflyerError
from fireflyer.collectives import Communicator


def program(comm: Communicator, params: dict[str, Any]) -> None:
    """Sums of 1, 2, 3, ... thousand elements; at number `at`, rank `odd` waits for a line, then does what `how` says.
    The others say when they are in that sum."""
    for number in range(params["operations"]):
        count = 1000 * (number + 1)
        if number == params["at"] and comm.rank == params["odd"]:
            sys.stdin.readline()
            if params["how"] == "skip":
                continue
            if params["how"] == "other":
                count += 1
        elif number == params["at"] and params["odd"] >= 0:
            threading.Thread(target=say_when_in, args=(comm, number)).start()
        comm.allreduce(np.ones(count, "f4"))
    comm.barrier()


def say_when_in(comm: Communicator, seq: int) -> None:
    wait_until(lambda: any(r.seq == seq and r.started_ns > 0 for r in comm.records().records), allowed_s(30))
    say("in it")


def endless(comm: Communicator, params: dict[str, Any]) -> None:
    """Until it breaks."""
    array = np.ones(params["count"], "f4")
    for step in range(1 << 30):
        comm.allreduce(array)
        if step == 20:
            say("under way")


def circle(comm: Communicator, params: dict[str, Any]) -> None:
    """Every rank first waits for a message of the next one."""
    comm.barrier()
    comm.recv(np.empty(8, "f4"), source=(comm.rank + 1) % comm.world_size)


def main() -> None:
    arguments = json.loads(sys.argv[1])
    params = arguments["params"]
    comm = joined(arguments, peer_memory=params.get("peer_memory", True), dump_dir=params["dump_dir"])
    try:
        {"program": program, "endless": endless, "circle": circle}[arguments["scenario"]](comm, params)
    except FireflyerError as error:
        say("failed", type=type(error).__name__, culprit=getattr(error, "rank", None), message=str(error))
    else:
        comm.dump()
        comm.barrier()
        say("dumped")
    comm.close()
    say("done")


if __name__ == "__main__":
    main()
