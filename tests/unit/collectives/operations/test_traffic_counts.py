"""What the executor sends is what the transfers of its plan say, connection by connection, as the kernel counts it."""

from __future__ import annotations

import os
import socket
import struct
import threading
from collections import Counter
from typing import Final

import numpy as np
import pytest

from fireflyer.collectives import Communicator, Plan, make_plan, traffic
from fireflyer.collectives.planning.plan import HALVING_DOUBLING, LINE, RING, TREE, Route
from fireflyer.identity.secrets import new_secret
from fireflyer.runtime.store import LocalStore

KIB: Final = 1024
ELEMENTS: Final = 512 * KIB
BYTES_RECEIVED: Final = 128
"""Place of tcpi_bytes_received in struct tcp_info of Linux."""


def received() -> Counter[int]:
    """Bytes that have come to each TCP socket of this process."""
    found: Counter[int] = Counter()
    for name in os.listdir("/proc/self/fd"):
        try:
            with socket.socket(fileno=os.dup(int(name))) as one:
                if one.family == socket.AF_INET and one.type == socket.SOCK_STREAM:
                    info = one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, BYTES_RECEIVED + 8)
                    found[int(name)] = struct.unpack_from("Q", info, BYTES_RECEIVED)[0]
        except OSError:  # no socket, or closed meanwhile
            continue
    return found


def counted(plan: Plan) -> list[int]:
    """Bytes of one allreduce over each connection in each direction, in ascending order."""
    store, secret = LocalStore(), new_secret()
    counts: list[Counter[int]] = []

    def run(rank: int) -> None:
        where = {"rank": rank, "world_size": plan.world_size, "node": plan.node_of_rank[rank]}
        with Communicator.create(**where, store=store, secret=secret, plan=plan) as comm:  # type: ignore[arg-type]
            array = np.ones(ELEMENTS, np.float32)
            for _ in range(2):
                comm.allreduce(array)
                comm.barrier()
                if rank == 0:
                    counts.append(received())
                comm.barrier()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(plan.world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    first, second = counts
    return sorted(count - first[place] for place, count in second.items())


@pytest.mark.parametrize("algorithm", [TREE, RING, LINE, HALVING_DOUBLING])
def test_an_allreduce_sends_over_each_connection_what_its_transfers_say(algorithm: str) -> None:
    plan = make_plan(range(5), routes=[Route("allreduce", None, algorithm, 64 * KIB)])
    expected: Counter[tuple[int, int, int | None]] = Counter()
    for one in traffic(plan, "allreduce", ELEMENTS):
        expected[one.source, one.target, one.connection] += one.nbytes
    ours = sorted(expected.values())
    others, theirs = (counts := counted(plan))[: -len(ours)], counts[-len(ours) :]
    assert theirs == pytest.approx(ours, rel=0.01)
    assert sum(theirs) >= sum(ours)  # frames have headers
    assert sum(others) < 0.01 * sum(ours)  # control connections
