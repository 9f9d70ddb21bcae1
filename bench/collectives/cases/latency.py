"""Allreduces up to 4 MiB: how long one takes, in a loop of many, from Python beside gloo and from C++ beside Open MPI.

A sample is the time of a loop divided by its length; the 99th percentiles are of single operations, of all rounds, on
the rank where they are worst. Open MPI polls while it waits, which is fast while there is a processor for each rank.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Final, NamedTuple

from bench.collectives.contenders import OPEN_MPI, node_list, open_mpi, our_native_ranks, python_ranks
from bench.collectives.crew import Crew
from bench.collectives.targets import Target, all_met, judged
from bench.collectives.turns import Contender, Taken, prepare_all, take_turns
from bench.report import Figure, Options, Result
from fireflyer.base.units import KIB, MIB

__all__ = ["run"]

_LAYOUTS: Final = {"tiny": ("1x2",), "brief": ("1x2",), "full": ("1x2", "1x4", "1x8", "2x1", "4x1", "2x2")}
_SIZES: Final = {
    "tiny": (8,),
    "brief": (8, 4 * KIB, 64 * KIB),
    "full": (8, 256, 4 * KIB, 16 * KIB, 64 * KIB),
}
_MIDDLE: Final = {"tiny": (), "brief": (), "full": (256 * KIB, MIB, 4 * MIB)}
"""From Python beside Open MPI, too."""
_LOOPS: Final = {"tiny": 10, "brief": 100, "full": 100}
_LOOPED_BYTES: Final = 64 * KIB
"""Larger ones are repeated so many times less."""
_NATIVE_REPEATS: Final = 20
"""Of all contenders for the sizes of `_MIDDLE`: a loop of one operation measures how late ranks begin as well."""
_WARM_UPS: Final = 2


class _Side(NamedTuple):
    """Ours, called from a language, and its peers. gloo is called from Python, Open MPI from C."""

    language: str
    peers: tuple[str, ...]
    target: Target


_PYTHON: Final = _Side("python", ("gloo",), Target.times_faster("gloo", 1))
_THAN_OPEN_MPI: Final = Target.times_faster("best openmpi", 1)


def run(options: Options) -> Iterator[Result]:
    for layout in _LAYOUTS[options.scale]:
        sides = {size: _sides(layout, size, options) for size in (*_SIZES[options.scale], *_MIDDLE[options.scale])}
        if any(sides.values()):
            yield from _layout(layout, sides, options)


def _sides(layout: str, size: int, options: Options) -> list[_Side]:
    """Those that are measured with arrays of this size."""
    # nodes talk over TCP on loopback
    names = tuple(OPEN_MPI)[:3] if layout.startswith("1x") else tuple(OPEN_MPI)[3:]
    small = size in _SIZES[options.scale]
    both = [_PYTHON if small else _Side("python", ("gloo", *names), _THAN_OPEN_MPI)]
    both += [_Side("native", names, _THAN_OPEN_MPI)]
    return [side for side in both if options.selects(_name(layout, side.language, size))]


def _layout(layout: str, sides: dict[int, list[_Side]], options: Options) -> Iterator[Result]:
    with ExitStack() as stack:
        python = stack.enter_context(python_ranks(layout))
        python.tell("join", "ours")
        missing = {"gloo": str(python.tell("join", "gloo")[0].get("missing", ""))}
        contenders = [Contender("ours python", python, "ours")]
        contenders += [] if missing["gloo"] else [Contender("gloo", python, "gloo")]
        every = [side for some in sides.values() for side in some]
        if native := {peer for side in every for peer in side.peers if peer in OPEN_MPI}:
            ranks = len(node_list(layout))
            crews = {"ours native": our_native_ranks(layout, stack)}
            crews |= {name: open_mpi(name, ranks, stack) for name in OPEN_MPI if name in native}
            missing |= {name: crew for name, crew in crews.items() if isinstance(crew, str)}
            contenders += [
                Contender(name, crew, "native", repeats=_NATIVE_REPEATS)
                for name, crew in crews.items()
                if isinstance(crew, Crew)
            ]
        for size, some in sides.items():
            wanted = {f"ours {side.language}" for side in some} | {peer for side in some for peer in side.peers}
            repeats = _NATIVE_REPEATS if size in _MIDDLE[options.scale] else 1
            takes_part = [one._replace(repeats=max(one.repeats, repeats)) for one in contenders if one.name in wanted]
            prepare_all(takes_part, "fp32", size)
            loops = max(1, _LOOPS[options.scale] * _LOOPED_BYTES // max(size, _LOOPED_BYTES))
            taken = take_turns(takes_part, rounds=options.rounds, warm_ups=_WARM_UPS, loops=loops)
            for side in some:
                yield _result(_name(layout, side.language, size), side, taken, missing)


def _result(name: str, side: _Side, taken: dict[str, Taken], missing: dict[str, str]) -> Result:
    key = f"ours {side.language}"
    if missing.get(key):
        raise SystemExit(f"{key} cannot be measured: {missing[key]}")
    ours = taken[key].figure
    assert isinstance(ours, Figure)
    peers: dict[str, Figure | str] = {peer: missing.get(peer) or taken[peer].figure for peer in side.peers}
    verdicts = judged((side.target,), ours, peers, None)
    timed = {peer: taken[peer] for peer in side.peers if isinstance(peers[peer], Figure)}
    return Result(
        suite="collectives",
        case=name,
        metric="time_s",
        better="lower",
        ours=ours,
        peers=peers,
        bound=None,
        target="; ".join(verdicts),
        met=all_met(verdicts),
        verdicts=verdicts,
        more={f"{who}_p99_s": statistics.median(its.p99) for who, its in ({"ours": taken[key]} | timed).items()},
    )


def _name(layout: str, language: str, size: int) -> str:
    amount = f"{size // MIB}MiB" if size >= MIB else f"{size // KIB}KiB" if size >= KIB else f"{size}B"
    return f"latency/{layout}/{language}/{amount}"
