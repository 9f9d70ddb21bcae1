"""Gradients of a divided model: what is still a sum over ranks is added, over tensor ranks and over replicas.

A parameter that each rank has whole, such as a norm under sequence parallelism, got from each rank the gradient of its
own tokens: a DTensor whose placement is `Partial`. Its sum over the tensor group is one allreduce for all of them, once
a step, however many micro-batches were accumulated. `fully_shard` does it for its parameters by itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from fireflyer.base.units import MIB

__all__ = ["clip_gradients", "finish_gradients"]

BUCKET_BYTES = 25 * MIB


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
    with torch.no_grad():
        local = [_local(one.grad) for one in parameters if one.grad is not None]
        for bucket in _buckets(local):
            flat = torch.cat([one.reshape(-1) for one in bucket])
            dist.all_reduce(flat, group=data)
            if average:
                flat /= data.size()
            _copy_back(flat, bucket)


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
            for bucket in _buckets([_local(one.grad) for one in mine]):  # type: ignore[arg-type]
                flat = torch.cat([one.reshape(-1) for one in bucket])
                dist.all_reduce(flat, group=mesh.get_group(0))
                _copy_back(flat, bucket)
            for one in mine:
                local = _local(one.grad)  # type: ignore[arg-type]
                one.grad = DTensor.from_local(local, mesh, [Replicate()], run_check=False)


def _is_partial(gradient: Tensor | None) -> bool:
    return isinstance(gradient, DTensor) and gradient.device_mesh.ndim == 1 and gradient.placements[0].is_partial()


def _buckets(tensors: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Tensors of one dtype, of about `BUCKET_BYTES` together or one larger; the same on all ranks."""
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        by_dtype.setdefault(tensor.dtype, []).append(tensor)
    for same in by_dtype.values():
        bucket: list[Tensor] = []
        size = 0
        for tensor in same:
            bytes_here = tensor.numel() * tensor.element_size()
            if bucket and size + bytes_here > BUCKET_BYTES:
                yield bucket
                bucket, size = [], 0
            bucket.append(tensor)
            size += bytes_here
        yield bucket


def _copy_back(flat: Tensor, bucket: Sequence[Tensor]) -> None:
    for part, tensor in zip(torch.split(flat, [one.numel() for one in bucket]), bucket, strict=True):
        tensor.copy_(part.view(tensor.shape))
