"""Which process is meant, for ever: a number alone is given to another process when the first one has ended.

A process is its number, the time of its start (in ticks since the boot, field 22 of proc(5) stat) and the boot.
"""

from __future__ import annotations

import os

import msgspec

__all__ = ["ProcessIdentity", "boot_id", "identity_of", "open_process"]


class ProcessIdentity(msgspec.Struct, frozen=True, kw_only=True):
    pid: int
    start_ticks: int
    boot_id: str


def boot_id() -> str:
    """Of the running kernel; empty where /proc does not tell."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return file.read(64).strip()
    except OSError:
        return ""


def identity_of(pid: int) -> ProcessIdentity | None:
    """None where there is no such process."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read(4096).rpartition(b")")[2].split()
    except OSError:
        return None
    return ProcessIdentity(pid=pid, start_ticks=int(fields[19]), boot_id=boot_id()) if len(fields) > 19 else None


def open_process(identity: ProcessIdentity) -> int | None:
    """A pidfd of exactly this process; None where it has ended. The descriptor is opened first and compared then: it
    stays that of one process whatever happens to the number."""
    try:
        fd = os.pidfd_open(identity.pid)
    except OSError:
        return None
    if identity_of(identity.pid) == identity:
        return fd
    os.close(fd)
    return None
