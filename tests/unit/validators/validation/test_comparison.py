"""Nodes beside their peers: which figure is too low, whose result differs, and who measures with whom when."""

from __future__ import annotations

import statistics
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fireflyer.validators.core.validation.pairs import rounds_of_pairs
from fireflyer.validators.core.validation.paths import path_name
from fireflyer.validators.core.validation.records import (
    HEALTHY_FLAGGED,
    MIN_PEERS,
    NORMAL_DEVIATIONS,
    NodeRecord,
    compare_digests,
    compare_figures,
    deviations_for,
    peers_of,
)


def record(node: str, value: float = 100.0, digest: str = "d", *, model: str = "m", seen_ns: int = 1) -> NodeRecord:
    return NodeRecord(
        node=node, model=model, seen_ns=seen_ns, figures={"gemm_flop_per_s": value}, digests={"cpu": digest}
    )


PEERS = [record(f"n{number}", value) for number, value in enumerate((99, 100, 101, 100, 40, 102))]
"""One of them is as slow as the node that is looked for; the median does not mind."""


def test_a_figure_far_below_its_peers_is_told_with_all_that_one_asks() -> None:
    (finding,) = compare_figures(record("slow", 80), PEERS)
    assert finding.words == "gemm_flop_per_s is 80.0, 20.0% below the median of 6 peers, 100, 13.5 deviations"
    assert (finding.severity, finding.cause) == ("low", "gemm_flop_per_s")


@pytest.mark.parametrize("value", [96, 100, 500])
def test_a_figure_within_the_tolerance_or_above_is_none(value: float) -> None:
    assert not list(compare_figures(record("n", value), PEERS))


def test_equal_peers_have_no_deviation_and_the_share_decides() -> None:
    peers = [record(f"n{number}") for number in range(5)]
    assert not list(compare_figures(record("n", 95.1), peers))
    assert [finding.words for finding in compare_figures(record("n", 94), peers)] == [
        "gemm_flop_per_s is 94.0, 6.0% below the median of 5 peers, 100"
    ]


def test_few_peers_say_nothing() -> None:
    assert not list(compare_figures(record("n", 1), PEERS[: MIN_PEERS - 1]))


@given(st.lists(st.floats(50, 150), min_size=5, max_size=40), st.floats(0, 200))
def test_only_what_is_below_the_median_is_a_fault(values: list[float], value: float) -> None:
    peers = [record(f"n{number}", one) for number, one in enumerate(values)]
    if list(compare_figures(record("me", value), peers)):
        assert value < 0.95 * statistics.median(values)


@pytest.mark.parametrize(("figures", "peers"), [(1, 4), (10, 4), (10, 5), (10, 7), (148, 6), (148, 16), (148, 33)])
def test_noise_makes_few_healthy_nodes_slow(figures: int, peers: int) -> None:
    """Nodes that all are the same, with independent noise of a fiftieth: a fault of one is a mistake."""
    random = np.random.default_rng(7)
    nodes = 800_000 // (figures * (peers + 1))
    values = random.normal(100.0, 2.0, (nodes, figures, peers + 1))
    own, others = values[..., 0], np.sort(values[..., 1:], axis=-1)
    middle = others[..., [(peers - 1) // 2, peers // 2]].mean(-1)
    deviation = NORMAL_DEVIATIONS * np.median(np.abs(others - middle[..., None]), axis=-1)
    flagged = ((middle - own) > deviations_for(figures, peers) * deviation).any(-1)
    assert flagged.sum() <= HEALTHY_FLAGGED * nodes + 3 * np.sqrt(HEALTHY_FLAGGED * nodes)


@pytest.mark.parametrize(("names", "peers"), [(10, 4), (148, 6), (148, 16)])
def test_comparisons_call_few_healthy_nodes_slow(names: int, peers: int) -> None:
    random = np.random.default_rng(3)
    paths = [path_name(f"gpu{number // 16}", f"numa{number % 16}") for number in range(names)]

    def healthy(node: str) -> NodeRecord:
        figures = dict(zip(paths, random.normal(100.0, 2.0, names).tolist(), strict=True))
        return NodeRecord(node=node, model="m", seen_ns=1, figures=figures)

    flagged = 0
    for _ in range(20):
        known = [healthy(f"n{number}") for number in range(peers)]
        flagged += bool(list(compare_figures(healthy("me"), known)))
    assert flagged <= 1


def test_a_path_that_fails_is_found_among_all_of_a_node() -> None:
    random = np.random.default_rng(5)
    paths = [path_name(f"gpu{a}", f"gpu{b}") for a in range(8) for b in range(8) if a != b]
    known = [
        NodeRecord(node=f"n{n}", model="m", seen_ns=1, figures={name: random.normal(100.0, 2.0) for name in paths})
        for n in range(16)
    ]
    mine = NodeRecord(
        node="me", model="m", seen_ns=1, figures={name: 50.0 if name == paths[3] else 100.0 for name in paths}
    )
    assert [finding.cause for finding in compare_figures(mine, known)] == [paths[3]]


def test_peers_are_other_nodes_of_the_model_with_their_newest_record() -> None:
    records = [
        record("a", 1, seen_ns=1), record("a", 2, seen_ns=3), record("b", model="other"), record("me"),
        record("c", seen_ns=2),
    ]  # fmt: skip
    assert peers_of(record("me"), records) == [records[1], records[4]]


def test_the_node_whose_result_differs_is_told() -> None:
    (finding,) = compare_digests(record("n", digest="x"), PEERS)
    assert (finding.severity, finding.cause, finding.at_once) == ("high", "corruption", True)
    assert "6 of 6 peers" in finding.words
    assert not list(compare_digests(record("n"), PEERS))
    divided = [record("a", digest="a"), record("b", digest="b")]
    assert not list(compare_digests(record("n", digest="x"), divided)), "no result has a majority"


@given(st.integers(0, 41))
def test_each_pair_of_nodes_meets_once_and_no_node_twice_in_a_round(nodes: int) -> None:
    rounds = rounds_of_pairs(nodes)
    met = [pair for pairs in rounds for pair in pairs]
    assert sorted(met) == list(combinations(range(nodes), 2))
    for pairs in rounds:
        busy = [node for pair in pairs for node in pair]
        assert len(busy) == len(set(busy))
    assert len(rounds) == (0 if nodes < 2 else nodes - 1 if nodes % 2 == 0 else nodes)
