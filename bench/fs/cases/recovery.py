"""A replica comes back with an empty disk: how long until it has everything, and what readers notice meanwhile.

Three replicas; one is killed, its directory is made anew, and the process is started again. Counted from the moment
when it is ready until the manager says that it serves. The rate of a resync is bounded on purpose (`Limits` of
`core.chain.replica`): the bound. Readers ask for 1 MiB pieces all the time, from the two others.

Other work on the machine comes and goes, so that a resync is compared with the quiet windows next to it, one before and
one after, in which the same two replicas serve; how far those two are apart says what the comparison is worth.
"""

from __future__ import annotations

import asyncio
import itertools
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

from bench.fs.cluster import Cluster, all_serve, running, spread
from bench.fs.work import Chunks
from bench.report import Bound, Options, Result, figure
from fireflyer.base.units import MIB, SECOND
from fireflyer.fs.core.chain.replica import Limits
from fireflyer.fs.schema.manager import Status
from fireflyer.fs.schema.routing import TargetState
from fireflyer.fs.service.storage.process import TICK_NS

__all__ = ["run"]

_MIB: Final = {"tiny": 32, "brief": 256, "full": 1024}
_ROUNDS: Final = {"tiny": 1, "brief": 2, "full": 3}
_REPLICAS: Final = 3
_DEPTH: Final = 8
_SLICE_S: Final = 0.25
_QUIET_SLICES: Final = {"tiny": 2, "brief": 8, "full": 12}


class _Recovered(NamedTuple):
    seconds: float
    reads_per_s: float
    """Meanwhile."""


def run(options: Options) -> Iterator[Result]:
    name = f"recovery/resync/{_MIB[options.scale]} MiB"
    if options.selects(name):
        yield asyncio.run(_measure(options, name))


async def _measure(options: Options, name: str) -> Result:
    size = _MIB[options.scale]
    rounds = options.rounds_wanted or _ROUNDS[options.scale]
    with tempfile.TemporaryDirectory(prefix="ff-bench-") as directory:
        async with running(Path(directory), nodes=_REPLICAS, chains=spread(_REPLICAS, _REPLICAS)) as cluster:
            with cluster.ring() as ring:
                chunks = Chunks(ring, size)
                chunks.fill()
                quiet = [await _lose(cluster, chunks, _QUIET_SLICES[options.scale])]
                recovered = []
                for _ in range(rounds):
                    recovered.append(await _recover(cluster, chunks))
                    quiet.append(await _lose(cluster, chunks, _QUIET_SLICES[options.scale]))
    limit_s = size * MIB / (Limits().copy_bytes_per_tick * SECOND / TICK_NS)
    beside = [statistics.mean(pair) for pair in itertools.pairwise(quiet)]
    slower = figure([1 - one.reads_per_s / usual for one, usual in zip(recovered, beside, strict=True)])
    apart = statistics.median(
        abs(after - before) / usual for (before, after), usual in zip(itertools.pairwise(quiet), beside, strict=True)
    )
    return Result(
        suite="fs", case=name, metric="resync_s", better="lower", ours=figure([one.seconds for one in recovered]),
        peers={}, bound=Bound(limit_s, "the rate to which a resync is limited"), target="",
        note=f"readers are {100 * slower.median:.0f} % ({100 * slower.min:.0f} to {100 * slower.max:.0f}) slower "
        f"meanwhile, of {statistics.median(quiet) * MIB / 1e6:.0f} MB/s from two replicas; quiet windows before and "
        f"after are {100 * apart:.0f} % apart",
        more={"readers_slower_share": slower.median, "quiet_apart_share": apart},
    )  # fmt: skip


async def _lose(cluster: Cluster, chunks: Chunks, slices: int) -> float:
    """One replica; returns what the two others do in a quiet window."""
    await cluster.nodes[_REPLICAS].kill()
    await cluster.until(_has_left)
    return await _read(chunks, asyncio.create_task(asyncio.sleep(_SLICE_S * slices)))


async def _recover(cluster: Cluster, chunks: Chunks) -> _Recovered:
    shutil.rmtree(cluster.target_directory(_REPLICAS))
    cluster.make_target(_REPLICAS)
    await cluster.nodes[_REPLICAS].start()
    began_s = time.perf_counter()
    recovering = asyncio.create_task(cluster.until(all_serve))
    reads_per_s = await _read(chunks, recovering)
    await recovering
    return _Recovered(time.perf_counter() - began_s, reads_per_s)


async def _read(chunks: Chunks, until: asyncio.Task[None]) -> float:
    """Reads per second of 1 MiB until then. Of the first slice only that it works is counted, not its rate."""
    rates: list[float] = []
    while not until.done() or len(rates) < 2:
        work = await asyncio.to_thread(chunks.reads, MIB, _DEPTH, _SLICE_S)
        rates.append(work.done / work.elapsed_s)
    return statistics.mean(rates[1:])


def _has_left(status: Status) -> bool:
    (chain,) = status.chains
    return sum(one.state is TargetState.SERVING for one in chain.members) == _REPLICAS - 1
