"""Ranks that make one call again and again until it fails; one of them may make another one instead.

Run as `python -m tests.support.ranks.fault_ranks JSON`, by `processes`.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import numpy as np
from tests.support.ranks.collective_scenarios import DivertedStore, say
from tests.support.ranks.joining import joined

from fireflyer.base.errors import FireflyerError
from fireflyer.collectives import Communicator
from fireflyer.identity.secrets import Secret


def call(comm: Communicator, kind: str, count: int, dtype: str = "f4", root: int = 0, op: str = "sum") -> None:
    """The operation on parts of `count` elements for each rank."""
    part, whole = np.ones(count, dtype), np.ones(count * comm.world_size, dtype)
    mine = comm.rank == root
    if kind == "allreduce":
        comm.allreduce(part, op=op)
    elif kind == "reduce":
        comm.reduce(part, root=root, op=op)
    elif kind == "broadcast":
        comm.broadcast(part, root=root)
    elif kind == "reduce_scatter":
        comm.reduce_scatter(part, whole, op=op)
    elif kind == "allgather":
        comm.allgather(whole, part)
    elif kind == "all_to_all":
        comm.all_to_all(np.empty_like(whole), whole)
    elif kind == "send":  # a ring of messages, and nothing else
        sent = comm.send(part, to=(comm.rank + 1) % comm.world_size, async_op=True)
        comm.recv(np.empty_like(part), source=(comm.rank - 1) % comm.world_size)
        sent.wait()
    elif kind == "gather":
        comm.gather(part, root=root, out=whole if mine else None)
    elif kind == "scatter":
        comm.scatter(part, root=root, array=whole if mine else None)
    else:
        comm.barrier()


def run(comm: Communicator, params: dict[str, Any]) -> None:
    usual: dict[str, Any] = params["call"]
    for step in range(1 << 30):
        odd = comm.rank == params.get("odd") and step == params["at"]
        call(comm, **(usual | params["other"] if odd else usual))
        comm.barrier()  # who only gives, as all but the root of a gather do, would run ahead of the others
        if step == 20:
            say("under way")


def main() -> None:
    arguments = json.loads(sys.argv[1])
    params = arguments["params"]

    def diverted(address: str, secret: Secret) -> DivertedStore:
        store = DivertedStore(address, secret)
        store.proxy_port = params.get("proxies", {}).get(str(arguments["node"]))
        store.listen_port = params.get("listen_ports", {}).get(str(arguments["rank"]))
        return store

    comm = joined(arguments, store_of=diverted, dump_dir=params.get("dump_dir"))
    try:
        run(comm, params)
    except FireflyerError as error:
        say("failed", type=type(error).__name__, culprit=getattr(error, "rank", None), message=str(error))
    sys.stdin.read()  # so that the end of one process is not what the others report
    comm.close()


if __name__ == "__main__":
    main()
