"""`transformers.Trainer` with checkpoints and reports: a run that died goes on bitwise as one that did not."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fireflyer.base.errors import UsageError
from fireflyer.base.events import ResumeReport, StepReport
from fireflyer.checkpoint import describe

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]


@pytest.mark.parametrize("die_at", [6, 14])
def test_a_run_that_died_goes_on_bitwise_as_one_that_did_not(tmp_path: Path, die_at: int) -> None:
    from tests.support.integrations.transformers_runs import Told, losses, run

    whole = run(tmp_path / "whole")
    run(tmp_path / "died", die_at=die_at)
    steps = [info.step for info in describe(str(tmp_path / "died" / "checkpoints"))]
    assert steps[0] <= die_at
    told = Told()
    resumed = run(tmp_path / "died", reporter=told)
    assert losses(resumed)[-(20 - steps[0]) :] == losses(whole)[-(20 - steps[0]) :]
    assert whole.model is not None
    assert resumed.model is not None
    found = resumed.model.state_dict()
    assert all(torch.equal(found[name], value) for name, value in whole.model.state_dict().items())
    (resume,) = [report for report in told.reports if isinstance(report, ResumeReport)]
    assert resume.step == steps[0]
    reported = [report for report in told.reports if isinstance(report, StepReport)]
    assert [report.step for report in reported] == list(range(steps[0] + 1, 21))
    assert [report.loss for report in reported] == losses(whole)[-len(reported) :]
    assert describe(str(tmp_path / "died" / "checkpoints"))[0].step == 20


def test_a_callback_that_cannot_work_says_so(tmp_path: Path) -> None:
    from tests.support.integrations.transformers_runs import run

    from fireflyer.integrations.transformers import CheckpointCallback

    run(tmp_path, max_steps=4)
    callback = CheckpointCallback(tmp_path / "checkpoints", period_steps=2)
    with pytest.raises(UsageError, match="leave resume_from_checkpoint out"):
        callback.train(run(tmp_path / "other", max_steps=2), resume_from_checkpoint="x")
