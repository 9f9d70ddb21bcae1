"""Files that are on disk were laid out by these numbers: they never change."""

from __future__ import annotations

from fireflyer.fs.core.meta.inodes.layout import SplitMix64, order_of
from fireflyer.fs.schema.inodes import Layout

CHUNK_BYTES = 1 << 20


def test_split_mix_gives_the_numbers_of_its_authors() -> None:
    numbers = SplitMix64(1234567)  # of the reference implementation in C, with this state
    assert [numbers.next() for _ in range(5)] == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]


def test_orders_of_chains() -> None:
    chains = tuple(range(101, 111))
    assert order_of(Layout(1, CHUNK_BYTES, 10, 1), chains) == (106, 109, 102, 104, 108, 103, 105, 107, 101, 110)
    assert order_of(Layout(1, CHUNK_BYTES, 3, 2), chains) == (101, 107, 110)
    assert order_of(Layout(1, CHUNK_BYTES, 1, (1 << 63) - 1), chains) == (110,)
    assert order_of(Layout(1, CHUNK_BYTES, 4, 7), (5, 9, 7, 8)) == (8, 9, 7, 5)
