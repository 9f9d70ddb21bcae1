"""Processor time that the executor of a pipeline takes for each action, outside stages and waits, beside PyTorch's
runtime on the same schedule, 1F1B.

Time is that of the thread that runs the step, so that waits and other programs do not count. What a stage takes is, of
ours, a pass with its bookkeeping, and of PyTorch's the calls `forward_one_chunk` and `backward_one_chunk`.

And the part of a step on four ranks whose passes sleep that the simulator computes from what these sleeps ask for, for
each schedule.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import msgspec

from bench.collectives.contenders import python_ranks
from bench.collectives.crew import CrewDied
from bench.report import Figure, Options, Result, figure
from bench.training.sleeping import SLEEP_S, sleeping_costs
from fireflyer.codesign.schedule import build_schedule, compile_schedule, simulate
from fireflyer.training.pipeline import StepRecord, compare

__all__ = ["run"]

_LAYOUTS: Final = {"tiny": ("1x2",), "brief": ("1x2",), "full": ("1x2", "1x4")}
_MICRO_BATCHES: Final = 8
_LOOPS: Final = {"tiny": 1, "brief": 10, "full": 20}
_LIMIT_S: Final = 200e-6
_WAYS: Final = ("ours", "torch")
_SCHEDULES: Final = ("gpipe", "1f1b", "interleaved", "zb-h1", "zbv", "dualpipe", "dualpipev")
_SLEEPING: Final = {"tiny": ("1f1b",), "brief": _SCHEDULES, "full": _SCHEDULES}
_BOUND: Final = 1.1
"""Of the time of a step, over that of the simulator."""


def run(options: Options) -> Iterator[Result]:
    yield from _overheads(options)
    yield from _steps(options)


def _steps(options: Options) -> Iterator[Result]:
    chosen = [name for name in _SLEEPING[options.scale] if options.selects(_step_case(name))]
    if not chosen:
        return
    try:
        with python_ranks("1x4", "bench.training.ranks.pipelining") as crew:
            for name in chosen:
                schedule = build_schedule(name, 4, _MICRO_BATCHES)
                ideal_s = simulate(compile_schedule(schedule), sleeping_costs(schedule.placement.stages)).total_s
                shares = []
                for _ in range(options.rounds):
                    answers = crew.tell("sleep", name, _MICRO_BATCHES)
                    records = [msgspec.convert(answer["record"], StepRecord) for answer in answers]
                    shares.append(ideal_s / compare(schedule, records).measured_s)
                yield _step_result(_step_case(name), figure(shares))
    except CrewDied as error:
        raise SystemExit(str(error)) from error


def _step_case(name: str) -> str:
    return f"pipeline/1x4/{name}"


def _step_result(case: str, shares: Figure) -> Result:
    return Result(
        suite="training",
        case=case,
        metric="simulated_share",
        better="higher",
        ours=shares,
        peers={},
        bound=None,
        target="within 10 % of the simulator",
        note=f"{_MICRO_BATCHES} micro-batches; passes sleep {SLEEP_S * 1e3:g} ms each for F, I and W",
        met=shares.median > 1 / _BOUND,
        verdicts={"within 10 % of the simulator": shares.median > 1 / _BOUND},
    )


def _overheads(options: Options) -> Iterator[Result]:
    for layout in _LAYOUTS[options.scale]:
        case = f"pipeline/{layout}/1f1b"
        if not options.selects(case):
            continue
        taken: dict[str, list[float]] = {way: [] for way in _WAYS}
        try:
            with python_ranks(layout, "bench.training.ranks.pipelining") as crew:
                crew.tell("prepare", _MICRO_BATCHES)
                for number in range(options.rounds + 1):
                    for way in _WAYS:
                        answers = crew.tell("time", way, _LOOPS[options.scale])
                        if number:  # the first is a warm-up
                            taken[way].append(max(answer["overhead_s"] for answer in answers))
        except CrewDied as error:
            raise SystemExit(str(error)) from error
        yield _result(case, figure(taken["ours"]), figure(taken["torch"]))


def _result(case: str, ours: Figure, torch: Figure) -> Result:
    verdicts: dict[str, bool | None] = {"under 200 us": ours.median < _LIMIT_S}
    return Result(
        suite="training",
        case=case,
        metric="overhead_per_action_s",
        better="lower",
        ours=ours,
        peers={"torch": torch},
        bound=None,
        target="; ".join(verdicts),
        note=f"{_MICRO_BATCHES} micro-batches; the rank that takes most",
        met=verdicts["under 200 us"],
        verdicts=verdicts,
    )
