"""Batches as tensors, read ahead of their use by background threads, a bounded number of them.

    sampler.batch(position, rank, world_size) -> dataset[i] for each -> collate -> Batch

Batches come in the order of their positions, whichever thread finished first. `position` (and with it the state that a
checkpoint keeps) is that of the batches handed out, never of those read ahead: what was only read ahead is read again
after a restart.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol, Self

import msgspec
import torch

from fireflyer.base.errors import Aborted, UsageError
from fireflyer.data.sampler import ResumableSampler, SamplerState, slice_of_rank

__all__ = ["Batch", "PrefetchLoader", "Sample", "Samples", "stack"]

Sample = tuple[torch.Tensor, ...]

MAX_DEPTH = 1024


class Samples(Protocol):
    """A data set with random access; `__getitem__` is called by several threads at once."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Sample: ...


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


class PrefetchLoader:
    """An endless iterator over this rank's batches, from `position` on. For one consumer thread.

    An error of a background thread is raised by the `next` that would have given that batch; the loader is then closed.
    """

    def __init__(
        self,
        dataset: Samples,
        sampler: ResumableSampler,
        *,
        rank: int = 0,
        world_size: int = 1,
        position: int = 0,
        depth: int = 4,
        threads: int = 1,
        collate: Callable[[Sequence[Sample]], tuple[torch.Tensor, ...]] = stack,
    ) -> None:
        """`depth` bounds the batches held ready. Raises `UsageError`, also where a rank would get no sample at all."""
        if len(dataset) != sampler.size:
            raise UsageError(f"the data set has {len(dataset)} samples, the sampler was made for {sampler.size}")
        if not 1 <= depth <= MAX_DEPTH or threads < 1:
            raise UsageError(f"depth={depth}, threads={threads}; depth must be 1 to {MAX_DEPTH}, threads at least 1")
        if position < 0:
            raise UsageError(f"position={position} is negative")
        first, end = slice_of_rank(sampler.global_batch, rank, world_size)
        if first == end:
            raise UsageError(f"global_batch={sampler.global_batch} is smaller than the world size {world_size}")
        self.sampler = sampler
        self.rank = rank
        self.world_size = world_size
        self.depth = depth
        self._dataset = dataset
        self._collate = collate
        self._position = position
        self._ahead: deque[Future[Batch]] = deque()
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix=f"ff-loader-{rank}")
        self._closed: str | None = None

    @property
    def position(self) -> int:
        """Samples that all ranks together consumed: where the next batch begins."""
        return self._position

    def state(self) -> SamplerState:
        return self.sampler.state(self._position)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Batch:
        if self._closed is not None:
            raise Aborted(f"this loader is closed: {self._closed}")
        self._read_ahead()
        try:
            batch = self._ahead.popleft().result()
        except BaseException as error:
            self.close(f"batch at {self._position} failed: {error}")
            raise
        self._position += self.sampler.global_batch
        self._read_ahead()
        return batch

    def close(self, reason: str = "close() was called") -> None:
        """Gives up what was read ahead and joins the threads; may be called twice."""
        if self._closed is None:
            self._closed = reason
        for future in self._ahead:
            future.cancel()
        self._ahead.clear()
        self._pool.shutdown(wait=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _read_ahead(self) -> None:
        while len(self._ahead) < self.depth:
            position = self._position + len(self._ahead) * self.sampler.global_batch
            self._ahead.append(self._pool.submit(self._load, position))

    def _load(self, position: int) -> Batch:
        indices = self.sampler.batch(position, self.rank, self.world_size)
        return Batch(position, self._collate([self._dataset[index] for index in indices.tolist()]))
