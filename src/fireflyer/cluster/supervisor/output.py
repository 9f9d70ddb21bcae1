"""What ranks print, on its way to the launcher: complete lines out of bytes, bounded, with back-pressure.

When more than `HIGH_BYTES` wait, `full` is called and the readers of the ranks' pipes must stop; a rank that goes on
printing then blocks in its own `write`. Below `LOW_BYTES` `free` is called. Nothing is dropped.
"""

from __future__ import annotations

import asyncio
import re
from collections import deque
from collections.abc import Awaitable, Callable

from fireflyer.cluster.schema.wire import MAX_BATCH_BYTES, MAX_BATCH_LINES, MAX_LINE_BYTES, Output, OutputLine

__all__ = ["HIGH_BYTES", "LOW_BYTES", "LineSplitter", "Outbox"]

HIGH_BYTES = 1 << 20
LOW_BYTES = 256 << 10
_END = re.compile(rb"\r\n|\n|\r")


class LineSplitter:
    """Feed it pieces as they come; it gives complete lines as `(text, cut)`.

    A line ends with a newline, or with a carriage return (progress bars write those). A line longer than
    `MAX_LINE_BYTES` is given at once, cut, and the rest of it is dropped. Bytes that are not UTF-8 are replaced.
    """

    def __init__(self, max_line_bytes: int = MAX_LINE_BYTES) -> None:
        self._max_bytes = max_line_bytes
        self._partial = b""
        self._skipping = False
        self._after_return = False

    def feed(self, data: bytes) -> list[tuple[str, bool]]:
        lines: list[tuple[str, bool]] = []
        if not data:
            return lines
        if self._after_return and data.startswith(b"\n"):
            data = data[1:]
        self._after_return = data.endswith(b"\r")
        *complete, rest = _END.split(data)
        for piece in complete:
            self._take(piece, lines)
            if not self._skipping:
                lines.append((self._partial.decode(errors="replace"), False))
            self._partial, self._skipping = b"", False
        self._take(rest, lines)
        return lines

    def flush(self) -> list[tuple[str, bool]]:
        """The last line, when it has no end."""
        text, self._partial, self._skipping = self._partial, b"", False
        return [(text.decode(errors="replace"), False)] if text else []

    def _take(self, piece: bytes, lines: list[tuple[str, bool]]) -> None:
        if self._skipping:
            return
        self._partial += piece
        if len(self._partial) > self._max_bytes:
            lines.append((self._partial[: self._max_bytes].decode(errors="replace"), True))
            self._partial, self._skipping = b"", True


class Outbox:
    def __init__(self, *, full: Callable[[], None], free: Callable[[], None]) -> None:
        self._lines: deque[OutputLine] = deque()
        self._bytes = 0
        self._full, self._free = full, free
        self._is_full = False
        self._filled = asyncio.Event()
        self._empty = asyncio.Event()
        self._empty.set()

    def put(self, line: OutputLine) -> None:
        self._lines.append(line)
        self._bytes += _size(line)
        self._filled.set()
        self._empty.clear()
        if self._bytes > HIGH_BYTES and not self._is_full:
            self._is_full = True
            self._full()

    async def send_all(self, send: Callable[[Output], Awaitable[object]]) -> None:
        """Sends batch after batch for ever; ends with the error of `send`."""
        while True:
            await self._filled.wait()
            await send(Output(self._take()))
            if not self._lines:
                self._filled.clear()
                self._empty.set()

    async def drained(self) -> None:
        """Waits until everything has been taken by the launcher."""
        await self._empty.wait()

    def _take(self) -> tuple[OutputLine, ...]:
        batch: list[OutputLine] = []
        batch_bytes = 0
        while self._lines and len(batch) < MAX_BATCH_LINES and batch_bytes < MAX_BATCH_BYTES:
            line = self._lines.popleft()
            batch.append(line)
            batch_bytes += _size(line)
        self._bytes -= batch_bytes
        if self._is_full and self._bytes < LOW_BYTES:
            self._is_full = False
            self._free()
        return tuple(batch)


def _size(line: OutputLine) -> int:
    return len(line.text) + 64
