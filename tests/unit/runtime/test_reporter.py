"""The reporter never blocks and never breaks the training, and loses no more than it says."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
from tests.support.loops import on_loop
from tests.support.patience import allowed_s

from fireflyer.base.errors import PeerFailed
from fireflyer.base.events import (
    CheckpointReport,
    PeerFailureReport,
    Report,
    ResumeReport,
    SaturationReport,
    StepReport,
)
from fireflyer.base.launch import RankEnvironment
from fireflyer.base.units import MS, SECOND
from fireflyer.cluster.core.messages import Event, RankReported
from fireflyer.cluster.launcher.collected import CollectedFiles, CollectedLogs
from fireflyer.cluster.launcher.control import ControlService
from fireflyer.identity.secrets import new_secret, save_secret
from fireflyer.runtime import reporter as reporter_module
from fireflyer.runtime.reporter import CLOSE_NS, MAX_STEPS_QUEUED, REPORT, Acknowledged, Reporter, Reports
from fireflyer.runtime.rpc import Accepts, Caller, RpcServer


def step(number: int) -> StepReport:
    return StepReport(rank=1, attempt=0, step=number, samples=8, tokens=64, loss=0.1 * number, productive_ns=1)


RESUME = ResumeReport(rank=1, attempt=0, step=0, checkpoint=None)
CHECKPOINT = CheckpointReport(rank=1, attempt=0, step=5, bytes=10, stall_ns=1, write_ns=2)


class Launcher:
    """The launcher's own handler behind a gate."""

    def __init__(self, tmp_path: Path) -> None:
        self.secret = new_secret()
        self.secret_file = str(tmp_path / "secret")
        save_secret(self.secret, self.secret_file)
        self.reports: list[Report] = []
        self.control = ControlService(
            feed=self._feed,
            on_line=lambda line: None,
            on_port=lambda port: None,
            on_asks=lambda: None,
            local_rank=lambda attempt, rank: rank,
            logs=CollectedLogs(lambda name: f"{tmp_path}/{name}", on_error=lambda reason: None),
            files=CollectedFiles(str(tmp_path)),
        )
        self.gate = asyncio.Event()
        self.gate.set()
        self.calls = 0
        self.lose_answers = 0
        self.env = RankEnvironment()

    def _feed(self, event: Event) -> None:
        assert isinstance(event, RankReported)
        self.reports.append(event.report)

    async def report(self, request: Reports, caller: Caller) -> Acknowledged:
        self.calls += 1
        await self.gate.wait()
        done = await self.control._report(request, caller)
        if self.lose_answers > 0:
            self.lose_answers -= 1
            await asyncio.sleep(3600)
        return done


@contextlib.asynccontextmanager
async def launcher(tmp_path: Path) -> AsyncIterator[Launcher]:
    service = Launcher(tmp_path)
    server = RpcServer(Accepts(service.secret))
    server.register(REPORT, service.report)
    address = await server.start("127.0.0.1", 0)
    service.env = RankEnvironment(rank=1, world_size=2, control=str(address), secret_file=service.secret_file)
    try:
        yield service
    finally:
        await server.close()


@on_loop
async def test_reports_arrive_in_order_and_close_sends_the_last(tmp_path: Path) -> None:
    async with launcher(tmp_path) as service:
        reporter = Reporter.from_environment(service.env)
        reporter.resume(RESUME)
        for number in range(1, 1001):
            reporter.step(step(number))
        reporter.checkpoint(CHECKPOINT)
        await asyncio.to_thread(reporter.close)
        assert service.reports == [RESUME, *map(step, range(1, 1001)), CHECKPOINT]
        assert service.control.reports_dropped == reporter.dropped == 0


@on_loop
async def test_a_report_is_of_the_attempt_in_which_it_is_made(tmp_path: Path) -> None:
    async with launcher(tmp_path) as service:
        env = msgspec.structs.replace(service.env, attempt=2)
        with Reporter.from_environment(env) as reporter:
            for report in (RESUME, step(1), CHECKPOINT):  # all say attempt 0, as a checkpoint manager does by default
                reporter._put(report)
            await asyncio.to_thread(reporter.close)
        assert [report.attempt for report in service.reports] == [2, 2, 2]
        assert [type(report).__name__ for report in service.reports] == [
            "ResumeReport",
            "StepReport",
            "CheckpointReport",
        ]


