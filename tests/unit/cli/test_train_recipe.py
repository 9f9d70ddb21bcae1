"""`ff train run` and `ff train compare`: what they print before anything runs, and the line for what cannot."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.trainer.recipes import raw_recipe, write_tokens

from fireflyer.base.toml_text import to_toml
from fireflyer.checkpoint import CheckpointManager, State
from fireflyer.cli import main
from fireflyer.recipes.deepseek import PRESETS
from fireflyer.recipes.trainer.core.parsing import recipe_of
from fireflyer.recipes.trainer.core.recipe import resolved
from fireflyer.recipes.trainer.preconditions import plan_of_checkpoints

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


def test_a_check_says_how_often_the_run_is_saved(tmp_path: Path, capsys: Capture) -> None:
    write_tokens(tmp_path)
    for table, words in (
        ({"period_steps": 4, "period": "10m"}, "every 4 steps, and every 10 min 00 s"),
        ({}, "every 5 min 00 s"),
        ({"period": "auto", "mttf": "8h"}, "as often as loses least with a failure every 8 h 00 min"),
    ):
        raw = raw_recipe() | {"checkpoint": {"directory": "checkpoints", **table}}
        (tmp_path / "recipe.toml").write_text(to_toml(raw))
        assert main(["train", str(tmp_path / "recipe.toml"), "--check"]) == 0
        assert f"/checkpoints, {words}; none yet" in capsys.readouterr().out


def test_a_check_refuses_checkpoints_of_another_model(tmp_path: Path, capsys: Capture) -> None:
    write_tokens(tmp_path)
    config = tmp_path / "config.json"
    keys = PRESETS["tiny"].to_hugging_face() | {"vocab_size": 64}
    config.write_text(json.dumps(keys))
    raw = raw_recipe() | {"model": {"kind": "deepseek", "config": "config.json"}}
    (tmp_path / "recipe.toml").write_text(to_toml(raw))
    check = ("run", str(tmp_path / "recipe.toml"), "--check")
    recipe = resolved(recipe_of(raw), str(tmp_path))
    plan = plan_of_checkpoints(recipe)
    with CheckpointManager(recipe.checkpoint.directory, rank=0, world_size=1, store=None, plan=plan) as manager:
        manager.save(1, State({"model/one": torch.zeros(1)}), blocking=True).result()
    config.write_text(json.dumps(keys | {"transformers_version": "9.9"}, indent=2))
    assert main(["train", *check]) == 0
    capsys.readouterr()
    config.write_text(json.dumps(keys | {"rms_norm_eps": 0.5}))
    assert "are of another model: [model], or its config.json, has changed since" in failed(capsys, *check)
    config.write_text(json.dumps(keys | {"max_position_embeddings": 15}))
    assert "sequence_tokens = 16 is longer than the context of the model; use at most 15" in failed(capsys, *check)


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
