"""How a shard is cut into pieces: what is written, and what is read, in one call.

A shard is written as it lies in memory, from its first byte to its last. It is read in pieces that begin and end at
multiples of the alignment that direct IO wants, wherever tensors begin and end: a piece holds parts of several tensors,
and a tensor lies in several pieces. Small tensors share a piece; what nobody wants is left out where it is large.
Pieces end where multiples of their largest size are in the file, so that two of them seldom have parts of one chunk.

A file that can be read into any memory needs no pieces for large tensors: these are read straight to their places.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

__all__ = ["Part", "Piece", "ReadPiece", "StraightRead", "cut", "plan_reads", "plan_straight"]

MAX_GAP_BYTES: Final = 256 << 10
"""A gap between wanted bytes that is not larger is read along: another call would cost more."""


class Piece(NamedTuple):
    offset: int
    """In the file."""
    size_bytes: int


class Part(NamedTuple):
    """Bytes of one tensor within a piece."""

    tensor: int
    """Its number among those that are wanted."""
    start: int
    """In the tensor."""
    at: int
    """In the piece."""
    size_bytes: int


class StraightRead(NamedTuple):
    """Bytes that go to their place without a buffer."""

    offset: int
    """In the file."""
    tensor: int
    """Its number among those that are wanted."""
    start: int
    """In the tensor."""
    size_bytes: int


class ReadPiece(NamedTuple):
    offset: int
    """In the file; a multiple of the alignment."""
    size_bytes: int
    """A multiple of the alignment: it may reach past the end of the file."""
    needed_bytes: int
    """As much of it must be there."""
    parts: tuple[Part, ...]


def cut(size_bytes: int, piece_bytes: int) -> Iterator[Piece]:
    """All of a file, in order; the last piece may be shorter."""
    for offset in range(0, size_bytes, piece_bytes):
        yield Piece(offset, min(piece_bytes, size_bytes - offset))


def plan_reads(extents: Sequence[tuple[int, int]], piece_bytes: int, align_bytes: int) -> Iterator[ReadPiece]:
    """Pieces of at most `piece_bytes` (a multiple of `align_bytes`) with every byte of `extents`, (offset, size) in
    rising order that do not overlap. Parts come in the order of the extents and, within one, of its bytes."""
    begin, end = 0, 0
    parts: list[Part] = []
    limit = 0
    for index, (offset, size_bytes) in enumerate(extents):
        start = 0
        while start < size_bytes:
            at = offset + start
            if parts and (at >= limit or at - end > MAX_GAP_BYTES):
                yield _piece(begin, end, parts, align_bytes)
                parts = []
            if not parts:
                begin = at - at % align_bytes
                limit = begin - begin % piece_bytes + piece_bytes
            taken = min(size_bytes - start, limit - at)
            parts.append(Part(index, start, at - begin, taken))
            start, end = start + taken, at + taken
    if parts:
        yield _piece(begin, end, parts, align_bytes)


def plan_straight(extents: Sequence[tuple[int, int, int]], piece_bytes: int) -> Iterator[StraightRead]:
    """Every byte of `extents`, (number of the tensor, offset, size), in order, in reads that end at multiples of
    `piece_bytes` in the file."""
    for index, offset, size_bytes in extents:
        start = 0
        while start < size_bytes:
            at = offset + start
            taken = min(size_bytes - start, piece_bytes - at % piece_bytes)
            yield StraightRead(at, index, start, taken)
            start += taken


def _piece(begin: int, end: int, parts: list[Part], align_bytes: int) -> ReadPiece:
    needed_bytes = end - begin
    return ReadPiece(begin, needed_bytes + -needed_bytes % align_bytes, needed_bytes, tuple(parts))
