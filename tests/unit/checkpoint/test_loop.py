"""`TrainingLoop`: what was interrupted goes on as if nothing had happened, and stops when it is asked to."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.checkpoints.states import listed

from fireflyer.base.errors import NoSpace, UsageError
from fireflyer.base.events import CheckpointReport, ResumeReport, StepReport
from fireflyer.base.launch import RankEnvironment
from fireflyer.base.units import SECOND
from fireflyer.checkpoint import CheckpointManager, TrainingLoop, describe
from fireflyer.runtime.reporter import Reporter

ENV = RankEnvironment()


class Died(Exception):
    pass


class Left(BaseException):
    pass


def parts() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 1))
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def train(
    directory: Path, *, last: int = 10, at: Callable[[int, TrainingLoop], None] | None = None, **options: Any
) -> list[float]:
    """The losses of the steps that were done here. `at` is called in each step."""
    model, optimizer = parts()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    losses: list[float] = []
    with TrainingLoop(directory, model, optimizer, stateful={"scheduler": scheduler}, env=ENV, **options) as loop:
        for step in loop.steps(last):
            loss = model(torch.rand(16, 4)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
            losses.append(loss.item())
            loop.values["seen"] = loop.values.get("seen", 0) + 16
            loop.record(loss=losses[-1], samples=16)
            loop.manager.wait()  # steps are faster than saves here, and none is to be skipped
            if at is not None:
                at(step, loop)
    assert loop.values["seen"] == 16 * loop.step
    return losses


def die_at(step: int) -> Callable[[int, TrainingLoop], None]:
    def at(number: int, loop: TrainingLoop) -> None:
        if number == step:
            raise Died

    return at


def steps_in(directory: Path) -> list[int]:
    return [info.step for info in describe(str(directory))]


def test_a_run_that_died_goes_on_bitwise_as_one_that_did_not(tmp_path: Path) -> None:
    whole = train(tmp_path / "whole", period_steps=3)
    with pytest.raises(Died):
        train(tmp_path / "died", period_steps=3, at=die_at(8))
    assert steps_in(tmp_path / "died") == [6, 3], "an exception makes no checkpoint of the step in progress"
    assert train(tmp_path / "died", period_steps=3) == whole[6:]
    assert steps_in(tmp_path / "died") == [10, 9]


def test_a_run_that_is_complete_has_no_steps_left_and_can_be_prolonged(tmp_path: Path) -> None:
    whole = train(tmp_path / "whole", last=12)
    assert train(tmp_path / "run", last=7) == whole[:7]
    assert steps_in(tmp_path / "run") == [7]
    assert train(tmp_path / "run", last=12) == whole[7:]
    model, optimizer = parts()
    with TrainingLoop(tmp_path / "run", model, optimizer, env=ENV) as loop:
        assert list(loop.steps(12)) == []
        assert loop.restored is not None


def test_a_loop_that_goes_back_takes_the_steps_after_the_newest_checkpoint_again(tmp_path: Path) -> None:
    went_back: list[int] = []

    def at(step: int, loop: TrainingLoop) -> None:
        if step == 8 and not went_back:
            loop.rewind()
            went_back.append(loop.step)

    whole = train(tmp_path / "whole", period_steps=3)
    assert train(tmp_path / "run", period_steps=3, at=at) == whole[:8] + whole[6:]
    assert went_back == [6]
    assert steps_in(tmp_path / "run") == [10, 9]


def test_a_loop_without_a_checkpoint_cannot_go_back(tmp_path: Path) -> None:
    def at(step: int, loop: TrainingLoop) -> None:
        if step == 2:
            loop.rewind()

    with pytest.raises(UsageError, match="no checkpoint to go back to from step 2"):
        train(tmp_path / "run", period_steps=3, at=at)


def test_each_save_is_announced_and_is_not_made_where_that_raises(tmp_path: Path) -> None:
    announced: list[int] = []
    train(tmp_path / "run", period_steps=3, before_save=announced.append)
    assert announced == [3, 6, 9, 10]

    def refuse(step: int) -> None:
        if step == 6:
            raise Died

    with pytest.raises(Died):
        train(tmp_path / "refused", period_steps=3, before_save=refuse)
    assert steps_in(tmp_path / "refused") == [3]


def test_a_signal_saves_the_step_in_progress_and_ends_the_process_as_the_signal_would(tmp_path: Path) -> None:
    def at(step: int, _: TrainingLoop) -> None:
        if step == 4:
            signal.raise_signal(signal.SIGTERM)

    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as ended:
        train(tmp_path / "run", at=at)
    assert ended.value.code == 128 + signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) == before
    assert steps_in(tmp_path / "run") == [4]
    assert train(tmp_path / "run") == train(tmp_path / "whole")[4:]


def test_a_loop_that_is_to_leave_saves_the_step_in_progress_and_goes_on_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def go_suspend() -> None:
        raise Left

    with monkeypatch.context() as patch:
        patch.setattr("fireflyer.checkpoint.loop.should_suspend", lambda step: step >= 4)
        patch.setattr("fireflyer.checkpoint.loop.go_suspend", go_suspend)
        with pytest.raises(Left):
            train(tmp_path / "run")
        assert steps_in(tmp_path / "run") == [4]
        assert train(tmp_path / "last", last=3) != [], "the last step is the end, and nobody is asked"
    assert train(tmp_path / "run") == train(tmp_path / "whole")[4:]


def test_the_second_signal_ends_the_process_at_once(tmp_path: Path) -> None:
    told: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, _: told.append(number))

    def at(step: int, _: TrainingLoop) -> None:
        if step == 2:
            signal.raise_signal(signal.SIGUSR1)
            assert told == []
            signal.raise_signal(signal.SIGUSR1)
            assert told == [signal.SIGUSR1], "the handler that was there before has it"
            raise Died

    try:
        with pytest.raises(Died):
            train(tmp_path, at=at, stop_signals=[signal.SIGUSR1])
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert steps_in(tmp_path) == []


@pytest.mark.parametrize("signals", [(), (signal.SIGTERM,)])
def test_stop_makes_the_step_in_progress_the_last(tmp_path: Path, signals: tuple[int, ...]) -> None:
    def at(step: int, loop: TrainingLoop) -> None:
        if step == 5:
            loop.stop()

    assert len(train(tmp_path, at=at, stop_signals=signals)) == 5
    assert steps_in(tmp_path) == [5]


def test_a_period_in_time_saves_when_it_has_passed(tmp_path: Path) -> None:
    class Clock:
        now = 0

        def now_ns(self) -> int:
            return Clock.now * 1_000_000_000

    def at(step: int, loop: TrainingLoop) -> None:
        Clock.now = 7 * step

    train(tmp_path, period="20s", keep=9, clock=Clock(), at=at)
    assert steps_in(tmp_path) == [10, 9, 6, 3]


class MinuteClock:
    """A minute passes where a step says so."""

    def __init__(self) -> None:
        self.minutes = 0

    def now_ns(self) -> int:
        return self.minutes * 60 * SECOND

    def pass_minute(self, step: int, loop: TrainingLoop) -> None:
        self.minutes += 1


@pytest.mark.parametrize("signals", [(), (signal.SIGTERM,)])
def test_a_loop_that_is_told_no_period_saves_every_five_minutes(tmp_path: Path, signals: tuple[int, ...]) -> None:
    clock = MinuteClock()
    train(tmp_path, last=17, keep=9, clock=clock, at=clock.pass_minute, stop_signals=signals)
    assert steps_in(tmp_path) == [17, 15, 10, 5]
    clock = MinuteClock()
    train(tmp_path / "steps", last=17, keep=9, clock=clock, at=clock.pass_minute, period_steps=8)
    assert steps_in(tmp_path / "steps") == [17, 16, 8], "steps are given, and time does not count"


def test_a_loop_chooses_its_period_by_what_saves_cost_and_how_often_the_job_fails(tmp_path: Path) -> None:
    """Saves cost nothing by this clock, but for the least that a period can be."""
    clock = MinuteClock()
    train(tmp_path, last=12, keep=20, clock=clock, at=clock.pass_minute, period="auto", mttf="8h")
    assert steps_in(tmp_path) == [*range(12, 4, -1)], "the first after 4 minutes, and one step more"
    with pytest.raises(UsageError, match='needs mttf="8h"'):
        train(tmp_path, period="auto")


def test_the_last_checkpoint_raises_when_it_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def at(step: int, loop: TrainingLoop) -> None:
        if step == 10:
            monkeypatch.setattr("fireflyer.checkpoint.engine.performing.write_shard", full)

    def full(*_: object, **__: object) -> object:
        raise NoSpace("no space left on the device")

    with pytest.raises(NoSpace):
        train(tmp_path, period_steps=5, at=at)
    assert steps_in(tmp_path) == [5]


def test_a_failed_save_is_told_at_the_next_step_and_training_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object, **__: object) -> object:
        raise NoSpace("no space left on the device")

    def at(step: int, loop: TrainingLoop) -> None:
        told = [record.getMessage() for record in caplog.records if "checkpoint failed" in record.getMessage()]
        failed = step in (5, 6)  # the save of step 4 has failed, and that of step 6 comes when its body has ended
        assert isinstance(loop.save_error, NoSpace) if failed else loop.save_error is None, step
        assert len(told) == (step >= 5)
        if step == 5:
            patch.undo()
        if step == 3:
            patch.setattr("fireflyer.checkpoint.engine.performing.write_shard", full)

    with monkeypatch.context() as patch:
        train(tmp_path, last=8, period_steps=2, at=at, keep=9)
    assert steps_in(tmp_path) == [8, 6, 2]


def test_a_save_that_takes_longer_than_the_grace_period_is_given_up_and_the_one_before_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def endless(*_: object, **__: object) -> Iterator[None]:
        while True:
            time.sleep(0.001)
            yield

    def go_suspend() -> None:
        raise Left

    def at(step: int, _: TrainingLoop) -> None:
        if step == 4:
            patch.setattr("fireflyer.checkpoint.engine.performing.write_shard", endless)

    with monkeypatch.context() as patch:
        patch.setattr("fireflyer.checkpoint.loop.should_suspend", lambda step: step >= 4)
        patch.setattr("fireflyer.checkpoint.loop.suspend_deadline_ns", lambda: time.monotonic_ns() + SECOND // 5)
        patch.setattr("fireflyer.checkpoint.loop.go_suspend", go_suspend)
        with pytest.raises(Left):
            train(tmp_path / "run", period_steps=3, at=at)
    assert steps_in(tmp_path / "run") == [3]
    assert train(tmp_path / "run") == train(tmp_path / "whole")[3:]
    assert not list((tmp_path / "run").rglob(".tmp-*")), "what was given up is removed at the next start"


def test_a_save_within_the_grace_period_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def go_suspend() -> None:
        raise Left

    monkeypatch.setattr("fireflyer.checkpoint.loop.should_suspend", lambda step: step >= 4)
    monkeypatch.setattr("fireflyer.checkpoint.loop.suspend_deadline_ns", lambda: time.monotonic_ns() + 3600 * SECOND)
    monkeypatch.setattr("fireflyer.checkpoint.loop.go_suspend", go_suspend)
    with pytest.raises(Left):
        train(tmp_path, period_steps=3)
    assert steps_in(tmp_path) == [4, 3]


def test_every_step_resume_and_checkpoint_is_reported(tmp_path: Path) -> None:
    class Told(Reporter):
        def __init__(self) -> None:
            super().__init__(None, None, "")
            self.reports: list[object] = []

        def _put(self, report: object) -> None:
            self.reports.append(report)

    with pytest.raises(Died):
        train(tmp_path, period_steps=3, at=die_at(5))
    told = Told()
    losses = train(tmp_path, period_steps=3, reporter=told)
    (resume,) = [report for report in told.reports if isinstance(report, ResumeReport)]
    assert (resume.step, resume.checkpoint) == (3, "step-00000003")
    steps = [report for report in told.reports if isinstance(report, StepReport)]
    assert [(report.step, report.loss, report.samples) for report in steps] == [
        (step, loss, 16) for step, loss in enumerate(losses, start=4)
    ]
    assert all(report.productive_ns > 0 for report in steps)
    saved = [report.step for report in told.reports if isinstance(report, CheckpointReport)]
    assert sorted(saved) == [6, 9, 10]


def test_relative_directories_are_below_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    train(Path("some/run"), last=2)
    assert listed(os.listdir(tmp_path / "some" / "run")) == ["step-00000002"]
    for wrong in ("", "/"):
        with pytest.raises(UsageError, match=f"checkpoint directory '{wrong}' must be a directory below /"):
            CheckpointManager.from_environment(wrong, env=ENV)


def test_what_cannot_work_is_said(tmp_path: Path) -> None:
    train(tmp_path, last=2)
    model, optimizer = parts()
    other = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    with pytest.raises(UsageError, match="step-00000002 has no state of 'scaler'"):
        TrainingLoop(tmp_path, model, optimizer, stateful={"scaler": other}, env=ENV).__enter__()
    loop = TrainingLoop(tmp_path, model, optimizer, env=ENV)
    with pytest.raises(UsageError, match="use it in a `with` block"):
        list(loop.steps(5))
    with loop:
        pass
    with pytest.raises(UsageError, match="entered once"):
        loop.__enter__()
    with pytest.raises(UsageError, match=r"rank 0 of 2 cannot find the others .*init_process_group"):
        CheckpointManager.from_environment(tmp_path, env=RankEnvironment(world_size=2, local_world_size=2))
