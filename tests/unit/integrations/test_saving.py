"""When the callbacks of all libraries save: at what was due, and always at the last step."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from fireflyer.base.errors import UsageError
from fireflyer.base.events import CheckpointReport
from fireflyer.base.units import SECOND
from fireflyer.checkpoint import State, capture, describe
from fireflyer.checkpoint.core.schedule import Periods
from fireflyer.integrations.saving import Saving
from fireflyer.runtime.reporter import Reporter


class SlowReporter(Reporter):
    """A save is in flight until `released`: its report is part of it."""

    def __init__(self) -> None:
        super().__init__(None, None, "")
        self.released = threading.Event()

    def checkpoint(self, report: CheckpointReport) -> None:
        self.released.wait(60)


def state() -> State:
    return capture(torch.nn.Linear(2, 2), None, values={})


def test_the_last_step_is_saved_though_it_was_due_while_an_earlier_save_was_in_flight(tmp_path: Path) -> None:
    reporter = SlowReporter()
    saving = Saving(tmp_path, period_steps=1, reporter=reporter)
    saving.open()
    for step in (1, 2):
        saving.step_begins()
        saving.step_ends(step, 1, state)
    assert saving.manager.skipped == 1
    reporter.released.set()
    saving.ends(2, state)
    saving.close(failed=False)
    assert describe(str(tmp_path))[0].step == 2


def test_a_last_step_that_is_saved_is_not_saved_again(tmp_path: Path) -> None:
    reporter = SlowReporter()
    reporter.released.set()
    saving = Saving(tmp_path, period_steps=1, reporter=reporter)
    saving.open()
    saving.step_begins()
    saving.step_ends(1, 1, state)
    saving.manager.wait()
    before = describe(str(tmp_path))
    saving.ends(1, state)
    saving.close(failed=False)
    assert describe(str(tmp_path)) == before


class Minutes:
    now = 0

    def now_ns(self) -> int:
        return Minutes.now * 60 * SECOND


def steps_that_were_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, **options: Any) -> list[int]:
    """Of 17 steps of a minute each."""
    monkeypatch.setattr(Minutes, "now", 0)
    monkeypatch.setattr("fireflyer.integrations.saving.MonotonicClock", Minutes)
    monkeypatch.setattr("fireflyer.checkpoint.manager.MonotonicClock", Minutes)
    saving = Saving(tmp_path, **options)
    saving.open()
    for step in range(1, 18):
        saving.step_begins()
        monkeypatch.setattr(Minutes, "now", step)
        saving.step_ends(step, 1, state)
        saving.manager.wait()
    saving.ends(17, state)
    saving.close(failed=False)
    return [info.step for info in describe(str(tmp_path))]


def test_without_a_period_a_checkpoint_is_saved_every_five_minutes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert steps_that_were_saved(tmp_path, monkeypatch, keep=9) == [17, 15, 10, 5]


def test_every_so_many_checkpoints_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved = steps_that_were_saved(tmp_path, monkeypatch, period_steps=2, keep=1, keep_every=6)
    assert saved == [17, 12, 6]


def test_the_period_is_chosen_by_what_saves_cost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved = steps_that_were_saved(tmp_path, monkeypatch, keep=99, period="auto", mttf="8h")
    assert saved == [*range(17, 4, -1)], "saves cost nothing here, so after the first there is one at each step"
    with pytest.raises(UsageError, match='needs mttf="8h"'):
        Saving(tmp_path, period="auto")


@pytest.mark.parametrize("library", ["lightning", "transformers"])
def test_callbacks_pass_on_what_they_are_given(library: str, tmp_path: Path) -> None:
    callback = pytest.importorskip(f"fireflyer.integrations.{library}").CheckpointCallback
    given = callback(tmp_path, period="auto", mttf="8h", keep=3, keep_every=50)._saving
    assert given._periods == Periods(mttf_ns=8 * 3600 * SECOND)
    assert (given._keep, given._keep_every) == (3, 50)
    assert callback(tmp_path)._saving._periods == Periods(time_ns=300 * SECOND)
