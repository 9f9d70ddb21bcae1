"""The plan of a batch: every byte that is asked for is read once, to where the record is looked for; neighbours share a
read."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from fireflyer.data.read_plan import RUN_BYTES, plan_reads, split_by_bytes


def laid_out(lengths: list[int]) -> tuple[list[int], bytes]:
    """Offsets of records one after another as in a shard, and what the file then holds."""
    offsets, content = [], bytearray(16)
    for number, length in enumerate(lengths):
        offsets.append(len(content))
        content += bytes([number % 251]) * length
        content += bytes(-len(content) % 8)
    return offsets, bytes(content)


shards = st.lists(st.lists(st.integers(0, 40), min_size=1, max_size=12), min_size=1, max_size=4)


@given(shards, st.data())
def test_each_record_is_where_the_plan_says(lengths: list[list[int]], data: st.DataObject) -> None:
    files = [laid_out(one) for one in lengths]
    every = [(shard, number) for shard, one in enumerate(lengths) for number in range(len(one))]
    wanted = data.draw(st.lists(st.sampled_from(every), max_size=30))
    of = np.array([shard for shard, _ in wanted], np.int64)
    offsets = np.array([files[shard][0][number] for shard, number in wanted], np.int64)
    sizes = np.array([lengths[shard][number] for shard, number in wanted], np.int64)
    plan = plan_reads(of, offsets, sizes)
    buffer = bytearray(plan.buffer_bytes)
    touched: set[int] = set()
    for shard, offset, length, place in zip(plan.shards, plan.offsets, plan.lengths, plan.places, strict=True):
        assert length > 0
        assert not touched & set(range(place, place + length)), "two reads into one place"
        touched |= set(range(place, place + length))
        buffer[place : place + length] = files[shard][1][offset : offset + length]
    for (shard, number), place in zip(wanted, plan.records, strict=True):
        length = lengths[shard][number]
        begin = files[shard][0][number]
        assert buffer[place : place + length] == files[shard][1][begin : begin + length]
        assert place % 8 == 0


def test_neighbours_come_with_one_read_and_strangers_do_not() -> None:
    offsets, _ = laid_out([10, 20, 0, 30, 40])
    lengths = np.array([10, 20, 0, 30, 40])
    zeros = np.zeros(5, np.int64)
    whole = plan_reads(zeros, np.array(offsets), lengths)
    assert (whole.offsets.tolist(), whole.lengths.tolist()) == ([16], [offsets[4] + 40 - 16])
    some = plan_reads(zeros[:3], np.array(offsets)[[4, 0, 1]], lengths[[4, 0, 1]])
    assert some.offsets.tolist() == [offsets[0], offsets[4]]
    twice = plan_reads(zeros[:2], np.array(offsets)[[3, 3]], lengths[[3, 3]])
    assert twice.lengths.tolist() == [30]
    assert twice.records[0] == twice.records[1]


def test_a_long_run_is_cut_so_that_its_parts_can_be_under_way_together() -> None:
    lengths = np.full(64, 100_000)
    offsets = 16 + np.arange(64) * 100_000
    plan = plan_reads(np.zeros(64, np.int64), offsets, lengths)
    assert len(plan.lengths) == 7
    assert plan.lengths.max() < RUN_BYTES + 100_000
    assert plan.lengths.sum() == lengths.sum()


@given(st.lists(st.integers(0, 50), max_size=40), st.integers(1, 100), st.integers(1, 9))
def test_successive_records_are_split_into_bounded_batches(lengths: list[int], most: int, records: int) -> None:
    parts = list(split_by_bytes(np.array(lengths, np.int64), most, records))
    assert [at for first, end in parts for at in range(first, end)] == list(range(len(lengths)))
    for first, end in parts:
        assert end - first <= records
        assert end - first == 1 or sum(lengths[first:end]) <= most
