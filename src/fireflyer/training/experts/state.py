"""State of a model with divided experts, as `torch.distributed.checkpoint` saves and reshards it.

The stacked tensors of a layer's experts are one tensor, `[E, …]`, divided along its first dimension over the expert
group and repeated on the ranks with the same experts: a DTensor says so, and another division is loaded by ranges.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from fireflyer.training.mesh import PlanMesh

__all__ = ["load_state", "tensors_of"]


def tensors_of(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, mesh: PlanMesh, experts: Mapping[str, nn.Parameter]
) -> dict[str, Any]:
    """`model`, and `optimizer` if there is one; tensors of `experts` (by name) and their states as DTensors."""
    where = None if mesh.expert_mesh is None else mesh.expert_mesh["expert_data", "expert"]
    of_model = get_model_state_dict(model)
    found: dict[str, Any] = {"model": {name: _divided(one, experts.get(name), where) for name, one in of_model.items()}}
    if optimizer is not None:
        state = cast("dict[str, Any]", get_optimizer_state_dict(model, optimizer))
        per_parameter: dict[str, dict[str, Any]] = {
            name: {key: _divided(one, experts.get(name), where) for key, one in values.items()}
            for name, values in state["state"].items()
        }
        found["optimizer"] = {**state, "state": per_parameter}
    return found


def load_state(model: nn.Module, optimizer: torch.optim.Optimizer | None, state: dict[str, Any]) -> None:
    """The other way; the parts of this rank are taken from DTensors."""
    set_model_state_dict(model, {name: _local(one) for name, one in state["model"].items()})
    if optimizer is not None:
        whole = state["optimizer"]
        per_parameter = {
            name: {key: _local(one) for key, one in values.items()} for name, values in whole["state"].items()
        }
        set_optimizer_state_dict(model, optimizer, cast("Any", {**whole, "state": per_parameter}))


def _divided(value: Any, expert: nn.Parameter | None, mesh: DeviceMesh | None) -> Any:
    """`value` is of a parameter of experts where `expert` is given; counters of steps are numbers of all."""
    if mesh is None or expert is None or not isinstance(value, Tensor) or value.shape != expert.shape:
        return value
    return DTensor.from_local(value.detach(), mesh, [Replicate(), Shard(0)], run_check=False)


def _local(value: Any) -> Any:
    return value.to_local() if isinstance(value, DTensor) else value
