"""Command lines of running processes, which every user of a machine may read: no secret may be in one."""

from __future__ import annotations

import base64
from collections.abc import Iterable

from tests.support.machines.machines import Machine

__all__ = ["none_in_arguments"]

_MARK_CHARS = 16
"""The beginning of a secret is looked for: nothing else holds so many of its characters."""


def none_in_arguments(machines: Iterable[Machine], secrets: Iterable[bytes], *, program: str) -> None:
    """No process of the machines has one of the secrets in its arguments, as it is, in hexadecimal digits or in base64.
    `program` is an argument of one that runs on each machine: of the job that is looked at."""
    marks = [
        form[:_MARK_CHARS]
        for secret in secrets
        for form in (secret, secret.hex().encode(), base64.b64encode(secret), base64.urlsafe_b64encode(secret))
    ]
    assert marks
    for machine in machines:
        lines = [_line(machine, pid) for pid, _ in machine.processes()]
        assert any(program.encode() in line.split(b"\0") for line in lines), (machine.name, lines)
        told = [line for line in lines if any(mark in line for mark in marks)]
        assert not told, (machine.name, told)


def _line(machine: Machine, pid: int) -> bytes:
    try:
        return machine.path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):  # it has ended
        return b""
