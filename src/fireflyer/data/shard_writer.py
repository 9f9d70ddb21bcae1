"""Writes one record shard (layout: `fireflyer.data.shard_format`).

A shard appears under its name only when whole and durable (temporary name, fsync, rename, fsync of the directory), and
is never changed afterwards: any number of processes may read it at once.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Callable
from typing import Final, Self

from fireflyer.base.errors import Exists, UsageError
from fireflyer.base.ports import Data, Disk
from fireflyer.data.files import create_temporary, default_disk, publish
from fireflyer.data.shard_format import (
    INDEX_ENTRY_BYTES,
    MAX_RECORD_BYTES,
    MAX_RECORDS,
    MAX_SHARD_BYTES,
    TRAILER_BYTES,
    ShardInfo,
    aligned,
    header,
    index_and_trailer,
)
from fireflyer.native import crc32c

__all__ = ["ShardWriter"]

_WRITE_BUFFER_BYTES: Final = 1 << 20


class ShardWriter:
    """Writes one shard; it appears at `path` on `commit`, and never if `abort` is called or the process dies.

    As a context manager it commits at the end and aborts on an exception. Not thread-safe.
    """

    def __init__(
        self,
        path: str,
        *,
        disk: Disk | None = None,
        max_bytes: int = MAX_SHARD_BYTES,
        before_publish: Callable[[], None] | None = None,
    ) -> None:
        """`before_publish` is called when all but the name is done, and may raise. Raises `Exists` if there is a shard
        at `path`, `NotFound` if its directory is missing, `NoSpace`."""
        if not 0 < max_bytes <= MAX_SHARD_BYTES:
            raise UsageError(f"max_bytes={max_bytes}; it must be 1 to {MAX_SHARD_BYTES}")
        self.path = os.path.abspath(path)
        self.max_bytes = max_bytes
        self._disk = default_disk(disk)
        self._before_publish = before_publish
        self._refuse_existing()
        self._temporary, self._file = create_temporary(self._disk, self.path)
        self._open = True
        self._buffer = bytearray(header())
        self._written = 0
        self._data_bytes = 0
        self._offsets = array("Q")
        self._lengths = array("I")
        self._crcs = array("I")

    def __len__(self) -> int:
        return len(self._offsets)

    @property
    def file_bytes(self) -> int:
        """Size that the shard would have if it were committed now."""
        records_end = aligned(self._written + len(self._buffer))
        return records_end + len(self) * INDEX_ENTRY_BYTES + TRAILER_BYTES

    def fits(self, length: int) -> bool:
        """Whether a record of `length` bytes can still be added."""
        grown = self.file_bytes + aligned(length) + INDEX_ENTRY_BYTES
        return length <= MAX_RECORD_BYTES and len(self) < MAX_RECORDS and grown <= self.max_bytes

    def add(self, record: Data) -> int:
        """Appends a record (any contiguous bytes, also none) and returns its number. Raises `UsageError` if it does
        not fit, `NoSpace`."""
        self._require_open()
        with memoryview(record) as view, view.cast("B") as data:
            if not self.fits(len(data)):
                raise UsageError(
                    f"{self.path}: a record of {len(data)} bytes does not fit after {len(self)} records "
                    f"({self.file_bytes} of {self.max_bytes} bytes used); begin another shard"
                )
            self._pad()
            self._offsets.append(self._written + len(self._buffer))
            self._lengths.append(len(data))
            self._crcs.append(crc32c(data))
            self._data_bytes += len(data)
            if len(data) < _WRITE_BUFFER_BYTES:
                self._buffer += data
            else:
                self._flush()
                self._file.pwrite(data, self._written)
                self._written += len(data)
        if len(self._buffer) >= _WRITE_BUFFER_BYTES:
            self._flush()
        return len(self) - 1

    def commit(self) -> ShardInfo:
        """Makes the shard durable and visible. Raises `Exists`, `NoSpace`; the shard is then aborted."""
        self._require_open()
        try:
            self._pad()
            index_offset = self._written + len(self._buffer)
            end, index_crc = index_and_trailer(self._offsets, self._lengths, self._crcs, index_offset)
            self._buffer += end
            self._flush()
            self._file.fsync()
            self._file.close()
            if self._before_publish is not None:
                self._before_publish()
            self._refuse_existing()
            publish(self._disk, self._temporary, self.path)
        except BaseException:
            self.abort()
            raise
        self._open = False
        return ShardInfo(
            name=os.path.basename(self.path),
            records=len(self),
            data_bytes=self._data_bytes,
            file_bytes=self._written,
            index_crc=index_crc,
        )

    def abort(self) -> None:
        """Leaves nothing behind; harmless when the shard was committed or aborted before."""
        if not self._open:
            return
        self._open = False
        self._buffer = bytearray()
        try:
            self._file.close()
        finally:
            if self._disk.exists(self._temporary):
                self._disk.remove(self._temporary)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self.abort()
        elif self._open:
            self.commit()

    def _require_open(self) -> None:
        if not self._open:
            raise UsageError(f"{self.path}: this writer was committed or aborted; open another one")

    def _refuse_existing(self) -> None:
        if self._disk.exists(self.path):
            raise Exists(f"{self.path} exists; shards are never overwritten, choose another name or remove it")

    def _pad(self) -> None:
        position = self._written + len(self._buffer)
        self._buffer += bytes(aligned(position) - position)

    def _flush(self) -> None:
        self._file.pwrite(self._buffer, self._written)
        self._written += len(self._buffer)
        self._buffer = bytearray()
