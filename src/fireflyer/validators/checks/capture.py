"""Captures what the checks of one round need."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterator, Sequence
from typing import Final

from fireflyer.validators.checks.commands import run_commands
from fireflyer.validators.checks.files import FilesRead, matching, read_files, read_links
from fireflyer.validators.checks.kernel_log import JOURNAL, KMSG, KernelLogRead, from_journal, open_kmsg, read_kmsg
from fireflyer.validators.core.checks.evidence import Evidence, Output
from fireflyer.validators.core.checks.mounts import not_mounted
from fireflyer.validators.core.checks.sources import Command, Files, KernelLog, MountPoints, Source

__all__ = ["capture"]

_MAX_DEVICES: Final = 64
_LAST_S: Final = 5.0
_BOOT: Final = "proc/sys/kernel/random/boot_id"


def capture(
    sources: Sequence[Source], now_ns: int, *, root: str = "/", tool_path: str | None = None, ends_s: float = math.inf
) -> Evidence:
    """`root`: of /sys, /proc and /etc; another than `/` is for tests, and has what a
    `journalctl` of `tool_path` prints as its kernel log. `tool_path`: where tools
    are looked for. `ends_s`: of the monotonic clock; tools that would run longer are ended. Never raises: what is
    missing is told in the `Evidence`."""
    read = _read_all(sources, root)
    links = _links(sources, read, root)
    outputs: dict[str, Output] = {}
    commands = [p for source in sources if isinstance(source, Command) for p in _for_devices(source, root, outputs)]
    places = {} if tool_path is None else {"path": tool_path}
    outputs |= run_commands(commands, ends_s=ends_s, **places)
    kernel = KernelLogRead()
    if any(isinstance(source, KernelLog) for source in sources):
        kernel = _kernel_log(now_ns, outputs) if root == "/" else _journal(outputs, tool_path)
    return Evidence(
        now_ns=now_ns,
        boot=read.files.get(_BOOT, "").strip(),
        outputs=outputs,
        files=read.files,
        unreadable=read.unreadable,
        incomplete=read.incomplete,
        late=frozenset(_late(sources, read, kernel)),
        links=links,
        kernel=kernel.faults,
        kernel_oldest=kernel.oldest,
        kernel_sequence=kernel.sequence,
        kernel_lost=kernel.lost,
        kernel_problem=kernel.problem,
    )


def _read_all(sources: Sequence[Source], root: str) -> FilesRead:
    """What users decide the number of comes last: it takes no time from the rest."""
    files = [source for source in sources if isinstance(source, Files)]
    read = read_files([_BOOT, *(pattern for one in files if not one.last for pattern in one.patterns)], root=root)
    if last := [pattern for one in files if one.last for pattern in one.patterns]:
        more = read_files(last, root=root, limit_s=_LAST_S)
        read.files |= more.files
        read.unreadable |= more.unreadable
        read.incomplete |= more.incomplete
        read.late |= more.late
    return read


def _links(sources: Sequence[Source], read: FilesRead, root: str) -> dict[str, str]:
    """Of mount points that are not mounted by their name. Those of which it is not known are noted as unreadable."""
    points: list[str] = []
    for source in sources:
        if isinstance(source, MountPoints):
            points += not_mounted(read.files, source.points, fstab=source.fstab)
    if not points:
        return {}
    links, unknown = read_links(points, root=root)
    read.unreadable |= {point.lstrip("/"): reason for point, reason in unknown.items()}
    read.late |= set(unknown)
    return links


def _late(sources: Sequence[Source], read: FilesRead, kernel: KernelLogRead) -> Iterator[str]:
    """Names of the sources that were not read in time, or not all of them."""
    for source in sources:
        if isinstance(source, Files):
            late = not read.late.isdisjoint(source.patterns)
        elif isinstance(source, MountPoints):
            late = any(path.startswith("/") for path in read.late)  # patterns have no leading `/`
        else:
            late = isinstance(source, KernelLog) and kernel.late
        if late:
            yield source.name


def _for_devices(command: Command, root: str, outputs: dict[str, Output]) -> list[tuple[str, Command]]:
    """Where they cannot be listed, the output says why."""
    if not command.each:
        return [(command.name, command)]
    place = max(at for at, part in enumerate(command.each.split("/")) if "*" in part)
    try:
        devices = [path.split("/")[place] for path in matching(command.each, root)][:_MAX_DEVICES]
    except OSError as error:
        reason = f"/{command.each} cannot be listed: {(error.strerror or '').lower()}"
        outputs[f"{command.name}:*"] = Output(problem=reason)
        return []
    return [
        (
            f"{command.name}:{device}",
            Command(
                name=command.name,
                argv=tuple(word.replace("{}", device) for word in command.argv),
                limit_s=command.limit_s,
                root=command.root,
            ),
        )
        for device in devices
    ]


def _journal(outputs: dict[str, Output], tool_path: str | None) -> KernelLogRead:
    if tool_path is None:
        return KernelLogRead(problem="there is no kernel log")
    outputs |= run_commands([("journal", JOURNAL)], path=tool_path)
    return from_journal(outputs["journal"])


def _kernel_log(now_ns: int, outputs: dict[str, Output]) -> KernelLogRead:
    try:
        fd = open_kmsg(KMSG)
    except OSError:
        outputs |= run_commands([("journal", JOURNAL)])
        return from_journal(outputs["journal"])
    try:
        return read_kmsg(fd, now_ns - time.monotonic_ns())
    finally:
        os.close(fd)
