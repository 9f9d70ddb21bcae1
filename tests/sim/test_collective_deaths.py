"""A node dies at every step of every algorithm: each other node ends with the right result or names the dead one."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fireflyer.collectives import make_plan
from fireflyer.collectives.planning.plan import SUITABLE
from fireflyer.collectives.planning.simulator import Death, run

WAYS = [(kind, algorithm) for kind, suitable in SUITABLE.items() for algorithm in suitable if kind != "barrier"]


@pytest.mark.parametrize(("kind", "algorithm"), WAYS)
@pytest.mark.parametrize("nodes", [2, 3, 5])
def test_a_death_at_every_step_ends_in_results_or_in_the_name_of_the_dead(
    kind: str, algorithm: str, nodes: int
) -> None:
    plan = make_plan(range(nodes), window=2)
    root = nodes - 1 if kind in ("reduce", "broadcast") else None
    chunks = 4
    _, events = run(plan, kind, algorithm, chunks, random.Random(1).randrange, root=root)
    blamed = 0
    for when in range(events):
        death = Death(when % nodes, when)
        ends, _ = run(plan, kind, algorithm, chunks, random.Random(1).randrange, root=root, death=death)
        for node, end in enumerate(ends):
            assert end.dead == (node == death.node)
            assert end.blamed in (None, death.node)
            whole = end.delivered == chunks or (kind == "reduce" and node != root)
            assert end.dead or end.blamed == death.node or whole
        blamed += any(end.blamed is not None for end in ends)
    assert blamed > events // 2


@settings(max_examples=100)
@given(
    way=st.sampled_from(WAYS),
    nodes=st.integers(2, 9),
    window=st.sampled_from([2, 4, 8]),
    chunks=st.integers(1, 6),
    seed=st.integers(),
    data=st.data(),
)
def test_deaths_anywhere_in_any_interleaving(
    way: tuple[str, str], nodes: int, window: int, chunks: int, seed: int, data: st.DataObject
) -> None:
    kind, algorithm = way
    plan = make_plan(range(nodes), window=window, sockets=data.draw(st.integers(1, 2)))
    root = data.draw(st.integers(0, nodes - 1)) if kind in ("reduce", "broadcast") else None
    death = Death(data.draw(st.integers(0, nodes - 1)), data.draw(st.integers(0, 400)))
    ends, _ = run(
        plan, kind, algorithm, chunks, random.Random(seed).randrange, root=root, in_transit=2, scratch=2, death=death
    )
    for node, end in enumerate(ends):
        takes = kind != "reduce" or node == root
        assert end.dead or end.blamed == death.node or end.delivered == (chunks if takes else 0)
