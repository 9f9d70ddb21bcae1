"""Files that commands write: whole, or not there."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from typing import IO, TextIO

from fireflyer.base.errors import PermanentError, UsageError

__all__ = ["new_file", "replaced_file"]


@contextlib.contextmanager
def new_file(path: str) -> Iterator[IO[bytes]]:
    """It has its name when all is in it and on the disk. Only its owner may read it."""
    if os.path.lexists(path):
        raise UsageError(f"{path} exists already; give another FILE")
    try:
        out = tempfile.NamedTemporaryFile(dir=os.path.dirname(path) or ".", prefix=".ff-dump-")  # noqa: SIM115
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}") from error
    with out:
        yield out
        try:
            out.flush()
            os.fsync(out.fileno())
            os.link(out.name, path)
        except OSError as error:
            raise PermanentError(f"cannot write {path}: {error.strerror}") from error


@contextlib.contextmanager
def replaced_file(path: str) -> Iterator[TextIO]:
    """A text file that replaces another of its name only when it is whole."""
    partial = f"{path}.partial"
    try:
        with open(partial, "w", encoding="utf-8", newline="") as file:
            yield file
        os.replace(partial, path)
    except BaseException:
        if os.path.exists(partial):
            os.unlink(partial)
        raise
