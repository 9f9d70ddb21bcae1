"""What docs/how-to/train.md tells users to type works."""

from __future__ import annotations

import json
import re
import runpy
import tomllib
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.support.how_to import Shell
from tests.support.torch_ranks.processes import run_torch_ranks
from tests.support.trainer.recipes import write_tokens

from fireflyer.base.toml_text import to_toml
from fireflyer.cli import main
from fireflyer.recipes.trainer.compare import recipe_text
from fireflyer.recipes.trainer.core import recipe as tables
from fireflyer.recipes.trainer.core.comparison import planned_runs, technique_of
from fireflyer.recipes.trainer.core.figures import MetricsLine
from fireflyer.recipes.trainer.core.parsing import recipe_of
from fireflyer.recipes.trainer.core.recipe import resolved

TEXT = (Path(__file__).parents[3] / "docs/how-to/train.md").read_text()
RECIPE, PIPELINE = re.findall(r"```toml\n(.*?)```", TEXT, re.DOTALL)


def test_every_key_and_every_kind_of_line_is_named() -> None:
    structs = [one for one in vars(tables).values() if isinstance(one, type) and issubclass(one, msgspec.Struct)]
    own = [one for one in structs if one.__module__ == tables.__name__ and one is not tables.Recipe]
    for struct in own:
        for field in msgspec.structs.fields(struct):
            assert f"`{field.name}`" in TEXT, f"{struct.__name__}.{field.name}"
    for line in MetricsLine.__args__:
        assert f"| `{line.__struct_config__.tag}` |" in TEXT


def test_the_recipe_of_the_page_is_one() -> None:
    assert recipe_of(tomllib.loads(RECIPE)).plan.world_size == 2


def test_the_plan_of_the_page_with_stages_and_experts_is_one() -> None:
    tables_of_page = tomllib.loads(RECIPE)
    tables_of_page["plan"] |= tomllib.loads(PIPELINE)["plan"]
    recipe = recipe_of(tables_of_page)
    assert (recipe.plan.world_size, recipe.plan.pipeline, recipe.plan.expert) == (4, 2, 2)


@pytest.mark.slow
@pytest.mark.processes
def test_the_page_trains_a_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What starts no rank runs in this process, which has imported torch already."""
    (script,) = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    (tmp_path / "prepare.py").write_text(script)
    (tmp_path / "recipe.toml").write_text(RECIPE)
    for command in ("python prepare.py", "ff train run recipe.toml --check"):
        assert f"\n{command}\n" in TEXT
    monkeypatch.chdir(tmp_path)
    runpy.run_path("prepare.py", run_name="__main__")
    assert main(["train", "run", "recipe.toml", "--check"]) == 0
    checked = capsys.readouterr().out
    assert "plan: 2 ranks: replicate 2" in checked
    assert "steps: 30 of 1,024 tokens, 30,720 in all" in checked
    assert checked.rstrip().endswith("none yet")
    assert not (tmp_path / "metrics.jsonl").exists()

    Shell(tmp_path).run("ff", "run", "--ranks-per-node", "2", "--no-python", "ff", "train", "run", "recipe.toml")
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    losses = {one["step"]: one["loss"] for one in lines if one["kind"] == "step"}
    assert losses[30] < losses[1] - 0.5
    assert [one["step"] for one in lines if one["kind"] == "evaluation"] == [15, 30]


@pytest.mark.slow
@pytest.mark.processes
def test_the_page_compares_a_technique_and_goes_on_where_it_was_interrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_tokens(tmp_path, ("train", "held-out"))
    raw = smaller(tomllib.loads(RECIPE))
    (tmp_path / "recipe.toml").write_text(to_toml(raw))
    baseline, technique = (resolved(one, str(tmp_path)) for one in technique_of(raw))
    *done, last = planned_runs(baseline, technique, str(tmp_path / "comparison"))
    for run in done:
        recipe = tomllib.loads(recipe_text(run.recipe))
        (ended,) = run_torch_ranks(
            "tests.support.torch_ranks.trainer",
            [0],
            recipe=recipe,
            base="/",
        )
        assert ended.code == 0, ended

    assert "ff train compare recipe.toml --dir comparison" in TEXT
    monkeypatch.chdir(tmp_path)
    assert main(["train", "compare", "recipe.toml", "--dir", "comparison"]) == 0
    compared = capsys.readouterr().out
    assert re.findall(r"run \d of \d: (.*)", compared) == [f"{last.arm}, seed {last.seed}"], "the others are complete"
    assert len(re.findall(r"held-out loss \d", compared)) == 4
    assert re.search(r"mean [+-].*%, 95% interval .* \(2 pairs\), bound 0.250%\nverdict: ", compared)


def smaller(raw: dict[str, Any]) -> dict[str, Any]:
    """On one rank, with two seeds and a few steps: a comparison starts a process for each run."""
    raw["plan"]["replicate"] = 1
    raw["plan"]["sequence_tokens"] = 16
    raw["optimizer"]["steps"] = 3
    raw["compare"]["seeds"] = [0, 1]
    return raw
