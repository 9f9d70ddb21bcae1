"""Batches read ahead of their use by background threads, a bounded number of them.

    sampler.batch(position, rank, world_size) -> the data set's items -> a batch

Batches come in the order of their positions, whichever thread finished first. `position` (and with it the state that a
checkpoint keeps) is that of the batches handed out, never of those read ahead: what was only read ahead is read again
after a restart.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Generic, NamedTuple, Protocol, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from fireflyer.base.errors import Aborted, UsageError
from fireflyer.data.concatenation import Items, fetch
from fireflyer.data.sampler import slice_of_rank

__all__ = ["MAX_DEPTH", "Prefetcher", "RecordBatch", "RecordLoader", "Sampler"]

MAX_DEPTH = 1024
T = TypeVar("T")
B = TypeVar("B")
S_co = TypeVar("S_co", covariant=True)


class Sampler(Protocol[S_co]):
    """`ResumableSampler` or `MixtureSampler`; `S_co` is what its state is."""

    size: int
    global_batch: int

    def batch(self, position: int, rank: int = 0, world_size: int = 1) -> NDArray[np.int64]: ...
    def state(self, position: int) -> S_co: ...


class Prefetcher(Generic[T, B]):
    """An endless iterator over this rank's batches, from `position` on. For one consumer thread.

    An error of a background thread is raised by the `next` that would have given that batch; the loader is then closed.
    """

    def __init__(
        self,
        dataset: Items[T],
        sampler: Sampler[Any],
        make: Callable[[int, Sequence[T]], B],
        *,
        rank: int,
        world_size: int,
        position: int,
        depth: int,
        threads: int,
    ) -> None:
        """`make(position, items)` is a batch. `depth` bounds the batches held ready, `threads` those that are being
        read. Raises `UsageError`, also where a rank would get no sample at all."""
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
        self._make = make
        self._position = position
        self._ahead: deque[Future[B]] = deque()
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix=f"ff-loader-{rank}")
        self._closed: str | None = None

    @property
    def position(self) -> int:
        """Samples that all ranks together consumed: where the next batch begins."""
        return self._position

    def state(self) -> Any:
        """Of the sampler, at `position`."""
        return self.sampler.state(self._position)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> B:
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

    def _load(self, position: int) -> B:
        indices = self.sampler.batch(position, self.rank, self.world_size)
        return self._make(position, fetch(self._dataset, indices.tolist()))


class RecordBatch(NamedTuple):
    """One rank's part of the global batch that begins at `position` of the sample stream."""

    position: int
    records: Sequence[memoryview]
    """Read-only bytes. They share a buffer, which lives as long as one of them does."""


class RecordLoader(Prefetcher[memoryview, RecordBatch]):
    """Batches of records as bytes, without torch: of a `RecordSet`, or a `Concatenation` of several."""

    def __init__(
        self,
        dataset: Items[memoryview],
        sampler: Sampler[Any],
        *,
        rank: int = 0,
        world_size: int = 1,
        position: int = 0,
        depth: int = 4,
        threads: int = 2,
    ) -> None:
        """As `Prefetcher`."""
        super().__init__(
            dataset,
            sampler,
            RecordBatch,
            rank=rank,
            world_size=world_size,
            position=position,
            depth=depth,
            threads=threads,
        )
