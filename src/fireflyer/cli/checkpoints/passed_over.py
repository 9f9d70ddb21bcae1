"""The warning of a command that uses an older checkpoint than the newest."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from fireflyer.cli.fs.files.common import clean

if TYPE_CHECKING:
    from fireflyer.base.events import SkippedCheckpoint

__all__ = ["say_passed_over"]


def say_passed_over(passed_over: Sequence[SkippedCheckpoint], used: str) -> None:
    """One line on stderr for each checkpoint that is newer than `used` and cannot be read."""
    for one in passed_over:
        line = f"warning: {one.name} is damaged: {one.reason}; {used} is used instead"
        click.echo(clean(" ".join(line.split())), err=True)
