"""The arithmetic of slices and blocks, against the plain way: indexing arrays, and sums of whole bytes."""

from __future__ import annotations

import itertools
import tracemalloc
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fireflyer.base.errors import UsageError
from fireflyer.checkpoint.core import blocks
from fireflyer.checkpoint.core.blocks import block_sizes, combine, needed_blocks, summed
from fireflyer.checkpoint.core.exporting import band_boxes
from fireflyer.checkpoint.core.safetensors import TensorSpec
from fireflyer.checkpoint.core.shares import HeldSlice, assign_slices
from fireflyer.checkpoint.core.slices import Box, covers, overlap, runs, whole
from fireflyer.checkpoint.engine.loading import Scattered
from fireflyer.native import crc32c


def boxes_in(shape: list[int]) -> st.SearchStrategy[Box]:
    """Often all of a dim: then runs are longer than a row."""

    def ranges(n: int) -> st.SearchStrategy[tuple[int, int]]:
        some = st.integers(0, n - 1).flatmap(lambda begin: st.tuples(st.just(begin), st.integers(0, n - begin)))
        return st.one_of(st.just((0, n)), some)

    def to_box(found: list[tuple[int, int]]) -> Box:
        return Box(tuple(begin for begin, _ in found), tuple(size for _, size in found))

    return st.tuples(*map(ranges, shape)).map(list).map(to_box)


shapes = st.lists(st.integers(1, 5), max_size=4)
two_boxes = shapes.flatmap(lambda shape: st.tuples(st.just(shape), boxes_in(shape), boxes_in(shape)))


def part(array: np.ndarray[Any, Any], box: Box) -> np.ndarray[Any, Any]:
    ranges = (slice(begin, begin + size) for begin, size in zip(box.offset, box.shape, strict=True))
    index: Any = (*ranges, ...)
    found: np.ndarray[Any, Any] = array[index]
    return found


def all_boxes(shape: list[int]) -> list[Box]:
    per_dim = [[(begin, size) for begin in range(n) for size in range(1, n - begin + 1)] for n in shape]
    return [
        Box(tuple(begin for begin, _ in found), tuple(size for _, size in found))
        for found in itertools.product(*per_dim)
    ]


def test_runs_of_all_boxes_of_a_small_tensor_move_what_both_have() -> None:
    shape = [3, 2, 2]
    assert len(all_boxes(shape)) == 54
    for stored, wanted in itertools.product(all_boxes(shape), repeat=2):
        check_runs(shape, stored, wanted, 2)


@given(two_boxes, st.sampled_from([1, 2, 8]))
def test_runs_move_exactly_what_both_boxes_have(case: tuple[list[int], Box, Box], element_bytes: int) -> None:
    check_runs(*case, element_bytes)


def check_runs(shape: list[int], stored: Box, wanted: Box, element_bytes: int) -> None:
    array = np.arange(int(np.prod(shape)), dtype=f"u{element_bytes}").reshape(shape)
    source = np.ascontiguousarray(part(array, stored)).tobytes()
    target = bytearray(b"\xff" * (wanted.elements * element_bytes))
    found = runs(stored, wanted, element_bytes)
    for run in found:
        target[run.target : run.target + run.size_bytes] = source[run.source : run.source + run.size_bytes]
    expected = np.full(shape, -1, dtype=f"i{element_bytes}").view(f"u{element_bytes}")
    part(expected, stored)[...] = part(array, stored)
    assert bytes(target) == np.ascontiguousarray(part(expected, wanted)).tobytes()

    common = overlap(stored, wanted)
    assert sum(run.size_bytes for run in found) == (common.elements * element_bytes if common else 0)
    for one, other in itertools.pairwise(found):
        assert one.source + one.size_bytes <= other.source, "in rising order"
        assert one.target + one.size_bytes <= other.target
        together = one.source + one.size_bytes == other.source and one.target + one.size_bytes == other.target
        assert not together, "as long as they can be"


@given(two_boxes, st.integers(1, 7))
def test_pieces_of_any_size_bring_what_the_whole_does(case: tuple[list[int], Box, Box], piece: int) -> None:
    shape, stored, wanted = case
    array = np.arange(int(np.prod(shape)), dtype="u2").reshape(shape)
    source = memoryview(np.ascontiguousarray(part(array, stored)).tobytes())
    found = runs(stored, wanted, 2)
    at_once, in_pieces = (bytearray(wanted.elements * 2) for _ in range(2))
    Scattered([(found, memoryview(at_once))]).put(0, source)
    scattered = Scattered([(found, memoryview(in_pieces))])
    for begin in range(0, len(source), piece):
        scattered.put(begin, source[begin : begin + piece])
    assert in_pieces == at_once


