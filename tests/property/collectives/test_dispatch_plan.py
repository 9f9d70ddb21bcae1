"""Plans of random routings, carried out on arrays, give the sums of the plain oracle; and who gets how many copies."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.collectives.dispatching import combined, expected_rows, random_choices

from fireflyer.codesign.parallel.experts import expected_places
from fireflyer.collectives.dispatch import ExpertPlacement
from fireflyer.collectives.dispatch.plan import add_in_order, plan_arrival, plan_forward, plan_source

Array = npt.NDArray[Any]
WIDTH = 3


def carried_out(
    values: list[Array], choices: list[Array], placement: ExpertPlacement
) -> tuple[list[Array], list[Array]]:
    """Rows that arrive at each rank, and sums of what the experts make of them."""
    ranks = range(placement.ranks)
    sources = [plan_source(choice, placement) for choice in choices]

    def across(rank: int) -> list[int]:
        return [int(peer) for peer in placement.ranks_of_node[:, placement.number_in_node(rank)]]

    def inside(rank: int) -> list[int]:
        return [int(peer) for peer in placement.ranks_of_node[placement.node_of_rank[rank]]]

    node, number = placement.node_of_rank.tolist(), [placement.number_in_node(rank) for rank in ranks]
    forwards = [
        plan_forward([sources[peer].entries[node[rank]] for peer in across(rank)], placement, rank) for rank in ranks
    ]
    passing = [
        np.concatenate([values[peer][sources[peer].token_of_row[node[rank]]] for peer in across(rank)])
        for rank in ranks
    ]
    arrivals, rows = [], []
    for rank in ranks:
        peers, here = inside(rank), number[rank]
        arrivals.append(
            plan_arrival(
                [forwards[peer].sent[here] for peer in peers],
                [forwards[peer].source_of_row[forwards[peer].needed[here]] for peer in peers],
                placement,
                rank,
            )
        )
        arrived = np.concatenate([passing[peer][forwards[peer].needed[here]] for peer in peers])
        rows.append(arrived[arrivals[rank].row])
    outputs = []
    for rank in ranks:
        expert = np.repeat(placement.experts_of(rank), arrivals[rank].counts)
        by_arrival = np.empty_like(rows[rank])
        by_arrival[arrivals[rank].order] = rows[rank] * (1 + expert.astype(np.float32) / 8)[:, None]
        outputs.append(by_arrival)
    partial = []
    for rank in ranks:
        gathered = np.empty((len(forwards[rank].entries), WIDTH), np.float32)
        for peer, place in zip(inside(rank), forwards[rank].place, strict=True):
            first = arrivals[peer].first_entry
            gathered[place] = outputs[peer][first[number[rank]] : first[number[rank] + 1]]
        partial.append(add_in_order(gathered, forwards[rank].entries.row, forwards[rank].entries.rows))
    sums = []
    for rank in ranks:
        token = np.concatenate(sources[rank].token_of_row)
        parts = [
            partial[peer][forwards[peer].first_row[node[rank]] : forwards[peer].first_row[node[rank] + 1]]
            for peer in across(rank)
        ]
        order = np.argsort(token, kind="stable")
        sums.append(add_in_order(np.concatenate(parts)[order], token[order], sources[rank].tokens))
    return rows, sums


@given(
    shape=st.sampled_from([(1, 1), (1, 3), (2, 1), (2, 2), (3, 2), (2, 4)]),
    per_token=st.integers(1, 4),
    kind=st.sampled_from(["even", "one", "few"]),
    interleaved=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
def test_rows_and_sums_of_a_plan_are_those_of_the_oracle(
    shape: tuple[int, int], per_token: int, kind: str, interleaved: bool, seed: int
) -> None:
    nodes, each = shape
    node_of_rank = list(range(nodes)) * each if interleaved else [rank // each for rank in range(nodes * each)]
    rng = np.random.default_rng(seed)
    experts = int(rng.integers(per_token, per_token + 9))
    placement = ExpertPlacement(rng.integers(0, nodes * each, experts).tolist(), node_of_rank)
    counts = rng.choice([0, 1, 2, 7], nodes * each)
    values = [rng.standard_normal((count, WIDTH)).astype(np.float32) for count in counts]
    choices = [random_choices(rng, int(count), per_token, experts, kind) for count in counts]
    rows, sums = carried_out(values, choices, placement)
    for rank in range(placement.ranks):
        expected = expected_rows(values, choices, choices, placement, rank, "f32")
        assert np.array_equal(rows[rank], np.array([one[3] for one in expected], np.float32).reshape(-1, WIDTH))
        for token, chosen in enumerate(choices[rank]):
            parts = {int(e): values[rank][token : token + 1] * np.float32(1 + e / 8) for e in chosen}
            assert np.array_equal(sums[rank][token], combined(parts, placement, "f32", np.float32)[0])


def v3_choices(scores: Array, groups_kept: int) -> Array:
    """The 8 best of 256 experts, within so many of 8 groups, which are chosen by the sum of their two best."""
    grouped = scores.reshape(len(scores), 8, 32)
    best = np.sort(grouped, axis=2)[:, :, -2:].sum(axis=2)
    kept = np.argsort(-best, axis=1)[:, :groups_kept]
    allowed = np.zeros((len(scores), 8), bool)
    np.put_along_axis(allowed, kept, True, axis=1)
    return np.argsort(-np.where(allowed[..., None], grouped, -np.inf).reshape(len(scores), 256), axis=1)[:, :8]


@pytest.mark.parametrize(("groups_kept", "mean"), [(8, 5.295), (4, 3.954)], ids=["free", "limited to 4 nodes"])
def test_a_token_is_sent_to_as_many_nodes_as_is_published(groups_kept: int, mean: float) -> None:
    placement = ExpertPlacement.even(256, list(range(8)))
    tokens = 8_000
    choices = v3_choices(np.random.default_rng(11).random((tokens, 256), np.float32), groups_kept)
    copies = sum(entries.rows for entries in plan_source(choices, placement).entries) / tokens
    assert copies == pytest.approx(mean, abs=0.02)
    if groups_kept == 8:
        assert copies == pytest.approx(expected_places(256, 8, 8), abs=0.02)
