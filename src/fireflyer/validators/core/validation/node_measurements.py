"""Nodes of a cluster that were validated beside each other: which figures have to be measured again, and what is wrong
with which node. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

import msgspec

from fireflyer.base.health_event import HealthEvent
from fireflyer.base.units import counted
from fireflyer.validators.core.checks.evidence import Finding
from fireflyer.validators.core.checks.health_round import as_event
from fireflyer.validators.core.checks.settings import CheckSettings
from fireflyer.validators.core.validation.node_models import (
    UsualModel,
    as_its_peers,
    as_recorded,
    lacking_gpus,
    usual_model,
)
from fireflyer.validators.core.validation.records import (
    NodeRecord,
    Usual,
    compare_digests,
    figures_of_models,
    low_findings,
    peers_of,
    usual_figures,
)
from fireflyer.validators.core.validation.repetition import LowFigures, validators_of
from fireflyer.validators.core.validation.reports import NodeReport

__all__ = ["NodeMeasurements"]

CHECK = "validation"


class NodeMeasurements:
    """`first` for each node, then `to_repeat` and `again` a few times, then `events` and `records`. Nodes are compared
    with what their peers measured first: so a figure that was not low stays so."""

    def __init__(self, known: Sequence[NodeRecord], only: Sequence[str] = ()) -> None:
        """`known`: records of earlier days, also of other nodes. `only`: names of the validators that are run; empty:
        all."""
        self._only = frozenset(only)
        self._known = known
        self._records: dict[str, NodeRecord] = {}
        self._events: dict[str, list[HealthEvent]] = {}
        self._peers: dict[str, list[NodeRecord]] = {}
        self._model: dict[str, UsualModel | None] = {}
        self._usual: dict[str, dict[str, Usual]] = {}
        self._low: dict[str, LowFigures[str]] = {}
        self._missing: dict[str, dict[str, int]] = {}
        """By node: how many figures of a validator its peers have, and it has not."""

    def first(self, node: str, report: NodeReport | None, now_ns: int) -> None:
        """`node`: the platform's name of it. `now_ns`: of this machine, as clocks of nodes may be what is at fault."""
        if report is not None:
            self._records[node] = msgspec.structs.replace(report.record, node=node, seen_ns=now_ns)
            self._events[node] = list(report.events)

    def to_repeat(self) -> dict[str, list[str]]:
        """Validators by node, that measure its low figures; once all have been measured first."""
        self._compare()
        found = {node: validators_of(low.undecided) for node, low in self._low.items()}
        return {node: names for node, names in found.items() if names}

    def again(self, node: str, report: NodeReport | None) -> None:
        """Faults that come up meanwhile count as well."""
        if report is not None:
            self._low[node].add(report.record.figures)
            self._events[node] += [event for event in report.events if event.severity != "ok"]

    def events(self) -> dict[str, list[HealthEvent]]:
        """By node: what the validators have found, and what is wrong beside its peers."""
        self._compare()
        found = {}
        for node, record in self._records.items():
            low = low_findings(record.figures, self._usual[node], self._low[node].measured)
            beside = [
                *lacking_gpus(self._model[node]),
                *low,
                *self._not_measured(node),
                *compare_digests(record, self._peers[node]),
            ]
            events = [as_event(CHECK, one, CheckSettings(), record.seen_ns) for one in beside]
            found[node] = [*self._events[node], *events]
        return found

    def records(self) -> list[NodeRecord]:
        """With the figures that count; without nodes that have a low figure which could not be measured again, or have
        not been measured as their peers: they stay due."""
        self._compare()
        return [
            msgspec.structs.replace(
                as_recorded(record, self._model[node]),
                figures=record.figures | self._low[node].counted,
                repeated=self._low[node].measured,
            )
            for node, record in self._records.items()
            if not self._low[node].undecided and not self._missing[node] and not self._has_lost_gpus(node)
        ]

    def _has_lost_gpus(self, node: str) -> bool:
        usual = self._model[node]
        return usual is not None and usual.is_fault

    def _compare(self) -> None:
        """Each node once, though it is asked for again and again: a thousand nodes take a minute."""
        new = {node: record for node, record in self._records.items() if node not in self._low}
        usual = figures_of_models([*self._known, *self._records.values()]) if new else {}
        for node, record in new.items():
            all_of_them = [*self._known, *self._records.values()]
            self._model[node] = usual_model(record, all_of_them)
            compared = as_its_peers(record, self._model[node])
            self._peers[node] = peers_of(compared, all_of_them)
            self._usual[node] = usual_figures(compared, self._peers[node])
            least = {name: one.least for name, one in self._usual[node].items()}
            self._low[node] = LowFigures(record.figures, least)
            missing = [validators_of([name]) for name in usual[compared.model] - record.figures.keys()]
            self._missing[node] = Counter(
                name for names in missing for name in names if not self._only or name in self._only
            )

    def _not_measured(self, node: str) -> Iterator[Finding]:
        """A GPU that is lost, or was not given to the job, has no figures, and so no low ones."""
        for name, figures in sorted(self._missing[node].items()):
            words = f"{name}: {counted(figures, 'figure')} of its peers could not be measured here; it stays due"
            yield Finding(severity="warn", cause="not_measured", words=words)
