"""File systems: those that must be mounted, and the room that is left on them."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Final, NamedTuple

from fireflyer.base.units import format_bytes
from fireflyer.validators.core.checks.evidence import CannotJudge, Evidence, Finding, Outcome
from fireflyer.validators.core.checks.settings import CheckSettings, Names, Share

__all__ = ["MOUNTS_FILES", "MountSettings", "SpaceSettings", "judge_mounts", "judge_space", "not_mounted"]

_MOUNTINFO: Final = "proc/self/mountinfo"
_FSTAB: Final = "etc/fstab"
MOUNTS_FILES: Final = (_MOUNTINFO, _FSTAB)
_ON_A_DISK: Final = frozenset({"ext2", "ext3", "ext4", "xfs", "btrfs", "f2fs", "zfs"})
_IN_MEMORY: Final = "tmpfs"
_WITHOUT_ROOM: Final = frozenset({"squashfs", "iso9660", "overlay", "devtmpfs", "efivarfs", "ramfs", "autofs"})
_OCTAL: Final = re.compile(r"\\([0-7]{3})")


class MountSettings(CheckSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    fstab: bool = True
    """What /etc/fstab lists, without `noauto` and `nofail`, must be mounted, beside the mounts of the inventory."""
    at_once: bool = False
    """A missing mount counts without being probed: an automount or a server that is away for a second drains then."""


class SpaceSettings(CheckSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    warn_used_share: Share = 0.90
    low_used_share: Share = 0.97
    """Of space, and of inodes."""
    ignored: Names = ()
    """Mount points."""
    tmpfs: bool = False
    """Also of file systems in memory: training fills /dev/shm, and they are empty after the next start."""


class _Mount(NamedTuple):
    point: str
    kind: str
    options: frozenset[str]
    super_options: frozenset[str]


def judge_mounts(evidence: Evidence, settings: MountSettings, expected: tuple[str, ...]) -> Outcome:
    """`expected`: mount points of the inventory. A missing one is of high severity (arXiv:2410.21680, II-C)."""
    mounts = {mount.point: mount for mount in _mounts(evidence.text(_MOUNTINFO))}
    if not mounts:
        raise CannotJudge(f"/{_MOUNTINFO}: {evidence.unreadable.get(_MOUNTINFO, 'it lists no mount')}")
    wanted = _wanted(evidence.files, expected, fstab=settings.fstab)
    unknown = [point for point in wanted if point not in mounts and point.lstrip("/") in evidence.unreadable]
    findings = [
        Finding(
            severity="high",
            part=f"mount:{point}",
            cause="missing",
            words=f"{point} is not mounted",
            at_once=settings.at_once,
        )
        for point in wanted
        if evidence.links.get(point, point) not in mounts and point not in unknown
    ]
    findings += [
        Finding(
            severity="high", part=f"mount:{mount.point}", cause="read_only",
            words=f"{mount.point} ({mount.kind}) was mounted to be written to, and the kernel turned it read-only",
        )
        for mount in mounts.values()
        if mount.kind in _ON_A_DISK and "ro" in mount.super_options and "rw" in mount.options
    ]  # fmt: skip
    unread = "; ".join(f"{point}: {evidence.unreadable[point.lstrip('/')]}" for point in unknown)
    if unread and not findings:
        raise CannotJudge(unread)
    return Outcome(findings=tuple(findings), words=f"{len(mounts)} mounts, {len(wanted)} of them expected")


def not_mounted(files: Mapping[str, str], expected: Iterable[str], *, fstab: bool) -> list[str]:
    """Mount points that must be mounted, and are not by this name: they may be links."""
    mounted = {mount.point for mount in _mounts(files.get(_MOUNTINFO, ""))}
    return [point for point in _wanted(files, expected, fstab=fstab) if point not in mounted]


def _wanted(files: Mapping[str, str], expected: Iterable[str], *, fstab: bool) -> list[str]:
    listed = _fstab(files.get(_FSTAB, "")) if fstab else ()
    return list(dict.fromkeys(_normal(point) for point in (*expected, *listed)))


def judge_space(evidence: Evidence, settings: SpaceSettings) -> Outcome:
    """From `df -B1 --output=source,fstype,size,avail,itotal,iavail,target -l`."""
    lines = evidence.output("df").splitlines()[1:]
    if not lines:
        raise CannotJudge("df lists no file system")
    findings: list[Finding] = []
    seen: set[str] = set()
    for line in lines:
        words = line.split(None, 6)
        if len(words) < 7:
            raise CannotJudge(f"df printed {line[:80]!r}, which has not seven columns")
        source, kind, point = words[0], words[1], words[6]
        if (
            kind in _WITHOUT_ROOM
            or (kind == _IN_MEMORY and not settings.tmpfs)
            or point in settings.ignored
            or (source.startswith("/") and source in seen)
        ):
            continue
        seen.add(source)
        findings += _room(point, kind, words[2:6], settings)
    return Outcome(findings=tuple(findings), words=f"{len(seen)} file systems have room")


def _room(point: str, kind: str, words: list[str], settings: SpaceSettings) -> Iterator[Finding]:
    numbers = [int(word) if word.isdecimal() and len(word) <= 20 else 0 for word in words]
    for what, (total, left) in (("space", numbers[:2]), ("inodes", numbers[2:])):
        used = 1 - left / total if total else 0.0
        limit = settings.low_used_share if used > settings.low_used_share else settings.warn_used_share
        if used > limit:
            remains = format_bytes(left) if what == "space" else f"{left} inodes"
            yield Finding(
                severity="low" if used > settings.low_used_share else "warn",
                part=f"mount:{point}",
                cause=what,
                user_made=True,  # who has filled it is not known
                words=f"{point} ({kind}): {used:.1%} of its {what} is used, {remains} left; {limit:.0%} is allowed",
            )


def _mounts(text: str) -> Iterator[_Mount]:
    """See proc(5), mountinfo."""
    for line in text.splitlines():
        ours, _, theirs = line.partition(" - ")
        first, last = ours.split(" "), theirs.split(" ")
        if len(first) > 5 and len(last) > 2:
            yield _Mount(_path(first[4]), last[0], frozenset(first[5].split(",")), frozenset(last[-1].split(",")))


def _fstab(text: str) -> Iterator[str]:
    for line in text.splitlines():
        words = line.split("#", 1)[0].split()
        if len(words) >= 4 and words[1].startswith("/") and not {"noauto", "nofail"} & set(words[3].split(",")):
            yield _path(words[1])


def _normal(point: str) -> str:
    """Without slashes that say nothing, as the kernel lists it."""
    return f"/{posixpath.normpath(point).lstrip('/')}"


def _path(text: str) -> str:
    return _OCTAL.sub(lambda found: chr(int(found[1], 8)), text)
