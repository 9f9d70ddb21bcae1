"""Dispatch and combine of tokens to experts, beside `all_to_all_single` over gloo of one copy for each token and rank.

The peer sends bf16 rows, without routes, without repeating a row for each expert of a rank, and without the sums of the
combine. The combine of ours sends a row for each expert inside a node: `sent` beside `peer sent` says how many bytes.
`processor` is the processor time of all ranks, which depends less on other programs than the time does.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from bench.collectives.contenders import python_ranks
from bench.collectives.crew import Crew, CrewDied
from bench.collectives.targets import Target, all_met, judged
from bench.collectives.turns import Contender, Taken, take_turns
from bench.report import Figure, Options, Result

__all__ = ["run"]

_LAYOUTS: Final = {"tiny": ("1x2",), "brief": ("1x4",), "full": ("1x4", "2x2")}
_CODECS: Final = {"tiny": ("bf16",), "brief": ("bf16", "fp8"), "full": ("bf16", "fp8", "logfmt10")}
_SIZES: Final = {"tiny": (16, 256, 8, 2), "brief": (512, 2048, 64, 6), "full": (512, 2048, 64, 6)}
"""Tokens of a rank, width, experts, experts of a token."""
_STEPS: Final = ("dispatch", "combine", "both")
_WARM_UPS: Final = 2
_TARGET: Final = Target.times_faster("gloo", 2)


def run(options: Options) -> Iterator[Result]:
    """Transport between nodes: TCP on loopback. On one node rows are read from the memory of the other process."""
    for layout in _LAYOUTS[options.scale]:
        transport = "memory" if layout.startswith("1x") else "tcp"
        cases = {codec: f"dispatch/{layout}/{transport}/{codec}" for codec in _CODECS[options.scale]}
        chosen = {codec: case for codec, case in cases.items() if options.selects(case)}
        if not chosen:
            continue
        try:
            with python_ranks(layout, "bench.training.ranks.dispatching") as crew:
                for codec, case in chosen.items():
                    yield from _measured(case, crew, codec, options)
        except CrewDied as error:
            raise SystemExit(str(error)) from error


def _measured(case: str, crew: Crew, codec: str, options: Options) -> Iterator[Result]:
    said = crew.tell("prepare", *_SIZES[options.scale], codec)
    contenders = [
        Contender(f"{who}{step}", crew, f"{who}{step}", verified=not who) for step in _STEPS for who in ("", "gloo-")
    ]
    taken = take_turns(contenders, rounds=options.rounds, warm_ups=_WARM_UPS, loops=1, must_live="")
    costs = {name: sum(answer["processor_s"] for answer in crew.tell("cost", name, options.rounds)) for name in taken}
    for step in _STEPS:
        yield _result(case, step, taken, said, costs)


def _result(
    case: str, step: str, taken: dict[str, Taken], said: list[dict[str, Any]], costs: dict[str, float]
) -> Result:
    ours, peer = taken[step].figure, taken[f"gloo-{step}"].figure
    assert isinstance(ours, Figure)
    peers: dict[str, Figure | str] = {"gloo": peer}
    verdicts = judged((_TARGET,), ours, peers, None) if step == "both" else {}
    experts, ranks, nodes = said[0]["copies"]
    times = 2 if step == "both" else 1
    parts = ("dispatch", "combine") if step == "both" else (step,)
    return Result(
        suite="training",
        case=f"{case}/{step}",
        metric="time_s",
        better="lower",
        ours=ours,
        peers=peers,
        bound=None,
        target="; ".join(verdicts),
        note=f"copies of a token: {experts} experts, {ranks:.2f} ranks, {nodes:.2f} nodes",
        met=all_met(verdicts),
        verdicts=verdicts,
        more={
            "processor_s": costs[step],
            "peer_processor_s": costs[f"gloo-{step}"],
            "sent_bytes": max(sum(one[f"{part}_bytes"] for part in parts) for one in said),
            "peer_sent_bytes": times * max(one["gloo_bytes"] for one in said),
        },
    )
