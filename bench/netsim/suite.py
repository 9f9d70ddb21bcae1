"""Seconds of simulating 10,000 GPUs, of random flows to their end beside SimGrid's flow model, and how well transfers
predict an allreduce on this machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from bench.netsim.calibration import LAYOUTS, calibration_results
from bench.netsim.workload import GPUS_PER_NODE, queued_flows, random_flows
from bench.report import Figure, Measuring, Options, Result, figure
from fireflyer.base.units import GIB
from fireflyer.native import FlowRun
from fireflyer.netsim import Links, Router, Settings, simulate
from fireflyer.topology.fabrics import Fabric
from fireflyer.topology.traffic import Transfer

__all__ = ["run"]

ROOT: Final = Path(__file__).parents[2]
ORACLE: Final = ROOT / "tests/support/simgrid_flows.py"
NODES: Final = {"tiny": (16,), "brief": (128,), "full": (312, 625, 1250, 12_500)}
FLOWS: Final = {"tiny": ((64, 8),), "brief": ((512, 32),), "full": ((2048, 64), (8192, 64))}
"""Flows and ports of a switch."""
ADAPTIVE: Final = {"tiny": ((200, 8),), "brief": ((5000, 32),), "full": ((50_000, 64),)}
"""Transfers and ports of a switch."""
AT_ONCE: Final = {"tiny": ((200, 8),), "brief": ((4096, 32),), "full": ((16_384, 64), (50_000, 64))}
"""Transfers that begin together, and ports of a switch."""
MOST_S: Final = 10.0
MOST_BYTES: Final = 2 * GIB
TIMES_SIMGRID: Final = 20
MOST_ROUNDS: Final = 3
"""Since SimGrid takes minutes for the largest case."""
MOST_REPEATED: Final = 1250
"""Nodes of a cluster that is simulated more than once: ten times as many take minutes."""


def run(options: Options) -> Measuring:
    for nodes in NODES[options.scale]:
        case = f"cluster/{nodes * GPUS_PER_NODE}-gpus/allreduce-and-reads"
        if options.selects(case):
            yield from _cluster(case, nodes, options)
    for flows, radix in FLOWS[options.scale]:
        case = f"random/{flows}-flows/to-the-end"
        if options.selects(case):
            yield _random(case, flows, radix, options)
    for count, radix in ADAPTIVE[options.scale]:
        case = f"adaptive/{count}-transfers/{radix * radix // 4}-nodes"
        if options.selects(case):
            yield _adaptive(case, queued_flows(count, radix), "each sends one transfer after the other", options)
    for count, radix in AT_ONCE[options.scale]:
        case = f"adaptive/{count}-transfers-at-once/{radix * radix // 4}-nodes"
        if options.selects(case):
            yield _adaptive(case, queued_flows(count, radix, at_once=True), "all begin together", options)
    if any(options.selects(f"prediction/allreduce/{layout}") for layout in LAYOUTS[options.scale]):
        yield from calibration_results(options)
    return (
        f"{os.cpu_count()} processors, load {os.getloadavg()[0]:.1f}; cluster: checks, routes and run of given "
        "transfers in a process of its own, whose memory is all of it; random: rates and events alone, on both "
        "sides in turns, the first round not counted, SimGrid in a new process each time; adaptive: no peer; "
        "prediction: one machine is all nodes, rates are calibrated on 3x1 and 2x3",
    )


def _cluster(case: str, nodes: int, options: Options) -> list[Result]:
    most = MOST_ROUNDS if nodes <= MOST_REPEATED else 1
    runs = [_child(nodes) for _ in range(min(options.rounds, most))]
    judged = nodes * GPUS_PER_NODE == 10_000
    wall, peak = figure([one["wall_s"] for one in runs]), figure([one["peak_bytes"] for one in runs])
    one = runs[0]
    simulated_ms = one["makespan_s"] * 1e3
    note = f"{one['transfers']:,} transfers, {one['events']:,} events, {simulated_ms:.1f} ms simulated"
    more = {"processor_s": figure([one["processor_s"] for one in runs]).median}
    return [
        _result(case, "time_s", wall, {}, f"ours < {MOST_S:g} s" if judged else "", wall.median < MOST_S, note, more),
        _result(case, "peak_memory_bytes", peak, {}, "ours < 2 GiB" if judged else "", peak.median < MOST_BYTES, note),
    ]


def _child(nodes: int) -> dict[str, Any]:
    """In a process of its own, so that its memory is that of this case."""
    done = subprocess.run(
        [sys.executable, "-m", "bench.netsim.cluster", str(nodes)],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
    )
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def _random(case: str, flows: int, radix: int, options: Options) -> Result:
    fabric, transfers = random_flows(flows, radix)
    links = Links(fabric)
    router = Router(links, "ecmp", seed=flows)
    ways = [router.flows(one.id, one.source, one.target)[0].links for one in transfers]
    ours, theirs, missing, name = [], [], "", "SimGrid"
    for _ in range(1 + min(options.rounds, MOST_ROUNDS)):  # in turns; the first round warms up
        seconds, finish_s = _native(links, transfers, ways)
        ours.append(seconds)
        if not missing:
            peer = _simgrid(fabric, links, transfers, ways)
            if isinstance(peer, str):
                missing = peer
                continue
            theirs.append(peer.engine_s)
            name = f"SimGrid {peer.version}"
            np.testing.assert_allclose(finish_s, peer.finish_s, rtol=1e-6)
    ours, theirs = ours[1:], theirs[1:]
    target = f"ours <= SimGrid/{TIMES_SIMGRID}" if flows == 8192 else ""
    peers: dict[str, Figure | str] = {name: missing or figure(theirs)}
    met = None if missing else figure(ours).median * TIMES_SIMGRID <= figure(theirs).median
    return _result(case, "time_s", figure(ours), peers, target, met, f"{fabric.nodes} nodes, ECMP")


def _native(links: Links, transfers: list[Transfer], ways: list[tuple[int, ...]]) -> tuple[float, np.ndarray[Any, Any]]:
    engine = FlowRun(links.capacities)
    paths = [engine.add_path(np.array(way, np.uint32), np.ones(len(way))) for way in ways]
    count, none = len(transfers), np.zeros(0, np.int64)
    engine.add_transfers(
        np.array([one.nbytes for one in transfers], np.float64),
        np.zeros(count),
        np.zeros(count),
        np.arange(count + 1),
        np.array(paths, np.int64),
        np.ones(count),
        np.zeros(count + 1, np.int64),
        none,
    )
    begun = time.perf_counter()
    engine.run_until(float("inf"))
    return time.perf_counter() - begun, engine.finish_s


def _adaptive(case: str, traffic: tuple[Fabric, list[Transfer]], how: str, options: Options) -> Result:
    """Processor time of routes and run where each transfer is divided over all links; nobody else divides flows."""
    fabric, transfers = traffic
    seconds, events = [], 0
    for _ in range(1 + min(options.rounds, MOST_ROUNDS)):  # the first round warms up
        begun = time.process_time()
        events = simulate(fabric, transfers, Settings(routing="adaptive")).events
        seconds.append(time.process_time() - begun)
    taken = figure(seconds[1:])
    target = f"ours < {MOST_S:g} s" if len(transfers) == 50_000 else ""
    note = f"{fabric.nodes} nodes, {how}; {events:,} events"
    return _result(case, "processor_s", taken, {}, target, taken.median < MOST_S, note)


class _Peer(NamedTuple):
    engine_s: float
    finish_s: list[float]
    """Of each flow."""
    version: str


def _simgrid(fabric: Fabric, links: Links, transfers: list[Transfer], ways: list[tuple[int, ...]]) -> _Peer | str:
    """Or why there is nothing."""
    network = {
        "capacities": [fabric.link_bytes_per_s] * len(links.ends),
        "flows": [[0.0, one.nbytes, list(way)] for one, way in zip(transfers, ways, strict=True)],
    }
    done = subprocess.run(
        ["/usr/bin/python3", str(ORACLE)], input=json.dumps([network]), capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        return "SimGrid did not run; apt-get install python3-simgrid"
    words = next(line for line in done.stderr.splitlines() if line.startswith("engine ran for")).split()
    return _Peer(float(words[3]), json.loads(done.stdout)[0], words[-1])


def _result(
    case: str,
    metric: str,
    ours: Figure,
    peers: dict[str, Figure | str],
    target: str,
    met: bool | None,
    note: str,
    more: dict[str, float] | None = None,
) -> Result:
    return Result(
        suite="netsim",
        case=case,
        metric=metric,
        better="lower",
        ours=ours,
        peers=peers,
        bound=None,
        target=target,
        note=note,
        met=met if target else None,
        verdicts={target: met} if target else {},
        more=more or {},
    )