@given(shapes, st.integers(1, 6))
def test_slices_along_any_axis_are_all_of_a_tensor_and_with_one_missing_they_are_not(shape: list[int], n: int) -> None:
    if not shape:
        assert covers([whole(())], ())
        return
    edges = [shape[0] * rank // n for rank in range(n + 1)]
    parts = [Box((a, *([0] * (len(shape) - 1))), (b - a, *shape[1:])) for a, b in itertools.pairwise(edges)]
    assert covers(parts, shape)
    full = [box for box in parts if box.elements]
    assert not covers(full[1:], shape)
    assert not covers([*full[1:], Box((shape[0], *full[0].offset[1:]), full[0].shape)], shape), "outside of it"


@given(shapes.flatmap(lambda shape: st.tuples(st.just(shape), st.lists(boxes_in(shape), max_size=6))), st.booleans())
def test_slices_are_all_of_a_tensor_exactly_where_each_element_is_in_one_of_them(
    case: tuple[list[int], list[Box]], completed: bool
) -> None:
    shape, parts = case
    times = np.zeros(shape, int)
    for box in parts:
        part(times, box)[...] += 1
    if completed:  # so that half of the cases are near to be all of it
        for index in np.argwhere(times == 0).tolist():
            parts = [*parts, Box(tuple(index), (1,) * len(shape))]
            times[tuple(index)] += 1
    assert covers(parts, shape) == bool((times == 1).all())


def test_slices_that_lie_like_a_pinwheel_are_all_of_a_tensor() -> None:
    wheel = [Box((0, 0), (1, 2)), Box((0, 2), (2, 1)), Box((2, 1), (1, 2)), Box((1, 0), (2, 1)), Box((1, 1), (1, 1))]
    assert covers(wheel, (3, 3))
    assert not covers([*wheel[:-1], Box((0, 0), (1, 1))], (3, 3)), "as many elements, one of them twice"


def test_tens_of_thousands_of_slices_are_checked_in_one_pass() -> None:
    """Each against each other would be a billion comparisons."""
    grid = [Box((64 * row, 3 * column), (64, 3)) for row in range(256) for column in range(128)]
    assert covers(grid, (64 * 256, 3 * 128))
    moved = Box((grid[77].offset[0] + 1, grid[77].offset[1]), grid[77].shape)
    assert not covers([*grid[:77], moved, *grid[78:]], (64 * 256, 3 * 128))


def test_no_time_is_spent_on_slices_that_cut_more_dims_than_any_job_does() -> None:
    def halves(dims: int) -> list[Box]:
        """One half of a tensor, half of the other half, and so on, each time along another dim."""
        ends = [Box((1,) * at + (0,) * (dims - at), (1,) * (at + 1) + (2,) * (dims - at - 1)) for at in range(dims)]
        return [*ends, Box((1,) * dims, (1,) * dims)]

    assert covers(halves(6), (2,) * 6)
    assert not covers(halves(40), (2,) * 40)


@given(two_boxes, st.integers(0, 200), st.integers(0, 200))
def test_the_runs_of_a_range_are_those_with_bytes_in_it(case: tuple[list[int], Box, Box], one: int, other: int) -> None:
    _, stored, wanted = case
    begin, end = sorted((one, other))
    found = runs(stored, wanted, 2)
    expected = [run for run in found if run.source + run.size_bytes > begin and run.source < end]
    assert list(found.between(begin, end)) == expected
    assert len(found) == len(list(found))


@given(st.lists(st.integers(1, 5), max_size=4), st.integers(1, 40))
def test_bands_of_a_tensor_are_all_of_it_in_order_and_no_larger_than_they_may_be(shape: list[int], most: int) -> None:
    array = np.arange(int(np.prod(shape)), dtype="u2").reshape(shape)
    bands = list(band_boxes(shape, most))
    assert np.concatenate([part(array, box).reshape(-1) for box in bands]).tolist() == array.reshape(-1).tolist()
    assert max(box.elements for box in bands) == bands[0].elements <= most
    assert all(one.elements + other.elements > most for one, other in itertools.pairwise(bands)), "not many small ones"


def test_runs_take_no_memory_before_they_are_needed() -> None:
    """Of a table that is cut by its columns there is a run for each row."""
    tracemalloc.start()
    try:
        found = runs(Box((0, 4), (1 << 40, 4)), Box((1 << 30, 0), (1 << 30, 16)), 1)
        assert len(found) == 1 << 30
        assert next(found.between(5 << 30, 6 << 30)).source == 5 << 30
        assert tracemalloc.get_traced_memory()[1] < 100_000
    finally:
        tracemalloc.stop()


@given(st.binary(max_size=300), st.binary(max_size=300))
def test_the_sum_of_two_ranges_follows_from_their_sums(first: bytes, second: bytes) -> None:
    assert combine(crc32c(first), crc32c(second), len(second)) == crc32c(first + second)


@pytest.mark.parametrize("size", [0, 1, 4 << 20, (4 << 20) + 1, (12 << 20) - 1, 12 << 20])
def test_a_tensor_has_its_own_sum_and_one_of_each_block(size: int) -> None:
    data = np.arange(size, dtype=np.uint8).tobytes()
    ends = list(itertools.accumulate(block_sizes(size), initial=0))
    sums = [crc32c(data[begin:end]) for begin, end in itertools.pairwise(ends)]
    found = summed([size], sums)
    assert found.crc32c == [crc32c(data)]
    assert found.blocks == [tuple(sums) if size > blocks.BLOCK_BYTES else ()]


BYTES = blocks.BLOCK_BYTES


@pytest.mark.parametrize("size", [5, BYTES, 3 * BYTES, 3 * BYTES + 7])
def test_the_needed_blocks_are_those_with_a_wanted_byte(size: int) -> None:
    edges = [0, 1, 5, BYTES - 1, BYTES, BYTES + 1, 2 * BYTES, 3 * BYTES, 3 * BYTES + 7]

    def needed(*ranges: tuple[int, int]) -> list[int]:
        parts = [(runs(whole((size,)), Box((begin,), (count,)), 1), memoryview(b"")) for begin, count in ranges]
        return needed_blocks(size, Scattered(parts).next_wanted)

    for begin, end in itertools.combinations_with_replacement([edge for edge in edges if edge <= size], 2):
        expected = [
            number
            for number in range(-(-size // BYTES))
            if begin < end and number * BYTES < end and (number + 1) * BYTES > begin
        ]
        assert needed((begin, end - begin)) == expected
    if size >= 3 * BYTES:
        assert needed((0, 1), (2 * BYTES, 1)) == needed((2 * BYTES, 1), (0, 1)) == [0, 2]


@given(
    st.lists(st.tuples(st.integers(1, 1000), st.integers(0, 3)), max_size=40),
    st.lists(st.integers(0, 500), min_size=8, max_size=8),
)
def test_replicas_agree_on_one_writer_for_each_slice_and_share_the_bytes(
    slices: list[tuple[int, int]], loads: list[int]
) -> None:
    """Four groups of two replicas: ranks 0 and 4 have the same slices, 1 and 5, …"""
    held = [HeldSlice(TensorSpec(f"{n}", "U8", (size,)), (group, group + 4)) for n, (size, group) in enumerate(slices)]
    of_all = assign_slices(held, loads)
    for rank in range(8):
        mine = [each for each in held if rank in each.holders]
        assert assign_slices(mine, loads) == {each.spec.name: of_all[each.spec.name] for each in mine}
    for each in held:
        assert of_all[each.spec.name] in each.holders
    for group in range(4):
        written = dict.fromkeys((group, group + 4), 0)
        for each in held:
            if each.holders[0] == group:
                written[of_all[each.spec.name]] += each.spec.size_bytes
        one, other = (loads[rank] + size for rank, size in written.items())
        if all(written.values()):
            assert abs(one - other) <= max(each.spec.size_bytes for each in held if each.holders[0] == group)


def test_a_mesh_with_ranks_that_do_not_save_is_refused() -> None:
    with pytest.raises(UsageError, match="needs all ranks of the device mesh"):
        assign_slices([HeldSlice(TensorSpec("w", "U8", (3,)), (0, 2))], [0, 0])
