"""Whether the kernel killed a rank because memory ran out.

The kernel counts such kills for each control group (`oom_kill` of `memory.events` in version 2, of
`memory.oom_control` in version 1) and writes a line into its log. A rank that was killed by a SIGKILL that we did not
send, in a group whose counter has grown since the rank was started, was killed for memory. The counter does not say
which process it was: with several ranks in a group, two that are killed at a time by different hands are both said to
have run out of memory. The kernel log does say it, where it may be read.

Formats: https://docs.kernel.org/admin-guide/cgroup-v2.html, cgroup-v1/memory.html, ABI/testing/dev-kmsg.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from typing import NamedTuple

from fireflyer.base.units import format_bytes

__all__ = ["MemoryEvents", "MemoryGroup", "killed_in_kernel_log", "memory_groups"]

MAX_FILE_BYTES = 64 << 10
MAX_LOG_RECORDS = 50_000
_NO_LIMIT_BYTES = 1 << 60
"""Version 1 says "no limit" as a number near 2**63."""


class MemoryGroup(NamedTuple):
    """One control group: its own counters and limit, without those of the groups around it."""

    kills_path: str
    limit_path: str


def memory_groups(pid: int | str = "self", *, proc: str = "/proc", root: str = "/sys/fs/cgroup") -> list[MemoryGroup]:
    """The control group of a process, then those around it. Empty where the kernel does not tell."""
    for line in _read(f"{proc}/{pid}/cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if "memory" in controllers.split(","):
            return [
                MemoryGroup(f"{at}/memory.oom_control", f"{at}/memory.limit_in_bytes")
                for at in _upwards(f"{root}/memory", path)
                if os.path.exists(f"{at}/memory.oom_control")
            ]
    for line in _read(f"{proc}/{pid}/cgroup").splitlines():
        if line.startswith("0::"):
            return [
                MemoryGroup(f"{at}/memory.events", f"{at}/memory.max")
                for at in _upwards(root, line[3:])
                if os.path.exists(f"{at}/memory.events")
            ]
    return []


def _upwards(root: str, path: str) -> Iterator[str]:
    """A path that a namespace hides (`/../..`) ends at the root."""
    parts = [part for part in path.split("/") if part and part != ".."]
    for count in range(len(parts), -1, -1):
        yield "/".join([root, *parts[:count]])


class MemoryEvents:
    """The counters of a process's groups at the time when this was made."""

    def __init__(self, groups: list[MemoryGroup]) -> None:
        self._groups = [(group, _counts(group)) for group in groups]

    def killed_since(self) -> str:
        """What ran out, if the kernel has killed a process of the groups for memory since then: `cgroup limit 512 MiB`,
        or `memory of the machine`. Empty if it has not.

        Version 2 also counts in which group a limit was reached (`oom`); of version 1 the lowest limit is named."""
        now = [(group, before, _counts(group)) for group, before in self._groups]
        if not any(_grew("oom_kill", before, after) for _, before, after in now):
            return ""
        reached = [group for group, before, after in now if "oom" not in after or _grew("oom", before, after)]
        limits = [limit for group in reached if (limit := _limit_bytes(group)) is not None]
        if not limits:
            return "memory of the machine"
        return f"cgroup limit {format_bytes(min(limits)).replace('.0 ', ' ')}"


def killed_in_kernel_log(pid: int, started_ns: int, *, path: str = "/dev/kmsg") -> str:
    """The same of one process, from the kernel's log; `started_ns` is on the monotonic clock, and older lines, of
    another process with this number, are passed over. Empty where the log says nothing or may not be read.

    The log names processes by their number in the machine's own namespace: in a container this finds nothing."""
    needle = re.compile(rf"Killed process {pid}\b")
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return ""
    try:
        for _ in range(MAX_LOG_RECORDS):
            try:
                record = os.read(fd, 8192)
            except BrokenPipeError:
                continue  # the record was overwritten meanwhile; the next read gives the oldest that is left
            if not record:
                return ""
            head, _, text = record.decode(errors="replace").partition(";")
            fields = head.split(",")
            at_us = int(fields[2]) if len(fields) > 2 and fields[2].isdigit() else 0
            if at_us * 1000 >= started_ns and needle.search(text):
                return "cgroup limit" if text.startswith("Memory cgroup") else "memory of the machine"
    except OSError:
        pass  # EAGAIN: that was the last record
    finally:
        os.close(fd)
    return ""


def _counts(group: MemoryGroup) -> dict[str, int]:
    pairs = [line.partition(" ") for line in _read(group.kills_path).splitlines()]
    return {key: int(value) for key, _, value in pairs if value.isdigit()}


def _grew(name: str, before: dict[str, int], after: dict[str, int]) -> bool:
    return after.get(name, 0) > before.get(name, 0)


def _limit_bytes(group: MemoryGroup) -> int | None:
    text = _read(group.limit_path).strip()
    return int(text) if text.isdigit() and int(text) < _NO_LIMIT_BYTES else None


def _read(path: str) -> str:
    try:
        with open(path, "rb") as file:
            return file.read(MAX_FILE_BYTES).decode(errors="replace")
    except OSError:
        return ""
