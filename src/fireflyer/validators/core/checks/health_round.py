"""One round: from what was captured to the events of all checks, and the counters that the next round needs.

A check gives an event for each of its findings, or else one event, without a part: `ok`, or that it could not run. So
an event `ok` without a part says that all parts are well.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

import msgspec

from fireflyer.base.health_event import HealthEvent, Severity
from fireflyer.validators.core.checks.catalogue import CheckSpec, sources_of
from fireflyer.validators.core.checks.evidence import (
    MAX_COUNTERS,
    CannotJudge,
    CheckCounters,
    Counters,
    Evidence,
    Finding,
    NotNow,
    Outcome,
)
from fireflyer.validators.core.checks.part_serials import merged, part_serials, with_serial
from fireflyer.validators.core.checks.policy import HealthPolicy, settings_of
from fireflyer.validators.core.checks.settings import CheckSettings
from fireflyer.validators.core.checks.sources import Files

__all__ = ["MAX_EVENTS_OF_A_CHECK", "Round", "as_event", "judge_round", "nagios_exit_code"]

MAX_EVENTS_OF_A_CHECK: Final = 64


class Round(NamedTuple):
    events: tuple[HealthEvent, ...]
    counters: Counters


def judge_round(
    checks: Sequence[CheckSpec], evidence: Evidence, policy: HealthPolicy, earlier: Counters | None = None,
    serials: Mapping[str, str] = {},
) -> Round:  # fmt: skip
    """A check that fails by a defect of its own could not run: the others go on. `earlier`: of the rounds before; of a
    check that is not in this round, or does not come to a result, they stay. `serials`: serial numbers of parts that
    somebody else has found, by their names; findings get those of their parts."""
    events: list[HealthEvent] = []
    if earlier is None or earlier.boot != evidence.boot:
        earlier = Counters()
    known = dict(earlier.checks)
    own = merged(earlier.serials, part_serials(evidence))
    for check in checks:
        settings = settings_of(policy, check.name)
        mine = msgspec.structs.replace(evidence, before=known.get(check.name))
        try:
            _refuse_incomplete(check, evidence, policy)
            outcome = check.judge(mine, policy)
        except NotNow as error:
            words = _line(str(error), 400)
            events.append(
                HealthEvent(check=check.name, severity="ok", words=words, seen_ns=evidence.now_ns, could_not_run=True)
            )
        except CannotJudge as error:
            event = _could_not_run(check, settings, policy, evidence.now_ns, str(error))
            events.append(msgspec.structs.replace(event, user_made=_users_can_hold(check, evidence, policy)))
        except Exception as error:
            reason = f"the check failed: {type(error).__name__}: {error}"
            events.append(_could_not_run(check, settings, policy, evidence.now_ns, reason))
        else:
            events += _events(check, settings, policy, evidence.now_ns, outcome)
            values = {key: value for key, value in outcome.counters.items() if len(key) <= 256 and value >= 0}
            known[check.name] = CheckCounters(
                seen_ns=evidence.now_ns, values=dict(itertools.islice(values.items(), MAX_COUNTERS))
            )
    names = merged(serials, own)
    counters = Counters(boot=evidence.boot[:64], checks=dict(list(known.items())[-256:]), serials=own)
    return Round(tuple(with_serial(event, names) for event in events), counters)


def as_event(check: str, finding: Finding, settings: CheckSettings, now_ns: int) -> HealthEvent:
    """With the severity that the policy gives to the cause."""
    severity: Severity = settings.severity.get(finding.cause, settings.severity.get("any", finding.severity))
    return HealthEvent(
        check=check,
        severity=severity,
        part=_line(finding.part, 128),
        serial=_line(finding.serial, 128),
        cause=_line(finding.cause, 64),
        words=_line(finding.words, 400),
        seen_ns=now_ns if finding.seen_ns is None else finding.seen_ns,
        at_once=finding.at_once and severity in ("low", "high"),
        once=finding.once,
        user_made=finding.user_made,
    )


def nagios_exit_code(events: Sequence[HealthEvent], *, asked: bool = False) -> int:
    """0 ok; 1 a warning; 2 a finding of low or high severity; 3 a required check could not run, or, where checks were
    `asked` for by name, one of them."""
    ran = [event.severity for event in events if not event.could_not_run]
    failed = [event for event in events if event.could_not_run]
    if any(event.severity in ("low", "high") for event in events):
        return 2
    if "warn" in ran:
        return 1
    return 3 if any(event.severity != "ok" or asked for event in failed) or not ran else 0


def _refuse_incomplete(check: CheckSpec, evidence: Evidence, policy: HealthPolicy) -> None:
    """What was not looked for is not missing. Raises `CannotJudge`."""
    if not evidence.incomplete:
        return
    for source in sources_of([check], policy):
        for pattern in source.patterns if isinstance(source, Files) else ():
            if (reason := evidence.incomplete.get(pattern)) is not None:
                raise CannotJudge(f"/{pattern} was not read completely: {reason}")


def _users_can_hold(check: CheckSpec, evidence: Evidence, policy: HealthPolicy) -> bool:
    """Whether what the check lacks came too late, or was too much: a user who loads the node can cause that."""
    names = {source.name for source in sources_of([check], policy)}
    hung = (key.partition(":")[0] if key not in names else key for key, one in evidence.outputs.items() if one.hung)
    return not names.isdisjoint({*hung, *evidence.late})


def _events(
    check: CheckSpec, settings: CheckSettings, policy: HealthPolicy, now_ns: int, outcome: Outcome
) -> list[HealthEvent]:
    if outcome.findings:
        return [as_event(check.name, one, settings, now_ns) for one in outcome.findings[:MAX_EVENTS_OF_A_CHECK]]
    if outcome.absent and settings.required and check.device(policy.inventory):
        return [_could_not_run(check, settings, policy, now_ns, outcome.absent)]
    words = outcome.absent or outcome.words
    if outcome.unread:
        words = f"{words}; not read: {outcome.unread}"
    return [HealthEvent(check=check.name, severity="ok", words=_line(words, 400), seen_ns=now_ns)]


def _could_not_run(
    check: CheckSpec, settings: CheckSettings, policy: HealthPolicy, now_ns: int, reason: str
) -> HealthEvent:
    """Only a required check is missed: a warning, which blocks a return to service; of high severity where the
    inventory says that the device exists."""
    severity: Severity = "ok"
    if settings.required:
        severity = "high" if check.device(policy.inventory) else "warn"
    return HealthEvent(
        check=check.name, severity=severity, words=_line(reason, 400), seen_ns=now_ns, could_not_run=True
    )


def _line(text: str, limit: int) -> str:
    return "".join(char for char in " ".join(text.split()) if char.isprintable())[:limit]
