"""`ff train run` and `ff train compare`: what they print before anything runs, and the line for what cannot."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.support.trainer.recipes import raw_recipe, write_tokens

from fireflyer.base.toml_text import to_toml
from fireflyer.cli import main

Capture = pytest.CaptureFixture[str]


def written(directory: Path, **tables: Any) -> str:
    path = directory / "recipe.toml"
    path.write_text(to_toml(raw_recipe(**tables)))
    return str(path)


def failed(capsys: Capture, *arguments: str) -> str:
    """The one line with which the command refuses."""
    assert main(["train", *arguments]) == 2
    found = capsys.readouterr()
    assert found.out == ""
    (line,) = found.err.splitlines()
    return line


def test_a_check_says_what_would_run_and_starts_nothing(tmp_path: Path, capsys: Capture) -> None:
    write_tokens(tmp_path)
    before = sorted(tmp_path.iterdir())
    path = written(tmp_path, plan={"replicate": 2})
    for command in (["run", path, "--check"], [path, "--check"]):
        assert main(["train", *command]) == 0
        text = capsys.readouterr().out
        assert "model: gpt, 7,248 parameters" in text
        assert "plan: 2 ranks: replicate 2 x shard 1 (ZeRO 0) x tensor 1; 2 micro-batches of 2" in text
        assert "data: a, 49 sequences, 3 of 4 samples" in text
        assert "evaluation: held, 12 of 49 sequences" in text
        assert "steps: 8 of 128 tokens, 1,024 in all" in text
        assert text.rstrip().endswith("every 4 steps; none yet")
    assert sorted(tmp_path.iterdir()) == sorted([*before, Path(path)])


def test_a_check_says_which_pipeline_would_run(tmp_path: Path, capsys: Capture) -> None:
    write_tokens(tmp_path)
    path = written(tmp_path, plan={"pipeline": 2, "replicate": 2, "schedule": "zb-h1"})
    assert main(["train", path, "--check"]) == 0
    assert "plan: 4 ranks: pipeline 2 (zb-h1) x replicate 2 x shard 1" in capsys.readouterr().out


def test_an_unknown_key_is_named_with_its_line(tmp_path: Path, capsys: Capture) -> None:
    line = failed(capsys, "run", written(tmp_path, optimizer={"step": 3}))
    assert "recipe.toml', line " in line
    assert "[optimizer] has no key 'step'; allowed: steps, learning_rate, " in line


def test_what_is_no_recipe_is_one_line(tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "recipe.toml"
    assert "is not a file; give a recipe, see docs/how-to/train.md" in failed(capsys, str(path))
    for content in (b"[model", b"\xff\xfe", b"model = 1"):
        path.write_bytes(content)
        assert "docs/how-to/train.md" in failed(capsys, str(path))


def test_a_plan_that_is_not_executed_is_refused_before_data_are_opened(tmp_path: Path, capsys: Capture) -> None:
    path = written(tmp_path, plan={"pipeline": 2, "tensor": 2, "expert": 2})
    for command in (["run", path, "--check"], ["run", path]):
        line = failed(capsys, *command)
        assert "pipeline = 2 with tensor = 2: the trainer has either; use replicate, and tensor = 1" in line
        assert "expert = 2, but the model has no experts" in line


def test_a_plan_of_several_ranks_says_how_to_start_them(tmp_path: Path, capsys: Capture) -> None:
    line = failed(capsys, "run", written(tmp_path, plan={"replicate": 2}))
    assert "the plan has 2 ranks, this job 1; start it with `ff run --ranks-per-node 2 --no-python ff train" in line


def test_a_comparison_needs_a_technique(tmp_path: Path, capsys: Capture) -> None:
    line = failed(capsys, "compare", written(tmp_path), "--dir", str(tmp_path / "out"))
    assert "nothing to compare with: give a second recipe, or lay [technique] over this one" in line
    assert not (tmp_path / "out").exists()
