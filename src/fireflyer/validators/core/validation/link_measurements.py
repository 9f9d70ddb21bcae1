"""Links of nodes that were measured beside each other: which have to be measured again, and what is wrong. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from fireflyer.base.health_event import HealthEvent
from fireflyer.base.units import format_bytes
from fireflyer.validators.core.validation.link_speeds import Pair, least_speed, slow_links
from fireflyer.validators.core.validation.records import NodeRecord
from fireflyer.validators.core.validation.repetition import LowFigures
from fireflyer.validators.core.validation.reports import LinkReport

__all__ = ["LINK_MODEL", "LinkMeasurements"]

_CHECK = "link"
LINK_MODEL: Final = _CHECK
"""Of records of links, in place of the model of a node."""
_FIGURE = "link_bytes_per_s"


class LinkMeasurements:
    """`first` for each link, then `to_repeat` and `again` a few times, then `events` and `records`; as
    `NodeMeasurements`."""

    def __init__(self) -> None:
        self._speeds: dict[str, dict[Pair, float]] = {}
        """By leaf."""
        self._wrong: dict[Pair, int] = {}
        self._low: dict[str, LowFigures[Pair]] = {}

    def first(self, pair: Pair, leaf: str, report: LinkReport | None) -> None:
        if report is not None:
            self._speeds.setdefault(leaf, {})[pair] = report.bytes_per_s
            self._wrong[pair] = report.wrong_blocks

    def to_repeat(self) -> list[Pair]:
        """Links that are slow; once all have been measured first."""
        self._compare()
        return [pair for low in self._low.values() for pair in low.undecided]

    def again(self, pair: Pair, report: LinkReport | None) -> None:
        """Wrong blocks that come up meanwhile count as well."""
        if report is not None:
            for low in self._low.values():
                low.add({pair: report.bytes_per_s})
            self._wrong[pair] += report.wrong_blocks

    def events(self, now_ns: int) -> dict[str, list[HealthEvent]]:
        """By the names of a node, or of two."""
        self._compare()
        found: dict[str, list[HealthEvent]] = {}
        for leaf, speeds in self._speeds.items():
            unclear, counted = set(self._low[leaf].undecided), speeds | self._low[leaf].counted
            repeated, good = self._low[leaf].measured, set(self._low[leaf].good_after_all)
            for pair, speed in counted.items():
                values = repeated[pair] if pair in good else ()
                found[" ".join(pair)] = [self._of_link(pair, speed, values, pair in unclear, now_ns)]
            told = {pair: speed for pair, speed in counted.items() if pair not in unclear}
            for slow in slow_links(told, first=speeds):
                which = f"{slow.slow} of {slow.measured} links" if len(slow.nodes) == 1 else "the link"
                words = (
                    f"{which}: {format_bytes(int(slow.bytes_per_s))}/s, "
                    f"{1 - slow.bytes_per_s / slow.usual_bytes_per_s:.0%} below the usual of its leaf, also when "
                    "measured again"
                )
                event = HealthEvent(check=_CHECK, severity="low", cause="slow_link", words=words, seen_ns=now_ns)
                found.setdefault(" ".join(slow.nodes), []).append(event)
        return found

    def records(self, now_ns: int) -> list[NodeRecord]:
        """Of each link, with all measurements of one that was slow at first."""
        self._compare()
        found = []
        for leaf, speeds in self._speeds.items():
            repeated = self._low[leaf].measured
            for pair, speed in (speeds | self._low[leaf].counted).items():
                samples = {_FIGURE: repeated[pair]} if pair in repeated else {}
                found.append(
                    NodeRecord(
                        node=" ".join(pair),
                        model=LINK_MODEL,
                        seen_ns=now_ns,
                        figures={_FIGURE: speed},
                        repeated=samples,
                    )
                )
        return found

    def _of_link(
        self, pair: Pair, speed: float, repeated: Sequence[float], is_unclear: bool, now_ns: int
    ) -> HealthEvent:
        """`repeated`: all measurements of a link that was slow at first, and is not after all."""
        if wrong := self._wrong[pair]:
            words = f"{wrong} blocks are not what was sent"
            return HealthEvent(check=_CHECK, severity="high", words=words, seen_ns=now_ns)
        words = f"{format_bytes(int(speed))}/s"
        if is_unclear:
            words += ", slower than the usual of its leaf at least once; it could not be measured again"
            return HealthEvent(check=_CHECK, severity="warn", cause="slow_link", words=words, seen_ns=now_ns)
        if repeated:
            told = ", ".join(f"{format_bytes(int(one))}/s" for one in repeated)
            words += f", slower than the usual of its leaf once of {len(repeated)} measurements: {told}"
            return HealthEvent(check=_CHECK, severity="warn", cause="slow_link", words=words, seen_ns=now_ns)
        return HealthEvent(check=_CHECK, severity="ok", words=words, seen_ns=now_ns)

    def _compare(self) -> None:
        for leaf, speeds in self._speeds.items():
            if leaf not in self._low:
                self._low[leaf] = LowFigures(speeds, dict.fromkeys(speeds, least_speed(speeds)))
