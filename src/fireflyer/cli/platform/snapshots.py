"""A directory that travels with a task, sent from the command line."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import click

from fireflyer.base.units import counted, format_bytes
from fireflyer.cli.platform.connect import plain

if TYPE_CHECKING:
    from fireflyer.cluster.client import Client
    from fireflyer.cluster.sending import SnapshotOf

__all__ = ["send_snapshot", "sent_snapshot"]


def sent_snapshot(client: Client, directory: str | None) -> str:
    """The snapshot of the directory, which the manager has now."""
    from fireflyer.cluster.sending import default_cache_directory, snapshot_of

    found = snapshot_of(os.path.abspath(directory or os.getcwd()), cache_directory=default_cache_directory())
    click.echo(send_snapshot(client, found), err=True)
    return found.snapshot


def send_snapshot(client: Client, found: SnapshotOf) -> str:
    """Sends what the manager lacks; what a person is told of it."""
    from fireflyer.cluster.sending import send_directory

    sent = send_directory(client, found)
    all_files = f"{counted(sent.files, 'file')}, {format_bytes(sent.size_bytes)}"
    if not sent.sent_files:
        return f"{plain(found.directory)}: {all_files}; all of it was there already"
    return f"{plain(found.directory)}: {all_files}; sent {sent.sent_files}, {format_bytes(sent.sent_bytes)}"
