"""Transfers end when SimGrid, an independent simulator, says that they end. Needs Debian's python3-simgrid."""

from __future__ import annotations

import json
import random
import subprocess
from pathlib import Path
from typing import Any, get_args

import msgspec
import numpy as np
import pytest
from tests.support.patience import allowed_s

from fireflyer.netsim import Links, Pattern, Router, Settings, pattern_transfers, simulate
from fireflyer.topology.fabrics import (
    Fabric,
    NodeGroup,
    dragonfly,
    multi_plane,
    slim_fly,
    three_layer_tree,
    two_layer_tree,
    zones,
)
from fireflyer.topology.traffic import Transfer

ORACLE = Path(__file__).parents[2] / "support/simgrid_flows.py"
SMALL = 196
FLOWS_OF_LARGE = (500, 500, 1000, 2000)


def ask_simgrid(networks: list[dict[str, Any]]) -> list[list[float]]:
    done = subprocess.run(
        ["/usr/bin/python3", str(ORACLE)],
        input=json.dumps(networks),
        capture_output=True,
        text=True,
        timeout=allowed_s(300),
        check=False,
    )
    assert done.returncode == 0, f"SimGrid did not run; apt-get install python3-simgrid: {done.stderr[-2000:]}"
    found: list[list[float]] = json.loads(done.stdout)
    return found


def gpus(count: int, ports: int = 1) -> list[NodeGroup]:
    return [NodeGroup(kind="gpu", count=count, ports=ports)]


def drawn_fabric(rng: random.Random) -> Fabric:
    radix, rate = 2 * rng.randrange(2, 5), 8.0 * rng.randrange(1, 5)
    storage = [NodeGroup(kind="storage", count=2, ports=2)]
    choices = (
        lambda: two_layer_tree(gpus(radix * rng.randrange(1, radix // 2 + 1)), radix=radix, gbit_per_s=rate),
        lambda: three_layer_tree(gpus(radix * radix), radix=radix, gbit_per_s=rate),
        lambda: zones(gpus(2 * radix - 4), radix=radix, gbit_per_s=rate, between=radix // 2, shared=storage),
        lambda: multi_plane(gpus(radix, 2), planes=2, radix=radix, gbit_per_s=rate),
        lambda: slim_fly(rng.choice((3, 4, 5)), gbit_per_s=rate),
        lambda: dragonfly(nodes_per_switch=2, group_switches=3, global_links=1, groups=4, gbit_per_s=rate),
    )
    return rng.choice(choices)()


def drawn_transfers(rng: random.Random, nodes: int, count: int, *, together: bool) -> list[Transfer]:
    """Of a pattern, or between nodes that are drawn."""
    pattern = rng.choice((None, None, *get_args(Pattern)))
    if pattern is not None:
        found = pattern_transfers(pattern, range(nodes), rng.randrange(10**6, 10**9), seed=rng.randrange(1000))
        return [msgspec.structs.replace(one, delay_ns=0 if together else rng.randrange(10**9)) for one in found[:count]]
    transfers = []
    for number in range(count):
        source, target = rng.sample(range(nodes), 2)
        delay_ns = 0 if together else rng.randrange(10**9)
        nbytes = rng.randrange(10**6, 10**9)
        transfers.append(Transfer(id=number, source=source, target=target, nbytes=nbytes, delay_ns=delay_ns))
    return transfers


def case(seed: int, count: int) -> tuple[dict[str, Any], list[float]]:
    """A network for SimGrid, and when its transfers end here."""
    rng = random.Random(seed)
    fabric = drawn_fabric(rng)
    links = Links(fabric)
    capacities = links.capacities * np.array([rng.choice((1.0, 0.5, 0.37)) for _ in links.ends])
    transfers = drawn_transfers(rng, fabric.nodes, count, together=seed % 2 == 0)
    settings = Settings(routing=rng.choice(("static", "ecmp")), seed=seed)
    run = simulate(fabric, transfers, settings, capacities=capacities)
    router = Router(links, settings.routing, seed=seed)
    flows = [
        [one.delay_ns / 1e9, one.nbytes, list(router.flows(one.id, one.source, one.target)[0].links)]
        for one in transfers
    ]
    return {"capacities": capacities.tolist(), "flows": flows}, run.finish_s.tolist()


@pytest.mark.slow
def test_200_networks_end_as_in_simgrid_and_a_wrong_route_is_noticed() -> None:
    cases = [case(seed, 1 + seed % 60) for seed in range(SMALL)]
    cases += [case(seed, flows) for seed, flows in enumerate(FLOWS_OF_LARGE, SMALL)]
    assert len(cases) == 200
    wrong = json.loads(json.dumps(cases[57][0]))
    first = max(wrong["flows"], key=lambda flow: len(flow[2]))
    wrong["capacities"].append(min(wrong["capacities"]) / 1000)  # whatever its flow had
    first[2][0] = len(wrong["capacities"]) - 1
    *found, mutated = ask_simgrid([*(network for network, _ in cases), wrong])
    for seed, (theirs, (_, ours)) in enumerate(zip(found, cases, strict=True)):
        assert ours == pytest.approx(theirs, rel=1e-6), f"seed {seed}"
    assert mutated != pytest.approx(found[57], rel=1e-3)
