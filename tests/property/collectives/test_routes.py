"""Whatever the speeds and the layout: times grow with bytes, chunks fit a plan, rows cover every size, ranks agree."""

from __future__ import annotations

import itertools
import math
import subprocess
import sys

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fireflyer.base.errors import UsageError
from fireflyer.base.units import KIB, MIB, format_bytes
from fireflyer.collectives.planning.cost import GOOD_ENOUGH, Layout, Speeds, best_chunk_bytes, predict_ns
from fireflyer.collectives.planning.crossings import crossings
from fireflyer.collectives.planning.plan import (
    ACROSS_ZONES,
    ALGORITHMS,
    LINE,
    MAX_CHUNK_BYTES,
    MIN_CHUNK_BYTES,
    PARTED,
    SUITABLE,
    Plan,
    Route,
    double_binary_tree,
)
from fireflyer.collectives.planning.routing import MAX_ROWS, best_window, choose_routes, explain, plan_for
from fireflyer.collectives.planning.shapes import shape_of

rates = st.floats(1e6, 1e12)
times = st.floats(100.0, 1e7)


@st.composite
def some_speeds(draw: st.DrawFn) -> Speeds:
    return Speeds(
        latency_ns=draw(times),
        bytes_per_s=draw(rates),
        both_ways_bytes_per_s=draw(rates),
        message_ns=draw(times),
        add_bytes_per_s=draw(rates),
        memory_bytes_per_s=draw(rates),
        local_latency_ns=draw(times),
        cross_latency_ns=draw(st.just(0.0) | times),
        cross_bytes_per_s=draw(st.just(0.0) | rates),
    )


@st.composite
def some_layouts(draw: st.DrawFn) -> Layout:
    nodes = draw(st.integers(1, 70))
    zones = draw(st.just(()) | st.lists(st.integers(0, 2), min_size=nodes, max_size=nodes).map(tuple))
    window = draw(st.sampled_from([2, 4, 8, 32]))
    return Layout(nodes=nodes, ranks_per_node=draw(st.integers(1, 64)), window=window, zones=zones)


