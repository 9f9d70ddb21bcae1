"""Processor time that the executor of a pipeline takes for each action, outside stages and waits, beside PyTorch's
runtime on the same schedule, 1F1B.

Time is that of the thread that runs the step, so that waits and other programs do not count. What a stage takes is, of
ours, a pass with its bookkeeping, and of PyTorch's the calls `forward_one_chunk` and `backward_one_chunk`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from bench.collectives.contenders import python_ranks
from bench.collectives.crew import CrewDied
from bench.report import Figure, Options, Result, figure

__all__ = ["run"]

_LAYOUTS: Final = {"tiny": ("1x2",), "brief": ("1x2",), "full": ("1x2", "1x4")}
_MICRO_BATCHES: Final = 8
_LOOPS: Final = {"tiny": 1, "brief": 10, "full": 20}
_LIMIT_S: Final = 200e-6
_WAYS: Final = ("ours", "torch")


def run(options: Options) -> Iterator[Result]:
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
