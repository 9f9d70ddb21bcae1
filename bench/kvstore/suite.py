"""Seconds per transaction at 1, 8 and 64 tasks at once, on each engine, beside the same work without us."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import AsyncIterator
from typing import Final

import lmdb
from tests.support.kvstore.postgres import postgres_programs, running_postgres

from bench.held_open import held_open
from bench.kvstore.contenders import BareAsyncpg, BareLmdb, Contender, Ours, synced_append_s
from bench.report import Bound, Measuring, Options, Result, figure
from fireflyer import kvstore
from fireflyer.kvstore.postgres import MAX_CONNECTIONS

__all__ = ["run"]

TASKS: Final = (1, 8, 64)
DURATION_S: Final = {"tiny": 0.02, "brief": 0.3, "full": 1.0}
SYNCS_PER_ROUND: Final = 20


def run(options: Options) -> Measuring:
    with tempfile.TemporaryDirectory(prefix="ff-bench-") as directory:
        return (yield from _run(options, directory))


def _run(options: Options, directory: str) -> Measuring:
    for name, opened in (("memory", _memory()), ("embedded", _embedded(directory)), ("postgres", _postgres())):
        cases = [(work, tasks) for work in ("increment", "read") for tasks in TASKS]
        cases = [(work, tasks) for work, tasks in cases if options.selects(f"{work}/{name}/{tasks}")]
        if not cases or (name == "postgres" and postgres_programs() is None):
            continue
        with held_open(opened) as (runner, contenders):
            for work, tasks in cases:
                yield runner.run(_measure(options, f"{work}/{name}/{tasks}", contenders, directory))
            for each, contender in contenders.items():
                assert runner.run(contender.total()) == contender.done, f"{each} lost or invented increments"
    remarks = [f"{os.cpu_count()} processors; LMDB {'.'.join(map(str, lmdb.version()))}; values of up to 20 bytes"]
    if postgres_programs() is None:
        remarks.append("missing: PostgreSQL (Debian package postgresql)")
    return tuple(remarks)


async def _measure(options: Options, case: str, contenders: dict[str, Contender], directory: str) -> Result:
    work, name, tasks = case.split("/")
    samples: dict[str, list[float]] = {each: [] for each in contenders}
    syncs: list[float] = []
    for number in range(options.rounds + 1):
        for each, contender in contenders.items():
            sample = await contender.run(work, int(tasks), DURATION_S[options.scale])
            if number:  # the first round warms up
                samples[each].append(sample)
        if number and name != "memory" and work == "increment":
            syncs.append(synced_append_s(os.path.join(directory, "append"), SYNCS_PER_ROUND))
    ours = figure(samples.pop("ours"))
    bound = None
    if syncs:
        formula = "4 KiB appended and synced (fdatasync), shared by all tasks: seconds / tasks"
        bound = Bound(figure(syncs).median / int(tasks), formula)
    return Result(
        suite="kvstore",
        case=case,
        metric="transaction_s",
        better="lower",
        ours=ours,
        peers={each: figure(times) for each, times in samples.items()},
        bound=bound,
        target="",
        note=f"{1 / ours.median:,.0f} per second",
    )


@contextlib.asynccontextmanager
async def _memory() -> AsyncIterator[dict[str, Contender]]:
    async with await kvstore.open("memory:") as engine:
        yield {"ours": Ours(engine)}


@contextlib.asynccontextmanager
async def _embedded(directory: str) -> AsyncIterator[dict[str, Contender]]:
    bare = BareLmdb(os.path.join(directory, "bare"))
    async with await kvstore.open(f"embedded:{directory}/ours") as engine:
        yield {"ours": Ours(engine), "bare LMDB": bare}


@contextlib.asynccontextmanager
async def _postgres() -> AsyncIterator[dict[str, Contender]]:
    with running_postgres(postgres_programs() or "", durable=True) as server:
        bare = await BareAsyncpg.connect(server.url().partition("&table=")[0], MAX_CONNECTIONS)
        try:
            async with await kvstore.open(server.url()) as engine:
                yield {"ours": Ours(engine), "bare asyncpg": bare}
        finally:
            await bare.close()
