"""A recipe of a decoded TOML file: unknown keys, wrong kinds, and values that make no sense, each one line.

recipe = recipe_of(tomllib.loads(text))
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final, NamedTuple, get_args

import msgspec

from fireflyer.base.decoding import convert
from fireflyer.base.errors import UsageError
from fireflyer.checkpoint.core.schedule import periods_of
from fireflyer.recipes.trainer.core.recipe import REMOTE, DataSettings, DeepseekTable, GptTable, Recipe

__all__ = ["MAX_SOURCES", "UnknownKey", "recipe_of", "unknown_key"]

MAX_SOURCES: Final = 256
MAX_SEEDS: Final = 64
MAX_SEED: Final = (1 << 63) - 1
_MAX_COUNT: Final = 1 << 40


class UnknownKey(NamedTuple):
    """A key that the format does not have."""

    table: str
    """`data`, `data.sources[1]`; empty for the file itself."""
    key: str
    allowed: tuple[str, ...]

    def __str__(self) -> str:
        where = f"[{self.table}]" if self.table else "the recipe"
        return f"{where} has no key {self.key!r}; allowed: {', '.join(self.allowed)}"


def unknown_key(raw: Mapping[str, Any]) -> UnknownKey | None:
    """The first key of the decoded TOML that no recipe has."""
    return next(_unknown(raw, Recipe, ""), None)


def recipe_of(raw: Mapping[str, Any]) -> Recipe:
    """The recipe of a decoded TOML file. Raises `UsageError`: one line that names the key and what is allowed."""
    found = unknown_key(raw)
    if found is not None:
        raise UsageError(str(found))
    try:
        recipe = convert(raw, Recipe)
    except msgspec.ValidationError as error:
        raise UsageError(str(error)) from error
    for reason in _faults(recipe):
        raise UsageError(reason)
    return recipe


def _unknown(value: Any, kind: Any, table: str) -> Iterator[UnknownKey]:
    """Unknown keys in `value`, which should be a `kind`; values of another kind are left to the decoder."""
    if isinstance(value, Mapping):
        struct = _struct_of(value, kind)
        if struct is None:
            return
        fields = {field.encode_name: field.type for field in msgspec.structs.fields(struct)}
        config = struct.__struct_config__
        tag = () if config.tag is None else (config.tag_field,)
        for key, one in value.items():
            if key in tag:
                continue
            if key not in fields:
                yield UnknownKey(table, str(key), (*tag, *fields))
                return
            yield from _unknown(one, fields[key], f"{table}.{key}" if table else key)
    elif isinstance(value, list) and get_args(kind):
        for number, one in enumerate(value):
            yield from _unknown(one, get_args(kind)[0], f"{table}[{number}]")


def _struct_of(value: Mapping[str, Any], kind: Any) -> Any:
    """The struct that `value` is to become; None where it is none, or cannot be told."""
    structs = [one for one in (kind, *get_args(kind)) if isinstance(one, type) and issubclass(one, msgspec.Struct)]
    if len(structs) <= 1:
        return structs[0] if structs else None
    tags = {one.__struct_config__.tag: one for one in structs}
    return tags.get(value.get("kind"))


def _faults(recipe: Recipe) -> Iterator[str]:
    """Values that are of the right kind and make no sense, whatever the plan is."""
    yield from _out_of_range(recipe)
    yield from _bad_sources(recipe.data)
    yield from _remote_files(recipe)
    model, optimizer, profile = recipe.model, recipe.optimizer, recipe.metrics.profile
    if isinstance(model, DeepseekTable) and (model.preset is None) == (model.config is None):
        yield "[model] of kind deepseek needs either preset or config"
    if optimizer.decay == "cosine" and optimizer.decay_steps < 1:
        yield "[optimizer] decay = 'cosine' needs decay_steps of 1 or more"
    if profile is not None and not 1 <= profile.first_step <= profile.last_step:
        yield (
            f"[metrics.profile] first_step {profile.first_step} and last_step {profile.last_step} are no range of "
            "steps; steps count from 1"
        )
    try:
        periods_of(recipe.checkpoint.period_steps, recipe.checkpoint.period, recipe.checkpoint.mttf)
    except UsageError as error:
        yield f"[checkpoint] {error}"
    if not 2 <= len(recipe.compare.seeds) <= MAX_SEEDS or len(set(recipe.compare.seeds)) != len(recipe.compare.seeds):
        yield f"[compare] seeds must be 2 to {MAX_SEEDS} different numbers"


def _out_of_range(recipe: Recipe) -> Iterator[str]:
    model, optimizer, policy, compare = recipe.model, recipe.optimizer, recipe.policy, recipe.compare
    whole: dict[str, tuple[int, int, int]] = {
        "[model] seed": (model.seed, 0, MAX_SEED),
        "[data] seed": (recipe.data.seed, 0, MAX_SEED),
        "[optimizer] steps": (optimizer.steps, 1, _MAX_COUNT),
        "[optimizer] warm_up_steps": (optimizer.warm_up_steps, 0, _MAX_COUNT),
        "[optimizer] decay_steps": (optimizer.decay_steps, 0, _MAX_COUNT),
        "[checkpoint] keep": (recipe.checkpoint.keep, 1, 1 << 16),
        "[evaluation] period_steps": (recipe.evaluation.period_steps, 0, _MAX_COUNT),
        "[evaluation] sequences": (recipe.evaluation.sequences, 1, _MAX_COUNT),
        "[evaluation] batch": (recipe.evaluation.batch, 1, 1 << 16),
        "[guard] period_steps": (recipe.guard.period_steps, 0, _MAX_COUNT),
        "[policy] limit": (policy.limit, 0, 1 << 16),
        "[policy] window": (policy.window, 2, 1 << 16),
        **{f"[compare] seeds[{number}]": (seed, 0, MAX_SEED) for number, seed in enumerate(compare.seeds)},
    }
    for key in ("period_steps", "keep_every"):
        value = getattr(recipe.checkpoint, key)
        if value is not None:
            whole[f"[checkpoint] {key}"] = (value, 1, _MAX_COUNT)
    for name, (value, least, most) in whole.items():
        if not least <= value <= most:
            yield f"{name} is {value}; allowed: {least} to {most}"
    # Comparisons that NaN fails, too.
    real = {
        "[optimizer] learning_rate": (0 < optimizer.learning_rate < 1, "above 0 and below 1"),
        "[optimizer] final_share": (0 <= optimizer.final_share <= 1, "0 to 1"),
        "[optimizer] beta1": (0 <= optimizer.beta1 < 1, "0 to below 1"),
        "[optimizer] beta2": (0 <= optimizer.beta2 < 1, "0 to below 1"),
        "[optimizer] epsilon": (0 < optimizer.epsilon < 1, "above 0 and below 1"),
        "[optimizer] weight_decay": (0 <= optimizer.weight_decay < 1, "0 to below 1"),
        "[optimizer] max_norm": (optimizer.max_norm > 0, "above 0"),
        "[policy] deviations": (0 < policy.deviations < 1e6, "above 0"),
        "[policy] least_rise": (0 <= policy.least_rise < 1e6, "0 or more"),
        "[metrics] peak_flops": (recipe.metrics.peak_flops is None or recipe.metrics.peak_flops > 0, "above 0"),
        "[compare] bound": (0 <= compare.bound < 1, "0 to below 1"),
        "[compare] confidence": (0.5 <= compare.confidence <= 0.999, "0.5 to 0.999"),
    }
    for name, (good, allowed) in real.items():
        if not good:
            table, key = name[1:].split("] ")
            yield f"{name} is {getattr(getattr(recipe, table), key)}; allowed: {allowed}"


def _remote_files(recipe: Recipe) -> Iterator[str]:
    """Only data and checkpoints are read and written through the client of 3FS."""
    model, metrics = recipe.model, recipe.metrics
    files = {
        "[model] config": None if isinstance(model, GptTable) else model.config,
        "[metrics] file": metrics.file,
        "[metrics.profile] file": None if metrics.profile is None else metrics.profile.file,
    }
    for name, path in files.items():
        if path is not None and path.startswith(REMOTE):
            yield f"{name} is {path!r}, and must be a file of this machine; ff:// is for [data] and [checkpoint]"


def _bad_sources(data: DataSettings) -> Iterator[str]:
    for name, sources in (("sources", data.sources), ("evaluation", data.evaluation)):
        least = 1 if name == "sources" else 0
        if not least <= len(sources) <= MAX_SOURCES:
            yield f"[data] {name} has {len(sources)} entries; allowed: {least} to {MAX_SOURCES}"
        names = [one.name for one in sources]
        if len(set(names)) != len(names) or "" in names:
            yield f"[data] {name} needs a name for each entry, and no name twice; it has {', '.join(map(repr, names))}"
