"""Whether a node is suspect, and why.

Each finding is *ok*, a *note* (worth a line, but no program fails of it, or another machine may be the cause) or a
*fault* of this node. One fault makes the node suspect. A counter counts by how much it grew since it was read before;
where nothing was read before, errors of memory count in any case: it cannot be known that they are old.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final, Literal

import msgspec

from fireflyer.base.node_counters import LinkCounters
from fireflyer.base.units import MIB, counted, format_bytes
from fireflyer.validators.core.evidence import DirectoryTest, Evidence

__all__ = ["Finding", "Limits", "Report", "judge"]

Part = Literal["memory", "disk", "link"]
_FAULTS: Final = {
    "EIO": "input/output error",
    "EROFS": "it is read-only",
    "ENOSPC": "no space is left",
    "EUCLEAN": "its structures are damaged",
    "EBADMSG": "its data are damaged",
    "ENODEV": "its device is gone",
    "ENXIO": "its device is gone",
    "EREMOTEIO": "input/output error of its device",
}
"""Errors of a local file system that are not those of who writes there, as a quota or missing rights are."""
_MAX_TEXT: Final = 200


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    available_share: float = 0.02
    """Of memory; with less of it available, and no rank left, the node can run nothing."""
    free_bytes: int = 64 * MIB
    free_inodes: int = 1000
    corrected: int = 1000
    """Memory errors that were corrected: so many since the last reading are a storm."""
    link_errors: int = 100
    """Fewer are a note."""
    link_error_share: float = 1e-4
    """Of the packets, and a smaller share is a note."""


class Finding(msgspec.Struct, frozen=True):
    part: Part
    level: Literal["ok", "note", "fault"]
    text: str
    """One line."""


class Report(msgspec.Struct, frozen=True):
    findings: tuple[Finding, ...]

    @property
    def suspect(self) -> bool:
        return any(finding.level == "fault" for finding in self.findings)

    @property
    def verdict(self) -> str:
        """One line: the first fault, and how many there are."""
        faults = [finding for finding in self.findings if finding.level == "fault"]
        if not faults:
            return "sound: nothing is wrong with the node's memory, disk and link, as far as they were checked"
        more = f" (and {len(faults) - 1} more)" if len(faults) > 1 else ""
        return f"suspect: {faults[0].part}: {faults[0].text}{more}"


_LIMITS: Final = Limits()


def judge(evidence: Evidence, limits: Limits = _LIMITS) -> Report:
    found = [*_memory(evidence, limits), *_disk(evidence, limits), *_links(evidence, limits), *_peers(evidence)]
    return Report(tuple(msgspec.structs.replace(finding, text=_line(finding.text)) for finding in found))


def _line(text: str) -> str:
    return "".join(char for char in " ".join(text.split()) if char.isprintable())[:_MAX_TEXT]


# --- memory ---


def _memory(evidence: Evidence, limits: Limits) -> Iterator[Finding]:
    before, now = evidence.before, evidence.now
    test = evidence.memory
    if test is not None and test.wrong_words:
        words = "1 word was" if test.wrong_words == 1 else f"{test.wrong_words} words were"
        tested = f"in {format_bytes(test.tested_bytes)} {words} read back other than written"
        yield Finding("memory", "fault", f"{tested}, the first {test.first}")
    elif test is not None and test.tested_bytes:
        yield Finding("memory", "ok", f"{format_bytes(test.tested_bytes)} were written and read back")
    if evidence.total_bytes and evidence.available_bytes < limits.available_share * evidence.total_bytes:
        left = f"{format_bytes(evidence.available_bytes)} of {format_bytes(evidence.total_bytes)} are available"
        yield Finding("memory", "fault", f"only {left}, though the ranks are gone")
    for name, count in now.uncorrected.items():
        level, when = _grown(evidence, before.uncorrected.get(name, 0), count)
        if level:
            yield Finding("memory", level, f"{name} counts {counted(count, 'uncorrected error')} {when}")
    level, when = _grown(evidence, before.poisoned_kib, now.poisoned_kib)
    if level:
        yield Finding("memory", level, f"the kernel has taken {now.poisoned_kib} KiB of bad memory out of use {when}")
    for name, count in now.corrected.items():
        grown = count - before.corrected.get(name, 0)
        if evidence.since and grown > 0:
            storm = grown >= limits.corrected
            yield Finding(
                "memory", "fault" if storm else "note", f"{name} corrected {counted(grown, 'error')} {evidence.since}"
            )


def _grown(evidence: Evidence, before: int, now: int) -> tuple[Literal["", "note", "fault"], str]:
    if now <= 0:
        return "", ""
    if not evidence.since:
        return "fault", "since the node was started"
    if now > before:
        return "fault", f"({now - before} of them {evidence.since})" if before else evidence.since
    return "note", f"since the node was started, none of them {evidence.since}"


# --- disk ---


def _disk(evidence: Evidence, limits: Limits) -> Iterator[Finding]:
    for directory in evidence.directories:
        yield from _directory(directory, limits)
    before, now = evidence.before, evidence.now
    for point in now.turned_read_only:
        new = bool(evidence.since) and point not in before.turned_read_only
        when = f"was turned read-only {evidence.since}" if new else "is mounted to be written to, and read-only"
        yield Finding("disk", "fault" if new else "note", f"{point} {when}")
    for device, count in now.file_system_errors.items():
        grown = count - before.file_system_errors.get(device, 0)
        if evidence.since and grown > 0:
            yield Finding("disk", "fault", f"the kernel found {counted(grown, 'error')} on {device} {evidence.since}")
        elif count > 0:
            yield Finding("disk", "note", f"{counted(count, 'error')} on {device} wait for a repair (fsck)")


def _directory(test: DirectoryTest, limits: Limits) -> Iterator[Finding]:
    where = f"{test.path} ({test.kind})" if test.kind else test.path
    if not test.local:
        yield Finding("disk", "note", f"{where} is served by other machines and not checked")
        return
    if test.read_only:
        yield Finding("disk", "fault", f"{where} is read-only")
        return
    short = False
    if test.free_bytes is not None and test.free_bytes < limits.free_bytes:
        short = True
        yield Finding("disk", "fault", f"{where} has {format_bytes(test.free_bytes)} left")
    if test.free_inodes is not None and test.free_inodes < limits.free_inodes:
        short = True
        yield Finding("disk", "fault", f"{where} has {test.free_inodes} inodes left")
    if not test.finished:
        yield Finding("disk", "fault", f"{where}: a small file was not written and read back in time")
    elif test.error in _FAULTS:
        yield Finding("disk", "fault", f"{where}: {_FAULTS[test.error]} ({test.error})")
    elif test.error:
        yield Finding("disk", "note", f"{where} was not checked: {test.error}")
    elif not test.same:
        yield Finding("disk", "fault", f"{where}: a file was read back other than written")
    elif not short:
        yield Finding("disk", "ok", f"{where}: a file was written, synced and read back")


# --- link ---


def _links(evidence: Evidence, limits: Limits) -> Iterator[Finding]:
    """Those that were in use when the counters were read before."""
    now: Mapping[str, LinkCounters] = evidence.now.links
    for name, before in evidence.before.links.items() if evidence.since else ():
        if before.carrier:
            found = now.get(name)
            yield from (
                _link(name, before, found, evidence.since, limits)
                if found is not None
                else (Finding("link", "fault", f"{name} has gone {evidence.since}"),)
            )


def _link(name: str, before: LinkCounters, now: LinkCounters, since: str, limits: Limits) -> Iterator[Finding]:
    if not now.carrier:
        yield Finding("link", "fault", f"{name} has lost its carrier {since}")
        return
    clean = True
    if 0 < now.speed_mbps < before.speed_mbps:
        clean = False
        yield Finding("link", "fault", f"{name} has {now.speed_mbps} Mbit/s, and had {before.speed_mbps} before")
    packets = max(now.packets - before.packets, 0)
    errors, drops = now.errors - before.errors, now.drops - before.drops
    if errors > 0:
        clean = False
        many = errors >= limits.link_errors and errors > limits.link_error_share * packets
        text = f"{name} counts {counted(errors, 'error')} in {counted(packets, 'packet')} {since}"
        yield Finding("link", "fault" if many else "note", text)
    if drops > 0:
        clean = False  # full buffers and unknown protocols, not the wire
        yield Finding("link", "note", f"{name} dropped {counted(drops, 'packet')} {since}")
    if clean:
        yield Finding("link", "ok", f"{name} has a carrier and counts no error {since}")


def _peers(evidence: Evidence) -> Iterator[Finding]:
    """One that is not reached may be at fault itself; when there is none that is, this node is."""
    failed = [peer for peer in evidence.peers if peer.error]
    reached = len(evidence.peers) - len(failed)
    for peer in failed[:8]:
        text = f"{peer.address} is not reached: {peer.error}"
        yield Finding("link", "note" if reached else "fault", text)
    if reached:
        yield Finding("link", "ok", f"reached {counted(reached, 'other node')}")
