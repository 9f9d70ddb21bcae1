"""A rank that goes on: it sums, and re-forms its group when ranks are lost or want to come in.

Run as `python -m tests.support.ranks.reform_scenarios JSON`; a rank of -1 joins the group that it finds.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import time
from typing import Any

import numpy as np
from tests.support.ranks.collective_scenarios import say

from fireflyer.base.errors import Aborted, PeerFailed
from fireflyer.base.units import SECOND
from fireflyer.collectives import Communicator
from fireflyer.identity.secrets import load_secret
from fireflyer.runtime.store import StoreClient

COUNT = 300_001
GRACE_NS = 2 * SECOND


class DyingStore(StoreClient):
    """Kills its process when it is called the `calls_left`-th time."""

    calls_left = -1

    def _count(self) -> None:
        self.calls_left -= 1
        if self.calls_left == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    def set(self, key: str, value: bytes) -> None:
        self._count()
        super().set(key, value)

    def set_if_missing(self, key: str, value: bytes) -> bytes:
        self._count()
        return super().set_if_missing(key, value)

    def get(self, key: str, timeout_ns: int) -> bytes:
        self._count()
        return super().get(key, timeout_ns)

    def try_get(self, key: str) -> bytes | None:
        self._count()
        return super().try_get(key)

    def keys(self, prefix: str) -> list[str]:
        self._count()
        return super().keys(prefix)

    def wait(self, keys: list[str], timeout_ns: int) -> None:
        self._count()
        super().wait(keys, timeout_ns)


def sum_digest(comm: Communicator) -> str:
    """The bits of a sum that says who is in the group, and in which order they are added."""
    array = np.random.default_rng([comm.rank, comm.world_size]).standard_normal(COUNT).astype("f4")
    comm.allreduce(array)
    return hashlib.sha256(array.tobytes()).hexdigest()


def tell(comm: Communicator, gradient: Any, began_ns: int) -> None:
    took_s = (time.monotonic_ns() - began_ns) / SECOND
    say(
        "formed",
        rank=comm.rank,
        nodes=comm.plan.node_of_rank,
        digest=sum_digest(comm),
        took_s=took_s,
        registered=comm.registered(gradient),
    )


def others_wait(comm: Communicator, store: StoreClient) -> bool:
    """Rank 0 asks, all hear the same."""
    answer = np.array([comm.newcomers(store) if comm.rank == 0 else 0])
    comm.broadcast(answer)
    return bool(answer[0])


def main() -> None:
    arguments = json.loads(sys.argv[1])
    secret, rank = load_secret(arguments["secret_file"]), arguments["rank"]
    store = DyingStore(arguments["store"], secret)
    common: dict[str, Any] = {"node": arguments["node"], "store": store, "secret": secret}
    if rank < 0:
        comm = Communicator.join(**common)
        gradient = comm.empty(COUNT)
        tell(comm, gradient, time.monotonic_ns())
    else:
        comm = Communicator.create(rank=rank, world_size=arguments["world_size"], **common)
        gradient = comm.empty(COUNT)
    say("joined")
    step, changed = 0, rank < 0
    while not changed or comm.world_size != arguments["last_size"] or step < 40:  # the first group does not end
        began_ns = time.monotonic_ns()
        try:
            if not others_wait(comm, store):
                comm.allreduce(gradient)
                step += 1
                if step in (1, 20):
                    say("step")
                continue
        except (PeerFailed, Aborted) as error:
            say("failed", type=type(error).__name__, culprit=getattr(error, "rank", None))
            began_ns = time.monotonic_ns()
        store.calls_left = arguments.get("calls_left", -1)
        comm = comm.reform(store, grace_ns=GRACE_NS)
        tell(comm, gradient, began_ns)
        step, changed = 0, True
    comm.barrier()
    comm.close()
    store.close()
    say("done")


if __name__ == "__main__":
    main()
