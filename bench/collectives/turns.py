"""Everybody takes turns: in each round each contender runs once, so that all see the same machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from bench.collectives.crew import Crew, CrewDied
from bench.report import Figure, figure

__all__ = ["Contender", "Taken", "prepare_all", "take_turns"]


class Contender(NamedTuple):
    """Who runs what: `what` is the crew's word for it."""

    name: str
    crew: Crew
    what: str
    verified: bool = True
    """Whether it computes a sum that can be checked; the bounds do not."""
    repeats: int = 1
    """How many times as many operations in a row as the others; short ones need more for a sample to mean something."""


@dataclass
class Taken:
    """Of one contender: seconds for one operation of the slowest rank, by round."""

    seconds: list[float] = field(default_factory=list)
    p99: list[float] = field(default_factory=list)
    """Of single operations, of the worst rank."""
    failure: str = ""

    @property
    def figure(self) -> Figure | str:
        return self.failure or figure(self.seconds)


def prepare_all(contenders: Sequence[Contender], dtype: str, size_bytes: int) -> None:
    """Gives every crew an array of that size; 0 takes it away."""
    for crew in {id(contender.crew): contender.crew for contender in contenders}.values():
        crew.tell("prepare", dtype, size_bytes)


def take_turns(
    contenders: Sequence[Contender], *, rounds: int, warm_ups: int, loops: int, must_live: str = "ours"
) -> dict[str, Taken]:
    """Each contender `warm_ups + rounds` times, `loops` operations in a row; results are verified after the last.

    A peer that dies is reported as such; ours (names that begin with `must_live`) end the benchmark.
    """
    taken = {contender.name: Taken() for contender in contenders}
    for number in range(warm_ups + rounds):
        last = number == warm_ups + rounds - 1
        for contender in contenders:
            mine = taken[contender.name]
            if mine.failure:
                continue
            try:
                _one_turn(contender, mine, loops, counts=number >= warm_ups, check=last)
            except CrewDied as error:
                if contender.name.startswith(must_live):
                    raise SystemExit(str(error)) from error
                mine.failure = str(error)
    return taken


def _one_turn(contender: Contender, mine: Taken, loops: int, *, counts: bool, check: bool) -> None:
    loops *= contender.repeats
    answers = contender.crew.tell("time", contender.what, loops)
    if counts:
        mine.seconds.append(max(answer["seconds"] for answer in answers) / loops)
        mine.p99.append(max(answer["p99"] for answer in answers))
    if check and contender.verified:
        wrong = [
            rank for rank, answer in enumerate(contender.crew.tell("check", contender.what)) if not answer["right"]
        ]
        if wrong:
            raise SystemExit(f"{contender.crew.name}: {contender.name} gave a wrong result on ranks {wrong}")
