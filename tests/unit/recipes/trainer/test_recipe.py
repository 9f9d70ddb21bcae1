"""A recipe is closed: what it does not know, or what makes no sense, is one line that names the key."""

from __future__ import annotations

import math
import tomllib
from typing import Any

import msgspec
import pytest
from tests.support.trainer.recipes import raw_recipe

from fireflyer.base.errors import UsageError
from fireflyer.recipes.trainer.compare import recipe_text
from fireflyer.recipes.trainer.core.parsing import recipe_of, unknown_key
from fireflyer.recipes.trainer.core.recipe import DeepseekTable, Recipe, identity_of, resolved


def test_what_is_left_out_has_defaults() -> None:
    recipe = recipe_of(raw_recipe())
    assert recipe.policy.on_not_finite == "stop"
    assert recipe.evaluation.period_steps == 0
    assert recipe.metrics.file == "metrics.jsonl"
    assert recipe.plan.world_size == 1
    assert recipe.checkpoint.keep_every is None


@pytest.mark.parametrize(
    ("raw", "line"),
    [
        (raw_recipe(data={"seeds": 1}), "[data] has no key 'seeds'; allowed: sources, evaluation, seed"),
        ({**raw_recipe(), "modle": {}}, "the recipe has no key 'modle'; allowed: model, data, plan, "),
        (raw_recipe(model={"depth": 2}), "[model] has no key 'depth'; allowed: kind, vocabulary, layers, heads, width"),
        (
            raw_recipe(plan={"precision": {"compte": "fp8"}}),
            "[plan.precision] has no key 'compte'; allowed: parameters",
        ),
        (
            raw_recipe(data={"sources": [{"name": "a", "path": "a"}, {"name": "b", "pth": "b"}]}),
            "[data.sources[1]] has no key 'pth'; allowed: name, path, weight",
        ),
        (raw_recipe(metrics={"profile": {"step": 1}}), "[metrics.profile] has no key 'step'; allowed: first_step"),
    ],
)
def test_an_unknown_key_is_named_with_what_is_allowed(raw: dict[str, Any], line: str) -> None:
    with pytest.raises(UsageError) as error:
        recipe_of(raw)
    assert str(error.value).startswith(line)
    assert unknown_key(raw_recipe()) is None


@pytest.mark.parametrize(
    ("tables", "line"),
    [
        ({"optimizer": {"steps": 0}}, "[optimizer] steps is 0; allowed: 1 to "),
        ({"optimizer": {"learning_rate": 2.0}}, "[optimizer] learning_rate is 2.0; allowed: above 0 and below 1"),
        ({"optimizer": {"learning_rate": math.nan}}, "[optimizer] learning_rate is nan"),
        ({"checkpoint": {"period_steps": 0}}, "[checkpoint] period_steps is 0; allowed: 1 to "),
        ({"checkpoint": {"keep_every": 0}}, "[checkpoint] keep_every is 0; allowed: 1 to "),
        ({"checkpoint": {"period": "auto"}}, '[checkpoint] period="auto" needs mttf="8h" or so'),
        ({"checkpoint": {"mttf": "8h"}}, "[checkpoint] mttf='8h' is for period=\"auto\""),
        ({"checkpoint": {"period": "soon"}}, "[checkpoint] duration 'soon' is not understood"),
        ({"optimizer": {"decay": "cosine"}}, "[optimizer] decay = 'cosine' needs decay_steps"),
        ({"data": {"sources": []}}, "[data] sources has 0 entries; allowed: 1 to 256"),
        ({"data": {"sources": [{"name": "a", "path": "x"}] * 2}}, "[data] sources needs a name for each entry"),
        ({"metrics": {"profile": {"first_step": 3, "last_step": 2}}}, "[metrics.profile] first_step 3 and last_step 2"),
        ({"compare": {"seeds": [1, 1]}}, "[compare] seeds must be 2 to 64 different numbers"),
        ({"compare": {"bound": -0.1}}, "[compare] bound is -0.1"),
        ({"metrics": {"file": "ff:///run.jsonl"}}, "[metrics] file is 'ff:///run.jsonl', and must be a file of this"),
        (
            {"metrics": {"profile": {"first_step": 1, "last_step": 2, "file": "ff://a/t.json"}}},
            "[metrics.profile] file is 'ff://a/t.json', and must be a file of this machine",
        ),
        (
            {"model": {"kind": "huggingface", "config": "ff:///config.json"}},
            "[model] config is 'ff:///config.json', and must be a file of this machine; ff:// is for [data] and",
        ),
        ({"policy": {"window": 1}}, "[policy] window is 1; allowed: 2 to "),
        ({"policy": {"on_spike": "wait"}}, "Invalid enum value 'wait'"),
    ],
)
def test_values_that_make_no_sense_are_refused(tables: dict[str, Any], line: str) -> None:
    with pytest.raises(UsageError) as error:
        recipe_of(raw_recipe(**tables))
    assert str(error.value).startswith(line)


def test_a_deepseek_model_is_of_a_preset_or_of_a_file() -> None:
    raw = {**raw_recipe(), "model": {"kind": "deepseek", "preset": "tiny"}}
    assert isinstance(recipe_of(raw).model, DeepseekTable)
    for model in ({"kind": "deepseek"}, {"kind": "deepseek", "preset": "tiny", "config": "config.json"}):
        with pytest.raises(UsageError, match="either preset or config"):
            recipe_of({**raw, "model": model})


def test_paths_are_from_the_directory_of_the_recipe_but_for_those_of_3fs() -> None:
    raw = raw_recipe(checkpoint={"directory": "ff:///run"}, metrics={"profile": {"first_step": 1, "last_step": 1}})
    recipe = resolved(recipe_of(raw), "/base/sub")
    assert recipe.checkpoint.directory == "ff:///run"
    assert [one.path for one in recipe.data.sources] == ["/base/sub/a", "/base/sub/b"]
    assert recipe.data.evaluation[0].path == "/base/sub/held"
    assert recipe.metrics.file == "/base/sub/metrics.jsonl"
    assert recipe.metrics.profile is not None
    assert recipe.metrics.profile.file == "/base/sub/trace.json"
    assert resolved(recipe, "/elsewhere") == recipe


def test_the_identity_differs_where_a_value_does() -> None:
    assert identity_of(recipe_of(raw_recipe())) == identity_of(recipe_of(raw_recipe()))
    assert identity_of(recipe_of(raw_recipe())) != identity_of(recipe_of(raw_recipe(data={"seed": 4})))


def test_a_recipe_that_is_written_is_read_again() -> None:
    raw = raw_recipe(
        metrics={"profile": {"first_step": 1, "last_step": 2}},
        compare={"seeds": [3, 1]},
        optimizer={"max_norm": math.inf},
    )
    recipe = recipe_of(raw)
    again = recipe_of(tomllib.loads(recipe_text(recipe)))
    assert again == recipe
    assert "technique" in {field.name for field in msgspec.structs.fields(Recipe)}
