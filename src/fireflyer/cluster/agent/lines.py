"""Lines out of the bytes that a rank prints: pure."""

from __future__ import annotations

import re

from fireflyer.cluster.schema.wire import MAX_LINE_BYTES

__all__ = ["LineSplitter"]

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
