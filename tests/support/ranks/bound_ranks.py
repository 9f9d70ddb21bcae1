"""A rank on a machine that a directory describes. Run as `python -m tests.support.ranks.bound_ranks JSON`, by
`processes`."""

from __future__ import annotations

import json
import logging
import os
import sys

import msgspec
import numpy as np
from tests.support.ranks.joining import joined

from fireflyer.runtime.disk import RealDisk
from fireflyer.topology import read_machine


def main() -> None:
    arguments = json.loads(sys.argv[1])
    params = arguments["params"]
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(f"{record.levelname} {record.getMessage()}")  # type: ignore[method-assign]
    logger = logging.getLogger("fireflyer.collectives.bootstrap.cpu_binding")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    root = params["root"]
    machine = read_machine(RealDisk(), root=f"{root}/sys", status=f"{root}/proc/self/status")
    if params.get("mask") is not None:
        os.sched_setaffinity(0, params["mask"])
    if params.get("masks") is not None:
        mine = params["masks"][arguments["rank"]]
        os.sched_setaffinity(0, mine)
        machine = msgspec.structs.replace(machine, allowed_cpus=tuple(mine))
    with joined(arguments, machine=machine, pin=params.get("pin", True)) as comm:
        array = comm.empty(100_000)
        array[:] = comm.rank + 1
        comm.allreduce(array)
        assert array[0] == sum(range(comm.world_size + 1))
        word, peer = np.zeros(1), comm.rank ^ 1
        work = comm.send(word, to=peer, async_op=True)  # so that its thread exists
        comm.recv(word, source=peer)
        work.wait()
        print(
            json.dumps({"event": "bound", "pid": os.getpid(), "binding": str(comm.cpu_binding), "log": lines}),
            flush=True,
        )
        sys.stdin.read()


if __name__ == "__main__":
    main()
