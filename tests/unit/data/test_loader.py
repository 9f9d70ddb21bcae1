"""The loader gives the sampler's batches in order, reads a bounded number ahead, and hides no error."""

from __future__ import annotations

import threading

import pytest
import torch

from fireflyer.base.errors import Aborted, DataCorruption, UsageError
from fireflyer.data.loader import PrefetchLoader, Sample
from fireflyer.data.sampler import ResumableSampler


class Numbers:
    """Sample i is `(i, i²)`. Remembers what was read; reading waits for `gate`, and `broken` cannot be read."""

    def __init__(self, size: int, broken: int = -1) -> None:
        self.size = size
        self.broken = broken
        self.gate = threading.Semaphore(0)
        self.read: list[int] = []
        self._changed = threading.Condition()

    def wait_for_reads(self, count: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.read) >= count, timeout=30)

    def opened(self) -> Numbers:
        self.gate.release(1_000_000)
        return self

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Sample:
        self.gate.acquire()
        if index == self.broken:
            raise DataCorruption(f"record {index} is broken")
        with self._changed:
            self.read.append(index)
            self._changed.notify_all()
        return torch.tensor(index), torch.tensor([index * index])


def sampler(size: int = 50, global_batch: int = 6) -> ResumableSampler:
    return ResumableSampler(size, global_batch=global_batch, seed=3)


@pytest.mark.parametrize("threads", [1, 4])
def test_batches_are_those_of_the_sampler_in_order(threads: int) -> None:
    with PrefetchLoader(Numbers(50).opened(), sampler(), rank=1, world_size=3, threads=threads) as loader:
        for step in range(30):
            batch = next(loader)
            numbers, squares = batch.tensors
            assert (batch.position, batch.samples) == (6 * step, 2)
            assert numbers.tolist() == sampler().batch(6 * step, 1, 3).tolist()
            assert squares.tolist() == [[number**2] for number in numbers.tolist()]
            assert loader.position == 6 * (step + 1)


def test_the_state_counts_what_was_consumed_not_what_was_read_ahead() -> None:
    dataset = Numbers(50).opened()
    with PrefetchLoader(dataset, sampler(), depth=8) as loader:
        next(loader)
        next(loader)
        dataset.wait_for_reads(6 * 8)
        state = loader.state()
    assert state.position == 12
    with PrefetchLoader(Numbers(50).opened(), sampler(), position=sampler().resume(state)) as loader:
        assert next(loader).tensors[0].tolist() == sampler().batch(12).tolist()


def test_no_more_is_read_ahead_than_agreed() -> None:
    dataset = Numbers(1000).opened()
    loader = PrefetchLoader(dataset, sampler(1000), depth=3)
    next(loader)
    dataset.wait_for_reads(6 * 4)  # three more batches, without being asked
    assert len(loader._ahead) == 3
    loader.close()
    assert len(dataset.read) == 6 * 4


def test_an_error_comes_out_where_its_batch_was_due() -> None:
    broken = int(sampler().batch(12)[2])
    loader = PrefetchLoader(Numbers(50, broken).opened(), sampler(), depth=4, threads=2)
    next(loader)
    next(loader)
    with pytest.raises(DataCorruption, match=f"record {broken} is broken"):
        next(loader)
    assert loader.position == 12
    with pytest.raises(Aborted, match=f"record {broken} is broken"):
        next(loader)


def test_close_joins_the_threads_and_may_be_repeated() -> None:
    before = threading.active_count()
    loader = PrefetchLoader(Numbers(50).opened(), sampler(), threads=3)
    next(loader)
    loader.close()
    loader.close()
    assert threading.active_count() == before
    with pytest.raises(Aborted, match=r"close\(\) was called"):
        next(loader)


def test_misuse_is_refused() -> None:
    dataset = Numbers(50)
    with pytest.raises(UsageError, match="has 50 samples, the sampler was made for 51"):
        PrefetchLoader(dataset, sampler(51))
    with pytest.raises(UsageError, match="smaller than the world size 7"):
        PrefetchLoader(dataset, sampler(), rank=0, world_size=7)
    with pytest.raises(UsageError, match="depth=0"):
        PrefetchLoader(dataset, sampler(), depth=0)
    with pytest.raises(UsageError, match="position=-1"):
        PrefetchLoader(dataset, sampler(), position=-1)
