"""What the guard looks at, in one order on all ranks, and the group of ranks that hold the same."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from fireflyer.base.errors import UsageError

__all__ = ["Item", "describe", "items_of", "replica_group"]

Item = tuple[str, Tensor | None]
"""A name, and the tensor of this rank; None where there is none now, as a gradient that was not computed."""


def items_of(model: nn.Module, optimizer: torch.optim.Optimizer, *, gradients: bool) -> Iterator[Item]:
    """Parameters, what the optimizer keeps for them, and their gradients: for a DTensor the part of this rank."""
    for name, parameter in model.named_parameters():
        yield f"parameter {name}", _local(parameter)
        if gradients and parameter.requires_grad:
            yield f"gradient {name}", None if parameter.grad is None else _local(parameter.grad)
        kept = optimizer.state.get(parameter, {})
        for key in sorted(kept, key=str):
            if (value := _as_tensor(kept[key])) is not None:
                yield f"optimizer {name} {key}", value


def describe(items: list[Item]) -> int:
    """64 bits that differ where the names, shapes or dtypes differ; gradients that are missing have none here."""
    text = "\n".join(
        name if tensor is None or name.startswith("gradient ") else f"{name} {tuple(tensor.shape)} {tensor.dtype}"
        for name, tensor in items
    )
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little", signed=True)


def replica_group(model: nn.Module, group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """The ranks that hold the same tensors as this one: `group`; else, for parameters that are DTensors, the dimension
    of their mesh along which they are replicated (HSDP); else the world. None: there are no such ranks.

    Raises `UsageError` where parameters differ in that.
    """
    if group is not None:
        return group
    found = {_mesh_dimension(parameter) for parameter in model.parameters()}
    if len(found) > 1:
        raise UsageError(
            "parameters have different groups of replicas; pass group= to the guard, with parts of the model"
        )
    if not found or (kind := found.pop()) is None:
        return dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
    mesh, dimension = kind
    return None if dimension is None else mesh.get_group(dimension)


def _mesh_dimension(parameter: Tensor) -> tuple[Any, int | None] | None:
    if not isinstance(parameter, DTensor):
        return None
    replicated = [index for index, one in enumerate(parameter.placements) if isinstance(one, Replicate)]
    if len(replicated) > 1:
        raise UsageError(
            f"parameters are replicated along dimensions {replicated} of their mesh; pass group= to the guard"
        )
    return parameter.device_mesh, replicated[0] if replicated else None


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()


def _as_tensor(value: object) -> Tensor | None:
    """Numbers by their bits; what is neither number nor tensor is not looked at."""
    if isinstance(value, Tensor):
        return _local(value)
    if isinstance(value, bool | int) and -(2**63) <= value < 2**63:
        return torch.tensor(int(value), dtype=torch.int64)
    if isinstance(value, float):
        return torch.frombuffer(bytearray(struct.pack("<d", value)), dtype=torch.int64)
    return None
