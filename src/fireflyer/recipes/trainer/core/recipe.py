"""A recipe: one TOML file that says everything about a training run. Closed: a key that it does not know is an error.

`fireflyer.recipes.trainer.core.parsing` makes it of the file. Both commands read the same format: `ff train run` takes
the recipe as it is, `ff train compare` runs it once as it is and once with `[technique]` laid over it
(`fireflyer.recipes.trainer.core.comparison`).
"""

from __future__ import annotations

import hashlib
import posixpath
from typing import Any, Final, Literal

import msgspec

from fireflyer.codesign.parallel import ParallelPlan

__all__ = [
    "REMOTE",
    "CheckpointSettings",
    "CompareSettings",
    "DataSettings",
    "DeepseekTable",
    "EvaluationSettings",
    "EvaluationSource",
    "ExpertSettings",
    "GptTable",
    "GuardSettings",
    "HuggingFaceTable",
    "MetricsSettings",
    "ModelTable",
    "OptimizerSettings",
    "PolicySettings",
    "ProfileSettings",
    "Reaction",
    "Recipe",
    "TrainingSource",
    "identity_of",
    "resolved",
]

REMOTE: Final = "ff:"
"""Addresses of 3FS begin so: those of data and checkpoints."""

Reaction = Literal["stop", "skip", "rewind"]


