"""Mixtures: each source has its share of any window, its own epochs, and goes on where it was, whatever changes."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fireflyer.base.errors import UsageError
from fireflyer.data.mixture import MAX_PERIOD, MixtureSampler, MixtureState, Source, whole_weights

whole = st.lists(st.integers(1, 60), min_size=1, max_size=9)
seeds = st.integers(0, 2**63 - 1)


def mixture(weights: list[int], sizes: list[int] | None = None, *, seed: int = 5, batch: int = 6) -> MixtureSampler:
    found = sizes or [7 + 3 * at for at in range(len(weights))]
    sources = [Source(f"s{at}", size, weight) for at, (size, weight) in enumerate(zip(found, weights, strict=True))]
    return MixtureSampler(sources, global_batch=batch, seed=seed)


@given(whole, st.integers(0, 2**40), st.integers(1, 700))
def test_every_window_has_each_source_within_two_samples_of_its_share(
    weights: list[int], first: int, count: int
) -> None:
    sources, _ = mixture(weights).choices(first, count)
    for source, weight in enumerate(weights):
        assert abs(int(np.count_nonzero(sources == source)) - Fraction(count * weight, sum(weights))) < 2


@given(whole)
def test_every_prefix_is_as_even_as_tijdemans_bound_says(weights: list[int]) -> None:
    total, count = sum(weights), len(weights)
    bound = 1 - Fraction(1, max(2, 2 * count - 2))
    sources, _ = mixture(weights).choices(0, 2 * total)
    for source, weight in enumerate(weights):
        taken = np.cumsum(sources == source)
        for n in range(1, 2 * total + 1):
            assert abs(n * Fraction(weight, total) - int(taken[n - 1])) <= bound


@given(whole, seeds)
def test_each_source_is_read_as_if_it_were_alone(weights: list[int], seed: int) -> None:
    """All its samples in each of its epochs, in an order that the other sources do not change."""
    sampler = mixture(weights, seed=seed)
    numbers = sampler.stream(0, 400)
    sources = np.searchsorted(sampler.firsts, numbers, side="right") - 1
    for source, one in enumerate(sampler.sources):
        mine = (numbers[sources == source] - sampler.firsts[source]).tolist()
        for begin in range(0, len(mine) - one.size + 1, one.size):
            assert sorted(mine[begin : begin + one.size]) == list(range(one.size))
        alone = MixtureSampler([msgspec.structs.replace(one, weight=0.5)], global_batch=1, seed=seed)
        assert alone.stream(0, len(mine)).tolist() == mine


@given(whole, st.lists(st.tuples(st.integers(1, 7), st.integers(1, 40), st.integers(0, 5)), max_size=8))
def test_restarts_with_any_world_size_neither_repeat_nor_skip(
    weights: list[int], attempts: list[tuple[int, int, int]]
) -> None:
    consumed: list[int] = []
    state = mixture(weights).state(0)
    for world_size, batch, steps in attempts:
        sampler = mixture(weights, batch=batch)
        position = sampler.resume(msgspec.json.decode(msgspec.json.encode(state), type=MixtureState))
        for _ in range(steps):
            for rank in range(world_size):
                consumed += sampler.batch(position, rank, world_size).tolist()
            position += batch
        state = sampler.state(position)
    assert consumed == mixture(weights).stream(0, len(consumed)).tolist()


@given(st.lists(st.tuples(st.lists(st.integers(0, 5), min_size=4, max_size=4), st.integers(0, 60)), max_size=6))
def test_other_weights_take_effect_at_the_restart_and_each_source_goes_on(
    attempts: list[tuple[list[int], int]],
) -> None:
    """Sources are left out and come back; what was taken of each is one unbroken stretch of its own stream."""
    sizes = [5, 11, 17, 23]
    everything = MixtureSampler([Source(f"s{at}", size, 1) for at, size in enumerate(sizes)], global_batch=1, seed=5)
    taken: dict[str, list[int]] = {f"s{at}": [] for at in range(4)}
    state = everything.state(0)
    for weights, count in attempts:
        sources = [Source(f"s{at}", sizes[at], weight) for at, weight in enumerate(weights) if weight]
        if not sources:
            continue
        sampler = MixtureSampler(sources[::-1], global_batch=1, seed=5)
        position = sampler.resume(state)
        chosen, _ = sampler.choices(position, count)
        for source, number in zip(chosen.tolist(), sampler.stream(position, count).tolist(), strict=True):
            taken[sampler.sources[source].name].append(number - int(sampler.firsts[source]))
        shares = Counter(sampler.sources[source].name for source in chosen.tolist())
        for one in sources:
            assert abs(shares[one.name] - Fraction(count * int(one.weight), sum(weights))) < 1
        state = msgspec.json.decode(msgspec.json.encode(sampler.state(position + count)), type=MixtureState)
        assert state.position == position + count
    for at, size in enumerate(sizes):
        alone = MixtureSampler([Source(f"s{at}", size, 1)], global_batch=1, seed=5)
        mine = taken[f"s{at}"]
        assert mine == alone.stream(0, len(mine)).tolist()


def test_the_order_in_which_sources_are_given_does_not_matter() -> None:
    sources = [Source("a", 10, 1), Source("b", 20, 1), Source("c", 30, 3)]
    first = MixtureSampler(sources, global_batch=4, seed=1)
    other = MixtureSampler(sources[::-1], global_batch=4, seed=1)
    names = [[one.sources[at].name for at in one.choices(0, 50)[0]] for one in (first, other)]
    assert names[0] == names[1]
    assert other.resume(first.state(37)) == 37
    assert other.state(40).since == 0, "the weights are those that were in use"


def test_consumed_says_how_many_epochs_of_each_source_are_over() -> None:
    sampler = mixture([3, 1], [6, 4])
    assert sampler.consumed(40).tolist() == [30, 10]
    for position in range(80):
        sources, _ = sampler.choices(0, position)
        assert sampler.consumed(position).tolist() == [int(np.count_nonzero(sources == at)) for at in (0, 1)]


def test_a_position_far_away_costs_nothing() -> None:
    sampler = mixture([1, 2, 4], [2**40, 2**41, 2**42])
    assert len(set(sampler.stream(2**45, 1000).tolist())) == 1000


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ([0.7, 0.2, 0.1], [7, 2, 1]),
        ([2, 0, 4], [1, 0, 2]),
        ([0.1, 0.1, 0.1], [1, 1, 1]),
        ([1e300, 1e300], [1, 1]),
        ([5], [1]),
    ],
)
def test_weights_become_whole_numbers_of_the_same_ratio(given: list[float], found: list[int]) -> None:
    assert whole_weights(given) == found


@given(st.lists(st.floats(0, 1), min_size=1, max_size=20).filter(any))
def test_odd_weights_are_rounded_by_less_than_one_in_65536_but_never_to_nothing(weights: list[float]) -> None:
    found = whole_weights(weights)
    period, total = sum(found), sum(map(Fraction, weights))
    assert period <= MAX_PERIOD + len(weights)
    for weight, one in zip(weights, found, strict=True):
        assert (one == 0) == (weight == 0)
        assert abs(Fraction(one, period) - Fraction(weight) / total) < Fraction(1 + len(weights), MAX_PERIOD)


@pytest.mark.parametrize(
    ("sources", "said"),
    [
        ([], "0 sources"),
        ([Source("a", 1, 1), Source("a", 2, 1)], "a name of its own"),
        ([Source("a", 0, 1)], "source 'a' has 0 samples"),
        ([Source("a", 1, -1)], "weight -1"),
        ([Source("a", 1, float("nan"))], "weight nan"),
        ([Source("a", 1, 0)], "all weights are 0"),
    ],
)
def test_nonsense_is_refused(sources: list[Source], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        MixtureSampler(sources, global_batch=1, seed=1)


def test_a_state_of_other_data_is_refused() -> None:
    sampler = mixture([1, 2])
    state = sampler.state(12)
    for change, said in (
        ({"seed": 6}, "seed=6"),
        ({"shuffle": False}, "shuffle=False"),
        ({"version": 2}, "version 2"),
        ({"since": 13}, "position 12 and weights since 13"),
        ({"weights": {"s0": 0}}, "damaged"),
        ({"sources": (msgspec.structs.replace(state.sources[0], size=8),)}, "source 's0' had 8 samples"),
    ):
        with pytest.raises(UsageError, match=said):
            sampler.resume(msgspec.structs.replace(state, **change))


def test_the_order_of_a_seed_is_fixed_for_ever() -> None:
    """Changing it would make old checkpoints resume into another stream."""
    assert mixture([3, 1, 1], [50, 60, 70], seed=7).stream(1000, 12).tolist() == GOLDEN


GOLDEN = [46, 99, 44, 143, 39, 18, 83, 3, 162, 19, 22, 84]
