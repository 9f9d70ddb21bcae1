"""Reads, writes and delays: one client process with a ring, real storage processes, everything in the page cache."""

from __future__ import annotations

import asyncio
import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from bench.fs import bounds
from bench.fs.cluster import running, spread
from bench.fs.results import of_bytes, of_small
from bench.fs.turns import in_turns, times
from bench.fs.work import Chunks
from bench.report import Bound, Figure, Options, Result, figure
from fireflyer.base.units import KIB, MIB

__all__ = ["run"]

DURATION_S: Final = {"tiny": 0.1, "brief": 1.0, "full": 2.5}
CHUNKS: Final = 64
DEPTH: Final = 64
BATCH: Final = 16
"""Reads of 1 MiB under way."""
SAMPLES: Final = {"tiny": 50, "brief": 1000, "full": 5000}
LARGE: Final = "read/batch/1MiB/3 nodes/cached"
SMALL: Final = "read/random/4KiB/64 deep/3 nodes/cached"
EACH: Final = "echo, each reply a call"
DELAY: Final = "delay/read/4KiB/3 nodes/cached"
DURABLE: Final = {8: "write/1MiB/2 replicas/durable/8 deep", 32: "write/1MiB/2 replicas/durable/32 deep"}
RELAXED: Final = {8: "write/1MiB/2 replicas/relaxed/8 deep", 32: "write/1MiB/2 replicas/relaxed/32 deep"}
"""By how many are under way: a durable write waits for two disks, one after the other."""


class _Setting(NamedTuple):
    replicas: int
    durable: bool
    cases: tuple[str, ...]


_SETTINGS: Final = (
    _Setting(3, True, (LARGE, SMALL, DELAY)),
    _Setting(2, True, tuple(DURABLE.values())),
    _Setting(2, False, tuple(RELAXED.values())),
)


class _Running(NamedTuple):
    options: Options
    chunks: Chunks
    directory: Path
    stream: str
    """A file to be sent."""

    @property
    def duration_s(self) -> float:
        return DURATION_S[self.options.scale]


def run(options: Options) -> Iterator[Result]:
    for setting in _SETTINGS:
        chosen = [case for case in setting.cases if options.selects(case)]
        if chosen:
            yield from asyncio.run(_measure(options, setting, chosen))


async def _measure(options: Options, setting: _Setting, cases: Sequence[str]) -> list[Result]:
    with tempfile.TemporaryDirectory(prefix="ff-bench-") as name:
        directory = Path(name)
        stream = bounds.random_file(name)
        nodes = setting.replicas
        async with running(directory, nodes=nodes, chains=spread(nodes, nodes), durable=setting.durable) as cluster:
            with cluster.ring() as ring:
                chunks = Chunks(ring, CHUNKS, storage_s=cluster.processor_s)
                chunks.fill()
                measures = {LARGE: _large, SMALL: _small, DELAY: _delay}
                here = _Running(options, chunks, directory, stream)
                return [measures.get(case, _writes)(case, here) for case in cases]


def _large(case: str, on: _Running) -> Result:
    taken = in_turns(
        on.options.rounds,
        lambda: on.chunks.reads(MIB, BATCH, on.duration_s),
        {"sockets": lambda: bounds.stream(on.stream, MIB, BATCH, on.duration_s)},
    )
    return of_bytes(case, "read_bytes_per_s", taken, bound=taken.others["sockets"], least=0.7)


def _small(case: str, on: _Running) -> Result:
    def echo(servers: int, *, each: bool) -> Callable[[], bounds.Rate]:
        return lambda: bounds.echo(4 * KIB, DEPTH, on.duration_s / 2, servers, each=each)

    others = {
        "echo": echo(1, each=False),
        EACH: echo(1, each=True),
        "3 echoes": echo(3, each=False),
        "3 echoes, each reply a call": echo(3, each=True),
    }
    taken = in_turns(on.options.rounds, lambda: on.chunks.reads(4 * KIB, DEPTH, on.duration_s), others)
    result = of_small(case, taken, "a bare epoll server with messages of the same sizes, one connection")
    peer = result.peers[EACH]
    assert result.bound is not None
    assert isinstance(peer, Figure)
    verdicts: dict[str, bool | None] = {
        "at least 100,000 per second": result.ours.median <= 1e-5,
        "at most twice the bound": result.ours.median <= 2 * result.bound.value,
        f"at most twice {EACH}": result.ours.median <= 2 * peer.median,
    }
    return msgspec.structs.replace(result, target="; ".join(verdicts), met=all(verdicts.values()), verdicts=verdicts)


def _delay(case: str, on: _Running) -> Result:
    ours: list[float] = []
    echo: list[float] = []
    for _ in range(on.options.rounds):
        ours += on.chunks.delays_s(SAMPLES[on.options.scale])
        echo += bounds.echo_delays_s(4 * KIB, SAMPLES[on.options.scale])
    late, bound_late = (statistics.quantiles(one, n=100)[98] for one in (ours, echo))
    return Result(
        suite="fs", case=case, metric="read_s", better="lower", ours=figure(ours), peers={},
        bound=Bound(statistics.median(echo), "a bare epoll server with messages of the same sizes"), target="",
        note=f"99 of 100 within {1e6 * late:.0f} us; the bound {1e6 * bound_late:.0f} us",
        more={"p99_s": late, "bound_p99_s": bound_late},
    )  # fmt: skip


def _writes(case: str, on: _Running) -> Result:
    durable = case in DURABLE.values()
    depth = next(depth for cases in (DURABLE, RELAXED) for depth, name in cases.items() if name == case)
    others = {"loopback": lambda: bounds.stream(on.stream, MIB, depth, on.duration_s / 2)}
    if durable:
        others["disk"] = lambda: bounds.disk(str(on.directory), depth, on.duration_s / 2)
    taken = in_turns(on.options.rounds, lambda: on.chunks.writes(depth, on.duration_s), others)
    bound = times(min(taken.others.values(), key=lambda one: one.median), 1 / 2)
    formula = "loopback / 2"
    if durable:
        formula += f", or 1 MiB writes with fdatasync by {depth} threads / 2, if that is less"
    return of_bytes(case, "write_bytes_per_s", taken, bound=bound, formula=formula, least=0.6)
