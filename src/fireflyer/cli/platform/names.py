"""Names of tasks, nodes, labels and groups on the command line."""

from __future__ import annotations

import re
from typing import Final

from fireflyer.base.errors import UsageError
from fireflyer.cli.numbers import WholeNumber
from fireflyer.cli.platform.connect import plain

__all__ = ["TASK_NUMBER", "checked_name"]

TASK_NUMBER: Final = WholeNumber(1, (1 << 53) - 1)
"""What the HTTP API takes: a number that JavaScript can hold."""

_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,79}")


def checked_name(name: str, option: str) -> str:
    """Raises `UsageError` where it is no name of a task, a node, a label or a group."""
    if _NAME.fullmatch(name) is None:
        rule = "a name begins with a letter or digit, and has letters, digits, '.', '_' and '-', 80 at most"
        raise UsageError(f"{option}: {plain(name, 40)!r} is no name; {rule}")
    return name
