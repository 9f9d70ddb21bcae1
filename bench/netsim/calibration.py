"""How well simulated transfers predict an allreduce on this machine, beside the cost model of collectives.

Nodes are processes here, and what limits them are their leaders' threads and the processors that they share: each
transfer uses the thread of its sender, that of its receiver, and the machine. Two numbers are calibrated, on a layout
and on sizes that are not predicted: the bytes per second of a thread, and the time of a message. What the ranks of a
node add is measured on two nodes, with a number of ranks that is not predicted: all nodes add on the same processors,
beside the transfers, so ranks of one node alone are too fast by a factor of three. The cost model gets the speeds that
`ff collectives tune` measures on the same layout as the transfers.
"""

from __future__ import annotations

import math
import os
import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Final, NamedTuple

import msgspec

from bench.collectives.contenders import node_list, python_ranks
from bench.collectives.crew import Crew
from bench.report import Figure, Options, Result, figure
from fireflyer.base.errors import InvariantViolation
from fireflyer.base.units import KIB, MIB
from fireflyer.collectives import Plan, traffic
from fireflyer.collectives.planning.cost import Speeds, predict_ns
from fireflyer.collectives.planning.routing import default_plan, layout_of
from fireflyer.netsim import simulate_paths
from fireflyer.topology.node_fabric import Path

__all__ = ["LAYOUTS", "Calibration", "Errors", "calibrate", "calibration_results", "simulated_s"]

RANKS: Final = "bench.netsim.ranks"
KIND: Final = "allreduce"
ELEMENT_BYTES: Final = 4
CALIBRATED_ON: Final = "3x1"
SUMS_ON: Final = "2x3"
SMALL, LARGE = 96 * KIB, 24 * MIB
LAYOUTS: Final = {"tiny": ("2x1",), "brief": ("2x1", "2x4"), "full": ("2x1", "4x1", "8x1", "2x4")}
SIZES: Final = {
    "tiny": (1 * MIB,),
    "brief": (1 * MIB, 16 * MIB),
    "full": tuple(size * MIB for size in (1, 2, 4, 8, 16, 32, 64, 128, 256)),
}
CREWS: Final = {"tiny": 1, "brief": 3, "full": 5}
"""Of new processes each."""
STEPS: Final = 30
"""Of a bisection: the last one changes less than a millionth."""
WORDS: Final = 2e9
"""Bytes that a call is repeated for, at the most, so that small arrays are not measured once."""
MOST_CALLS: Final = 20
MOST_MEDIAN, MOST_WORST = 0.2, 1.0
"""Errors of all predictions, on an idle machine."""


class Calibration(NamedTuple):
    thread_bytes_per_s: float
    """Sent and received by one leader together."""
    message_s: float
    sum_s: float
    """Of the sums on the nodes, whatever their size."""
    sum_bytes_per_s: float
    """Of all arrays of all ranks together."""
    processors: int


