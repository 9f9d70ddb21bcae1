"""What is kept of a node's health, of parts, and of repairs.

                       all probes fail, or at once         no run is left            recorded by an operator,
    HEALTHY ─> SUSPECT ──────────────────────> DRAINED ──────────────> RESET, REBOOT, ──────────> TESTING
      ^  ^     │  ^ └─ held: breaker, leaf, …              │           FIELD_DIAGNOSIS, RMA          │  │ ^
      │  └─────┘  │                                        └──────── the remedy is a test ───────────┤  │ │
      │   a flap  │                              the checks fail: the next remedy                    │  │ │
      │           │                     RESET … <────────────────────────────────────────────────────┘  │ │
      │           └──────────── a fault ────────────┐        all required checks pass, back-off is over │ │
      └── RETURNED <─── its time is over ─── PROBATION <───────────────────────────────────────────────-┘ │
                                                          an operator asks for its return, from any state ┘

HEALTHY, PROBATION and RETURNED take tasks, but none between the failure of a run and the answer of the checks that it
asks for (`NodeHealth.unchecked`). SUSPECT takes no new one, and keeps the run that it has.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from typing import Final, Generic, Protocol, TypeVar

import msgspec

from fireflyer.cluster.core.health.findings import Finding
from fireflyer.cluster.core.health.remedies import Remedy
from fireflyer.cluster.schema.sync import VALIDATION

__all__ = [
    "MAX_ACTIONS",
    "MAX_FAULTS",
    "MAX_FLAPS",
    "MAX_PARTS",
    "MAX_TICKETS",
    "MAX_WARNED",
    "MAX_WARNED_WORDS",
    "MORE_WARNINGS",
    "OUT",
    "REMEDY_STATES",
    "TAKES_TASKS",
    "Action",
    "Confirming",
    "Flap",
    "Fleet",
    "Hold",
    "MemoryRows",
    "NodeHealth",
    "PartHistory",
    "Records",
    "RepairState",
    "RepairTicket",
    "Warned",
    "part_key",
]

MAX_ACTIONS: Final = 64
MAX_FAULTS: Final = 16
"""Of one part that are remembered."""
MAX_FLAPS: Final = 64
MAX_WARNED: Final = 32
MAX_WARNED_WORDS: Final = 200
"""Characters of one warning that stand with the node."""
MAX_TICKETS: Final = 4096
"""That are closed; the oldest are forgotten first."""
MAX_PARTS: Final = 16_384


class RepairState(enum.Enum):
    HEALTHY = "healthy"
    SUSPECT = "suspect"
    DRAINED = "drained"
    RESET = "reset"
    REBOOT = "reboot"
    FIELD_DIAGNOSIS = "field diagnosis"
    RMA = "rma"
    TESTING = "testing"
    PROBATION = "probation"
    RETURNED = "returned"


TAKES_TASKS: Final = (RepairState.HEALTHY, RepairState.PROBATION, RepairState.RETURNED)
REMEDY_STATES: Final[dict[Remedy, RepairState]] = {
    Remedy.TEST: RepairState.TESTING,
    Remedy.RESET: RepairState.RESET,
    Remedy.REBOOT: RepairState.REBOOT,
    Remedy.FIELD_DIAGNOSIS: RepairState.FIELD_DIAGNOSIS,
    Remedy.RMA: RepairState.RMA,
}
OUT: Final = (RepairState.DRAINED, *REMEDY_STATES.values())


class Hold(enum.Enum):
    """Why a suspect is not acted on."""

    NONE = "none"
    BREAKER = "breaker"
    """As many nodes are out as the policy allows."""
    LEAF = "leaf"
    """Its leaf is suspect."""
    USER = "user"
    """The user of its run can have made the evidence: it is probed when the run is over."""
    UNCONFIRMED = "unconfirmed"
    """A probe came to no result."""


class Confirming(msgspec.Struct, frozen=True, kw_only=True):
    """Probes of one fault. `number` 0: the next one is due `policy.probe_spacing_ns` after `at_ns`."""

    number: int
    at_ns: int
    """When the probe was asked for, or the one before was answered."""
    failed: int = 0
    first: int = 0
    """Number of the first probe of a test; 0: it is none, or of a release that did not keep it."""


class Flap(msgspec.Struct, frozen=True):
    check: str
    part: str
    at_ns: int


class Warned(msgspec.Struct, frozen=True):
    """Of what a person was told, until the check passes."""

    check: str
    part: str
    cause: str
    words: str = ""
    """That were told; empty: a release told it that did not keep them."""

    @property
    def subject(self) -> tuple[str, str, str]:
        """What is told once, whatever the words."""
        return self.check, self.part, self.cause

    @property
    def text(self) -> str:
        """One line for people."""
        return self.words or " ".join(part for part in (self.check, self.part, self.cause) if part)


MORE_WARNINGS: Final = Warned("more warnings", "", "")
"""Stands for all that are more than `MAX_WARNED`; no check has this name."""


class NodeHealth(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    state: RepairState = RepairState.HEALTHY
    since_ns: int = 0
    reason: str = ""
    """One line for people: why it is in this state, and what is to be done."""
    fault: Finding | None = None
    hold: Hold = Hold.NONE
    confirming: Confirming | None = None
    unchecked: Confirming | None = None
    """A run on it ended by a failure: it takes no task until all checks have answered this probe, or time is over."""
    doubted: bool = False
    """Replicas of a run differed there: the validation is part of the answer to `unchecked`, or of that to the next
    one, where the node is suspect of something else first."""
    doubted_ns: int = 0
    """When that was last so."""
    numbers: int = 0
    """Numbers of probes that were given out."""
    ticket: int = 0
    taken: bool = False
    """A person has taken the repair over: the breaker counts the node no longer."""
    test_asked: str = ""
    """Why it is tested as soon as it has no run; empty: nobody has asked for that."""
    passed: tuple[str, ...] = ()
    """Checks that passed in this test."""
    failed: int = 0
    """Reports of this test in which a check failed, one after the other."""
    until_ns: int = 0
    """The test lasts until then at least; or the end of the probation."""
    flaps: tuple[Flap, ...] = ()
    warned: tuple[Warned, ...] = ()
    heard: tuple[int, int] = (0, 0)
    """The last report that is part of this: incarnation of the agent, number."""

    @property
    def takes_tasks(self) -> bool:
        return self.state in TAKES_TASKS and self.unchecked is None

    @property
    def asked(self) -> tuple[int, str] | None:
        """The probe that its agent is to carry out: number, and the check; an empty one: all, and where
        `is_validated` the validation, which is no check of the program."""
        if self.unchecked is not None:
            return self.unchecked.number, ""
        if self.confirming is None or not self.confirming.number or self.fault is None:
            return None
        is_all = self.state is RepairState.TESTING or self.fault.check == VALIDATION
        return self.confirming.number, "" if is_all else self.fault.check

    @property
    def is_validated(self) -> bool:
        """The validation is part of what its agent is asked for: minutes of load, so not beside a run."""
        if self.unchecked is not None:
            return self.doubted
        of_fault = self.fault is not None and self.fault.check == VALIDATION
        return self.state is RepairState.TESTING or (self.confirming is not None and of_fault)


class Action(msgspec.Struct, frozen=True, kw_only=True):
    at_ns: int
    by: str
    """A user, or `health` for what the platform did itself."""
    what: str
    words: str = ""


class RepairTicket(msgspec.Struct, frozen=True, kw_only=True):
    id: int
    node: str
    fault: Finding
    opened_ns: int
    opened_by: str
    actions: tuple[Action, ...] = ()
    closed_ns: int | None = None
    closed_by: str = ""


class PartHistory(msgspec.Struct, frozen=True, kw_only=True):
    """Faults of one part. It goes with the part's serial number; a part without one is known by its place."""

    key: str
    part: str
    node: str
    """Where it failed last."""
    faults_ns: tuple[int, ...] = ()


