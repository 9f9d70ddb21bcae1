"""Slices of tensors: which part of a tensor a rank has, and which bytes two parts have in common.

A sharded tensor is stored as slices: boxes of the whole tensor, each a tensor of its own in some shard, row-major. A
reader that wants another box (another number of ranks, another axis) takes from each stored slice the *runs* that both
have: ranges of bytes that are contiguous in the slice and in what is wanted. There may be one for each element, so they
are made when they are needed.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from typing import Final, NamedTuple

import msgspec
import numpy as np

__all__ = ["Box", "Run", "Runs", "Slice", "covers", "overlap", "runs", "slice_name", "whole"]

_MAX_CORNERS: Final = 1 << 22
"""Of the slices of one tensor, in the dims that they cut: those of 100,000 ranks in five dims are fewer."""


class Box(NamedTuple):
    """A part of a tensor: in each dim the elements from `offset` on, `shape` of them."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def elements(self) -> int:
        return math.prod(self.shape)


class Slice(msgspec.Struct, frozen=True, gc=False):
    """What a stored slice is a part of. `mesh` and `placements` say how the job that saved it had the tensor; a reader
    needs `of`, `shape` and `offset` alone."""

    of: str
    """The name of the whole tensor."""
    shape: tuple[int, ...]
    """Of the whole tensor."""
    offset: tuple[int, ...]
    """Of the slice's first element in it."""
    mesh: tuple[int, ...] = ()
    """Shape of the device mesh."""
    placements: tuple[str, ...] = ()
    """For each axis of the mesh, as torch writes it: `S(0)`, `R`, …"""


class Run(NamedTuple):
    """Bytes that lie together in a stored slice and in what is wanted."""

    source: int
    """Where they begin in the slice."""
    target: int
    """Where they begin in the wanted box."""
    size_bytes: int


def whole(shape: Sequence[int]) -> Box:
    return Box((0,) * len(shape), tuple(shape))


def slice_name(of: str, box: Box) -> str:
    """Of the tensor in a shard that holds `box` of the tensor `of`, as `of[0:4,8:16]`."""
    ranges = (f"{offset}:{offset + size}" for offset, size in zip(box.offset, box.shape, strict=True))
    return f"{of}[{','.join(ranges)}]"


def overlap(one: Box, other: Box) -> Box | None:
    """What both have; None where that is nothing."""
    offset = tuple(map(max, one.offset, other.offset))
    ends = (min(a + m, b + n) for a, m, b, n in zip(one.offset, one.shape, other.offset, other.shape, strict=True))
    shape = tuple(end - begin for begin, end in zip(offset, ends, strict=True))
    return Box(offset, shape) if min(shape, default=1) > 0 else None


def covers(parts: Iterable[Box], shape: Sequence[int]) -> bool:
    """Whether each element of a tensor is in exactly one of `parts`. The dims of the tensor must fit into 63 bits."""
    all_of_it = whole(shape)
    filled = [part for part in parts if part.elements]
    if any(overlap(part, all_of_it) != part for part in filled):
        return False
    return sum(part.elements for part in filled) == all_of_it.elements and (len(filled) < 2 or _tile(filled, all_of_it))


def _tile(parts: Sequence[Box], all_of_it: Box) -> bool:
    """Whether `parts`, which are not empty and within `all_of_it`, are all of it and do not overlap.

    How many of them have an element follows from where that number changes: each box counts +1 or -1 at each of its
    corners, in turns. It is 1 throughout exactly where these corners are those of `all_of_it`, and all others cancel.
    """
    begins = np.array([*(part.offset for part in parts), all_of_it.offset], np.int64)
    ends = begins + np.array([*(part.shape for part in parts), all_of_it.shape], np.int64)
    cut = np.flatnonzero((begins != begins[-1]).any(axis=0) | (ends != ends[-1]).any(axis=0))
    if len(parts) << len(cut) > _MAX_CORNERS:
        return False
    corners = np.zeros((len(begins), 1, 0), np.int64)
    signs = np.ones((len(begins), 1), np.int64)
    signs[-1] = -1
    for dim in cut:  # each corner so far becomes two
        both = np.stack([begins[:, dim], ends[:, dim]], axis=1)[:, :, None]
        count = corners.shape[1]
        corners = np.concatenate([np.repeat(corners, 2, axis=1), np.tile(both, (1, count, 1))], axis=2)
        signs = np.repeat(signs, 2, axis=1) * np.tile([1, -1], count)
    _, where = np.unique(corners.reshape(-1, len(cut)), axis=0, return_inverse=True)
    return not np.bincount(where.reshape(-1), weights=signs.reshape(-1)).any()


