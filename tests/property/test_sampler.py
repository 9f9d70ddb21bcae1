"""The sampler's promises, for any size, batch and world: each sample once per epoch, whatever stops and goes on how."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fireflyer.base.errors import UsageError
from fireflyer.data.sampler import MAX_SAMPLES, ResumableSampler, SamplerState, describe_uneven, permute, slice_of_rank

sizes = st.integers(1, 500)
seeds = st.integers(0, 2**63 - 1)


@given(sizes, seeds, st.integers(0, 2**70), st.booleans())
def test_every_epoch_holds_each_sample_exactly_once(size: int, seed: int, epoch: int, shuffle: bool) -> None:
    sampler = ResumableSampler(size, global_batch=1, seed=seed, shuffle=shuffle)
    assert sorted(sampler.stream(epoch * size, size).tolist()) == list(range(size))


@given(st.integers(0, 10_000), st.integers(1, 300))
def test_the_slices_of_all_ranks_partition_the_batch(count: int, world_size: int) -> None:
    slices = [slice_of_rank(count, rank, world_size) for rank in range(world_size)]
    assert [first for first, _ in slices[1:]] == [end for _, end in slices[:-1]]
    assert (slices[0][0], slices[-1][1]) == (0, count)
    lengths = [end - first for first, end in slices]
    assert max(lengths) - min(lengths) <= 1


@given(sizes, seeds, st.lists(st.tuples(st.integers(1, 9), st.integers(1, 40), st.integers(0, 6)), max_size=8))
def test_restarts_with_any_world_size_neither_repeat_nor_skip(
    size: int, seed: int, attempts: list[tuple[int, int, int]]
) -> None:
    """Attempts of (world size, global batch, steps) one after another consume exactly the undisturbed stream."""
    consumed: list[int] = []
    saved = ResumableSampler(size, global_batch=1, seed=seed).state(0)
    for world_size, global_batch, steps in attempts:
        saved = msgspec.json.decode(msgspec.json.encode(saved), type=SamplerState)
        sampler = ResumableSampler(size, global_batch=global_batch, seed=seed)
        position = sampler.resume(saved)
        for _ in range(steps):
            for rank in range(world_size):
                consumed += sampler.batch(position, rank, world_size).tolist()
            position += global_batch
        saved = sampler.state(position)
    undisturbed = ResumableSampler(size, global_batch=1, seed=seed).stream(0, len(consumed))
    assert consumed == undisturbed.tolist()


@given(st.integers(2**40, MAX_SAMPLES), seeds)
def test_huge_data_sets_need_no_memory_and_stay_a_bijection(size: int, seed: int) -> None:
    edge = np.array([0, 1, size // 2, size - 2, size - 1], dtype=np.int64)
    images = permute(edge, size, seed, epoch=3)
    assert len(set(images.tolist())) == len(edge)
    assert images.min() >= 0
    assert images.max() < size


def test_seeds_and_epochs_shuffle_differently_and_well() -> None:
    size = 4096
    natural = np.arange(size)
    orders = [permute(natural, size, seed, epoch) for seed in (0, 1) for epoch in (0, 1)]
    for number, order in enumerate(orders):
        assert abs(np.corrcoef(natural, order)[0, 1]) < 0.06
        assert 0.3 < np.mean(np.diff(order) > 0) < 0.7
        for other in orders[:number]:
            assert np.count_nonzero(order == other) < 12  # one is expected by chance


def test_the_order_of_a_seed_is_fixed_for_ever() -> None:
    """Changing the permutation would make old checkpoints resume into another stream."""
    assert ResumableSampler(1000, global_batch=8, seed=7).batch(996).tolist() == GOLDEN


GOLDEN = [207, 695, 862, 234, 191, 311, 897, 85]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"size": 11}, "size=11"),
        ({"seed": 2}, "seed=2"),
        ({"shuffle": False}, "shuffle=False"),
        ({"version": 2}, "version 2"),
    ],
)
def test_another_data_set_or_seed_is_refused(change: dict[str, int], named: str) -> None:
    sampler = ResumableSampler(10, global_batch=4, seed=1)
    with pytest.raises(UsageError, match=named):
        sampler.resume(msgspec.structs.replace(sampler.state(8), **change))


def test_nonsense_is_refused() -> None:
    sampler = ResumableSampler(10, global_batch=4, seed=1)
    with pytest.raises(UsageError, match="size=0"):
        ResumableSampler(0, global_batch=4, seed=1)
    with pytest.raises(UsageError, match="rank 2 of 2"):
        sampler.batch(0, 2, 2)
    with pytest.raises(UsageError, match="negative"):
        sampler.stream(-1, 3)
    with pytest.raises(UsageError, match="negative"):
        sampler.resume(sampler.state(-4))


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 6])
def test_a_step_has_the_same_global_batch_for_any_number_of_ranks(world_size: int) -> None:
    sampler = ResumableSampler(1000, global_batch=12, seed=3)
    for step in range(20):
        parts = [sampler.batch(step * 12, rank, world_size) for rank in range(world_size)]
        assert np.concatenate(parts).tolist() == sampler.stream(step * 12, 12).tolist()


def test_a_batch_that_does_not_divide_evenly_is_told_once_by_rank_0(caplog: pytest.LogCaptureFixture) -> None:
    sampler = ResumableSampler(1000, global_batch=16, seed=3)
    for rank in (0, 1, 0):
        sampler.batch(0, rank, 3)
    assert caplog.messages == [
        "global_batch=16 does not divide evenly among 3 ranks: they have 5 or 6 samples, and a mean over ranks of "
        "means is not that over the samples; it divides among 1, 2, 4 or 8 ranks"
    ]
    assert describe_uneven(16, 4) is None
    assert str(describe_uneven(1, 2)).endswith("it divides among 1 ranks")


def chi_square(counts: np.ndarray[Any, np.dtype[np.int64]], expected: float) -> float:
    return float(((counts - expected) ** 2 / expected).sum())


@pytest.mark.parametrize("size", [12, 37, 64])
def test_over_many_epochs_each_sample_is_equally_likely_at_each_place(size: int) -> None:
    """Chi-square of (place, sample) over 3000 seeds, whose degrees of freedom are (size - 1)²; 5 standard deviations
    above are allowed. The seeds are fixed, so it either holds or does not."""
    seeds = 3000
    counts = np.zeros((size, size), np.int64)
    natural = np.arange(size)
    for seed in range(seeds):
        counts[natural, permute(natural, size, seed, epoch=0)] += 1
    freedom = (size - 1) ** 2
    assert chi_square(counts, seeds / size) < freedom + 5 * np.sqrt(2 * freedom)


@pytest.mark.parametrize("size", [30, 1009])
def test_neighbours_are_as_far_apart_as_chance_puts_them(size: int) -> None:
    """Chi-square of the distance, around the ring, between samples that follow each other; over 400 epochs."""
    counts = np.zeros(size, np.int64)
    for epoch in range(400):
        order = permute(np.arange(size), size, 11, epoch)
        counts += np.bincount(np.diff(order) % size, minlength=size)
    freedom = size - 2
    assert counts[0] == 0
    assert chi_square(counts[1:], 400 * (size - 1) / (size - 1)) < freedom + 5 * np.sqrt(2 * freedom)


def test_a_batch_is_spread_over_a_large_data_set_as_drawn_ones_are() -> None:
    """Chi-square of 2000 batches of 64 of 10¹² samples over 64 equal parts; and of how many of a batch share a part."""
    sampler = ResumableSampler(10**12, global_batch=64, seed=5)
    parts = sampler.stream(7 * 10**11, 2000 * 64) // (10**12 // 64)
    assert chi_square(np.bincount(parts, minlength=64), 2000) < 63 + 5 * np.sqrt(2 * 63)
    distinct = np.array([len(set(row)) for row in parts.reshape(2000, 64).tolist()])
    expected = 64 * (1 - (1 - 1 / 64) ** 64)
    assert abs(distinct.mean() - expected) < 5 * 2.5 / np.sqrt(2000)