class GptTable(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind", tag="gpt"):
    """`fireflyer.recipes.gpt.GPTModel`; its context is the plan's `sequence_tokens`."""

    vocabulary: int
    layers: int
    heads: int
    width: int
    seed: int = 0


class DeepseekTable(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind", tag="deepseek"
):
    """`fireflyer.recipes.deepseek.DeepseekModel` of a preset, or of a `config.json`."""

    preset: Literal["tiny", "small"] | None = None
    config: str | None = None
    """Path of a `config.json`, from the directory of the recipe."""
    vocabulary: int | None = None
    """In place of the preset's."""
    seed: int = 0


class HuggingFaceTable(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind", tag="huggingface"
):
    """The causal language model that `transformers` makes of a `config.json`, with new weights."""

    config: str
    """Path of the `config.json`, from the directory of the recipe."""
    seed: int = 0


ModelTable = GptTable | DeepseekTable | HuggingFaceTable


class TrainingSource(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One data set of token records of the mixture."""

    name: str
    path: str
    """A directory, from that of the recipe, or ff://…"""
    weight: float = 1.0
    """Share of the samples, relative to the other weights."""


class EvaluationSource(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One data set of held-out token records."""

    name: str
    path: str


class DataSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Token records: little-endian uint16, as `fireflyer.data.TokenWindows` reads them. The length of a sequence is the
    plan's `sequence_tokens`."""

    sources: tuple[TrainingSource, ...]
    evaluation: tuple[EvaluationSource, ...] = ()
    seed: int = 0


class OptimizerSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """AdamW (Loshchilov and Hutter 2019) for `steps` steps."""

    steps: int
    learning_rate: float
    """After warm-up."""
    warm_up_steps: int = 0
    """Over which it rises linearly."""
    decay: Literal["constant", "cosine"] = "constant"
    decay_steps: int = 0
    """Cosine: steps after warm-up until it has fallen to `final_share`. A number of its own, so that a run can be
    prolonged without another course."""
    final_share: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    epsilon: float = 1e-8
    weight_decay: float = 0.1
    max_norm: float = 1.0
    """Gradients with a larger norm are scaled down to it."""


class CheckpointSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where and when the run is saved."""

    directory: str
    """From that of the recipe, or ff://…"""
    period_steps: int | None = None
    period: str | None = None
    """As well whenever that time has passed: "5m"; or "auto". 5 minutes where neither is given."""
    mttf: str | None = None
    """Mean time until one of the job's nodes fails: "8h". Period "auto" is chosen by it."""
    keep: int = 2
    keep_every: int | None = None
    """Those of every so many steps stay, too."""


class EvaluationSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """When and how much of the held-out data is evaluated."""

    period_steps: int = 0
    """0: after the last step only."""
    sequences: int = 64
    """Of each source, its first ones."""
    batch: int = 8
    """Sequences of one forward pass. The same at any number of ranks, so the losses are, but for rounding."""


class GuardSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Comparison of replicas, `fireflyer.training.guard`."""

    period_steps: int = 0
    """0: no guard."""


class ExpertSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which ranks the experts of a layer are on."""

    placement: Literal["fixed", "measured"] = "fixed"
    """`measured`: a run that goes on puts experts on ranks by the tokens that they got before."""


class PolicySettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What to do about a step whose loss or gradient is not finite, or whose loss is a spike."""

    on_not_finite: Reaction = "stop"
    on_spike: Reaction | Literal["ignore"] = "ignore"
    limit: int = 3
    """Steps that are skipped and rewinds together, in the whole run; the next one stops it."""
    window: int = 64
    """Accepted losses to which a loss is compared; until there are so many nothing is a spike."""
    deviations: float = 8.0
    """A spike lies this many deviations (1.4826 x median absolute deviation) above the median of the window, ..."""
    least_rise: float = 0.05
    """... and by this share of it."""


class ProfileSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Trace of rank 0 by `torch.profiler`."""

    first_step: int
    last_step: int
    file: str = "trace.json"
    """For chrome://tracing or Perfetto, from the directory of the recipe."""


class MetricsSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What rank 0 writes down."""

    file: str = "metrics.jsonl"
    """From the directory of the recipe."""
    peak_flops: float | None = None
    """Of one GPU, per second; with it the MFU is written."""
    profile: ProfileSettings | None = None


class CompareSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Of `ff train compare`."""

    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)
    """One pair of runs each: model and data have the same seed in both."""
    bound: float = 0.0025
    """Relative difference of the held-out loss that does not matter. DeepSeek-V3 validated FP8 with 0.25 % (Insights
    into DeepSeek-V3, 2.4)."""
    confidence: float = 0.95


class Recipe(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The whole file. `parsing.recipe_of` makes it, `checks` says whether it can be executed."""

    model: ModelTable
    data: DataSettings
    plan: ParallelPlan
    optimizer: OptimizerSettings
    checkpoint: CheckpointSettings
    evaluation: EvaluationSettings = EvaluationSettings()
    guard: GuardSettings = GuardSettings()
    experts: ExpertSettings = ExpertSettings()
    policy: PolicySettings = PolicySettings()
    metrics: MetricsSettings = MetricsSettings()
    compare: CompareSettings = CompareSettings()
    technique: dict[str, Any] = {}
    """Tables of this format that `ff train compare` lays over the others; `ff train run` leaves them alone."""


def identity_of(recipe: Recipe) -> str:
    """Digest of what a run is: equal on ranks that were given the same recipe."""
    return hashlib.blake2b(msgspec.json.encode(recipe), digest_size=16).hexdigest()


def resolved(recipe: Recipe, base: str) -> Recipe:
    """The recipe with all paths from the directory `base`; addresses of 3FS stay."""

    def local(path: str) -> str:
        return posixpath.normpath(posixpath.join(base, path))

    def place(path: str) -> str:
        return path if path.startswith(REMOTE) else local(path)

    replace = msgspec.structs.replace
    model, metrics = recipe.model, recipe.metrics
    if not isinstance(model, GptTable) and model.config is not None:
        model = replace(model, config=local(model.config))
    if metrics.profile is not None:
        metrics = replace(metrics, profile=replace(metrics.profile, file=local(metrics.profile.file)))
    data = replace(
        recipe.data,
        sources=tuple(replace(one, path=place(one.path)) for one in recipe.data.sources),
        evaluation=tuple(replace(one, path=place(one.path)) for one in recipe.data.evaluation),
    )
    return replace(
        recipe,
        model=model,
        data=data,
        checkpoint=replace(recipe.checkpoint, directory=place(recipe.checkpoint.directory)),
        metrics=replace(metrics, file=local(metrics.file)),
    )