class Runs:
    """What one box takes from another: runs of one size, in rising order in both. They lie in rows, in which each
    begins a step after the one before."""

    def __init__(
        self,
        counts: Sequence[int],
        begins: tuple[int, int],
        strides: Sequence[tuple[int, int]],
        size_bytes: int,
    ) -> None:
        """As many as the product of `counts`. Pairs are of the source and the target."""
        self._counts, self._strides = tuple(counts[:-1]), tuple(strides[:-1])
        self._in_row, self._steps = (counts[-1], strides[-1]) if counts else (1, (size_bytes, size_bytes))
        self._begins = begins
        self.size_bytes = size_bytes
        self._rows = math.prod(self._counts)

    def __len__(self) -> int:
        return self._rows * self._in_row

    def __iter__(self) -> Iterator[Run]:
        return self.between(0, self._row(self._rows - 1)[0] + self._row_bytes) if len(self) else iter(())

    @property
    def _row_bytes(self) -> int:
        """From the first byte of a row to its last, in the source."""
        return (self._in_row - 1) * self._steps[0] + self.size_bytes

    def _row(self, number: int) -> tuple[int, int]:
        """Where it begins in the source and in the target."""
        source, target = self._begins
        for count, (source_stride, target_stride) in zip(reversed(self._counts), reversed(self._strides), strict=True):
            number, index = divmod(number, count)
            source += index * source_stride
            target += index * target_stride
        return source, target

    def between(self, begin: int, end: int) -> Iterator[Run]:
        """Those with bytes in that range of the source."""
        first = bisect_left(range(self._rows), begin + 1, key=lambda number: self._row(number)[0] + self._row_bytes)
        source_step, target_step = self._steps
        for number in range(first, self._rows if self._in_row else 0):
            source, target = self._row(number)
            if source >= end:
                return
            low = max(0, (begin - self.size_bytes - source) // source_step + 1)
            high = min(self._in_row, -((source - end) // source_step))
            for index in range(low, high):
                yield Run(source + index * source_step, target + index * target_step, self.size_bytes)


def runs(stored: Box, wanted: Box, element_bytes: int) -> Runs:
    """What `wanted` takes from `stored`; each as long as it can be."""
    common = overlap(stored, wanted)
    if common is None:
        return Runs((0,), (0, 0), ((1, 1),), 1)
    inner = len(common.shape)  # dims from here on lie together in both
    while inner and common.shape[inner - 1] == stored.shape[inner - 1] == wanted.shape[inner - 1]:
        inner -= 1
    rows = max(inner - 1, 0)  # dims before this one are walked through, one run for each row
    size_bytes = math.prod(common.shape[rows:]) * element_bytes
    source_strides, target_strides = _strides(stored.shape, element_bytes), _strides(wanted.shape, element_bytes)
    source_begin = _place(common.offset, stored.offset, source_strides)
    target_begin = _place(common.offset, wanted.offset, target_strides)
    strides = list(zip(source_strides, target_strides, strict=True))
    return Runs(common.shape[:rows], (source_begin, target_begin), strides[:rows], size_bytes)


def _strides(shape: tuple[int, ...], element_bytes: int) -> list[int]:
    strides = [element_bytes] * len(shape)
    for dim in range(len(shape) - 1, 0, -1):
        strides[dim - 1] = strides[dim] * shape[dim]
    return strides


def _place(at: tuple[int, ...], origin: tuple[int, ...], strides: list[int]) -> int:
    return sum((a - o) * stride for a, o, stride in zip(at, origin, strides, strict=True))
