"""Many storage processes answer one client at once, behind one shallow queue, with request-to-send and without it.

Every host is a network namespace with a cable of 200 Mbit/s to one bridge (`tests.support.network.namespaces`); at 1
Gbit/s two processors are busy with packets, and that is measured. The port of the client's cable keeps 64 KiB, as a
switch does, and drops the rest; packets are of 1514 bytes on all cables. The client asks every node for one piece of
256 KiB at the same moment, waits for all, and asks again: how long each piece took is counted from the moment of
asking, whoever waits for permission.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
from tests.support.network import namespaces
from tests.support.network.namespaces import INTERFACE, Host, Network, enter_namespace, network_of

from bench.fs.cluster import Cluster, running, spread
from bench.fs.work import FILE, Chunks
from bench.report import Bound, Options, Result, figure
from fireflyer.base.units import KIB, MS
from fireflyer.fs.client import READ, Ring
from fireflyer.fs.client import Options as ClientOptions
from fireflyer.fs.core.requests.effects import Limits

__all__ = ["missing", "run"]

RATE_BITS_PER_S: Final = 2e8
QUEUE_BYTES: Final = 64 * KIB
BURST_BYTES: Final = 16 * KIB
"""Of the bucket that empties the queue."""
PAYLOAD: Final = 1448 / 1514
SENDERS: Final = 2
"""Who may send at once, with request-to-send."""
PIECE_BYTES: Final = 256 * KIB
NODES: Final = {"tiny": (2,), "brief": (8,), "full": (4, 8, 16, 32)}
DURATION_S: Final = {"tiny": 0.2, "brief": 2.0, "full": 3.0}
_ROUNDS: Final = 4


def missing() -> str:
    return namespaces.missing()


def run(options: Options) -> Iterator[Result]:
    for nodes in NODES[options.scale] if not missing() else ():
        if any(options.selects(_name(nodes, senders)) for senders in (0, SENDERS)):
            yield from _measure(options, nodes)


class _Turn(NamedTuple):
    """Seconds from asking to arrival of each piece; the time of all; what the queue dropped meanwhile."""

    delays_s: list[float]
    elapsed_s: float
    drops: int

    @property
    def bytes_per_s(self) -> float:
        return len(self.delays_s) * PIECE_BYTES / self.elapsed_s


def _measure(options: Options, nodes: int) -> list[Result]:
    with network_of(nodes + 1, rate_bits_per_s=RATE_BITS_PER_S) as network:
        host = _make_shallow(network)
        with _thread_of(network.control) as here:
            turns = here.submit(asyncio.run, _run_cluster(options, nodes, network, host)).result()
    return [_result(nodes, senders, taken) for senders, taken in turns.items()]


async def _run_cluster(options: Options, nodes: int, network: Network, host: Host) -> dict[int, list[_Turn]]:
    """Called on the host of the bridge, where the manager is."""
    few: dict[str, Any] = {"io_threads": 1, "job_threads": 1}
    with tempfile.TemporaryDirectory(prefix="ff-bench-") as directory:
        async with running(Path(directory), nodes=nodes, chains=spread(nodes, 1), network=network, **few) as cluster:
            with _thread_of(host) as there:
                loop = asyncio.get_running_loop()
                return await loop.run_in_executor(there, _take_turns, options, nodes, cluster, network, host)


def _thread_of(host: Host) -> concurrent.futures.ThreadPoolExecutor:
    return concurrent.futures.ThreadPoolExecutor(1, initializer=enter_namespace, initargs=(host.namespace,))


def _make_shallow(network: Network) -> Host:
    """The last host, the client's."""
    host = network.hosts[-1]
    for one in network.hosts:
        one.run(f"ip link set dev {INTERFACE} gso_max_segs 1")
    bucket = f"tbf rate {RATE_BITS_PER_S:.0f}bit burst {BURST_BYTES} limit {QUEUE_BYTES}"
    network.control.run(f"tc qdisc replace dev {_port(host)} root {bucket}")
    return host


def _take_turns(options: Options, nodes: int, cluster: Cluster, network: Network, host: Host) -> dict[int, list[_Turn]]:
    """Called on the client's host."""
    turns: dict[int, list[_Turn]] = {0: [], SENDERS: []}
    limited = ClientOptions(limits=Limits(senders=SENDERS))
    with cluster.ring() as free, cluster.ring(limited) as asking:
        Chunks(free, nodes, nodes).fill()
        for number in range(min(_ROUNDS, options.rounds) + 1):  # the first round warms up
            for senders, ring in ((0, free), (SENDERS, asking)):
                before = _drops(network, host)
                delays_s, elapsed_s = _stripes(ring, nodes, DURATION_S[options.scale])
                if number:
                    turns[senders].append(_Turn(delays_s, elapsed_s, _drops(network, host) - before))
    return turns


def _stripes(ring: Ring, nodes: int, duration_s: float) -> tuple[list[float], float]:
    memory = np.empty((nodes, PIECE_BYTES), dtype=np.uint8)
    reads = np.zeros(nodes, READ)
    reads["chain"], reads["file"], reads["index"] = 1 + np.arange(nodes), FILE, np.arange(nodes)
    reads["length"], reads["at"] = PIECE_BYTES, np.arange(nodes) * PIECE_BYTES
    delays_s: list[float] = []
    began_s = time.perf_counter()
    while (asked_s := time.perf_counter()) < began_s + duration_s:
        ring.prepare_reads(0, reads, memory)
        while ring.under_way:
            over = ring.wait(1)
            for error in over.errors.values():
                raise error
            delays_s += [time.perf_counter() - asked_s] * len(over.tags)
    return delays_s, time.perf_counter() - began_s


def _drops(network: Network, host: Host) -> int:
    said = json.loads(network.control.run(f"tc -s -j qdisc show dev {_port(host)}"))
    return sum(int(one["drops"]) for one in said if one["kind"] == "tbf")


def _port(host: Host) -> str:
    return f"port{host.number}"


def _result(nodes: int, senders: int, turns: list[_Turn]) -> Result:
    delays_s = [delay for turn in turns for delay in turn.delays_s]
    p50_s, p99_s = statistics.median(delays_s), statistics.quantiles(delays_s, n=100)[98]
    drops = statistics.median(turn.drops / len(turn.delays_s) for turn in turns)
    bound = RATE_BITS_PER_S / 8 * PAYLOAD
    ours = figure([turn.bytes_per_s for turn in turns])
    return Result(
        suite="fs", case=_name(nodes, senders), metric="read_bytes_per_s", better="higher", ours=ours, peers={},
        bound=Bound(bound, "the payload of 200 Mbit/s"), target="",
        note=f"99 of 100 pieces within {p99_s * 1e9 / MS:.0f} ms (one: {p50_s * 1e9 / MS:.0f} ms), "
        f"{drops:.1f} packets dropped for each piece",
        more={"p50_s": p50_s, "p99_s": p99_s},
    )  # fmt: skip


def _name(nodes: int, senders: int) -> str:
    return f"incast/200Mbit/{nodes} nodes/" + (f"request-to-send {senders}" if senders else "all at once")
