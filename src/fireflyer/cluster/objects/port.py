"""What keeps blobs: a directory, or what fsspec has a URL for.

Blobs are named by what they contain, so a blob never changes, and putting one that is there changes nothing but its
time. All calls block and may be made by several threads and processes; they raise `FireflyerError`.

Why a blob that somebody is about to name is not collected: `renew` and `put` give it a new time, and `delete` leaves
what has a newer time than it was told. `core.objects.collection` has the rest of the argument.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Final, Protocol

from fireflyer.base.errors import DataCorruption
from fireflyer.base.ports import Data
from fireflyer.base.units import GIB
from fireflyer.cluster.core.objects.blobs import StoredBlob, new_hasher

__all__ = ["MAX_BLOB_BYTES", "READ_BYTES", "Objects", "checked_pieces", "read_blob"]

MAX_BLOB_BYTES: Final = 16 * GIB
READ_BYTES: Final = 1 << 20


class Objects(Protocol):
    def put(self, blob: str, size_bytes: int, pieces: Iterable[Data]) -> bool:
        """Keeps the bytes of `pieces`; they are durable when it returns. False: it was there already, with this size,
        and `pieces` were not asked for. Nothing is kept, and `UsageError` raised, when they are not `size_bytes` long
        or have another hash than `blob`. Raises `NoSpace`."""

    def get(self, blob: str) -> Iterator[bytes]:
        """Pieces of at most `READ_BYTES`, read as they are asked for. The last one only comes when all of them have
        the right hash; else `DataCorruption`. Raises `NotFound` at once."""

    def stat(self, blob: str) -> StoredBlob:
        """Raises `NotFound`."""

    def renew(self, blobs: Sequence[str]) -> list[bool]:
        """Names of those that are there; each of them gets the time of now."""

    def delete(self, blobs: Sequence[str], renewed_before_ns: int) -> list[str]:
        """Removes those that were renewed before, and says which."""

    def discard(self, blob: str) -> None:
        """Removes a blob that is corrupt. Nothing happens where there is none."""

    def list(self) -> Iterator[StoredBlob]:
        """All of them, in no order. What is put or removed meanwhile may or may not be among them."""


def checked_pieces(blob: str, pieces: Iterator[bytes], where: str) -> Iterator[bytes]:
    """`pieces`, of which the last one only comes when they have the right hash. Raises `DataCorruption`."""
    hasher = new_hasher()
    held: bytes | None = None
    for piece in pieces:
        if held is not None:
            yield held
        hasher.update(piece)
        held = piece
    if hasher.hexdigest() != blob:
        raise DataCorruption(f"blob {blob[:12]}… in {where} has other bytes than were put; it must be put again")
    if held is not None:
        yield held


def read_blob(objects: Objects, blob: str, max_bytes: int) -> bytes:
    """All of a small blob. Raises `DataCorruption` when it is longer than `max_bytes`."""
    data = bytearray()
    for piece in objects.get(blob):
        data += piece
        if len(data) > max_bytes:
            raise DataCorruption(f"blob {blob[:12]}… is longer than {max_bytes} bytes, so it is not what was expected")
    return bytes(data)
