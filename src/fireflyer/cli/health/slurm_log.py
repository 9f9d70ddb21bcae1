"""Tells what `ff health slurm` does to whoever starts it, and to the system's log: slurmd keeps nothing of a program
that ends well."""

from __future__ import annotations

import os
import socket
import time
from typing import Final

import click

__all__ = ["IDENT", "SlurmLog"]

IDENT: Final = "ff-health-slurm"
"""Of its lines: `journalctl -t ff-health-slurm`."""
_DAEMON: Final = 3 << 3
_ERROR, _NOTICE = 3, 5
_MAX_CHARS: Final = 900


class SlurmLog:
    """Never waits, and never fails: a log that nobody reads must not keep a node from draining."""

    def __init__(self, path: str = "/dev/log", *, quiet: bool = False) -> None:
        """`quiet`: only to whoever starts it, as a person does."""
        self._path = path
        self._quiet = quiet

    def say(self, words: str) -> None:
        click.echo(words)
        self._send(_NOTICE, words)

    def fail(self, words: str) -> None:
        click.echo(words, err=True)
        self.note_error(words)

    def note_error(self, words: str) -> None:
        """Only to the log."""
        self._send(_ERROR, words)

    def _send(self, severity: int, words: str) -> None:
        if self._quiet:
            return
        line = "".join(char if char.isprintable() else " " for char in words)[:_MAX_CHARS]
        at = time.strftime("%b %e %H:%M:%S")
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as log:
                log.connect(self._path)
                log.send(f"<{_DAEMON | severity}>{at} {IDENT}[{os.getpid()}]: {line}".encode())
        except OSError:
            pass  # what it was started by has the words
