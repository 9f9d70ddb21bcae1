"""The pure half of the key-value engine against plain models: conflict sets, resolver, overlay, the map in memory."""

from __future__ import annotations

import asyncio
import random

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.kvstore.engines import values
from tests.support.kvstore.histories import explained, random_plans, run_interleaved

from fireflyer.kvstore import Attempted, Conflict, KeyRange, MemoryEngine, MemoryStore, key_after, prefix_range
from fireflyer.kvstore.core.conflicts import Conflicts, ConflictSetBuilder
from fireflyer.kvstore.core.keys import EVERYTHING
from fireflyer.kvstore.core.overlay import Mutations, Overlay
from fireflyer.kvstore.core.resolver import Resolver

SMALL = [bytes(each) for each in ([0], [0, 0], [0, 1], [1], [1, 255], [2], [255], [255, 0], [255, 255])]
"""All keys that the models know; bounds of ranges are these too."""
keys = st.sampled_from(SMALL)
ends = st.none() | keys
ranges = st.builds(KeyRange, st.just(b"") | keys, ends)
touched = st.lists(keys | ranges, max_size=6)


def gathered(parts: list[bytes | KeyRange]) -> Conflicts:
    gathering = ConflictSetBuilder()
    for part in parts:
        if isinstance(part, KeyRange):
            gathering.add_range(part)
        else:
            gathering.add_point(part)
    return gathering.normal()


def covers(parts: list[bytes | KeyRange], key: bytes) -> bool:
    return any(key in part if isinstance(part, KeyRange) else key == part for part in parts)


@given(touched, ranges)
def test_conflicts_hold_what_was_gathered_and_meet_what_overlaps(
    parts: list[bytes | KeyRange], wanted: KeyRange
) -> None:
    conflicts = gathered(parts)
    for key in SMALL:
        assert conflicts.holds(key) == covers(parts, key)
    overlap = any(
        part in wanted if isinstance(part, bytes) else not part.empty and not wanted.empty and part.overlaps(wanted)
        for part in parts
    )
    assert conflicts.meets(wanted) == overlap
    assert list(conflicts.points) == sorted(set(conflicts.points))
    assert not any(key in each for key in conflicts.points for each in conflicts.ranges)
    for left, right in zip(conflicts.ranges, conflicts.ranges[1:], strict=False):
        assert left.end is not None
        assert left.end < right.begin


@given(touched, st.randoms(use_true_random=False))
def test_the_same_conflicts_in_another_order_are_equal(parts: list[bytes | KeyRange], rng: random.Random) -> None:
    shuffled = list(parts)
    rng.shuffle(shuffled)
    assert gathered(shuffled + parts) == gathered(parts)


@given(st.lists(touched, max_size=8), st.integers(0, 8), touched, st.integers(1, 12))
def test_the_resolver_refuses_what_was_written_since_and_what_it_cannot_know(
    history: list[list[bytes | KeyRange]], read_version: int, reads: list[bytes | KeyRange], window: int
) -> None:
    resolver = Resolver(0, max_entries=window)
    for version, parts in enumerate(history, 1):
        resolver.add(version, gathered(parts))
    read_version = min(read_version, len(history))
    wanted = gathered(reads)
    written = [gathered(parts) for parts in history[read_version:]]
    crossed = any(writes.holds(key) for writes in written for key in wanted.points)
    crossed |= any(writes.meets(each) for writes in written for each in wanted.ranges)
    refusal = resolver.refusal(read_version, wanted)
    assert refusal is not None or not crossed
    if read_version >= resolver.oldest_version:
        assert (refusal is not None) == crossed
    entries = sum(gathered(parts).entries for parts in history)
    assert resolver.oldest_version == 0 or entries > window


@given(prefix=st.binary(max_size=4), key=st.binary(min_size=1, max_size=6))
def test_a_prefix_range_holds_exactly_the_keys_with_the_prefix(prefix: bytes, key: bytes) -> None:
    assert (key in prefix_range(prefix)) == key.startswith(prefix)
    assert (key in KeyRange(key, key_after(key))) is True


writes = st.tuples(keys, st.none() | st.binary(max_size=2)) | ranges


@given(st.dictionaries(keys, st.binary(max_size=2)), st.lists(writes, max_size=8), ranges, st.booleans())
def test_reads_through_an_overlay_are_those_after_its_commit(
    stored: dict[bytes, bytes],
    done: list[tuple[bytes, bytes | None] | KeyRange],
    wanted: KeyRange,
    reverse: bool,
) -> None:
    store = MemoryStore()
    store.commit(0, Conflicts(), Mutations(writes=tuple(sorted(stored.items()))))
    overlay, model = Overlay(), dict(stored)
    for each in done:
        if isinstance(each, KeyRange):
            overlay.clear_range(each)
            model = {key: value for key, value in model.items() if key not in each}
        else:
            overlay.write(*each)
            model.pop(each[0], None)
            if each[1] is not None:
                model[each[0]] = each[1]
    before = store.version
    page = store.scan(before, wanted, reverse=reverse)
    expected = sorted(((key, value) for key, value in model.items() if key in wanted), reverse=reverse)
    assert overlay.through(page.items, wanted, reverse=reverse) == expected
    for key in SMALL:
        known, value = overlay.find(key)
        assert (value if known else store.get(before, key)) == model.get(key)
    store.commit(before, Conflicts(), overlay.mutations())
    assert dict(store.scan(store.version, EVERYTHING).items) == model
    assert dict(store.scan(before, EVERYTHING).items) == stored
    overlay.clear_range(EVERYTHING)
    assert overlay.mutations() == Mutations(cleared=(EVERYTHING,))


@settings(max_examples=60)
@given(st.integers(0, 1 << 32), st.sampled_from([1, 4, 12, 1000]))
def test_histories_are_serial_in_the_order_of_versions_whatever_the_window(seed: int, window: int) -> None:
    asyncio.run(_history(seed, window))


async def _history(seed: int, window: int) -> None:
    rng = random.Random(seed)
    attempts: list[Attempted] = []
    store = MemoryStore(window_entries=window, attempts=attempts.append)
    async with MemoryEngine(store) as kv:
        ran = await run_interleaved(kv, random_plans(rng, transactions=6, operations=5), rng)
        assert explained(ran, {}, await values(kv))
    replayed = MemoryStore()
    for attempt in attempts:
        if attempt.version is not None and not attempt.mutations.empty:
            assert replayed.commit(replayed.version, Conflicts(), attempt.mutations) == attempt.version
    now = store.scan(store.version, EVERYTHING)
    assert now == replayed.scan(replayed.version, EVERYTHING)


@given(st.lists(st.lists(writes, min_size=1, max_size=4), min_size=1, max_size=10), st.integers(1, 10))
def test_every_version_that_is_kept_reads_as_it_was(
    commits: list[list[tuple[bytes, bytes | None] | KeyRange]], window: int
) -> None:
    store, states = MemoryStore(window_entries=window), {0: dict[bytes, bytes]()}
    for done in commits:
        overlay, model = Overlay(), dict(states[store.version])
        for each in done:
            if isinstance(each, KeyRange):
                overlay.clear_range(each)
                model = {key: value for key, value in model.items() if key not in each}
            else:
                overlay.write(*each)
                model.pop(each[0], None)
                if each[1] is not None:
                    model[each[0]] = each[1]
        version = store.commit(store.version, Conflicts(), overlay.mutations())
        states[version] = model
        for old, state in states.items():
            try:
                assert dict(store.scan(old, EVERYTHING).items) == state
            except Conflict:
                assert old < version
