"""Slices of tensors: which part of a tensor a rank has, and which bytes two parts have in common.

A sharded tensor is stored as slices: boxes of the whole tensor, each a tensor of its own in some shard, row-major. A
reader that wants another box (another number of ranks, another axis) takes from each stored slice the *runs* that both
have: ranges of bytes that are contiguous in the slice and in what is wanted.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import msgspec

__all__ = ["Box", "Run", "Slice", "covers", "overlap", "runs", "slice_name", "whole"]


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
    """Whether `parts`, of which no two overlap, are all of a tensor. That none overlap is not checked."""
    all_of_it = whole(shape)
    elements = 0
    for part in parts:
        if part.elements and overlap(part, all_of_it) != part:
            return False
        elements += part.elements
    return elements == all_of_it.elements


def runs(stored: Box, wanted: Box, element_bytes: int) -> list[Run]:
    """What `wanted` takes from `stored`, in rising order in both; each as long as it can be."""
    common = overlap(stored, wanted)
    if common is None:
        return []
    inner = len(common.shape)  # dims from here on lie together in both
    while inner and common.shape[inner - 1] == stored.shape[inner - 1] == wanted.shape[inner - 1]:
        inner -= 1
    rows = max(inner - 1, 0)  # dims before this one are walked through, one run for each row
    size_bytes = math.prod(common.shape[rows:]) * element_bytes
    source_strides, target_strides = _strides(stored.shape, element_bytes), _strides(wanted.shape, element_bytes)
    source_begin = _place(common.offset, stored.offset, source_strides)
    target_begin = _place(common.offset, wanted.offset, target_strides)
    found: list[Run] = []
    for index in itertools.product(*map(range, common.shape[:rows])):
        source = source_begin + sum(map(int.__mul__, index, source_strides))
        target = target_begin + sum(map(int.__mul__, index, target_strides))
        found.append(Run(source, target, size_bytes))
    return found


def _strides(shape: tuple[int, ...], element_bytes: int) -> list[int]:
    strides = [element_bytes] * len(shape)
    for dim in range(len(shape) - 1, 0, -1):
        strides[dim - 1] = strides[dim] * shape[dim]
    return strides


def _place(at: tuple[int, ...], origin: tuple[int, ...], strides: list[int]) -> int:
    return sum((a - o) * stride for a, o, stride in zip(at, origin, strides, strict=True))