@on_loop
async def test_who_failed_a_rank_is_told_before_it_gives_up(tmp_path: Path) -> None:
    async with launcher(tmp_path) as service:
        with Reporter.from_environment(service.env) as reporter:
            reporter.peer_failed(PeerFailed("rank 3 (node 1) has not entered allreduce #7", rank=3))
            reporter.peer_failed(PeerFailed("nobody in particular"))
            await asyncio.to_thread(reporter.close)
        assert service.reports == [
            PeerFailureReport(service.env.rank, 0, 3, "rank 3 (node 1) has not entered allreduce #7")
        ]


@on_loop
async def test_sums_that_did_not_fit_are_told(tmp_path: Path) -> None:
    async with launcher(tmp_path) as service:
        with Reporter.from_environment(service.env) as reporter:
            reporter.saturation("world", 12, 1000)
            await asyncio.to_thread(reporter.close)
        assert service.reports == [SaturationReport(service.env.rank, 0, "world", 12, 1000)]


@on_loop
async def test_a_slow_launcher_costs_old_steps_only(tmp_path: Path) -> None:
    async with launcher(tmp_path) as service:
        service.gate.clear()
        with Reporter.from_environment(service.env) as reporter:
            count = 3 * MAX_STEPS_QUEUED
            started = time.monotonic()
            for number in range(1, count + 1):
                reporter.step(step(number))
                if number % MAX_STEPS_QUEUED == 0:
                    reporter.checkpoint(CHECKPOINT)
            assert time.monotonic() - started < allowed_s(5), "reporting blocks"
            reporter.resume(RESUME)
            service.gate.set()
            await asyncio.to_thread(reporter.close)
        assert [report for report in service.reports if isinstance(report, CheckpointReport)] == [CHECKPOINT] * 3
        assert service.reports[-1] == RESUME
        steps = [report.step for report in service.reports if isinstance(report, StepReport)]
        assert steps == sorted(set(steps))
        assert steps[-MAX_STEPS_QUEUED:] == list(range(count - MAX_STEPS_QUEUED + 1, count + 1))
        assert reporter.dropped == count - len(steps) > 0
        assert service.control.reports_dropped == reporter.dropped


@on_loop
async def test_a_batch_whose_answer_was_lost_counts_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reporter_module, "CALL_NS", 300 * MS)
    async with launcher(tmp_path) as service:
        service.lose_answers = 1
        with Reporter.from_environment(service.env) as reporter:
            reporter.resume(RESUME)
            await asyncio.to_thread(reporter.close)
        assert service.calls >= 2  # more where the second answer took long as well
        assert service.reports == [RESUME]


@on_loop
async def test_two_reporters_of_one_rank_do_not_hide_each_other(tmp_path: Path) -> None:
    async with launcher(tmp_path) as service:
        for number in (1, 2):
            reporter = Reporter.from_environment(service.env)
            reporter.step(step(number))
            await asyncio.to_thread(reporter.close)
        assert service.reports == [step(1), step(2)]


@on_loop
async def test_a_launcher_that_hangs_does_not_hold_up_the_end(tmp_path: Path) -> None:
    async with launcher(tmp_path) as service:
        service.gate.clear()
        reporter = Reporter.from_environment(service.env)
        reporter.step(step(1))
        started = time.monotonic()
        await asyncio.to_thread(reporter.close)
        assert time.monotonic() - started < CLOSE_NS / SECOND + 3


@on_loop
async def test_a_launcher_that_is_gone_or_does_not_know_us_is_given_up(tmp_path: Path) -> None:
    async with launcher(tmp_path) as service:
        env = service.env
        os.unlink(service.secret_file)
        save_secret(new_secret(), service.secret_file)
        stranger = Reporter.from_environment(env)
        stranger.step(step(1))
        await asyncio.to_thread(stranger.close)
        assert service.reports == []
    gone = Reporter.from_environment(env)
    gone.step(step(1))
    started = time.monotonic()
    await asyncio.to_thread(gone.close)
    assert time.monotonic() - started < CLOSE_NS / SECOND + 3


def test_without_a_launcher_nothing_happens() -> None:
    before = threading.active_count()
    with Reporter.from_environment(RankEnvironment()) as reporter:
        reporter.resume(RESUME)
        reporter.step(step(1))
        reporter.checkpoint(CHECKPOINT)
        assert threading.active_count() == before
    assert reporter.dropped == 0
