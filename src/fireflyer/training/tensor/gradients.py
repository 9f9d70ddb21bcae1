"""Gradients of a divided model: what is still a sum over ranks is added, over tensor ranks and over replicas.

A parameter that each rank has whole, such as a norm under sequence parallelism, got from each rank the gradient of its
own tokens: a DTensor whose placement is `Partial`. Its sum over the tensor group is one allreduce for all of them, once
a step, however many micro-batches were accumulated. `fully_shard` does it for its parameters by itself.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from fireflyer.training.group_sums import add_over_group

__all__ = ["clip_gradients", "finish_gradients"]


def finish_gradients(model: nn.Module, *, data: dist.ProcessGroup | None = None, average: bool = False) -> None:
    """Completes the gradients after the last backward pass of a step, in place. Collective.

    `data`: group of the data-parallel ranks, over which they are added too (`average`: their mean), unless
    `fully_shard` has done so. All ranks must have gradients of the same parameters.
    """
    parameters = [one for one in model.parameters() if one.grad is not None]
    _add_partial(parameters)
    for one in parameters:
        # Of a loss that is not parallel each rank has the gradient of the whole head.
        if isinstance(one, DTensor) and isinstance(one.grad, DTensor) and one.grad.placements != one.placements:
            one.grad = one.grad.redistribute(placements=one.placements)
    if data is None or data.size() == 1:
        return
    local = [_local(one.grad) for one in parameters if one.grad is not None]
    add_over_group(local, data, divisor=data.size() if average else 1)


def clip_gradients(model: nn.Module, max_norm: float, *, pipeline: dist.ProcessGroup | None = None) -> Tensor:
    """Scales gradients so that their norm is at most `max_norm`; returns the norm before, a scalar on each rank.

    The norm is that of the whole gradient: over tensor and shard ranks by DTensor, where each element counts once
    however many ranks have it, and over the stages of `pipeline`. For finished gradients. Collective. Raises
    `RuntimeError` for a norm that is not finite, as the gradients then are of no use.
    """
    gradients = [one.grad for one in model.parameters() if one.grad is not None]
    total = _whole_tensor(torch.nn.utils.get_total_norm(gradients))
    if pipeline is not None and pipeline.size() > 1:
        squared = total.double() ** 2
        dist.all_reduce(squared, group=pipeline)
        total = squared.sqrt().to(total.dtype)
    if not torch.isfinite(total):
        raise RuntimeError(f"the norm of the gradients is {total.item()}; nothing was scaled, skip this step")
    torch.nn.utils.clip_grads_with_norm_(list(model.parameters()), max_norm, total)
    return total


def _whole_tensor(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _add_partial(parameters: Sequence[nn.Parameter]) -> None:
    waiting = [one for one in parameters if _is_partial(one.grad)]
    with torch.no_grad():
        for mesh in dict.fromkeys(one.grad.device_mesh for one in waiting):  # type: ignore[union-attr]
            mine = [one for one in waiting if one.grad.device_mesh == mesh]  # type: ignore[union-attr]
            add_over_group([_local(one.grad) for one in mine], mesh.get_group(0))  # type: ignore[arg-type]
            for one in mine:
                local = _local(one.grad)  # type: ignore[arg-type]
                one.grad = DTensor.from_local(local, mesh, [Replicate()], run_check=False)


def _is_partial(gradient: Tensor | None) -> bool:
    return isinstance(gradient, DTensor) and gradient.device_mesh.ndim == 1 and gradient.placements[0].is_partial()
