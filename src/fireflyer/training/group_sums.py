"""Tensors of all ranks of a process group, added up in buckets."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Final

import torch
import torch.distributed as dist
from torch import Tensor

from fireflyer.base.units import MIB

__all__ = ["BUCKET_BYTES", "add_over_group"]

BUCKET_BYTES: Final = 25 * MIB


@torch.no_grad()
def add_over_group(tensors: Iterable[Tensor], group: dist.ProcessGroup, *, divisor: int = 1) -> None:
    """Replaces each tensor by its sum over the ranks of `group`, divided by `divisor`, in place. Collective: all ranks
    pass tensors of the same shapes and dtypes in the same order."""
    for bucket in _buckets(tensors):
        flat = torch.cat([one.reshape(-1) for one in bucket])
        if group.size() > 1:
            dist.all_reduce(flat, group=group)
        if divisor != 1:
            flat /= divisor
        _copy_back(flat, bucket)


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
