"""Blobs one behind another in one stream: 32 bytes of the hash, 8 of the size (big-endian), then the blob. Pure.

So thousands of small files are sent in one request. Whoever reads takes each blob to its end before the next one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final, NamedTuple

from fireflyer.base.errors import UsageError
from fireflyer.cluster.core.objects.blobs import check_hash

__all__ = ["HEADER_BYTES", "Framed", "frame_header", "read_frames"]

_HASH_BYTES: Final = 32
HEADER_BYTES: Final = _HASH_BYTES + 8


class Framed(NamedTuple):
    blob: str
    size_bytes: int
    pieces: Iterator[bytes]
    """To be read to their end before the next frame. Raises `UsageError` where the stream ends before."""


def frame_header(blob: str, size_bytes: int) -> bytes:
    return bytes.fromhex(check_hash(blob)) + size_bytes.to_bytes(8, "big")


def read_frames(pieces: Iterable[bytes]) -> Iterator[Framed]:
    """Raises `UsageError` for a stream that ends inside a frame, or a blob that was not read to its end."""
    source = _Source(iter(pieces))
    while header := source.take(HEADER_BYTES):
        if len(header) < HEADER_BYTES:
            raise UsageError("the blobs end inside a header; send them again")
        source.left = size_bytes = int.from_bytes(header[_HASH_BYTES:], "big")
        yield Framed(header[:_HASH_BYTES].hex(), size_bytes, source.blob())
        if source.left:
            raise UsageError(f"{source.left} bytes of a blob were not read; its size is not that of the manifest")


class _Source:
    def __init__(self, pieces: Iterator[bytes]) -> None:
        self._pieces = pieces
        self._rest = b""
        self.left = 0
        """Bytes of the blob that is being read."""

    def take(self, count: int) -> bytes:
        """Fewer only at the end of the stream."""
        while len(self._rest) < count:
            piece = next(self._pieces, None)
            if piece is None:
                break
            self._rest += piece
        taken, self._rest = self._rest[:count], self._rest[count:]
        return taken

    def blob(self) -> Iterator[bytes]:
        while self.left:
            piece = self._rest or next(self._pieces, None)
            if piece is None:
                raise UsageError(f"the blobs end {self.left} bytes too early; send them again")
            taken, self._rest = piece[: self.left], piece[self.left :]
            self.left -= len(taken)
            if taken:
                yield taken
