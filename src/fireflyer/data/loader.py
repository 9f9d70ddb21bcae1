"""Batches as tensors, read ahead of their use (`fireflyer.data.prefetch`): the items of a batch are collated."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import torch

from fireflyer.data.concatenation import Items
from fireflyer.data.prefetch import Prefetcher, Sampler

__all__ = ["Batch", "PrefetchLoader", "Sample", "stack"]

Sample = tuple[torch.Tensor, ...]


class Batch(msgspec.Struct, frozen=True):
    """One rank's part of the global batch that begins at `position` of the sample stream."""

    position: int
    tensors: tuple[torch.Tensor, ...]
    """One for each field of a sample, its first dim the samples."""

    @property
    def samples(self) -> int:
        return len(self.tensors[0])


def stack(samples: Sequence[Sample]) -> tuple[torch.Tensor, ...]:
    """Field by field: n tensors `[...]` become one `[n, ...]`."""
    return tuple(torch.stack(field) for field in zip(*samples, strict=True))


class PrefetchLoader(Prefetcher[Sample, Batch]):
    """Loader of any data set of tuples of tensors, as `TokenWindows`, which is used by several threads at once."""

    def __init__(
        self,
        dataset: Items[Sample],
        sampler: Sampler[Any],
        *,
        rank: int = 0,
        world_size: int = 1,
        position: int = 0,
        depth: int = 4,
        threads: int = 1,
        collate: Callable[[Sequence[Sample]], tuple[torch.Tensor, ...]] = stack,
    ) -> None:
        """As `Prefetcher`. `collate` makes the tensors of a batch of its samples."""

        def make(position: int, samples: Sequence[Sample]) -> Batch:
            return Batch(position, collate(samples))

        super().__init__(
            dataset,
            sampler,
            make,
            rank=rank,
            world_size=world_size,
            position=position,
            depth=depth,
            threads=threads,
        )
