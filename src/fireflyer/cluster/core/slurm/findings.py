"""What the checks of a node of Slurm found, and what of it counts: pure.

fault                                     counts
──────────────────────────────────────────────────────────────────────────────────────
certain at once, or happened              at once, before any repetition
found by all repetitions of one round     then
comes and goes, as a link that flaps      when rounds of their own have found it as often
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

from fireflyer.base.health_event import HealthEvent

__all__ = [
    "Evidence",
    "Findings",
    "certain",
    "checks_to_repeat",
    "faults_in",
    "findings_in",
    "key_of",
    "still_failing",
    "uncertain",
]

Key = tuple[str, str, str]
"""Check, part and cause: the same fault in several rounds."""


class Evidence(NamedTuple):
    """What the checks of a node say."""

    faults: tuple[HealthEvent, ...]
    """Those that are certain, or were confirmed."""
    passed: bool
    """A full round has come to a result, and nothing in it is worse than a warning."""
    validated: bool = False
    not_run: tuple[str, ...] = ()
    """Checks that came to no result, required or not: a fault that one of them has found is not gone."""
    repair: str = ""
    """What has to be done before the node serves; empty: nothing."""
    remedy: str = ""
    """The name of that."""


class Findings(NamedTuple):
    """Of a full round."""

    faults: tuple[HealthEvent, ...]
    passed: bool
    not_run: tuple[str, ...]


def findings_in(events: Sequence[HealthEvent]) -> Findings:
    """`passed`: a check that is required and could not run has not passed; a round without checks has not, either."""
    missed = any(event.could_not_run and event.severity != "ok" for event in events)
    passed = bool(events) and not missed and all(event.severity in ("ok", "warn") for event in events)
    not_run = tuple(dict.fromkeys(event.check for event in events if event.could_not_run))
    return Findings(faults_in(events), passed, not_run)


def faults_in(events: Sequence[HealthEvent]) -> tuple[HealthEvent, ...]:
    return tuple(event for event in events if event.severity in ("low", "high") and not event.could_not_run)


def certain(faults: Sequence[HealthEvent]) -> tuple[HealthEvent, ...]:
    """No repetition says more of them: a device that is lost, or what has happened."""
    return tuple(event for event in faults if event.at_once or event.once)


def uncertain(faults: Sequence[HealthEvent]) -> tuple[HealthEvent, ...]:
    return tuple(event for event in faults if not (event.at_once or event.once))


def checks_to_repeat(faults: Sequence[HealthEvent], known: Collection[Key] = ()) -> tuple[str, ...]:
    """Names of checks whose faults are neither certain nor `known` to come and go."""
    return tuple(dict.fromkeys(event.check for event in uncertain(faults) if key_of(event) not in known))


def still_failing(
    faults: Sequence[HealthEvent], again: Sequence[HealthEvent], known: Collection[Key] = ()
) -> tuple[HealthEvent, ...]:
    """Those that a repetition of `checks_to_repeat` has found as well; and what is certain and new in it, which no
    later round finds."""
    repeated = faults_in(again)
    found = {key_of(event) for event in repeated} | set(known)
    kept = [event for event in faults if event.at_once or event.once or key_of(event) in found]
    keys = {key_of(event) for event in kept}
    return (*kept, *(event for event in certain(repeated) if event.once or key_of(event) not in keys))


def key_of(event: HealthEvent) -> Key:
    return event.check, event.part, event.cause
