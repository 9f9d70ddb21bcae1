"""The incremental solver and the engine in C++ beside their twins, which solve all rates anew."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fireflyer.native import FairRates
from fireflyer.netsim import Incidence, LinkFailure, Links, Routing, Settings, max_min_rates, simulate
from fireflyer.topology.fabrics import Fabric, NodeGroup, dragonfly, multi_plane, two_layer_tree, zones
from fireflyer.topology.traffic import Transfer

SEEDS = st.integers(0, 1 << 32)


class Network:
    """Links, and paths with a number of flows each, in both solvers."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.capacities = np.array([rng.choice((1.0, 2.5, 10.0, 100.0)) for _ in range(rng.randrange(1, 20))])
        self.native = FairRates(self.capacities)
        self.rows: list[tuple[tuple[int, ...], tuple[float, ...]]] = []
        self.weights: list[float] = []
        self.flows: list[int] = []

    def add_path(self) -> None:
        rng, links = self.rng, len(self.capacities)
        used = tuple(rng.sample(range(links), rng.randrange(1, min(links, 6) + 1)))
        shares = tuple(rng.choice((1.0, 1.0, 0.5, 0.125, 1 / 3)) for _ in used)
        self.rows.append((used, shares))
        self.weights.append(rng.choice((1.0, 1.0, 3.0, 0.7)))
        self.flows.append(0)
        added = self.native.add_path(np.array(used, np.uint32), np.array(shares), self.weights[-1])
        assert added == len(self.rows) - 1

    def change(self) -> None:
        rng = self.rng
        if not self.rows or rng.random() < 0.3:
            self.add_path()
        if rng.random() < 0.15:
            link = rng.randrange(len(self.capacities))
            self.capacities[link] *= rng.choice((0.5, 0.9, 2.0))
            self.native.set_capacity(link, float(self.capacities[link]))
        path = rng.randrange(len(self.rows))
        self.flows[path] = max(0, self.flows[path] + rng.choice((-2, -1, -1, 1, 1, 3)))
        self.native.set_flows(path, self.flows[path])

    def whole_solution(self) -> list[float]:
        """Of a flow of each path, each flow being a row of its own."""
        owners = [path for path, flows in enumerate(self.flows) for _ in range(flows)]
        incidence = Incidence.of([self.rows[path] for path in owners])
        priorities = np.array([self.weights[path] for path in owners])
        found = [0.0] * len(self.rows)
        for path, rate in zip(owners, max_min_rates(self.capacities, incidence, priorities).tolist(), strict=True):
            found[path] = rate
        return found


@given(SEEDS)
def test_after_each_event_the_rates_are_those_of_the_whole_network(seed: int) -> None:
    rng = random.Random(seed)
    network = Network(rng)
    for _ in range(rng.randrange(1, 25)):
        for _ in range(rng.choice((1, 1, 1, 4))):
            network.change()
        network.native.solve()
        assert network.native.rates().tolist() == pytest.approx(network.whole_solution(), rel=1e-9)


def test_a_change_is_solved_where_it_reaches_and_nowhere_else() -> None:
    rates = FairRates(np.ones(100))
    for link in range(100):
        rates.add_path(np.array([link], np.uint32), np.ones(1))
        rates.set_flows(link, 1)
    assert rates.solve() == 100
    rates.set_flows(7, 2)
    assert rates.solve() == 1
    assert rates.rates()[6:9].tolist() == [1.0, 0.5, 1.0]
    rates.set_flows(7, 1)
    rates.set_flows(7, 2)
    assert rates.solve() == 0  # as many as before


def drawn_fabric(rng: random.Random) -> Fabric:
    nodes = [NodeGroup(kind="gpu", count=16)]
    choices = (
        lambda: two_layer_tree(nodes, radix=8, gbit_per_s=8),
        lambda: multi_plane([NodeGroup(kind="gpu", count=16, ports=2)], planes=2, radix=8, gbit_per_s=8),
        lambda: dragonfly(nodes_per_switch=2, group_switches=3, global_links=1, groups=4, gbit_per_s=8),
        lambda: zones(
            nodes,
            radix=8,
            gbit_per_s=8,
            between=4,
            shared=[NodeGroup(kind="storage", count=4, ports=2)],
        ),
    )
    return rng.choice(choices)()


def drawn_transfers(rng: random.Random, nodes: int) -> list[Transfer]:
    return [
        Transfer(
            id=3 * number,
            source=rng.randrange(nodes),
            target=rng.randrange(nodes),
            nbytes=rng.choice((0, 10**6, 10**8, rng.randrange(1, 10**9))),
            after=tuple(3 * other for other in rng.sample(range(number), min(number, rng.randrange(3)))),
            delay_ns=rng.choice((0, rng.randrange(10**9))),
            lane=rng.randrange(2),
            connection=rng.choice((None, 1)),
        )
        for number in range(rng.randrange(1, 30))
    ]


def drawn_failures(rng: random.Random, links: Links) -> list[LinkFailure]:
    found = []
    for link in rng.sample(range(len(links.ends)), rng.randrange(6)):
        at_ns = rng.choice((0, rng.randrange(3 * 10**9)))
        repaired_ns = rng.choice((None, at_ns + rng.randrange(1, 2 * 10**9)))
        found.append(LinkFailure(link=link, at_ns=at_ns, repaired_ns=repaired_ns))
    return found


@given(SEEDS, st.sampled_from(("static", "ecmp", "adaptive")))
def test_the_engine_ends_transfers_when_its_twin_does(seed: int, routing: Routing) -> None:
    """With lanes, dependencies, failures and repairs of links."""
    rng = random.Random(seed)
    fabric = drawn_fabric(rng)
    transfers = drawn_transfers(rng, fabric.nodes)
    failures = drawn_failures(rng, Links(fabric))
    given_ = {
        "routing": routing,
        "queue_pairs": rng.choice((1, 3)),
        "seed": seed,
        "lane_weights": (1.0, rng.choice((1.0, 4.0))),
        "switch_latency_ns": rng.choice((0, 500)),
        "reroute_ns": rng.choice((0, 10**8)),
    }
    native, twin = (
        simulate(fabric, transfers, Settings(engine=engine, **given_), failures=failures)  # type: ignore[arg-type]
        for engine in ("native", "numpy")
    )
    assert native.cut_off == twin.cut_off
    assert native.start_s == pytest.approx(twin.start_s, rel=1e-9, abs=1e-12)
    assert native.finish_s == pytest.approx(twin.finish_s, rel=1e-9, abs=1e-12)
    assert native.link_bytes[: len(twin.link_bytes)] == pytest.approx(twin.link_bytes, rel=1e-6, abs=1.0)


def test_many_transfers_at_once_end_as_those_of_the_twin() -> None:
    """Enough that ends change the rates of a part of the others, and leave links between full and not full."""
    rng = random.Random(1)
    fabric = two_layer_tree([NodeGroup(kind="gpu", count=16)], radix=8, gbit_per_s=8)
    pairs = [rng.sample(range(16), 2) for _ in range(300)]
    transfers = [
        Transfer(id=number, source=source, target=target, nbytes=rng.randrange(1, 10**8))
        for number, (source, target) in enumerate(pairs)
    ]
    native, twin = (
        simulate(fabric, transfers, Settings(routing="adaptive", engine=engine)) for engine in ("native", "numpy")
    )
    assert native.finish_s == pytest.approx(twin.finish_s, rel=1e-9)
