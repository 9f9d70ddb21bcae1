"""The trace of a run has the steps of its range once, and costs no run its end."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import torch

from fireflyer.base.errors import FireflyerError, UsageError
from fireflyer.recipes.trainer.core.recipe import ProfileSettings
from fireflyer.recipes.trainer.tracing import Tracer, check_trace_file


def step(tracer: Tracer, number: int, name: str) -> None:
    tracer.before(number)
    with torch.profiler.record_function(name):
        torch.zeros(2)
    tracer.after(number)


def names(path: Path) -> set[str]:
    found = {str(event.get("name")) for event in json.loads(path.read_text())["traceEvents"]}
    return {name for name in found if name.startswith("step of the test")}


def test_steps_before_a_rewind_are_not_in_the_trace_and_a_trace_that_was_written_stays(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    with Tracer(ProfileSettings(first_step=2, last_step=3, file=str(path)), "cpu") as tracer:
        step(tracer, 1, "step of the test 1")
        step(tracer, 2, "step of the test 2, forgotten")
        tracer.forget()
        step(tracer, 2, "step of the test 2")
        step(tracer, 3, "step of the test 3")
        assert names(path) == {"step of the test 2", "step of the test 3"}
        tracer.forget()
        step(tracer, 3, "step of the test 3, again")
    assert names(path) == {"step of the test 2", "step of the test 3"}
    assert list(tmp_path.iterdir()) == [path]


def test_a_trace_that_cannot_be_written_is_a_line_in_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "removed meanwhile" / "trace.json"
    with (
        caplog.at_level(logging.WARNING),
        Tracer(ProfileSettings(first_step=1, last_step=1, file=str(path)), "cpu") as one,
    ):
        step(one, 1, "step")
    assert f"the trace was not written to {str(path)!r}, and training goes on without it" in caplog.text


def test_where_a_trace_cannot_be_written_is_known_at_the_start(tmp_path: Path) -> None:
    path = tmp_path / "new" / "trace.json"
    check_trace_file(str(path))
    assert list(path.parent.iterdir()) == []
    path.write_text("before")
    check_trace_file(str(path))
    assert path.read_text() == "before"
    with pytest.raises(FireflyerError, match=r"trace\.json/below"):
        check_trace_file(str(path / "below"))
    with pytest.raises(UsageError, match="it is a directory, a file is needed"):
        check_trace_file(str(path.parent))
