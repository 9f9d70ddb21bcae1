"""The update of one parameter, by the functions of `torch.optim`: new parameter and state from the old and a gradient.

An optimistic step, a step that is done again with a clipped gradient, and a step without either run the same function
on the same inputs, so they give the same bits, which are those of `torch.optim.AdamW`, `Adam` and `SGD`.

Tensors are local: the shard of this rank. `state` is what `Optimizer.state` holds of a parameter, under torch's names.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Protocol

import torch
from torch.optim.adam import adam
from torch.optim.sgd import sgd

from fireflyer.base.errors import UsageError

__all__ = ["Settings", "State", "UpdateRule", "rule_of"]

Settings = Mapping[str, Any]
"""A parameter group of an optimizer: learning rate, weight decay and so on, under torch's names."""
State = dict[str, torch.Tensor]


class UpdateRule(Protocol):
    """How one optimizer changes a parameter. Pure but for `apply`, which changes its arguments in place."""

    @property
    def settings(self) -> tuple[str, ...]:
        """The names in a parameter group that the update depends on."""

    def fresh(self, parameter: torch.Tensor, settings: Settings) -> State:
        """The state before the first step; tensors like `parameter` are sharded as it is."""

    def apply(self, parameter: torch.Tensor, gradient: torch.Tensor, state: State, settings: Settings) -> None:
        """One step in place. May add entries to `state`, as torch does in a first step."""


class _Adam:
    settings: Final = (
        "lr",
        "betas",
        "eps",
        "weight_decay",
        "decoupled_weight_decay",
        "amsgrad",
        "maximize",
        "foreach",
        "fused",
    )

    def fresh(self, parameter: torch.Tensor, settings: Settings) -> State:
        on_device = parameter.device if settings["fused"] else "cpu"
        # torch's own counter is float32 unless the default dtype is float64
        dtype = torch.float64 if torch.get_default_dtype() == torch.float64 else torch.float32
        names = ["exp_avg", "exp_avg_sq", *(["max_exp_avg_sq"] if settings["amsgrad"] else [])]
        moments = {name: torch.zeros_like(parameter, memory_format=torch.preserve_format) for name in names}
        step = torch.zeros((), dtype=torch.float32 if settings["fused"] else dtype, device=on_device)
        return {"step": step, **moments}

    def apply(self, parameter: torch.Tensor, gradient: torch.Tensor, state: State, settings: Settings) -> None:
        beta1, beta2 = settings["betas"]
        adam(
            [parameter],
            [gradient],
            [state["exp_avg"]],
            [state["exp_avg_sq"]],
            [state["max_exp_avg_sq"]] if settings["amsgrad"] else [],
            [state["step"]],
            foreach=settings["foreach"],
            fused=settings["fused"],
            has_complex=torch.is_complex(parameter),
            decoupled_weight_decay=settings["decoupled_weight_decay"],
            amsgrad=settings["amsgrad"],
            beta1=beta1,
            beta2=beta2,
            lr=settings["lr"],
            weight_decay=settings["weight_decay"],
            eps=settings["eps"],
            maximize=settings["maximize"],
        )


class _Sgd:
    settings: Final = ("lr", "momentum", "dampening", "weight_decay", "nesterov", "maximize", "foreach", "fused")

    def fresh(self, parameter: torch.Tensor, settings: Settings) -> State:  # noqa: ARG002 - the first step makes it
        return {}

    def apply(self, parameter: torch.Tensor, gradient: torch.Tensor, state: State, settings: Settings) -> None:
        has_momentum = settings["momentum"] != 0
        momentum = [state.get("momentum_buffer") if has_momentum else None]
        sgd(
            [parameter],
            [gradient],
            momentum,
            foreach=settings["foreach"],
            fused=settings["fused"],
            weight_decay=settings["weight_decay"],
            momentum=settings["momentum"],
            lr=settings["lr"],
            dampening=settings["dampening"],
            nesterov=settings["nesterov"],
            maximize=settings["maximize"],
        )
        if has_momentum and momentum[0] is not None:
            state["momentum_buffer"] = momentum[0]


_RULES: Final[dict[type, UpdateRule]] = {
    torch.optim.Adam: _Adam(),
    torch.optim.AdamW: _Adam(),
    torch.optim.SGD: _Sgd(),
}
_REFUSED: Final = ("capturable", "differentiable")


def rule_of(optimizer: torch.optim.Optimizer) -> UpdateRule:
    """That of torch's `Adam`, `AdamW` or `SGD`. Raises `UsageError` for others, and for options that need a graph."""
    rule = _RULES.get(type(optimizer))
    if rule is None:
        names = ", ".join(sorted(known.__name__ for known in _RULES))
        raise UsageError(f"cannot step a {type(optimizer).__name__} in backward; use torch's {names}")
    for number, group in enumerate(optimizer.param_groups):
        for name in _REFUSED:
            if group.get(name):
                raise UsageError(f"parameter group {number} has {name}=True, which a step in backward has not; drop it")
    return rule
