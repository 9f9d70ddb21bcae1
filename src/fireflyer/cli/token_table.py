"""Tokens of a user on a terminal, by their public numbers."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import TYPE_CHECKING

import click
import msgspec

from fireflyer.cli.jobs.hosts import columns
from fireflyer.cli.platform.connect import plain

if TYPE_CHECKING:
    from fireflyer.identity import TokenInfo

__all__ = ["print_tokens", "shown_date"]


def print_tokens(tokens: Iterable[TokenInfo], *, as_json: bool) -> None:
    """As a table, or one JSON object for each."""
    rows = [("TOKEN", "LABEL", "FOR", "ISSUED", "EXPIRES")]
    for token in tokens:
        if as_json:
            click.echo(msgspec.json.encode(token))
        until = "never" if token.expires_s is None else shown_date(token.expires_s)
        rows.append((token.id, plain(token.label) or "-", token.scope, shown_date(token.created_s), until))
    if not as_json:
        click.echo(columns(rows))


def shown_date(unix_s: int) -> str:
    """In the time zone of this machine."""
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(unix_s))
