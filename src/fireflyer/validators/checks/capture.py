"""Captures what the checks of one round need."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import Final

from fireflyer.validators.checks.commands import run_commands
from fireflyer.validators.checks.files import matching, read_files
from fireflyer.validators.checks.kernel_log import JOURNAL, KMSG, KernelLogRead, from_journal, open_kmsg, read_kmsg
from fireflyer.validators.core.checks.evidence import Evidence, Output
from fireflyer.validators.core.checks.sources import Command, Files, KernelLog, Source

__all__ = ["capture"]

_MAX_DEVICES: Final = 64
_BOOT: Final = "proc/sys/kernel/random/boot_id"


def capture(sources: Sequence[Source], now_ns: int, *, root: str = "/", tool_path: str | None = None) -> Evidence:
    """`root`: of /sys, /proc and /etc; another than `/` is for tests, and has no kernel log. `tool_path`: where tools
    are looked for. Never raises: what is missing is told in the `Evidence`."""
    patterns = [pattern for source in sources if isinstance(source, Files) for pattern in source.patterns]
    read = read_files([_BOOT, *patterns], root=root)
    commands = [pair for source in sources if isinstance(source, Command) for pair in _for_devices(source, root)]
    outputs = run_commands(commands) if tool_path is None else run_commands(commands, path=tool_path)
    kernel = KernelLogRead()
    if any(isinstance(source, KernelLog) for source in sources):
        kernel = _kernel_log(now_ns, outputs) if root == "/" else KernelLogRead(problem="there is no kernel log")
    return Evidence(
        now_ns=now_ns,
        boot=read.files.get(_BOOT, "").strip(),
        outputs=outputs,
        files=read.files,
        unreadable=read.unreadable,
        kernel=kernel.faults,
        kernel_sequence=kernel.sequence,
        kernel_problem=kernel.problem,
    )


def _for_devices(command: Command, root: str) -> list[tuple[str, Command]]:
    if not command.each:
        return [(command.name, command)]
    place = max(at for at, part in enumerate(command.each.split("/")) if "*" in part)
    devices = [path.split("/")[place] for path in matching(command.each, root)][:_MAX_DEVICES]
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
