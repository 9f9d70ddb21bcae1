"""How a shard is cut into pieces: what is written, and what is read, in one call.

A shard is written as it lies in memory, from its first byte to its last. It is read in pieces that begin and end at
multiples of the alignment that direct IO wants, wherever tensors begin and end: a piece holds parts of several tensors,
and a tensor lies in several pieces. Small tensors share a piece; what nobody wants is left out where it is large.
Pieces end where multiples of their largest size are in the file, so that two of them seldom have parts of one chunk.

A file that can be read into any memory needs no pieces for large tensors: these are read straight to their places.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

__all__ = ["Part", "Piece", "ReadPiece", "StraightRead", "cut", "plan_reads", "plan_straight"]

Counts = npt.NDArray[Any]
"""Numbers of bytes, of many tensors."""
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
    first: int
    """The number of the first tensor that has a part of it, among those that are wanted. Others follow, each with one
    part; of a tensor without bytes the part is empty."""
    starts: Counts
    """Of each part: where it begins in its tensor."""
    begins: Counts
    """Of each part: where it begins in the piece."""
    sizes: Counts
    """Of each part, in bytes."""

    @property
    def parts(self) -> list[Part]:
        columns = zip(self.starts.tolist(), self.begins.tolist(), self.sizes.tolist(), strict=True)
        return [Part(self.first + number, *column) for number, column in enumerate(columns)]


def cut(size_bytes: int, piece_bytes: int) -> Iterator[Piece]:
    """All of a file, in order; the last piece may be shorter."""
    for offset in range(0, size_bytes, piece_bytes):
        yield Piece(offset, min(piece_bytes, size_bytes - offset))


def plan_reads(
    offsets: Sequence[int] | Counts, sizes: Sequence[int] | Counts, piece_bytes: int, align_bytes: int
) -> Iterator[ReadPiece]:
    """Pieces of at most `piece_bytes` (a multiple of `align_bytes`) with every byte of extents that begin at `offsets`
    in the file, in rising order, and do not overlap. Parts come in the order of the extents and, within one, of its
    bytes. No Python runs for each extent: there may be a million."""
    begins, ends, numbers = _parts(_counts(offsets), _counts(sizes), piece_bytes)
    if not len(begins):
        return
    windows = begins // piece_bytes
    apart = (windows[1:] != windows[:-1]) | (begins[1:] > ends[:-1] + MAX_GAP_BYTES)
    firsts = np.concatenate(([0], np.flatnonzero(apart) + 1, [len(begins)]))
    of_extents = _counts(offsets)
    for low, high in zip(firsts[:-1].tolist(), firsts[1:].tolist(), strict=True):
        begin = int(begins[low]) - int(begins[low]) % align_bytes
        needed_bytes = int(ends[high - 1]) - begin
        first, last = int(numbers[low]), int(numbers[high - 1])
        at = numbers[low:high] - first
        starts, places, lengths = (np.zeros(last - first + 1, np.uint64) for _ in range(3))
        starts[at] = begins[low:high] - of_extents[numbers[low:high]]
        places[at] = begins[low:high] - begin
        lengths[at] = ends[low:high] - begins[low:high]
        yield ReadPiece(begin, needed_bytes + -needed_bytes % align_bytes, needed_bytes, first, starts, places, lengths)


def _counts(values: Sequence[int] | Counts) -> npt.NDArray[np.int64]:
    return np.asarray(values, dtype=np.int64)


def _parts(
    offsets: npt.NDArray[np.int64], sizes: npt.NDArray[np.int64], piece_bytes: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """The extents that have bytes, cut at multiples of `piece_bytes` in the file: where each part begins and ends, and
    the number of its extent."""
    filled = np.flatnonzero(sizes)
    begins, ends = offsets[filled], offsets[filled] + sizes[filled]
    first_window, last_window = begins // piece_bytes, (ends - 1) // piece_bytes
    of_each = last_window - first_window + 1
    at = np.repeat(np.arange(len(filled)), of_each)
    windows = np.arange(len(at)) - np.repeat(np.cumsum(of_each) - of_each, of_each) + first_window[at]
    part_begins = np.maximum(begins[at], windows * piece_bytes)
    part_ends = np.minimum(ends[at], (windows + 1) * piece_bytes)
    return part_begins, part_ends, filled[at]


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
