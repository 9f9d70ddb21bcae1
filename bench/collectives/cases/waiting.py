"""What waiting for a late rank costs: processor time while it lasts, and time until the waiting rank goes on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Final

from bench.collectives.contenders import node_list, open_mpi, our_native_ranks, python_ranks
from bench.collectives.crew import Crew, CrewDied
from bench.collectives.targets import Target, all_met, judged
from bench.collectives.turns import Contender, prepare_all
from bench.report import Figure, Options, Result, figure
from fireflyer.base.units import KIB

__all__ = ["run"]

_LAYOUTS: Final = {"tiny": ("1x2",), "brief": (), "full": ("1x2", "1x4", "2x1")}
_LATE_S: Final = {"tiny": 0.1, "brief": 2.0, "full": 2.0}
_MOST_ROUNDS: Final = 3
_ARRAY_BYTES: Final = 64 * KIB
_WAKE_UPS: Final = {"tiny": 10, "brief": 100, "full": 300}
_WAKE_UP_CASE: Final = "waiting/1x2/wake-up of an idle rank"


def run(options: Options) -> Iterator[Result]:
    if options.selects(_WAKE_UP_CASE):
        yield _wake_up(options.rounds, _WAKE_UPS[options.scale])
    late_s = _LATE_S[options.scale]
    for layout in _LAYOUTS[options.scale]:
        if options.selects(_name(layout, late_s)):
            yield _layout(layout, late_s, min(options.rounds, _MOST_ROUNDS))


def _wake_up(rounds: int, loops: int) -> Result:
    """From the last rank's call until the other, which sleeps by then, has returned from a barrier."""
    with ExitStack() as stack:
        crew = our_native_ranks("1x2", stack)
        if isinstance(crew, str):
            raise SystemExit(f"ours from C++ cannot be measured: {crew}")
        samples: dict[str, list[dict[str, float]]] = {"ours": [], "futex": []}
        for number in range(rounds + 1):  # the first does not count
            for what, found in samples.items():
                answer = crew.tell("wake", what, loops)[1]
                if number > 0:
                    found.append(answer)
    ours, futex = (figure([answer["p50"] for answer in found]) for found in samples.values())
    verdicts = judged((Target("futex", 1.5, "at most 1.5 x a bare futex"),), ours, {"futex": futex}, None)
    p99 = {f"{what}_p99_s": figure([answer["p99"] for answer in found]).median for what, found in samples.items()}
    return Result(
        suite="collectives",
        case=_WAKE_UP_CASE,
        metric="time_s",
        better="lower",
        ours=ours,
        peers={"futex": futex},
        bound=None,
        target="; ".join(verdicts),
        met=all_met(verdicts),
        verdicts=verdicts,
        more=p99,
    )


def _layout(layout: str, late_s: float, rounds: int) -> Result:
    with ExitStack() as stack:
        python = stack.enter_context(python_ranks(layout))
        python.tell("join", "ours")
        peers: dict[str, Figure | str] = {"gloo": str(python.tell("join", "gloo")[0].get("missing", ""))}
        contenders = [Contender("ours", python, "ours")]
        contenders += [] if peers["gloo"] else [Contender("gloo", python, "gloo")]
        setting = "openmpi" if layout.startswith("1x") else "openmpi tcp"
        mpi = open_mpi(setting, len(node_list(layout)), stack)
        if isinstance(mpi, Crew):
            contenders.append(Contender(setting, mpi, "openmpi"))
        else:
            peers[setting] = mpi
        prepare_all(contenders, "fp32", _ARRAY_BYTES)
        samples: dict[str, list[float]] = {contender.name: [] for contender in contenders}
        try:
            for number in range(rounds + 1):  # the first does not count
                for contender in contenders:
                    waited = contender.crew.tell("wait", contender.what, late_s)[1:]
                    if number > 0:
                        samples[contender.name].append(max(answer["cpu_s"] for answer in waited))
        except CrewDied as error:
            raise SystemExit(str(error)) from error
        peers |= {name: figure(found) for name, found in samples.items() if name != "ours"}
    ours = figure(samples["ours"])
    verdicts: dict[str, bool | None] = {"at most 1 % of the time": ours.median <= late_s / 100}
    return Result(
        suite="collectives",
        case=_name(layout, late_s),
        metric="cpu_of_the_busiest_waiting_rank_s",
        better="lower",
        ours=ours,
        peers=peers,
        bound=None,
        target="; ".join(verdicts),
        met=all_met(verdicts),
        verdicts=verdicts,
    )


def _name(layout: str, late_s: float) -> str:
    return f"waiting/{layout}/one rank {late_s:g} s late/{_ARRAY_BYTES // KIB}KiB"
