"""Digests and verdicts of the silent-corruption guard, for drawn tensors and replicas."""

from __future__ import annotations

from collections import Counter

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fireflyer.training.guard import MAX_NAMED, combine, compare, digest
from fireflyer.training.guard.digest import ROW

SIZES = st.one_of(st.integers(0, 40), st.sampled_from([8 * ROW - 1, 8 * ROW, 8 * ROW + 1, 3 * 8 * ROW + 13]))
DIGESTS = st.integers(0, 2)


def drawn_bytes(count: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, count, dtype=np.uint8)


def mixed(seed: int, count: int) -> list[int]:
    """SplitMix64, in Python's integers."""
    numbers, state = [], seed
    for _ in range(count):
        state = (state + 0x9E3779B97F4A7C15) % 2**64
        z = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
        numbers.append((z ^ (z >> 31)) | 1)
    return numbers


FACTORS = np.array(mixed(0x46697265466C7972, ROW), np.uint64)
OF_ROWS = mixed(0x47756172644F6E65, 5)


def oracle(content: np.ndarray) -> int:
    words = np.concatenate([content, np.zeros(-len(content) % 8, np.uint8)]).view(np.uint64)
    total = 0
    for row in range(0, len(words), ROW):
        part = words[row : row + ROW]
        summed = np.sum((part ^ (part >> np.uint64(32))) * FACTORS[: len(part)], dtype=np.uint64)
        total += int(summed) * OF_ROWS[row // ROW]
    return int(np.uint64(total % 2**64).view(np.int64))


@given(SIZES, st.integers(0, 1000))
@settings(max_examples=40)
def test_a_digest_is_that_of_the_oracle(count: int, seed: int) -> None:
    content = drawn_bytes(count, seed)
    assert int(digest(torch.from_numpy(content))) == oracle(content)


@given(SIZES.filter(bool), st.integers(0, 1000), st.data())
@settings(max_examples=40)
def test_every_flipped_bit_changes_the_digest(count: int, seed: int, data: st.DataObject) -> None:
    tensor = torch.from_numpy(drawn_bytes(count, seed))
    before = int(digest(tensor))
    at, bit = data.draw(st.integers(0, count - 1)), data.draw(st.integers(0, 7))
    tensor[at] ^= 1 << bit
    assert int(digest(tensor)) != before
    other, same = data.draw(st.integers(0, count - 1)), data.draw(st.booleans())
    second = bit if same else data.draw(st.integers(0, 7))
    if (other, second) != (at, bit):
        tensor[other] ^= 1 << second
        assert int(digest(tensor)) != before


@given(st.integers(0, 1000), st.sampled_from([torch.float32, torch.bfloat16, torch.float64, torch.int16, torch.uint8]))
def test_strides_do_not_count_and_order_does(seed: int, dtype: torch.dtype) -> None:
    tensor = torch.from_numpy(drawn_bytes(960, seed)).view(dtype).view(6, -1)
    assert int(digest(tensor.T.contiguous())) == int(digest(tensor.T))
    assert int(digest(tensor[1:, 1:].clone())) == int(digest(tensor[1:, 1:]))
    assert int(digest(tensor[1:])) == int(digest(tensor[1:].clone()))
    assert int(digest(tensor.flip(0))) != int(digest(tensor))


@given(st.lists(st.integers(-(2**63), 2**63 - 1), max_size=5), st.integers(0, 4), st.integers(0, 63))
def test_a_list_of_digests_is_one_number(digests: list[int], at: int, bit: int) -> None:
    assert combine(digests) != combine([*digests, 0])
    if at < len(digests):
        changed = int(np.int64(np.uint64(digests[at] % 2**64) ^ np.uint64(1 << bit)))
        assert combine([*digests[:at], changed, *digests[at + 1 :]]) != combine(digests)


@given(st.integers(1, 5).flatmap(lambda ranks: st.lists(st.tuples(*[DIGESTS] * ranks), min_size=1, max_size=40)))
def test_a_verdict_names_whoever_differs_from_a_majority(rows: list[tuple[int, ...]]) -> None:
    """`rows`: for each tensor the digests of the ranks, which are 10, 20, ..."""
    ranks = [10 * (index + 1) for index in range(len(rows[0]))]
    of_ranks = {rank: [row[index] for row in rows] for index, rank in enumerate(ranks)}
    names = [f"parameter {index}" for index in range(len(rows))]
    verdict = compare(3, "after_commit", names, of_ranks)
    assert verdict.compared == tuple(ranks)
    different = {name: row for name, row in zip(names, rows, strict=True) if len(set(row)) > 1}
    if len(ranks) == 1:
        assert (verdict.finding, verdict.corrupt) == ("no_replicas", False)
        return
    assert verdict.corrupt == bool(different)
    assert verdict.differing_tensors == len(different)
    assert [one.name for one in verdict.tensors] == list(different)[:MAX_NAMED]
    suspects: set[int] = set()
    for row in different.values():
        value, votes = Counter(row).most_common(1)[0]
        suspects |= {rank for rank, own in zip(ranks, row, strict=True) if own != value or votes * 2 <= len(row)}
    assert set(verdict.ranks) == suspects
    if verdict.finding == "ranks":
        assert len(ranks) > 2
        assert all(Counter(row).most_common(1)[0][1] * 2 > len(row) for row in rows)
    if len(ranks) == 2 and different:
        assert (verdict.finding, verdict.ranks) == ("pair", tuple(ranks))
    str(verdict)


@given(st.integers(3, 7), st.data())
def test_one_rank_of_three_or_more_is_named_alone(ranks: int, data: st.DataObject) -> None:
    good = [data.draw(st.integers(-(2**63), 2**63 - 1)) for _ in range(4)]
    bad, tensor = data.draw(st.integers(0, ranks - 1)), data.draw(st.integers(0, 3))
    digests = {rank: list(good) for rank in range(ranks)}
    digests[bad][tensor] ^= 1
    verdict = compare(0, "before_commit", list("abcd"), digests)
    assert (verdict.finding, verdict.ranks) == ("ranks", (bad,))
    assert [one.name for one in verdict.tensors] == ["abcd"[tensor]]