kinds = st.sampled_from([(kind, algorithm) for kind, suitable in SUITABLE.items() for algorithm in suitable])
sizes = st.integers(0, 34).flatmap(lambda bits: st.integers(0, 1 << bits))
chunks = st.integers(1, MAX_CHUNK_BYTES // MIN_CHUNK_BYTES).map(lambda pages: pages * MIN_CHUNK_BYTES)


@given(some_speeds(), some_layouts(), kinds, sizes, sizes, chunks)
def test_more_bytes_never_take_less_time(
    speeds: Speeds, layout: Layout, kind: tuple[str, str], one: int, other: int, chunk: int
) -> None:
    few, many = sorted((one, other))
    before = predict_ns(speeds, layout, *kind, few, chunk)
    after = predict_ns(speeds, layout, *kind, many, chunk)
    assert 0 <= before <= after * (1 + 1e-9)
    assert predict_ns(speeds, layout, *kind, few) <= predict_ns(speeds, layout, *kind, many) * GOOD_ENOUGH * 1.01


@given(some_speeds(), some_layouts(), kinds, sizes)
def test_chunks_fit_a_plan(speeds: Speeds, layout: Layout, kind: tuple[str, str], nbytes: int) -> None:
    chunk = best_chunk_bytes(speeds, layout, *kind, nbytes)
    assert chunk % MIN_CHUNK_BYTES == 0
    assert MIN_CHUNK_BYTES <= chunk <= MAX_CHUNK_BYTES
    slots = layout.window * (layout.ranks_per_node + 2) * chunk
    fits = slots <= layout.slot_bytes and layout.window * chunk <= layout.flight_bytes
    assert fits or chunk == layout.least_chunk_bytes(kind[0]) or chunk == MIN_CHUNK_BYTES
    if kind[0] in PARTED:
        assert chunk >= 8 * layout.nodes * layout.ranks_per_node


@settings(max_examples=60)
@given(some_speeds(), some_layouts(), kinds, st.integers(1, 4 * MIB))
def test_the_closed_form_finds_what_brute_force_finds(
    speeds: Speeds, layout: Layout, kind: tuple[str, str], nbytes: int
) -> None:
    layout = msgspec.structs.replace(layout, slot_bytes=1 << 40, flight_bytes=1 << 40)
    found = predict_ns(speeds, layout, *kind, nbytes)
    least = layout.least_chunk_bytes(kind[0])
    every = range(least, max(least, nbytes) + 2 * MIN_CHUNK_BYTES, MIN_CHUNK_BYTES)
    best = min(predict_ns(speeds, layout, *kind, nbytes, chunk) for chunk in every)
    assert found <= GOOD_ENOUGH * 1.001 * best


@pytest.mark.parametrize("nodes", [2, 8, 64])
@pytest.mark.parametrize("latency_ns", [5e3, 60e3, 1e6])
def test_the_closed_form_of_ordinary_networks(nodes: int, latency_ns: float) -> None:
    for window, bytes_per_s in ((4, 117e6), (32, 22e9)):
        speeds = Speeds(latency_ns=latency_ns, bytes_per_s=bytes_per_s, both_ways_bytes_per_s=40e9)
        layout = Layout(nodes=nodes, window=window, slot_bytes=1 << 40, flight_bytes=1 << 40)
        for algorithm, nbytes in itertools.product(SUITABLE["allreduce"], (MIB, 12 * MIB)):
            found = predict_ns(speeds, layout, "allreduce", algorithm, nbytes)
            every = range(MIN_CHUNK_BYTES, nbytes + MIN_CHUNK_BYTES, MIN_CHUNK_BYTES)
            best = min(predict_ns(speeds, layout, "allreduce", algorithm, nbytes, chunk) for chunk in every)
            assert found <= GOOD_ENOUGH * 1.001 * best, (algorithm, nbytes, window)


@settings(max_examples=60)
@given(some_speeds(), some_layouts())
def test_rows_cover_every_size_and_give_their_reason(speeds: Speeds, layout: Layout) -> None:
    rows = choose_routes(speeds, layout)
    assert rows == choose_routes(speeds, layout)
    assert len(rows) <= 64
    for kind, suitable in SUITABLE.items():
        mine = [row for row in rows if row.kind == kind]
        assert 1 <= len(mine) <= MAX_ROWS
        limits = [row.up_to_bytes for row in mine]
        assert limits[-1] is None
        bounds = [limit for limit in limits if limit is not None]
        assert bounds == sorted(set(bounds))
        assert len(bounds) == len(mine) - 1
        for limit, row in zip(bounds, mine[1:], strict=True):
            assert f" at {format_bytes(limit + 1)} on " in row.reason, "a row begins where its reason says"
        for limit, row in zip(bounds, mine, strict=False):
            assert row.chunk_bytes <= max(limit + 1, MIN_CHUNK_BYTES, layout.least_chunk_bytes(kind)), "slots are dear"
        for row in mine:
            assert row.algorithm in suitable
            assert row.chunk_bytes % MIN_CHUNK_BYTES == 0
            assert layout.least_chunk_bytes(kind) <= row.chunk_bytes <= MAX_CHUNK_BYTES
            assert row.reason
            assert "\n" not in row.reason


@settings(max_examples=300)
@example(
    Speeds(
        latency_ns=501.0,
        bytes_per_s=1e6,
        both_ways_bytes_per_s=1e6,
        message_ns=100.0,
        add_bytes_per_s=1e6,
        memory_bytes_per_s=1e6,
        local_latency_ns=100.0,
        cross_latency_ns=100.0,  # another zone is nearer
    ),
    Layout(nodes=2, ranks_per_node=1, window=2, zones=(0, 1)),
)
@given(some_speeds(), some_layouts())
def test_a_choice_is_near_the_best_prediction(speeds: Speeds, layout: Layout) -> None:
    """Rows go on while changing gains little; where that gives too many rows, a little more is given away."""
    rows = choose_routes(speeds, layout, kinds=["allreduce"])
    may = ACROSS_ZONES if len(set(layout.zones)) > 1 else [name for name in ALGORITHMS if name != LINE]
    for size in (64 * KIB, 25 * MIB, 186 * MIB):
        row = next(row for row in rows if row.up_to_bytes is None or size <= row.up_to_bytes)
        chosen = predict_ns(speeds, layout, "allreduce", row.algorithm, size, row.chunk_bytes)
        best = min(predict_ns(speeds, layout, "allreduce", algorithm, size) for algorithm in may)
        assert chosen <= 4 * best


@given(some_speeds(), some_layouts())
def test_windows_are_those_of_a_plan(speeds: Speeds, layout: Layout) -> None:
    assert best_window(speeds, layout) in (4, 8, 16, 32)


@settings(max_examples=40)
@given(some_speeds(), st.lists(st.integers(0, 9), min_size=1, max_size=40), st.data())
def test_a_plan_takes_the_rows(speeds: Speeds, places: list[int], data: st.DataObject) -> None:
    numbers = {place: number for number, place in enumerate(sorted(set(places)))}
    nodes = [numbers[place] for place in places]
    zones = data.draw(st.just([]) | st.lists(st.integers(0, 1), min_size=len(numbers), max_size=len(numbers)))
    plan = plan_for(nodes, speeds, zones=zones)
    assert msgspec.json.decode(msgspec.json.encode(plan), type=Plan) == plan
    assert {route.kind for route in plan.routes} == set(SUITABLE)
    if len(set(zones)) == 2:
        assert {len(pairs) for pairs in crossings(plan, zones).values()} == {1}
    if len(set(zones)) < 2:
        assert LINE not in {route.algorithm for route in plan.routes}
    for size in (0, 1, 5 * KIB, 3 * MIB, 1 << 40):
        assert plan.route("allreduce", size).reason in explain(plan)


def test_all_ranks_choose_alike() -> None:
    """Other processes, other hash seeds: the same rows, to the byte."""
    code = (
        "import msgspec; from fireflyer.collectives.planning.cost import Layout, Speeds;"
        "from fireflyer.collectives.planning.routing import choose_routes;"
        "print(msgspec.json.encode(choose_routes(Speeds(), Layout(nodes=13, ranks_per_node=3))).decode())"
    )
    texts = {
        subprocess.run(
            [sys.executable, "-c", code], env={"PYTHONHASHSEED": seed}, capture_output=True, check=True
        ).stdout
        for seed in ("0", "1", "2")
    }
    assert len(texts) == 1
    assert msgspec.json.decode(texts.pop(), type=list[Route])


def test_a_choice_can_be_overridden() -> None:
    rows = choose_routes(Speeds(), Layout(nodes=8), only=["ring"])
    assert {row.algorithm for row in rows if row.kind == "allreduce"} == {"ring"}
    assert {row.algorithm for row in rows if row.kind == "reduce"} == {"double_binary_tree"}
    with pytest.raises(UsageError, match="algorithm 'star' is not known"):
        choose_routes(Speeds(), Layout(nodes=8), only=["star"])


def test_what_is_asked_for_across_zones_is_done() -> None:
    """Whoever names an algorithm gets it, with all its pairs."""
    across = Layout(nodes=8, zones=(0,) * 4 + (1,) * 4)
    assert {row.algorithm for row in choose_routes(Speeds(), across)} <= set(ACROSS_ZONES)
    asked = choose_routes(Speeds(), across, only=["ring"], kinds=["allgather", "reduce"])
    assert {(row.kind, row.algorithm) for row in asked} == {("allgather", "ring"), ("reduce", "double_binary_tree")}


def test_the_line_costs_no_more_across_few_links_than_the_ring() -> None:
    for first in range(1, 32):
        zones = (0,) * first + (1,) * (32 - first)
        for kind in ("allreduce", "reduce_scatter", "allgather"):
            line, ring = shape_of(kind, LINE, zones), shape_of(kind, "ring", zones)
            assert line.crossing <= ring.crossing
            assert line.traffic <= ring.traffic * 33 / 31 + 1e-9


def test_reasons_read_well() -> None:
    fast_wire = Speeds(latency_ns=200e3, message_ns=1e3)
    rows = choose_routes(fast_wire, Layout(nodes=8, ranks_per_node=2), kinds=["allreduce"])
    assert any(row.reason.startswith("halving doubling: ") and " predicted against " in row.reason for row in rows)
    assert all(row.reason.endswith((" on 8 nodes", "not enough to change")) for row in rows)
    alone = choose_routes(Speeds(), Layout(nodes=1, ranks_per_node=4), kinds=["allreduce"])
    assert [row.reason for row in alone] == ["one node: nothing crosses the network"]


def test_few_links_between_zones_speak_for_the_tree() -> None:
    zones = (0,) * 16 + (1,) * 16
    layout = Layout(nodes=32, ranks_per_node=8, window=16, zones=zones)
    narrow = Speeds(bytes_per_s=22e9, both_ways_bytes_per_s=40e9, message_ns=500, cross_bytes_per_s=5e9, latency_ns=5e3)
    rows = choose_routes(narrow, layout, kinds=["allreduce"])
    assert rows[-1].algorithm == "double_binary_tree"


@pytest.mark.parametrize("nodes", [2, 3, 4, 7, 16, 33, 64])
def test_shapes_are_those_of_the_algorithms(nodes: int) -> None:
    zones = (0,) * nodes
    tree, ring, halving, line = (shape_of("allreduce", algorithm, zones) for algorithm in ALGORITHMS)
    assert tree.traffic == (nodes if nodes <= 3 else 4)
    assert tree.hops == 2 * max(depth(nodes))
    assert ring.hops == 2 * (nodes - 1)
    assert ring.traffic == pytest.approx(4 * (nodes - 1) / nodes)
    assert ring.hops <= line.hops <= 1.5 * ring.hops
    assert line.traffic == pytest.approx(4 if nodes > 2 else 4 * (nodes - 1) / nodes)
    power = 1 << (nodes.bit_length() - 1)
    assert halving.hops == 2 * int(math.log2(power)) + 2 * (nodes > power)
    assert halving.traffic == pytest.approx(4 * (1 - 1 / power) + 2 * (nodes > power))


def depth(nodes: int) -> list[int]:
    found = []
    for tree in double_binary_tree(nodes):
        for node in range(nodes):
            hops = 0
            while tree[node] >= 0:
                node, hops = tree[node], hops + 1
            found.append(hops)
    return found


@pytest.mark.parametrize("name", ["latency_ns", "bytes_per_s", "cross_bytes_per_s"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -1.0])
def test_speeds_must_make_sense(name: str, value: float) -> None:
    with pytest.raises(UsageError, match=name):
        Speeds(**{name: value})


def test_layouts_must_make_sense() -> None:
    with pytest.raises(UsageError, match="zones names 1 nodes of 2"):
        Layout(nodes=2, zones=(0,))
    with pytest.raises(UsageError, match="too small"):
        Layout(nodes=0)
    with pytest.raises(UsageError, match="must not be negative"):
        predict_ns(Speeds(), Layout(nodes=2), "allreduce", "ring", -1)
    with pytest.raises(UsageError, match="cannot be done by 'ring'"):
        predict_ns(Speeds(), Layout(nodes=2), "broadcast", "ring", 1)
    with pytest.raises(UsageError, match="kind 'gather' has no routes"):
        choose_routes(Speeds(), Layout(nodes=2), kinds=["gather"])
