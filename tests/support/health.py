"""A few nodes with the health machine: what their checks say goes in, what was asked for is remembered."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec

from fireflyer.base.health_event import Severity
from fireflyer.base.units import SECOND
from fireflyer.cluster.core.health.findings import Finding
from fireflyer.cluster.core.health.machine import HealthMachine
from fireflyer.cluster.core.health.messages import (
    Effect,
    Event,
    Moved,
    Probed,
    Repaired,
    Requeue,
    ReturnAsked,
    RunFailed,
    Said,
    Tell,
    TimePassed,
)
from fireflyer.cluster.core.health.policy import HealthPolicy
from fireflyer.cluster.core.health.records import Hold, NodeHealth, PartHistory, RepairState, RepairTicket
from fireflyer.cluster.core.health.remedies import Remedy
from fireflyer.validators.core.checks.catalogue import CHECKS

__all__ = ["Floor", "Table", "fault", "only_program", "passes"]

K = TypeVar("K")
R = TypeVar("R")


class Table(Generic[K, R]):
    def __init__(self) -> None:
        self.content: dict[K, R] = {}
        self.read = 0
        """Rows that were gone through."""

    def get(self, key: K, /) -> R | None:
        return self.content.get(key)

    def put(self, key: K, row: R | None, /) -> None:
        if row is None:
            self.content.pop(key, None)
        else:
            self.content[key] = row

    def rows(self) -> Iterator[tuple[K, R]]:
        for key, row in list(self.content.items()):
            self.read += 1
            yield key, row


def fault(check: str, severity: Severity = "high", **fields: Any) -> Finding:
    return msgspec.convert({"check": check, "severity": severity, "seen_ns": 0, **fields}, Finding)


def passes(check: str, part: str = "") -> Finding:
    return Finding(check=check, severity="ok", part=part, seen_ns=0)


def only_program(name: str, script: Path) -> str:
    """A policy of `ff health` with no check but this script: what the host has is none of the test's business."""
    off = "".join(f"[{check.name}]\nenabled = false\n" for check in CHECKS)
    return f'version = 1\n{off}[[programs]]\nname = "{name}"\nargv = ["/bin/sh", "{script}"]\ncritical = "high"\n'


class Floor:
    """`broken`: what each check of each node finds, also when it is probed; a check that is not in it passes.
    `happens`: what a check says once, so that no probe and no test finds it again."""

    def __init__(self, *nodes: str, machine: type[HealthMachine] = HealthMachine, **policy: Any) -> None:
        self.health: Table[str, NodeHealth] = Table()
        self.tickets: Table[int, RepairTicket] = Table()
        self.parts: Table[str, PartHistory] = Table()
        self.nodes = list(nodes)
        self.busy: set[str] = set()
        self.leaves: dict[str, str] = {}
        self.broken: dict[tuple[str, str], Finding] = {}
        self.hung: set[str] = set()
        """Nodes whose checks come to no result."""
        self.policy = HealthPolicy(**policy)
        self.now_ns = 0
        self.effects: list[Effect] = []
        self._machine = machine(self.policy, self, self)

    # --- as `Fleet` ---

    def count(self) -> int:
        return len(self.nodes)

    def leaf_of(self, node: str, /) -> str:
        return self.leaves.get(node, "")

    def group_of(self, node: str, /) -> str:
        return ""

    def is_busy(self, node: str, /) -> bool:
        return node in self.busy

    # --- what happens ---

    def feed(self, event: Event) -> list[Effect]:
        effects = self._machine.handle(self.now_ns, event)
        self.effects += effects
        return effects

    def says(self, node: str, *events: Finding) -> list[Effect]:
        return self.feed(Said(node, events))

    def breaks(self, node: str, event: Finding) -> list[Effect]:
        """For as long as `broken` has it."""
        self.broken[node, event.check] = event
        return self.says(node, event)

    def happens(self, node: str, event: Finding) -> list[Effect]:
        """Beside what its other checks find now."""
        found = (one for (name, check), one in self.broken.items() if (name, check != event.check) == (node, True))
        return self.says(node, msgspec.structs.replace(event, once=True), *found)

    def run_failed(self, *nodes: str, corrupt: tuple[str, ...] = ()) -> list[Effect]:
        return self.feed(RunFailed(nodes, corrupt))

    def pass_time(self, span_ns: int, *, step_ns: int = SECOND) -> None:
        """Agents answer each probe within a step."""
        until_ns = self.now_ns + span_ns
        while self.now_ns < until_ns:
            self.now_ns = min(until_ns, self.now_ns + step_ns)
            self.feed(TimePassed())
            for node in self.nodes:
                self.answer(node)

    def answer(self, node: str) -> None:
        asked = self.record(node).asked
        if asked is None or node in self.hung:
            return
        number, check = asked
        self.feed(Probed(node, number, self.report(node, check)))

    def report(self, node: str, check: str = "") -> tuple[Finding, ...]:
        """Of one check, or of all."""
        checks = [check] if check else dict.fromkeys((*self.policy.required, *(name for _, name in self.broken), "gpu"))
        if not check and (known := self.record(node).fault) is not None:
            checks = dict.fromkeys((*checks, known.check))
        return tuple(self.broken.get((node, name), passes(name)) for name in checks)

    def repair(self, node: str, remedy: Remedy, words: str = "", by: str = "ops") -> list[Effect]:
        return self.feed(Repaired(node, remedy, words, by))

    def ask_return(self, node: str, words: str = "", by: str = "ops") -> list[Effect]:
        return self.feed(ReturnAsked(node, words, by))

    # --- what there is ---

    def record(self, node: str) -> NodeHealth:
        return self.health.get(node) or NodeHealth(name=node)

    def state(self, node: str) -> RepairState:
        return self.record(node).state

    def hold(self, node: str) -> Hold:
        return self.record(node).hold

    def requeued(self) -> list[str]:
        return [effect.node for effect in self.effects if isinstance(effect, Requeue)]

    def told(self, node: str = "") -> list[str]:
        return [effect.words for effect in self.effects if isinstance(effect, Tell) and node in ("", effect.node)]

    def moves(self, node: str) -> list[RepairState]:
        return [effect.state for effect in self.effects if isinstance(effect, Moved) and effect.node == node]
