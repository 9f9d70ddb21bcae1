"""All chains told in the order of their files, while chunks come and go."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fireflyer.base.errors import DataCorruption
from fireflyer.fs.core.meta.fsck.chain_walk import LEAST_PAGE, ChainWalk, Piece, behind
from fireflyer.fs.core.meta.fsck.compare import InodeSet
from fireflyer.fs.schema.chunks import ChunkEntry
from fireflyer.fs.schema.ids import MAX_FILE, MAX_INDEX, ChainId, ChunkId

Chunks = dict[ChainId, set[ChunkId]]


class World:
    """Chains whose pages are answered in any order, and change between two."""

    def __init__(self, seed: int, chains: int, files: int, *, held: int = 1) -> None:
        self.rng = random.Random(seed)
        self.files = files
        names = self.rng.sample(range(1, 1000), chains)
        self.lasting: Chunks = {chain: {self.chunk() for _ in range(self.rng.choice((0, 5, 300)))} for chain in names}
        self.passing: Chunks = {chain: set() for chain in names}
        self.walk = ChainWalk(names, held=held)
        self.under: list[tuple[ChainId, ChunkId]] = []
        self.asks = 0

    def chunk(self) -> ChunkId:
        return ChunkId(self.rng.randrange(self.files), self.rng.choice((0, 1, 2, self.rng.randrange(500))))

    def change(self) -> None:
        chain = self.rng.choice(list(self.passing))
        if self.passing[chain] and self.rng.random() < 0.5:
            self.passing[chain].discard(self.rng.choice(sorted(self.passing[chain])))
        else:
            self.passing[chain].add(self.chunk())

    def turn(self) -> None:
        self.under += self.walk.wanted()
        if not self.under:
            return
        chain, start = self.under.pop(self.rng.randrange(len(self.under)))
        there = sorted(one for one in self.lasting[chain] | self.passing[chain] if one >= start)
        self.walk.take(chain, [ChunkEntry(one, None) for one in there[: self.walk.page]])
        self.asks += 1

    def told(self) -> list[Piece]:
        pieces: list[Piece] = []
        while not self.walk.over:
            self.change()
            self.turn()
            for piece in self.walk.pieces():
                pieces.append(piece)
                if self.rng.random() < 0.2:
                    self.change()
                    self.turn()
        assert not self.under
        return pieces


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 1 << 32), chains=st.integers(1, 6), files=st.sampled_from((1, 3, 200)))
def test_what_is_there_all_the_time_is_told_once_and_files_in_order(seed: int, chains: int, files: int) -> None:
    world = World(seed, chains, files)
    assert world.walk.page == LEAST_PAGE
    pieces = world.told()
    assert all(one.file <= other.file for one, other in pairwise(pieces))
    for chain, lasting in world.lasting.items():
        told = [one.chunk for piece in pieces if piece.chain == chain for one in piece.chunks]
        assert told == sorted(set(told))
        assert lasting <= set(told)
    assert all({one.chunk.file for one in piece.chunks} == {piece.file} for piece in pieces)


def test_pages_are_as_many_as_the_chunks_need_and_few_are_held() -> None:
    chains = range(1, 9)
    walk = ChainWalk(chains, held=1200)
    assert walk.page == 100
    left = {chain: [ChunkEntry(ChunkId(file, chain), None) for file in range(0, 1 << 60, 1 << 51)] for chain in chains}
    asks = told = held = most = 0
    while not walk.over:
        pieces = walk.pieces()
        while True:
            for chain, start in walk.wanted():
                page = [one for one in left[chain] if one.chunk >= start][: walk.page]
                walk.take(chain, page)
                asks, held = asks + 1, held + len(page)
            most = max(most, held)
            piece = next(pieces, None)
            if piece is None:
                break
            told, held = told + len(piece.chunks), held - len(piece.chunks)
    assert 800 < most <= 1200
    assert told == 8 * 512
    assert asks == 8 * 6


@pytest.mark.parametrize(
    "listed",
    [[(1, 1), (1, 1)], [(1, 1), (1, 0)], [(0, 0)], [(2, index) for index in range(LEAST_PAGE + 1)]],
    ids=["twice", "backwards", "told before", "too many"],
)
def test_pages_that_cannot_be_are_refused(listed: list[tuple[int, int]]) -> None:
    walk = ChainWalk([5], held=1)
    walk.wanted()
    walk.take(5, [ChunkEntry(ChunkId(0, index), None) for index in range(LEAST_PAGE)])
    for _ in walk.pieces():
        walk.wanted()
    with pytest.raises(DataCorruption, match="chain 5"):
        walk.take(5, [ChunkEntry(ChunkId(*one), None) for one in listed])


def test_the_id_that_follows() -> None:
    assert behind(ChunkId(4, 5)) == ChunkId(4, 6)
    assert behind(ChunkId(4, MAX_INDEX)) == ChunkId(5, 0)
    assert behind(ChunkId(MAX_FILE, MAX_INDEX)) is None


def test_no_chains() -> None:
    assert ChainWalk([]).over


@settings(max_examples=50, deadline=None)
@given(st.lists(st.one_of(st.integers(0, 1 << 18), st.integers(0, MAX_FILE)), max_size=200), st.integers(0, 9000))
def test_numbers_are_a_set(some: list[int], dense: int) -> None:
    numbers, model = InodeSet(), set[int]()
    for one in (*range(70000, 70000 + dense), *some):
        assert (one in numbers) == (one in model)
        assert numbers.add(one) == (one not in model)
        model.add(one)
    assert len(numbers) == len(model)
    assert all(one in numbers for one in model)
    assert not any(one in numbers for one in (69999, 70000 + dense, 1 << 40) if one not in model)
