"""Idle nodes are validated once each, and never two that something needs to be apart: in any order of events."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from fireflyer.validators.core.validation.queue import MAX_INTERRUPTIONS, ValidationQueue

NODES = [f"n{number}" for number in range(8)]
GROUPS = st.lists(st.frozensets(st.sampled_from(NODES), min_size=2), max_size=4)
VALIDATIONS = st.lists(
    st.one_of(st.tuples(st.sampled_from(NODES)), st.lists(st.sampled_from(NODES), min_size=2, max_size=2, unique=True)),
    max_size=12, unique_by=tuple,
).map(lambda found: [tuple(one) for one in found])  # fmt: skip


@given(VALIDATIONS, GROUPS, st.integers(1, 8), st.data())
@settings(deadline=None)
def test_what_runs_at_a_time_is_apart_and_all_end(
    validations: list[tuple[str, ...]], groups: list[frozenset[str]], most: int, data: st.DataObject
) -> None:
    queue = ValidationQueue(validations, groups, most_nodes=most)
    running: list[tuple[str, ...]] = []
    ended: list[tuple[str, ...]] = []
    interruptions = dict.fromkeys(validations, 0)
    for step in range(400):
        if queue.done:
            break
        taken = {node for one in running for node in one}
        free = [node for node in NODES if node not in taken]
        busy = data.draw(st.sets(st.sampled_from(free)), "busy") if step < 20 and free else set()
        begun = queue.begin([node for node in free if node not in busy])
        assert not busy.intersection(node for one in begun for node in one)
        running += begun
        nodes = [node for one in running for node in one]
        assert len(nodes) == len(set(nodes)), "a node has one validation at a time"
        assert len(nodes) <= max(most, *map(len, running), 0) if running else True
        for group in groups:
            assert sum(bool(group.intersection(one)) for one in running) <= 1, group
        assert running or busy, "nothing waits for nothing"
        if running:
            one = running.pop(data.draw(st.integers(0, len(running) - 1), "which") if step < 20 else 0)
            if step < 20 and data.draw(st.booleans(), "interrupted"):
                interruptions[one] += 1
                assert queue.interrupted(one) == (interruptions[one] < MAX_INTERRUPTIONS)
                if interruptions[one] == MAX_INTERRUPTIONS:
                    ended.append(one)
            else:
                queue.ended(one)
                ended.append(one)
    assert queue.done
    assert sorted(ended) == sorted(validations), "each once"
