"""The metrics file is appended to by a run that goes on, and never emptied."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

from fireflyer.base.errors import DataCorruption, NotFound, UsageError
from fireflyer.recipes.trainer.core.figures import (
    AnomalyLine,
    EvaluationLine,
    MetricsLine,
    SourceLoss,
    StartLine,
    evaluation_of,
    mean_loss,
)
from fireflyer.recipes.trainer.metrics_file import MetricsFile, read_metrics

START = StartLine(step=0, checkpoint=None, recipe="ab", world_size=2)
BAD = AnomalyLine(step=3, action="skip", reason="the loss is nan")


def written(path: Path, *lines: MetricsLine, resumed: bool) -> None:
    file = MetricsFile.open_for(str(path), resumed=resumed, identity=START.recipe)
    for line in lines:
        file.write(line)
    file.close()
    file.close()


def test_a_run_that_goes_on_appends(tmp_path: Path) -> None:
    path = tmp_path / "new" / "metrics.jsonl"
    written(path, START, resumed=False)
    written(path, BAD, resumed=True)
    assert read_metrics(str(path)) == [START, BAD]


GOES_ON = replace(START, step=4, checkpoint="step-4")


@pytest.mark.parametrize(
    "before",
    [
        msgspec.json.encode(replace(START, recipe="cd")) + b"\n",
        msgspec.json.encode(GOES_ON) + b"\n",
        msgspec.json.encode(BAD) + b"\n",
        b"notes\n",
        msgspec.json.encode(START),
    ],
    ids=["another-recipe", "goes-on", "no-start", "no-metrics", "torn"],
)
def test_a_fresh_run_does_not_write_behind_another_one(tmp_path: Path, before: bytes) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(before)
    with pytest.raises(UsageError, match="is not empty, and does not begin with the start of this recipe"):
        MetricsFile.open_for(str(path), resumed=False, identity=START.recipe)
    assert path.read_bytes() == before


def test_a_run_that_died_before_its_first_checkpoint_is_started_again(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.touch()
    written(path, START, BAD, resumed=False)
    path.write_bytes(path.read_bytes() + b'{"kind":"st')
    written(path, START, resumed=False)
    assert read_metrics(str(path)) == [START, BAD, START]


@pytest.mark.parametrize("torn", [b'{"kind":"st', b'{"kind":"step","step":4,"loss":1.0}'])
def test_the_line_that_a_killed_rank_was_writing_is_removed(tmp_path: Path, torn: bytes) -> None:
    path = tmp_path / "metrics.jsonl"
    written(path, START, resumed=False)
    path.write_bytes(path.read_bytes() + torn)
    written(path, BAD, resumed=True)
    assert read_metrics(str(path)) == [START, BAD]


def test_a_reader_leaves_out_the_line_that_is_being_written(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    written(path, START, BAD, resumed=False)
    whole = path.read_bytes()
    for end in range(len(msgspec.json.encode(START)) + 1, len(whole)):
        path.write_bytes(whole[:end])
        assert read_metrics(str(path)) == [START]
    path.write_bytes(b"")
    assert read_metrics(str(path)) == []


def test_a_damaged_line_is_named_by_its_number(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    written(path, START, resumed=False)
    path.write_bytes(path.read_bytes() + b"{}\n")
    with pytest.raises(DataCorruption, match="line 2"):
        read_metrics(str(path))
    with pytest.raises(NotFound):
        read_metrics(str(tmp_path / "other"))


def test_the_held_out_loss_is_that_of_the_last_attempt_and_weighted_by_tokens() -> None:
    sources = (SourceLoss(name="a", loss=1.0, tokens=30), SourceLoss(name="b", loss=2.0, tokens=10))
    assert mean_loss(sources) == 1.25
    lines = [EvaluationLine(step=8, loss=loss, sources=sources) for loss in (3.0, 2.0)]
    assert evaluation_of([START, *lines, BAD], 8) == lines[1]
    assert evaluation_of([START, *lines], 9) is None


def test_a_held_out_loss_that_is_not_finite_is_written_as_none_and_read(tmp_path: Path) -> None:
    sources = (SourceLoss(name="a", loss=1.0, tokens=30), SourceLoss(name="b", loss=None, tokens=10))
    line = EvaluationLine(step=8, loss=mean_loss(sources), sources=sources)
    assert line.loss is None
    path = tmp_path / "metrics.jsonl"
    written(path, START, line, resumed=False)
    assert read_metrics(str(path)) == [START, line]