def simulated_s(plan: Plan, nbytes: int, given: Calibration) -> float:
    """Of an allreduce of `nbytes` of FP32 by the nodes of the plan: the sums on the nodes, then the transfers."""
    ranks = sum(len(plan.ranks_of(node)) for node in range(plan.nodes))
    local_s = given.sum_s + ranks * nbytes / given.sum_bytes_per_s if ranks > plan.nodes else 0.0
    transfers = [
        msgspec.structs.replace(one, delay_ns=round(given.message_s * 1e9))
        for one in traffic(plan, KIND, nbytes // ELEMENT_BYTES)
    ]
    machine = plan.nodes
    rates = [given.thread_bytes_per_s] * plan.nodes + [given.thread_bytes_per_s * given.processors]
    # Sending and receiving is twice the bytes for the processors.
    paths = [Path((one.source, one.target, machine), (1.0, 1.0, 2.0)) for one in transfers]
    return local_s + simulate_paths(rates, transfers, paths).makespan_s


def calibrate(
    plan: Plan, small_s: float, large_s: float, sums: Plan, sums_s: Sequence[float], processors: int
) -> Calibration:
    """`small_s` and `large_s`: measured times of `SMALL` and `LARGE` by the nodes of `plan`; `sums_s`: by the ranks of
    `sums`. The rate makes the large one right, the time of a message the small one; the rest of `sums_s` is sums."""
    found = Calibration(1e9, 0.0, 0.0, math.inf, processors)
    for _ in range(3):
        found = found._replace(thread_bytes_per_s=_rate(plan, large_s, found))
        found = found._replace(message_s=_message_s(plan, small_s, found))
    small_left_s, large_left_s = (
        max(0.0, measured_s - simulated_s(sums, size, found))
        for measured_s, size in zip(sums_s, (SMALL, LARGE), strict=True)
    )
    ranks = len(sums.node_of_rank)
    slope = max((large_left_s - small_left_s) / (LARGE - SMALL) / ranks, 1e-15)
    return found._replace(sum_s=max(0.0, small_left_s - slope * ranks * SMALL), sum_bytes_per_s=1 / slope)


def _rate(plan: Plan, measured_s: float, given: Calibration) -> float:
    return _bisected(lambda rate: simulated_s(plan, LARGE, given._replace(thread_bytes_per_s=rate)), measured_s, 1e6)


def _message_s(plan: Plan, measured_s: float, given: Calibration) -> float:
    return _bisected(lambda time_s: -simulated_s(plan, SMALL, given._replace(message_s=time_s)), -measured_s, 1e-9)


def _bisected(falling: Callable[[float], float], wanted: float, least: float) -> float:
    """Where a function that falls from `least` on has a value; geometrically, up to a million times `least`."""
    low, high = least, least * 1e6
    for _ in range(STEPS):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if falling(middle) > wanted else (low, middle)
    return math.sqrt(low * high)


def calibration_results(options: Options) -> Iterator[Result]:
    """Median and worst error of each layout over all sizes, and of all layouts that were measured."""
    (small_s, large_s), speeds = _calibrated_on(CALIBRATED_ON, options)
    sums_s, _ = _calibrated_on(SUMS_ON, options)
    processors = len(os.sched_getaffinity(0))
    plan, sums = (default_plan(node_list(layout)) for layout in (CALIBRATED_ON, SUMS_ON))
    given = calibrate(plan, small_s, large_s, sums, sums_s, processors)
    ours, model = Errors([]), Errors([])
    for layout in LAYOUTS[options.scale]:
        case = f"prediction/{KIND}/{layout}"
        if options.selects(case):
            simulated, modelled, note = _predicted(layout, given, speeds, options)
            yield from _results(case, simulated, modelled, note, judged=False)
            ours, model = Errors(ours.ratios + simulated.ratios), Errors(model.ratios + modelled.ratios)
    yield from _results(f"prediction/{KIND}/all", ours, model, f"{len(ours.ratios)} sizes and layouts", judged=True)


def _calibrated_on(layout: str, options: Options) -> tuple[list[float], Speeds]:
    """Times of `SMALL` and `LARGE`: medians over `CREWS`, as all calls of one may be half as long again as another's.
    The speeds are those of the last one."""
    found, speeds = [], None
    for _ in range(CREWS[options.scale]):
        with python_ranks(layout, RANKS) as crew:
            _joined(crew)
            found.append([_measured_s(crew, size, options) for size in (SMALL, LARGE)])
            speeds = msgspec.convert(crew.tell("speeds")[0], Speeds)
    if speeds is None:
        raise InvariantViolation(f"no crew for the scale {options.scale}")
    return [statistics.median(times) for times in zip(*found, strict=True)], speeds


class Errors(NamedTuple):
    ratios: list[float]
    """Of each prediction over what was measured."""

    @property
    def median(self) -> float:
        """Of 1."""
        return statistics.median(abs(ratio - 1) for ratio in self.ratios)

    @property
    def worst(self) -> float:
        """By how much of the smaller the larger of both is longer: 1 where one is twice the other."""
        return max(max(ratio, 1 / ratio) for ratio in self.ratios) - 1


def _predicted(layout: str, given: Calibration, speeds: Speeds, options: Options) -> tuple[Errors, Errors, str]:
    """Of the simulation and of the cost model, and the times."""
    plan = default_plan(node_list(layout))
    simulated, modelled, shown = Errors([]), Errors([]), []
    with python_ranks(layout, RANKS) as crew:
        _joined(crew)
        for size in SIZES[options.scale]:
            measured = _measured_s(crew, size, options)
            ours, model = simulated_s(plan, size, given), _modelled_s(plan, size, speeds)
            simulated.ratios.append(ours / measured)
            modelled.ratios.append(model / measured)
            shown.append(f"{size // MIB} MiB {measured * 1e3:.1f} ms, {ours * 1e3:.1f}, {model * 1e3:.1f}")
    return simulated, modelled, "measured, simulated, cost model: " + "; ".join(shown)


def _results(case: str, ours: Errors, model: Errors, note: str, *, judged: bool) -> list[Result]:
    median = f"ours <= {MOST_MEDIAN:.0%}" if judged else ""
    worst = f"ours <= {1 + MOST_WORST:g}x" if judged else ""
    return [
        _result(case, "median_error_share", ours.median, model.median, note, median, met=ours.median <= MOST_MEDIAN),
        _result(case, "worst_error_share", ours.worst, model.worst, note, worst, met=ours.worst <= MOST_WORST),
    ]


def _modelled_s(plan: Plan, nbytes: int, speeds: Speeds) -> float:
    route = plan.route(KIND, nbytes)
    layout = msgspec.structs.replace(layout_of(plan.node_of_rank), window=plan.window)
    return predict_ns(speeds, layout, KIND, route.algorithm, nbytes, route.chunk_bytes) / 1e9


def _joined(crew: Crew) -> None:
    crew.tell("join", "ours")


def _measured_s(crew: Crew, nbytes: int, options: Options) -> float:
    """Median over rounds of a call, by the slowest rank."""
    crew.tell("prepare", "fp32", nbytes, "private")
    calls = max(1, min(MOST_CALLS, round(WORDS / nbytes / len(crew.members))))
    crew.tell("time", "private", 1)  # its pages and connections
    rounds: list[float] = [
        max(answer["seconds"] for answer in crew.tell("time", "private", calls)) / calls for _ in range(options.rounds)
    ]
    crew.tell("prepare", "fp32", 0)
    return statistics.median(rounds)


def _result(case: str, metric: str, ours: float, model: float, note: str, target: str, *, met: bool) -> Result:
    def shown(value: float) -> Figure:
        return figure([value])

    return Result(
        suite="netsim",
        case=case,
        metric=metric,
        better="lower",
        ours=shown(ours),
        peers={"cost model of collectives": shown(model)},
        bound=None,
        target=target,
        note=note,
        met=met if target else None,
        verdicts={target: met} if target else {},
    )
