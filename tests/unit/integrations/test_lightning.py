"""Lightning's `Trainer` with checkpoints and reports: a run that died goes on bitwise as one that did not."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from fireflyer.base.errors import UsageError
from fireflyer.base.events import ResumeReport, StepReport
from fireflyer.checkpoint import describe

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]


@pytest.mark.parametrize("die_at", [6, 14])
def test_a_run_that_died_goes_on_bitwise_as_one_that_did_not(tmp_path: Path, die_at: int) -> None:
    from tests.support.integrations.lightning_runs import Told, run

    whole = run(tmp_path / "whole")
    assert len(whole.losses) == 20
    run(tmp_path / "died", die_at=die_at)
    newest = describe(str(tmp_path / "died" / "checkpoints"))[0].step
    assert newest <= die_at
    told = Told()
    resumed = run(tmp_path / "died", reporter=told)
    assert resumed.losses == whole.losses[newest:]
    found = resumed.state_dict()
    assert all(torch.equal(found[name], value) for name, value in whole.state_dict().items())
    (resume,) = [report for report in told.reports if isinstance(report, ResumeReport)]
    assert resume.step == newest
    steps = [report for report in told.reports if isinstance(report, StepReport)]
    assert [(report.step, report.samples) for report in steps] == [(step, 4) for step in range(newest + 1, 21)]
    assert [report.loss for report in steps] == pytest.approx(whole.losses[newest:])


def test_what_is_taken_apart_is_put_together_the_same() -> None:
    from fireflyer.integrations.lightning import put_together, take_apart

    tensor = torch.rand(3)
    value = {"a": [1, (2.5, None)], 0: {"b": tensor, "c": True}, "inf": math.inf, "text": "x"}
    tensors: dict[str, torch.Tensor] = {}
    plain = take_apart(value, "checkpoint", tensors)
    assert list(tensors) == ["checkpoint/0/b"]
    assert put_together(plain, tensors) == value
    with pytest.raises(UsageError, match="checkpoint/x is object; only tensors"):
        take_apart({"x": object()}, "checkpoint", {})
