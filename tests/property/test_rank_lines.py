"""Lines come out of a rank's bytes the same, however the bytes are cut into pieces."""

from __future__ import annotations

import itertools
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fireflyer.cluster.supervisor.output import LineSplitter

_BYTES = st.lists(st.sampled_from([b"a", b"xyz", b"\n", b"\r", b"\r\n", "ü€".encode(), b"\xff", b"\0"])).map(b"".join)


def split(data: bytes, cuts: list[int], bound: int) -> list[tuple[str, bool]]:
    splitter = LineSplitter(bound)
    lines = []
    edges = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
    for start, end in itertools.pairwise(edges):
        lines += splitter.feed(data[start:end])
    return lines + splitter.flush()


@given(_BYTES, st.lists(st.integers(0, 1000)), st.integers(1, 12))
def test_pieces_do_not_matter(data: bytes, cuts: list[int], bound: int) -> None:
    assert split(data, cuts, bound) == split(data, [], bound)


@given(_BYTES, st.lists(st.integers(0, 1000)))
def test_nothing_is_lost_but_ends_of_lines(data: bytes, cuts: list[int]) -> None:
    pieces = re.split(rb"\r\n|\r|\n", data)
    if not pieces[-1]:
        pieces.pop()
    assert split(data, cuts, 1 << 20) == [(piece.decode(errors="replace"), False) for piece in pieces]


@given(_BYTES, st.lists(st.integers(0, 1000)), st.integers(1, 5))
def test_long_lines_are_cut_once(data: bytes, cuts: list[int], bound: int) -> None:
    pieces = re.split(rb"\r\n|\r|\n", data)
    if not pieces[-1]:
        pieces.pop()
    lines = split(data, cuts, bound)
    assert [cut for _, cut in lines] == [len(piece) > bound for piece in pieces]
    assert [text for text, _ in lines] == [piece[:bound].decode(errors="replace") for piece in pieces]


@pytest.mark.parametrize(
    ("pieces", "lines"),
    [
        ([b"a\r", b"\nb\n"], ["a", "b"]),
        ([b"a\r", b"\n", b"\n"], ["a", ""]),
        ([b"10%\r20%\r", b"done\n"], ["10%", "20%", "done"]),
        ([b"", b"x", b""], ["x"]),
    ],
)
def test_ends_of_lines(pieces: list[bytes], lines: list[str]) -> None:
    splitter = LineSplitter()
    found = [line for piece in pieces for line in splitter.feed(piece)] + splitter.flush()
    assert [text for text, _ in found] == lines
