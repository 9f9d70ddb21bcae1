"""How long a step of FSDP waits for communication: (step - the same step of the whole model on each rank) / step.

A step is a forward and a backward pass, without an optimizer, which would update a part of the model here and all of it
there. Both steps are of one round, and all ranks compute in both, so that they share the processors alike.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from bench.collectives.contenders import python_ranks
from bench.collectives.crew import CrewDied
from bench.collectives.targets import Target, all_met, judged
from bench.collectives.turns import Contender, Taken, take_turns
from bench.report import Figure, Options, Result, figure

__all__ = ["run"]

_LAYOUTS: Final = {"tiny": ("1x2",), "brief": (), "full": ("1x2", "1x4")}
_SIZES: Final = {"tiny": (2, 64, 16), "full": (24, 2048, 512)}
"""Layers, width, tokens of a rank: 24 matrices of 2048 x 2048 are 100.7 million parameters."""
_WARM_UPS: Final = 1
_WAYS: Final = ("ours", "gloo", "local")


def run(options: Options) -> Iterator[Result]:
    for layout in _LAYOUTS[options.scale]:
        case = f"fsdp/{layout}"
        if not options.selects(case):
            continue
        try:
            with python_ranks(layout, "bench.training.ranks.sharding") as crew:
                crew.tell("prepare", *_SIZES[options.scale])
                contenders = [Contender(way, crew, way, verified=way != "local") for way in _WAYS]
                taken = take_turns(contenders, rounds=options.rounds, warm_ups=_WARM_UPS, loops=1, must_live="")
        except CrewDied as error:
            raise SystemExit(str(error)) from error
        steps = {way: figure(taken[way].seconds) for way in _WAYS}
        yield _result(case, "step_s", steps, ())
        exposed = {way: _exposed(taken[way], taken["local"]) for way in ("ours", "gloo")}
        yield _result(case, "exposed_share", exposed, (Target("gloo", 0.5, "at most half of gloo's"),))


def _exposed(way: Taken, local: Taken) -> Figure:
    return figure([(step - alone) / step for step, alone in zip(way.seconds, local.seconds, strict=True)])


def _result(case: str, metric: str, found: dict[str, Figure], targets: tuple[Target, ...]) -> Result:
    peers: dict[str, Figure | str] = {name: one for name, one in found.items() if name != "ours"}
    verdicts = judged(targets, found["ours"], peers, None)
    return Result(
        suite="training",
        case=case,
        metric=metric,
        better="lower",
        ours=found["ours"],
        peers=peers,
        bound=None,
        target="; ".join(verdicts),
        met=all_met(verdicts),
        verdicts=verdicts,
    )
