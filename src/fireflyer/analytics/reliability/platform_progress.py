"""Up to where a platform's history is in the tables of a directory, as a file beside them.

It is written after the tables, so a kill between the two costs only that the same rows are read again. It names the
tables that there were: where one of them is gone, so is what it says, and the next import begins anew.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from typing import Annotated, Final

import msgspec

from fireflyer.analytics.reliability.tables import table_names
from fireflyer.base.decoding import DECODE_ERRORS, decode_json
from fireflyer.base.errors import UsageError
from fireflyer.base.os_errors import translate_os_error

__all__ = ["PROGRESS", "Progress", "Until", "read_progress", "write_progress"]

PROGRESS: Final = "platform.json"
_MAX_BYTES: Final = 64 << 20
_Change = Annotated[int, msgspec.Meta(ge=0, le=1 << 62)]


class Until(msgspec.Struct, frozen=True, kw_only=True):
    """Numbers of the changes from which to go on."""

    runs: _Change = 0
    nodes: _Change = 0


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    clusters: dict[str, Until]
    tables: tuple[str, ...]


def read_progress(directory: str, words: Collection[str]) -> dict[str, Until]:
    """By the word of the cluster; empty where there is none that can be relied on. `words`: all that the platform has
    had. Raises `UsageError` where the tables are of another platform: both number their tasks from 1."""
    path = os.path.join(directory, PROGRESS)
    try:
        with open(path, "rb") as file:
            found = decode_json(file.read(_MAX_BYTES), Progress)
    except (FileNotFoundError, NotADirectoryError, *DECODE_ERRORS):
        return {}
    except OSError as error:
        raise translate_os_error(error, f"read {path}") from error
    left = set(found.tables) & set(table_names(directory))
    if left and found.clusters and not set(words) & set(found.clusters):
        raise UsageError(
            f"{directory} has the history of another platform, whose tasks have the same numbers; give this one a "
            "directory of its own"
        )
    return dict(found.clusters) if left == set(found.tables) else {}


def write_progress(directory: str, clusters: dict[str, Until]) -> None:
    path = os.path.join(directory, PROGRESS)
    content = msgspec.json.encode(Progress(clusters=clusters, tables=tuple(table_names(directory))))
    try:
        os.makedirs(directory, exist_ok=True)
        with open(f"{path}.partial", "wb") as file:
            file.write(content)
        os.replace(f"{path}.partial", path)
    except OSError as error:
        raise translate_os_error(error, f"write {path}") from error
