"""Reads, writes and delays of the chunk store over loopback, each beside its bound in the same rounds."""

from __future__ import annotations

import asyncio
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from tests.support.fs_processes import running

from bench.fs import bounds
from bench.fs.work import Chunks
from bench.report import Bound, Figure, Options, Result, Suite, figure
from fireflyer.base.units import KIB, MIB
from fireflyer.fs.client import open_ring

__all__ = ["run"]

DURATION_S: Final = {"tiny": 0.1, "brief": 1.0, "full": 3.0}
CHUNKS: Final = 64
DEPTH: Final = 64
BATCH: Final = 16
"""Of 1 MiB reads."""
WRITES: Final = 8
"""Under way."""
SAMPLES: Final = {"tiny": 50, "brief": 1000, "full": 5000}


def run(options: Options) -> Suite:
    results = []
    for result in _all(options):
        print(f"{result.case}: {result.note}", file=sys.stderr, flush=True)
        results.append(result)
    load = os.getloadavg()[0]
    return Suite(results=tuple(results), remarks=(f"{os.cpu_count()} processors, load at the end {load:.1f}",))


def _all(options: Options) -> Iterator[Result]:
    for nodes, replicas, durable, cases in (
        (3, 3, True, ("read/batch/1MiB/3 nodes/cached", "read/random/4KiB/64 deep/cached", "delay/read/4KiB/cached")),
        (2, 2, True, ("write/1MiB/2 replicas/durable",)),
        (2, 2, False, ("write/1MiB/2 replicas/relaxed",)),
    ):
        chosen = [case for case in cases if options.selects(case)]
        if chosen:
            yield from asyncio.run(_measure(options, nodes, replicas, durable, chosen))


async def _measure(options: Options, nodes: int, replicas: int, durable: bool, cases: list[str]) -> list[Result]:
    with tempfile.TemporaryDirectory(prefix="ff-bench-") as directory:
        async with running(Path(directory), nodes=nodes, replicas=replicas, durable=durable, io_threads=2) as cluster:
            await cluster.until_all_serve()
            with open_ring([cluster.manager.address], cluster.site.service) as ring:
                chunks = Chunks(ring, CHUNKS)
                chunks.fill()
                return [_case(options, case, chunks, directory) for case in cases]


def _case(options: Options, case: str, chunks: Chunks, directory: str) -> Result:
    duration_s = DURATION_S[options.scale]
    if case.startswith("delay"):
        return _delays(options, case, chunks)
    if case.startswith("write"):
        return _writes(options, case, chunks, directory, duration_s)
    if "4KiB" in case:
        return _random(options, case, chunks, duration_s)
    path = os.path.join(directory, "stream")
    Path(path).write_bytes(os.urandom(MIB))
    rounds = _rounds(
        options,
        lambda: MIB * chunks.reads(MIB, BATCH, duration_s),
        lambda: bounds.stream_bytes_per_s(path, MIB, BATCH, duration_s),
    )
    share = rounds[0].median / rounds[1].median
    return Result(
        suite="fs", case=case, metric="read_bytes_per_s", better="higher", ours=rounds[0], peers={},
        bound=Bound(rounds[1].median, "one C program pair: sendfile to recv over loopback, one connection"),
        target="at least 70 % of the bound", note=f"{100 * share:.0f} % of the bound", met=share >= 0.7,
        verdicts={"at least 70 % of the bound": share >= 0.7},
    )  # fmt: skip


def _random(options: Options, case: str, chunks: Chunks, duration_s: float) -> Result:
    ours, echo = _rounds(
        options,
        lambda: 1 / chunks.reads(4 * KIB, DEPTH, duration_s),
        lambda: 1 / bounds.echo_per_s(4 * KIB, DEPTH, duration_s),
    )
    verdicts: dict[str, bool | None] = {
        "at least 100,000 per second": ours.median <= 1e-5,
        "at most twice the bound": ours.median <= 2 * echo.median,
    }
    return Result(
        suite="fs", case=case, metric="read_s", better="lower", ours=ours, peers={},
        bound=Bound(echo.median, "a bare epoll server with messages of the same sizes, one connection"),
        target="; ".join(verdicts), note=f"{1 / ours.median:,.0f} per second, bound {1 / echo.median:,.0f}",
        met=all(verdicts.values()), verdicts=verdicts,
    )  # fmt: skip


def _delays(options: Options, case: str, chunks: Chunks) -> Result:
    ours: list[float] = []
    echo: list[float] = []
    for _ in range(options.rounds):
        ours += chunks.delays_s(SAMPLES[options.scale])
        echo += bounds.echo_delays_s(4 * KIB, SAMPLES[options.scale])
    late, bound_late = (statistics.quantiles(one, n=100)[98] for one in (ours, echo))
    return Result(
        suite="fs", case=case, metric="read_s", better="lower", ours=figure(ours), peers={},
        bound=Bound(figure(echo).median, "a bare epoll server with messages of the same sizes"), target="",
        note=f"99 of 100 within {1e6 * late:.0f} us; the bound {1e6 * bound_late:.0f} us",
        more={"p99_s": late, "bound_p99_s": bound_late},
    )  # fmt: skip


def _writes(options: Options, case: str, chunks: Chunks, directory: str, duration_s: float) -> Result:
    path = os.path.join(directory, "stream")
    Path(path).write_bytes(os.urandom(MIB))
    durable = case.endswith("durable")

    def bound() -> float:
        wire = bounds.stream_bytes_per_s(path, MIB, WRITES, duration_s / 2) / 2
        return min(wire, bounds.disk_bytes_per_s(directory, WRITES, duration_s / 2) / 2) if durable else wire

    ours, limit = _rounds(options, lambda: chunks.writes(WRITES, duration_s), bound)
    share = ours.median / limit.median
    formula = "loopback / 2" + (
        ", or fdatasynced 1 MiB writes of as many tasks / 2, if that is less" if durable else ""
    )
    return Result(
        suite="fs", case=case, metric="write_bytes_per_s", better="higher", ours=ours, peers={},
        bound=Bound(limit.median, formula), target="at least 60 % of the bound",
        note=f"{100 * share:.0f} % of the bound", met=share >= 0.6,
        verdicts={"at least 60 % of the bound": share >= 0.6},
    )  # fmt: skip


def _rounds(options: Options, ours: Callable[[], float], bound: Callable[[], float]) -> tuple[Figure, Figure]:
    """Figures of both, taken in turns; the first round warms up."""
    pairs = [(ours(), bound()) for _ in range(options.rounds + 1)][1:]
    return figure([one for one, _ in pairs]), figure([one for _, one in pairs])
