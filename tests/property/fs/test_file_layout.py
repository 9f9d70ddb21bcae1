"""Order of chains and arithmetic of chunks, against the plain way of doing it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from fireflyer.fs.core.meta.inodes.layout import SplitMix64, chain_of, end_at, max_bytes, order_of, pieces
from fireflyer.fs.schema.inodes import MAX_FILE_BYTES, Layout

CHUNK_BYTES = st.sampled_from([1 << 16, 1 << 20, 1 << 26])
SEEDS = st.integers(0, (1 << 63) - 1)


@given(st.lists(st.integers(0, 10**6), unique=True, min_size=1, max_size=50), st.data(), SEEDS)
def test_the_order_is_the_beginning_of_a_shuffle_of_the_table(
    chains: list[int], data: st.DataObject, seed: int
) -> None:
    stripe = data.draw(st.integers(1, len(chains)))
    numbers, shuffled = SplitMix64(seed), list(chains)
    for place in range(stripe):
        other = place + numbers.next() % (len(chains) - place)
        shuffled[place], shuffled[other] = shuffled[other], shuffled[place]
    order = order_of(Layout(1, 1 << 20, stripe, seed), chains)
    assert list(order) == shuffled[:stripe]
    assert chain_of(order, stripe + 3) == order[3 % stripe]


@given(CHUNK_BYTES, st.integers(0, 1 << 30), st.integers(0, 1 << 28))
def test_pieces_cover_the_range_once_and_stay_in_their_chunks(chunk_bytes: int, offset: int, size: int) -> None:
    layout = Layout(1, chunk_bytes, 1, 0)
    at = offset
    for piece in pieces(layout, offset, size):
        assert end_at(layout, piece.chunk, piece.offset) == at
        assert 0 < piece.size <= chunk_bytes - piece.offset
        at += piece.size
    assert at == offset + size


@given(CHUNK_BYTES)
def test_a_file_is_as_long_as_its_chunks_and_offsets_allow(chunk_bytes: int) -> None:
    layout = Layout(1, chunk_bytes, 1, 0)
    assert max_bytes(layout) == min(MAX_FILE_BYTES, chunk_bytes << 32)
