"""Which layers of a model compute in FP8.

Replaced is a module that is exactly an `nn.Linear`, unless one of these rules keeps it:

1. its name, or that of a module around it, matches a pattern of `keep`: by default output heads, gates and routers;
2. its weight is the one of an `nn.Embedding`, or of any module that is kept.

Replaced is also the child `grouped_linear` of a module that has stacked matrices, as `recipes.deepseek` has its routed
experts, and multiplies them by calling `self.grouped_linear(rows, weights, counts)`; `keep` may name the module.

All else stays as it is: embeddings, norms, attention with its softmax, routing by parameters, and subclasses of
`nn.Linear`, whose owners may use the weight without calling them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from fnmatch import fnmatchcase
from typing import Final

import msgspec
from torch import nn

from fireflyer.base.errors import UsageError
from fireflyer.training.fp8.config import DEFAULT, Fp8Config
from fireflyer.training.fp8.counts import OperandCounts
from fireflyer.training.fp8.grouped import Fp8GroupedLinear
from fireflyer.training.fp8.linear import Fp8Linear

__all__ = ["DEFAULT_KEEP", "Conversion", "convert", "report", "reset_counts"]

DEFAULT_KEEP: Final = (
    *("head", "*.head", "lm_head", "*.lm_head", "output"),
    *("gate", "*.gate", "router", "*.router"),
)
"""Patterns as of the shell. `output` is a head only as a module of the model itself; `gate_proj` is no gate."""


class Conversion(msgspec.Struct, frozen=True, kw_only=True):
    """Result of a conversion: what became of the linear layers of a model, and of its groups of matrices."""

    converted: tuple[str, ...]
    kept: tuple[tuple[str, str], ...]
    """Names, and why."""
    other: tuple[str, ...]
    """Parameters of two or more dimensions of which this package does not know how they are used: neither of a layer
    above, nor of an embedding, nor in a module that `keep` names. Their products, if they have any, stay as they
    were."""


def convert(model: nn.Module, keep: Iterable[str] = DEFAULT_KEEP, config: Fp8Config = DEFAULT) -> Conversion:
    """Makes linear layers and groups of `model` FP8 layers, in place: parameters, names, hooks and references stay.

    Call it before `fully_shard` and before wrapping. `keep` replaces the default patterns; to add to them:
    `keep=(*DEFAULT_KEEP, "layers.0.*")`. Raises `UsageError` for a pattern of the caller's that matches no module, and
    where no layer is left.
    """
    patterns = tuple(keep)
    names = [name for name, _ in model.named_modules(remove_duplicate=False)]
    for pattern in patterns:
        if pattern not in DEFAULT_KEEP and not any(fnmatchcase(name, pattern) for name in names):
            raise UsageError(f"keep pattern {pattern!r} matches no module of the model")
    kept, chosen = _divide(model, patterns)
    groups = {name: one for name, one in _groups(model) if _keeping(name, patterns) is None}
    if not chosen and not groups:
        raise UsageError(f"no linear layer to convert; kept: {[f'{name} ({why})' for name, why in kept.items()]}")
    for module in chosen.values():
        if not isinstance(module, Fp8Linear):
            module.__class__ = Fp8Linear
        assert isinstance(module, Fp8Linear)  # noqa: S101 - for the type checker
        module.use_fp8(config)
    for group in groups.values():
        group.grouped_linear = Fp8GroupedLinear(config)
    other = tuple(_other(model, patterns, {*kept, *chosen, *groups}))
    return Conversion(converted=(*chosen, *groups), kept=tuple(kept.items()), other=other)


def report(model: nn.Module) -> list[OperandCounts]:
    """The counts of each operand of each FP8 layer of this rank, in the order of modules."""
    return [row for name, module in _fp8_layers(model) for row in module.fp8_counts.of(name)]


def reset_counts(model: nn.Module) -> None:
    """Counts of all layers begin anew."""
    for _, module in _fp8_layers(model):
        module.fp8_counts.reset()


def _fp8_layers(model: nn.Module) -> Iterator[tuple[str, Fp8Linear | Fp8GroupedLinear]]:
    return (
        (name, module) for name, module in model.named_modules() if isinstance(module, Fp8Linear | Fp8GroupedLinear)
    )


def _groups(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for name, module in model.named_modules():
        if isinstance(getattr(module, "grouped_linear", None), nn.Module):
            yield name, module


def _other(model: nn.Module, patterns: tuple[str, ...], known: set[str]) -> Iterator[str]:
    for name, module in model.named_modules():
        if name in known or isinstance(module, nn.Embedding) or _keeping(name, patterns) is not None:
            continue
        for own, parameter in module.named_parameters(recurse=False):
            if parameter.dim() > 1:
                yield f"{name}.{own}" if name else own


def _divide(model: nn.Module, patterns: tuple[str, ...]) -> tuple[dict[str, str], dict[str, nn.Linear]]:
    """Linear layers that are kept, with reasons, and those that are not, by name."""
    kept: dict[str, str] = {}
    chosen: dict[str, nn.Linear] = {}
    high = {id(module.weight): name for name, module in model.named_modules() if isinstance(module, nn.Embedding)}
    for name, module in model.named_modules(remove_duplicate=False):
        if not isinstance(module, nn.Linear):
            continue
        if (pattern := _keeping(name, patterns)) is not None:
            kept[name] = f"matches {pattern!r}"
        elif type(module) not in (nn.Linear, Fp8Linear):
            kept[name] = f"is a {type(module).__name__}, not exactly an nn.Linear"
        else:
            chosen[name] = module
            continue
        high.setdefault(id(module.weight), name)
    for name, module in list(chosen.items()):
        if (other := high.get(id(module.weight))) is not None:
            kept[name] = f"shares its weight with {other!r}"
            del chosen[name]
    return kept, chosen


def _keeping(name: str, patterns: tuple[str, ...]) -> str | None:
    """The first pattern that matches the name, or that of a module around it."""
    parts = name.split(".")
    around = [".".join(parts[:end]) for end in range(1, len(parts) + 1)]
    return next((pattern for pattern in patterns if any(fnmatchcase(one, pattern) for one in around)), None)
