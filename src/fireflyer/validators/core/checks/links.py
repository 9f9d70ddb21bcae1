"""Links to other nodes: Ethernet and InfiniBand, from sysfs."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Final

import msgspec

from fireflyer.base.health_event import Severity
from fireflyer.validators.core.checks.evidence import CannotJudge, Evidence, Finding, Outcome
from fireflyer.validators.core.checks.settings import Amount, CheckSettings

__all__ = [
    "ETHERNET_FILES",
    "INFINIBAND_FILES",
    "LinkSettings",
    "judge_ethernet",
    "judge_infiniband",
]

_NET: Final = "sys/class/net"
_NET_ERRORS: Final = ("rx_crc_errors", "rx_frame_errors", "tx_carrier_errors")
_MISSED: Final = "rx_missed_errors"
ETHERNET_FILES: Final = (
    *(f"{_NET}/*/{name}" for name in ("carrier", "operstate", "speed", "carrier_changes", "device/uevent")),
    *(f"{_NET}/*/statistics/{name}" for name in (*_NET_ERRORS, _MISSED)),
)
_IB: Final = "sys/class/infiniband"
_IB_ERRORS: Final = (
    "symbol_error",
    "link_error_recovery",
    "local_link_integrity_errors",
    "excessive_buffer_overrun_errors",
    "port_rcv_errors",
    "port_rcv_remote_physical_errors",
)
INFINIBAND_FILES: Final = (
    *(f"{_IB}/*/ports/*/{name}" for name in ("state", "phys_state", "rate", "link_layer")),
    *(f"{_IB}/*/ports/*/counters/{name}" for name in (*_IB_ERRORS, "link_downed")),
    f"{_IB}/*/node_guid",
)


class LinkSettings(CheckSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    warn_errors_per_hour: Amount = 100.0
    low_errors_per_hour: Amount = 10_000.0
    """Of each counter of errors."""
    warn_flaps_per_hour: Amount = 0.0
    low_flaps_per_hour: Amount = 4.0
    """How often the link went down."""


def judge_ethernet(evidence: Evidence, settings: LinkSettings, expected: Mapping[str, float]) -> Outcome:
    """`expected`: Gbit/s of each interface of the inventory. Others are warned of at most: they may be meant to be
    down, as that of a laptop that roams. So are packets that a busy host has left in the adapter."""
    names = [name for name in evidence.entries(_NET) if f"{_NET}/{name}/device/uevent" in evidence.files]
    findings: list[Finding] = []
    counters: dict[str, int] = {}
    for name in sorted({*names, *expected}):
        base, part = f"{_NET}/{name}", f"ethernet:{name}"
        if name in expected:
            findings += _expected_interface(evidence, name, expected[name], name in evidence.entries(_NET))
        errors = {key: evidence.number(f"{base}/statistics/{key}") for key in _NET_ERRORS}
        changes = evidence.number(f"{base}/carrier_changes")
        downs = None if changes is None else changes // 2  # each loss is followed by a return
        counted = [
            *_errors(evidence, part, errors, settings, counters),
            *_flaps(evidence, part, downs, settings, counters),
        ]
        missed = _errors(evidence, part, {_MISSED: evidence.number(f"{base}/statistics/{_MISSED}")}, settings, counters)
        findings += counted if name in expected else map(_as_warning, counted)
        findings += (_as_warning(one, user_made=True) for one in missed)
    if not names and not expected:
        return Outcome(absent="no network interface of hardware")
    words = f"{len(names)} interfaces, {len(expected)} of them expected"
    return Outcome(findings=tuple(findings), counters=counters, words=words)


def _expected_interface(evidence: Evidence, name: str, gbit_per_s: float, there: bool) -> Iterator[Finding]:
    part = f"ethernet:{name}"
    _require_readable(evidence, f"{_NET}/{name}/carrier")
    speed = evidence.number(f"{_NET}/{name}/speed") or 0
    if not there:
        yield Finding(severity="high", part=part, cause="missing", words=f"no interface {name}", at_once=True)
    elif evidence.text(f"{_NET}/{name}/carrier") != "1":
        yield Finding(severity="high", part=part, cause="down", words=f"{name} has no carrier", at_once=True)
    elif 0 < speed < gbit_per_s * 1000:
        words = f"{name} has {speed / 1000:g} Gbit/s; the inventory says {gbit_per_s:g} Gbit/s"
        yield Finding(severity="low", part=part, cause="rate", words=words)


def judge_infiniband(evidence: Evidence, settings: LinkSettings, expected: Mapping[str, float]) -> Outcome:
    """`expected`: Gbit/s of each adapter of the inventory, by its first port. An adapter of which the inventory says
    nothing may have ports without a cable: its ports count when they are active, or were in the round before."""
    adapters = evidence.entries(_IB)
    if not adapters and not expected:
        return Outcome(absent="no InfiniBand adapter")
    findings = [
        Finding(
            severity="high", part=f"infiniband:{name}", cause="missing", words=f"no adapter {name}", at_once=True
        )
        for name in expected
        if name not in adapters
    ]  # fmt: skip
    counters: dict[str, int] = {}
    active = 0
    for adapter in adapters:
        for number, port in enumerate(evidence.entries(f"{_IB}/{adapter}/ports")):
            wanted = expected.get(adapter, 0.0) if number == 0 else 0.0
            part = f"infiniband:{adapter}/{port}"
            found = _port(evidence, f"{_IB}/{adapter}/ports/{port}", part, wanted)
            up = not any(one.cause == "down" for one in found)
            was_up = evidence.before is not None and evidence.before.values.get(f"{part}:active") == 1
            findings += found if up or wanted or was_up else ()
            active += up
            counters[f"{part}:active"] = int(up or was_up)
            base = f"{_IB}/{adapter}/ports/{port}/counters"
            errors = {key: evidence.number(f"{base}/{key}") for key in _IB_ERRORS}
            findings += _errors(evidence, part, errors, settings, counters)
            findings += _flaps(evidence, part, evidence.number(f"{base}/link_downed"), settings, counters)
    serials = {name: evidence.text(f"{_IB}/{name}/node_guid") for name in adapters}
    marked = tuple(_with_serial(one, serials) for one in findings)
    return Outcome(findings=marked, counters=counters, words=f"{active} active ports of {len(adapters)} adapters")


def _port(evidence: Evidence, base: str, part: str, wanted: float) -> list[Finding]:
    _require_readable(evidence, f"{base}/state")
    state, physical = evidence.text(f"{base}/state"), evidence.text(f"{base}/phys_state")
    if not state.startswith("4:"):
        words = f"the port is {state or 'unknown'}, its link {physical or 'unknown'}; ACTIVE and LinkUp are expected"
        return [Finding(severity="high", part=part, cause="down", words=words, at_once=True)]
    found = re.match(r"([0-9]{1,6}(?:\.[0-9]+)?) Gb/sec", evidence.text(f"{base}/rate"))
    if wanted and (found is None or float(found[1]) < wanted):
        words = f"the port has {evidence.text(f'{base}/rate') or 'no rate'}; the inventory says {wanted:g} Gbit/s"
        return [Finding(severity="high", part=part, cause="rate", words=words)]
    return []


def _require_readable(evidence: Evidence, path: str) -> None:
    """What the kernel does not tell is no link that is down. Raises `CannotJudge`."""
    if path in evidence.unreadable:
        raise CannotJudge(f"/{path} cannot be read: {evidence.unreadable[path]}")


def _errors(
    evidence: Evidence, part: str, errors: Mapping[str, int | None], settings: LinkSettings, counters: dict[str, int]
) -> Iterator[Finding]:
    for name, count in errors.items():
        if count is None:
            continue
        counters[f"{part}:{name}"] = count
        growth = evidence.growth(f"{part}:{name}", count)
        if growth is None or growth.per_hour <= settings.warn_errors_per_hour:
            continue
        low = growth.per_hour > settings.low_errors_per_hour
        limit = settings.low_errors_per_hour if low else settings.warn_errors_per_hour
        words = f"{name} grows by {growth.per_hour:.0f} an hour; {limit:g} are allowed"
        yield Finding(severity="low" if low else "warn", part=part, cause="errors", words=words)


def _flaps(
    evidence: Evidence, part: str, downs: int | None, settings: LinkSettings, counters: dict[str, int]
) -> Iterator[Finding]:
    if downs is None:
        return
    counters[f"{part}:downs"] = downs
    growth = evidence.growth(f"{part}:downs", downs)
    if growth is not None and growth.per_hour > settings.warn_flaps_per_hour:
        # A single flap in a short round is a high rate, and not yet a bad link.
        low = growth.per_hour > settings.low_flaps_per_hour and growth.count > settings.low_flaps_per_hour
        severity: Severity = "low" if low else "warn"
        words = f"the link went down {growth.count} times since the round before"
        yield Finding(severity=severity, part=part, cause="flaps", words=words)


def _as_warning(finding: Finding, *, user_made: bool = False) -> Finding:
    return msgspec.structs.replace(finding, severity="warn", user_made=user_made)


def _with_serial(finding: Finding, serials: Mapping[str, str]) -> Finding:
    adapter = finding.part.removeprefix("infiniband:").split("/")[0]
    return Finding(
        **{name: getattr(finding, name) for name in finding.__struct_fields__} | {"serial": serials.get(adapter, "")}
    )
