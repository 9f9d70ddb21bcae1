"""Training steps: how much of a step is spent waiting for gradients to be summed.

Exposed communication is (step - step under `no_sync`) / step, of the two steps of the same round; a step is a forward
and a backward pass and the optimizer. The hidden share is that part of the time with a sum under way during which
gradients were still being computed. Where ranks outnumber processors, or equal them, summing takes processor time from
computing, and what it takes is part of the exposed share although nobody waited.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from bench.collectives.contenders import python_ranks
from bench.collectives.crew import Crew, CrewDied
from bench.collectives.targets import Target, all_met, judged
from bench.collectives.turns import Contender, Taken, take_turns
from bench.report import Figure, Options, Result, figure

__all__ = ["run"]

_LAYOUTS: Final = {"tiny": ("1x2",), "brief": (), "full": ("1x2", "1x4")}
_MODELS: Final = {"tiny": ("tiny",), "brief": (), "full": ("gpt", "vgg")}
_WAYS: Final = ("sync", "no_sync")
_WARM_UPS: Final = 2
_EXPOSED_AT_TWO_RANKS: Final = 0.1


def run(options: Options) -> Iterator[Result]:
    for layout in _LAYOUTS[options.scale]:
        models = [model for model in _MODELS[options.scale] if options.selects(f"ddp/{layout}/{model}")]
        if not models:
            continue
        try:
            with python_ranks(layout, "bench.collectives.ranks.ddp") as crew:
                missing = str(crew.tell("join", "hfreduce")[0].get("missing", ""))
                for model in models:
                    yield from _measure(f"ddp/{layout}/{model}", crew, model, missing, options)
        except CrewDied as error:
            raise SystemExit(str(error)) from error


def _measure(case: str, crew: Crew, model: str, missing: str, options: Options) -> Iterator[Result]:
    names = ["ours", *([] if missing else ["hfreduce"]), "gloo"]
    contenders = [
        Contender(f"{name}/{way}", crew, f"{name}/{way}", verified=way == "sync") for name in names for way in _WAYS
    ]
    crew.tell("prepare", model, 0)
    taken = take_turns(contenders, rounds=options.rounds, warm_ups=_WARM_UPS, loops=1)
    hidden = {name: _hidden(crew.tell("hidden", name)) for name in names}
    crew.tell("prepare", "fp32", 0)
    figures: dict[str, dict[str, Figure]] = {
        "step_s": {name: figure(taken[f"{name}/sync"].seconds) for name in names},
        "step_under_no_sync_s": {name: figure(taken[f"{name}/no_sync"].seconds) for name in names},
        "exposed_share": {name: _exposed(taken, name) for name in names},
        "hidden_share": {name: Figure(hidden[name], hidden[name], hidden[name], 1) for name in names},
    }
    for metric, found in figures.items():
        yield _result(case, metric, found, missing)


def _exposed(taken: dict[str, Taken], name: str) -> Figure:
    pairs = zip(taken[f"{name}/sync"].seconds, taken[f"{name}/no_sync"].seconds, strict=True)
    return figure([(step - alone) / step for step, alone in pairs])


def _hidden(answers: list[dict[str, Any]]) -> float:
    flight = sum(answer["flight_s"] for answer in answers)
    return sum(answer["hidden_s"] for answer in answers) / flight if flight > 0 else 0.0


def _result(case: str, metric: str, found: dict[str, Figure], missing: str) -> Result:
    ours = found["ours"]
    peers: dict[str, Figure | str] = {"gloo": found["gloo"], "hfreduce": found.get("hfreduce", missing)}
    verdicts: dict[str, bool | None] = {}
    if metric == "exposed_share":
        if "/1x2/" in case:
            verdicts = {f"under {_EXPOSED_AT_TWO_RANKS:.0%}": ours.median < _EXPOSED_AT_TWO_RANKS}
        verdicts |= judged((Target("gloo", 0.5, "at most half of gloo's"),), ours, peers, None)
    return Result(
        suite="collectives",
        case=case,
        metric=metric,
        better="higher" if metric == "hidden_share" else "lower",
        ours=ours,
        peers=peers,
        bound=None,
        target="; ".join(verdicts),
        met=all_met(verdicts),
        verdicts=verdicts,
    )
