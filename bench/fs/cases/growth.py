"""How figures change from 1 to 4 nodes, each with one chain, without copies.

All of them share this machine's processors: the best that can be seen is that more nodes cost nothing.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from bench.fs import bounds
from bench.fs.cluster import running, spread
from bench.fs.results import of_bytes, of_small
from bench.fs.turns import in_turns
from bench.fs.work import Chunks
from bench.report import Options, Result
from fireflyer.base.units import KIB, MIB

__all__ = ["DURATION_S", "KEPT", "LARGE", "ROUNDS", "SMALL", "WRITES", "measure", "run"]

DURATION_S: Final = {"tiny": 0.1, "brief": 0.7, "full": 2.0}
NODES: Final = {"tiny": (1, 2), "brief": (1, 2, 4), "full": (1, 2, 3, 4)}
ROUNDS: Final = 3
KEPT: Final = 32
"""Chunks of 1 MiB that are read."""
LARGE: Final = "read 1MiB"
SMALL: Final = "read 4KiB"
WRITES: Final = "write 1MiB, 1 replica, durable"


def run(options: Options) -> Iterator[Result]:
    for nodes in NODES[options.scale]:
        name = f"growth/nodes/{nodes}"
        chosen = [what for what in (LARGE, SMALL, WRITES) if options.selects(f"{name}/{what}")]
        if chosen:
            yield from asyncio.run(_measure(options, nodes, name, chosen))


async def _measure(options: Options, nodes: int, name: str, chosen: list[str]) -> list[Result]:
    with tempfile.TemporaryDirectory(prefix="ff-bench-") as directory:
        stream = bounds.random_file(directory)
        async with running(Path(directory), nodes=nodes, chains=spread(nodes, 1)) as cluster:
            with cluster.ring() as ring:
                chunks = Chunks(ring, KEPT, nodes, cluster.processor_s)
                chunks.fill()
                return [measure(options, what, f"{name}/{what}", chunks, stream, nodes) for what in chosen]


def measure(options: Options, what: str, case: str, chunks: Chunks, stream: str, nodes: int) -> Result:
    """One of `LARGE`, `SMALL` and `WRITES`; `stream` is a file to be sent."""
    duration_s, rounds = DURATION_S[options.scale], min(ROUNDS, options.rounds)
    if what == SMALL:
        echo = {"echo": lambda: bounds.echo(4 * KIB, 64, duration_s, nodes)}
        taken = in_turns(rounds, lambda: chunks.reads(4 * KIB, 64, duration_s), echo)
        return of_small(case, taken, f"{nodes} bare epoll servers with messages of the same sizes")
    ours = {LARGE: lambda: chunks.reads(MIB, 16, duration_s), WRITES: lambda: chunks.writes(8, duration_s)}[what]
    taken = in_turns(rounds, ours, {"sockets": lambda: bounds.stream(stream, MIB, 16, duration_s)})
    metric = "read_bytes_per_s" if what == LARGE else "write_bytes_per_s"
    return of_bytes(case, metric, taken, bound=taken.others["sockets"])
