"""The processes that a mount of proc(5) shows."""

from __future__ import annotations

import os
from typing import NamedTuple

__all__ = ["Process", "living"]


class Process(NamedTuple):
    pid: int
    argv: list[str]
    program: str
    """Path of what it executes; empty where it has just ended."""


def living(proc: str = "/proc") -> list[Process]:
    """All that are not zombies, by their numbers there."""
    found = []
    for name in sorted((name for name in os.listdir(proc) if name.isdigit()), key=int):
        try:
            if _has_ended(f"{proc}/{name}"):
                continue
            with open(f"{proc}/{name}/cmdline", "rb") as file:
                argv = [os.fsdecode(word) for word in file.read().split(b"\0")[:-1]]
            found.append(Process(int(name), argv, _program(f"{proc}/{name}")))
        except OSError:
            continue  # it has ended meanwhile
    return found


def _has_ended(place: str) -> bool:
    """A process whose first thread has ended looks like a zombie while its other threads run on."""
    with open(f"{place}/stat", "rb") as file:
        state = file.read().rpartition(b")")[2].split()[0]
    return state in (b"Z", b"X") and len(os.listdir(f"{place}/task")) < 2


def _program(place: str) -> str:
    try:
        return os.readlink(f"{place}/exe")
    except OSError:
        return ""
