"""The file of metrics, one JSON object in a line, which rank 0 appends to."""

from __future__ import annotations

import os
from typing import Final, Self

import msgspec

from fireflyer.base.decoding import DECODE_ERRORS, decode_json, json_decoder
from fireflyer.base.errors import DataCorruption, UsageError
from fireflyer.base.os_errors import translate_os_error
from fireflyer.recipes.trainer.core.figures import MetricsLine, StartLine

__all__ = ["MetricsFile", "read_metrics"]

_MAX_LINE_BYTES: Final = 1 << 20
_MAX_FILE_BYTES: Final = 1 << 30


class MetricsFile:
    """Each line is written to the operating system at once, so what a killed rank has seen is there. The line that it
    was writing may be torn: `open_for` removes it."""

    def __init__(self, descriptor: int, path: str) -> None:
        self._descriptor, self.path = descriptor, path

    @classmethod
    def open_for(cls, path: str, *, resumed: bool, identity: str) -> Self:
        """For appending. A run that begins at step 1 does not write behind another run, but behind an attempt of its
        own that ended before the first checkpoint: the file then begins with a fresh start of the recipe `identity`.
        Raises `UsageError` for a file of another run, and what the operating system says."""
        try:
            os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise translate_os_error(error, path) from error
        try:
            size = os.fstat(descriptor).st_size
            if size and not resumed and not _begins_with_start_of(descriptor, identity):
                raise UsageError(
                    f"metrics file {path!r} is not empty, and does not begin with the start of this recipe, as this "
                    "run does; move it away, or give another [metrics] file, or the [checkpoint] directory of the run "
                    "that wrote it"
                )
            _cut_torn_line(descriptor, size, path)
            os.lseek(descriptor, 0, os.SEEK_END)
        except BaseException:
            os.close(descriptor)
            raise
        return cls(descriptor, path)

    def write(self, line: MetricsLine) -> None:
        """Appends one line. Raises what the operating system says."""
        data = msgspec.json.encode(line) + b"\n"
        try:
            while data:
                data = data[os.write(self._descriptor, data) :]
        except OSError as error:
            raise translate_os_error(error, self.path) from error

    def close(self) -> None:
        """Idempotent."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def read_metrics(path: str) -> list[MetricsLine]:
    """All lines of a file of metrics, without one at its end that is not terminated: its writer was killed, or is
    writing. Raises `NotFound`, `DataCorruption` with the number of a line that is none."""
    try:
        with open(path, "rb") as file:
            data = file.read(_MAX_FILE_BYTES + 1)
    except OSError as error:
        raise translate_os_error(error, path) from error
    if len(data) > _MAX_FILE_BYTES:
        raise UsageError(f"metrics file {path!r} is larger than {_MAX_FILE_BYTES} bytes")
    decoder = json_decoder(MetricsLine)
    lines: list[MetricsLine] = []
    for number, text in enumerate(data.split(b"\n")[:-1], 1):
        try:
            lines.append(decoder.decode(text))
        except DECODE_ERRORS as error:
            raise DataCorruption(f"metrics file {path!r}, line {number}: {error}; remove that line") from error
    return lines


def _begins_with_start_of(descriptor: int, identity: str) -> bool:
    first, ended, _ = os.pread(descriptor, _MAX_LINE_BYTES, 0).partition(b"\n")
    try:
        line: MetricsLine = decode_json(first, MetricsLine)
    except DECODE_ERRORS:
        return False
    return bool(ended) and isinstance(line, StartLine) and line.step == 0 and line.recipe == identity


def _cut_torn_line(descriptor: int, size: int, path: str) -> None:
    first = max(0, size - _MAX_LINE_BYTES)
    tail = os.pread(descriptor, size - first, first)
    if not tail or tail.endswith(b"\n"):
        return
    end = tail.rfind(b"\n") + 1
    if end == 0 and first > 0:
        raise UsageError(f"metrics file {path!r} ends with a line of more than {_MAX_LINE_BYTES} bytes; move it away")
    os.ftruncate(descriptor, first + end)
