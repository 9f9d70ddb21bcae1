"""Numbers on the command line."""

from __future__ import annotations

import click

__all__ = ["WholeNumber"]


class WholeNumber(click.IntRange):
    """`click.IntRange` whose error for "two" says that it is no integer, not that it is no "integer range"."""

    name = "integer"
