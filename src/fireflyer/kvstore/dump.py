"""Rows of a store in a file, and back.

A dump is a line with its format, then each row as a MessagePack array of key and value, with its length in front, then
an array of the number of rows and their CRC-32. It is whole or it is refused.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import IO, Final, NamedTuple

import msgspec

from fireflyer.base.decoding import DECODE_ERRORS, msgpack_decoder
from fireflyer.base.errors import DataCorruption
from fireflyer.kvstore.api import Engine, Transaction

__all__ = ["PAGE_ROWS", "DumpFormat", "DumpWriter", "Progress", "Row", "load_rows", "read_dump", "silent"]

PAGE_ROWS: Final = 5000
"""To read at once from a store that is dumped."""
LOADED_BYTES_AT_ONCE: Final = 4 << 20
LOADED_ROWS_AT_ONCE: Final = 2000
MAX_ROW_BYTES: Final = 4 << 20
_LENGTH_BYTES: Final = 4

Row = tuple[bytes, bytes]
Progress = Callable[[int], None]
"""Told of rows so far, now and then."""


def silent(rows: int) -> None:
    """Nobody looks."""


class DumpFormat(NamedTuple):
    first_line: bytes
    """Ends with a newline; names format and version."""
    name: str
    """For messages."""


class DumpWriter:
    """`finish` makes the file whole."""

    def __init__(self, file: IO[bytes], form: DumpFormat) -> None:
        self._file = file
        self._encoder = msgspec.msgpack.Encoder()
        self._crc = 0
        self.rows = 0
        file.write(form.first_line)

    def add(self, rows: Sequence[Row]) -> None:
        for row in rows:
            encoded = self._encoder.encode(row)
            self._crc = zlib.crc32(encoded, self._crc)
            self._file.write(len(encoded).to_bytes(_LENGTH_BYTES, "big") + encoded)
        self.rows += len(rows)

    def finish(self) -> int:
        """Rows written."""
        self._file.write(bytes(_LENGTH_BYTES) + self._encoder.encode((self.rows, self._crc)))
        return self.rows


def read_dump(file: IO[bytes], form: DumpFormat) -> Iterator[Row]:
    """Raises `DataCorruption`, at the end at the latest."""
    if file.read(len(form.first_line)) != form.first_line:
        raise DataCorruption(f"{_name_of(file)} is not a {form.name}, or was written by a newer release")
    rows, crc = 0, 0
    decoder = msgpack_decoder(Row)
    while length := int.from_bytes(_exactly(file, _LENGTH_BYTES), "big"):
        if length > MAX_ROW_BYTES:
            raise DataCorruption(f"{_name_of(file)} is damaged: row {rows} has {length} bytes; use another dump")
        encoded = _exactly(file, length)
        crc = zlib.crc32(encoded, crc)
        try:
            yield decoder.decode(encoded)
        except DECODE_ERRORS as error:
            raise DataCorruption(f"{_name_of(file)} is damaged in row {rows}: {error}; use another dump") from error
        rows += 1
    if file.read() != msgspec.msgpack.encode((rows, crc)):
        raise DataCorruption(f"{_name_of(file)} is damaged: the checksum of {rows} rows is wrong; use another dump")


async def load_rows(engine: Engine, rows: Iterator[Row], progress: Progress = silent) -> int:
    """In transactions of bounded size, in the order of `rows`; how many they are."""
    done = 0
    for batch in _batches(rows):
        await engine.transact(lambda rows, batch=batch: _put(rows, batch), idempotent=True)  # type: ignore[misc]
        done += len(batch)
        progress(done)
    return done


async def _put(rows: Transaction, batch: Sequence[Row]) -> None:
    for key, value in batch:
        rows.set(key, value)


def _batches(rows: Iterator[Row]) -> Iterator[list[Row]]:
    batch: list[Row] = []
    size = 0
    for row in rows:
        batch.append(row)
        size += len(row[0]) + len(row[1])
        if size >= LOADED_BYTES_AT_ONCE or len(batch) == LOADED_ROWS_AT_ONCE:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _exactly(file: IO[bytes], size: int) -> bytes:
    data = file.read(size)
    if len(data) != size:
        raise DataCorruption(f"{_name_of(file)} is truncated; use another dump")
    return data


def _name_of(file: IO[bytes]) -> str:
    name = getattr(file, "name", None)
    return name if isinstance(name, str) else "the dump"
