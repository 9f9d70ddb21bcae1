"""Rows of a service that keeps its state in the key-value store: one byte, the version of the format, and MessagePack.

What does not decode is `DataCorruption` naming the key: a service then does not begin, rather than guess.
"""

from __future__ import annotations

from typing import Any, Final, Generic, TypeVar

import msgspec

from fireflyer.base.decoding import DECODE_ERRORS, decode_msgpack
from fireflyer.base.errors import DataCorruption

__all__ = ["FORMAT", "Kind", "decode_row", "encode_row"]

FORMAT: Final = 1

R = TypeVar("R")


class Kind(Generic[R]):
    """One kind of row that there are many of, by id. Ids are big-endian, so a range is in the order of ids."""

    def __init__(self, prefix: bytes, id_bytes: int, row_type: type[R]) -> None:
        """`prefix`: of the keys of these rows and no others."""
        self.prefix = prefix
        self.end = self.prefix[:-1] + bytes([self.prefix[-1] + 1])
        self._id_bytes = id_bytes
        self._row_type = row_type

    def key(self, row_id: int) -> bytes:
        return self.prefix + row_id.to_bytes(self._id_bytes, "big")

    def decode(self, key: bytes, value: bytes) -> tuple[int, R]:
        """Id and row. Raises `DataCorruption`, also when the row is another one's."""
        row = decode_row(key, value, self._row_type)
        row_id: Any = getattr(row, "id", None)
        if not isinstance(row_id, int) or key != self.key(row_id):
            raise DataCorruption(f"row {key.hex()} of the key-value store names id {row_id!r}; restore the store")
        return row_id, row


def encode_row(row: msgspec.Struct) -> bytes:
    return bytes([FORMAT]) + msgspec.msgpack.encode(row)


def decode_row(key: bytes, value: bytes, row_type: type[R]) -> R:
    """Raises `DataCorruption` for what `encode_row` did not make."""
    if value[:1] != bytes([FORMAT]):
        raise DataCorruption(
            f"row {key.hex()} of the key-value store has format {value[:1].hex() or 'none'}, not {FORMAT}; "
            "run the version that wrote it, or restore the store"
        )
    try:
        return decode_msgpack(value[1:], row_type)
    except DECODE_ERRORS as error:
        raise DataCorruption(
            f"row {key.hex()} of the key-value store is damaged: {error}; restore the store"
        ) from error
