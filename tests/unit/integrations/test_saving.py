"""When the callbacks of all libraries save: at what was due, and always at the last step."""

from __future__ import annotations

import threading
from pathlib import Path

import torch

from fireflyer.base.events import CheckpointReport
from fireflyer.checkpoint import State, capture, describe
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
    saving = Saving(tmp_path, period_steps=1, period=None, keep=2, reporter=reporter)
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
    saving = Saving(tmp_path, period_steps=1, period=None, keep=2, reporter=reporter)
    saving.open()
    saving.step_begins()
    saving.step_ends(1, 1, state)
    saving.manager.wait()
    before = describe(str(tmp_path))
    saving.ends(1, state)
    saving.close(failed=False)
    assert describe(str(tmp_path)) == before
