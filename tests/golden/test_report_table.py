"""The report on a terminal, as users see it. To accept a change: `FF_ACCEPT=1 pytest tests/golden`."""

from __future__ import annotations

import io
import os
from pathlib import Path

import pytest
from rich.console import Console
from tests.support.jobs.job_logs import Break, JobScript, example_log, make_log

from fireflyer.analytics.report import Fact, build_report
from fireflyer.base.events import AttemptFailed, AttemptStarted, JobFinished, JobStarted, Logged
from fireflyer.base.units import SECOND
from fireflyer.cli.tables import print_report

HERE = Path(__file__).parent


def example() -> tuple[list[Logged], tuple[Fact, ...]]:
    return example_log(), (Fact("loss curve", "steps 61 to 120 are bitwise those of the undisturbed run", True),)


def failed() -> tuple[list[Logged], tuple[Fact, ...]]:
    script = JobScript(steps=30, breaks=(Break(after_step=25), Break(after_step=0, before_ready=True)), finish=False)
    return make_log(script)[0], (Fact("problem", "the loss did not fall", False),)


def silent() -> tuple[list[Logged], tuple[Fact, ...]]:
    """As an existing torchrun script is: restarted once, and no word from any rank."""
    log = [
        Logged(0, JobStarted("plain", ("plain.py",), 1, 2, 3, 0.0)),
        Logged(0, AttemptStarted(0)),
        Logged(SECOND, AttemptFailed(0, "rank 1 died", True, 0, 1)),
        Logged(2 * SECOND, AttemptStarted(1)),
        Logged(4 * SECOND, JobFinished(0, "all ranks exited with code 0")),
    ]
    return log, ()


@pytest.mark.parametrize("name", ["example", "failed", "silent"])
@pytest.mark.parametrize("width", [60, 100])
def test_the_table_looks_as_it_did(name: str, width: int) -> None:
    log, facts = {"example": example, "failed": failed, "silent": silent}[name]()
    out = io.StringIO()
    print_report(Console(file=out, width=width, highlight=False), build_report(log, facts=facts))
    text = "".join(f"{line.rstrip()}\n" for line in out.getvalue().splitlines())
    path = HERE / f"report_table_{name}_{width}.txt"
    if os.environ.get("FF_ACCEPT"):
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8")
    assert max(len(line) for line in text.splitlines()) <= width
