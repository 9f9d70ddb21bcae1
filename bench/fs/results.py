"""Turns as rows of the tables: pieces of 1 MiB as bytes a second, small reads as seconds each."""

from __future__ import annotations

from typing import Final

from bench.fs.turns import Taken, seconds_each, times
from bench.report import Bound, Figure, Result
from fireflyer.base.units import MIB

__all__ = ["ONE_CONNECTION", "of_bytes", "of_small"]

ONE_CONNECTION: Final = "one C program pair: sendfile to recv over loopback, one connection"


def of_bytes(
    case: str, metric: str, taken: Taken, *, bound: Figure, formula: str = ONE_CONNECTION, least: float | None = None
) -> Result:
    """Operations are of 1 MiB. `bound` in operations a second; `least`: the share of it that is wanted."""
    share = taken.ours.median / bound.median
    target = "" if least is None else f"at least {100 * least:.0f} % of the bound"
    note = f"{100 * share:.0f} % of the bound"
    ours_s = sum(taken.processor_s.get(who, 0.0) for who in ("client", "storage"))  # none where no tick fell on it
    if "sockets" in taken.processor_s and ours_s > 0:
        part = taken.processor_s["sockets"] / ours_s
        note += f"; the bound takes {100 * part:.0f} % of the processor time"
    return Result(
        suite="fs", case=case, metric=metric, better="higher", ours=times(taken.ours, MIB),
        peers={} if len(taken.others) < 2 else {name: times(one, MIB) for name, one in taken.others.items()},
        bound=Bound(bound.median * MIB, formula), target=target, note=note, more=taken.used(),
        met=None if least is None else share >= least, verdicts={} if least is None else {target: share >= least},
    )  # fmt: skip


def of_small(case: str, taken: Taken, formula: str) -> Result:
    """The first of the others is the bound."""
    ours, *others = (seconds_each(one) for one in (taken.ours, *taken.others.values()))
    names = list(taken.others)
    ratios = ", ".join(f"{ours.median / one.median:.1f} x {name}" for name, one in zip(names, others, strict=True))
    return Result(
        suite="fs", case=case, metric="read_s", better="lower", ours=ours,
        peers=dict(zip(names[1:], others[1:], strict=True)), bound=Bound(others[0].median, formula),
        target="", more=taken.used(), note=f"{taken.ours.median:,.0f} per second; takes {ratios}",
    )  # fmt: skip