def part_key(node: str, event: Finding) -> str:
    return event.serial or f"{node}/{event.part or event.check}"


K = TypeVar("K")
R = TypeVar("R")


class _Rows(Protocol[K, R]):
    def get(self, key: K, /) -> R | None: ...

    def put(self, key: K, row: R | None, /) -> None: ...

    def rows(self) -> Iterator[tuple[K, R]]: ...


class MemoryRows(Generic[K, R]):
    """Rows of `Records` in a dict."""

    def __init__(self, rows: dict[K, R] | None = None) -> None:
        self._rows: dict[K, R] = {} if rows is None else rows

    def get(self, key: K, /) -> R | None:
        return self._rows.get(key)

    def put(self, key: K, row: R | None, /) -> None:
        if row is None:
            self._rows.pop(key, None)
        else:
            self._rows[key] = row

    def rows(self) -> Iterator[tuple[K, R]]:
        return iter(list(self._rows.items()))


class Records(Protocol):
    """Where the machine keeps all that it knows; `None` removes."""

    @property
    def health(self) -> _Rows[str, NodeHealth]: ...

    @property
    def tickets(self) -> _Rows[int, RepairTicket]: ...

    @property
    def parts(self) -> _Rows[str, PartHistory]: ...


class Fleet(Protocol):
    """What is known of the nodes otherwise."""

    def count(self) -> int: ...

    def leaf_of(self, node: str, /) -> str:
        """Empty: not known."""

    def group_of(self, node: str, /) -> str:
        """Empty: not known."""

    def is_busy(self, node: str, /) -> bool:
        """It has a run."""
