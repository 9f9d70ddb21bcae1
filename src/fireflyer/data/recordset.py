"""A data set: a directory of record shards and the manifest `dataset.json` that lists them.

    dataset.json          {"crc32c": n, "body": {"format", "version", "shards": [...], "meta": {...}}}
    shard-00000.ffr …     record shards, see `fireflyer.data.records`

`crc32c` is that of the bytes of `body` as they stand in the file. The manifest is written last, atomically: a directory
without it holds no data set. It names each shard's record count and index CRC, so a shard of another data set under the
right name is refused. Records are numbered through all shards in the order of the manifest.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import Any, Final, Self

import msgspec
import numpy as np
from numpy.typing import NDArray

from fireflyer.base.decoding import DECODE_ERRORS
from fireflyer.base.errors import DataCorruption, Exists, NotFound, UsageError
from fireflyer.base.ports import Data, Disk
from fireflyer.base.units import MIB
from fireflyer.data.files import default_disk, read_file, replace_file
from fireflyer.data.records import MAX_RECORDS, ShardInfo, ShardReader, ShardWriter, Verify
from fireflyer.native import crc32c

__all__ = ["MANIFEST_NAME", "MAX_SHARDS", "RecordSet", "RecordSetWriter"]

MANIFEST_NAME: Final = "dataset.json"
MAX_SHARDS: Final = 1 << 16
_MAX_MANIFEST_BYTES = 64 * MIB
_FORMAT = "fireflyer-dataset"


class _Body(msgspec.Struct, frozen=True):
    format: str
    version: int
    shards: tuple[ShardInfo, ...]
    meta: dict[str, Any]


class _Manifest(msgspec.Struct, frozen=True):
    crc32c: int
    body: msgspec.Raw


class RecordSetWriter:
    """Fills a directory with shards of about `shard_bytes` each; `commit` writes the manifest. Not thread-safe.

    As a context manager it commits at the end and removes what it wrote on an exception.
    """

    def __init__(
        self,
        directory: str,
        *,
        shard_bytes: int = 64 * MIB,
        meta: Mapping[str, Any] | None = None,
        disk: Disk | None = None,
    ) -> None:
        """`directory` must exist and hold no data set yet (`NotFound`, `Exists`). `meta`: JSON-able, the caller's."""
        self.directory = os.path.abspath(directory)
        self.shard_bytes = shard_bytes
        self._disk = default_disk(disk)
        self._meta = dict(meta or {})
        self._shards: list[ShardInfo] = []
        self._writer: ShardWriter | None = None
        self._open = True
        if not self._disk.is_dir(self.directory):
            raise NotFound(f"{self.directory} is not a directory; create it first")
        if MANIFEST_NAME in self._disk.list(self.directory):
            raise Exists(f"{self.directory} holds a data set already; choose an empty directory")

    def add(self, record: Data) -> int:
        """Appends a record and returns its number in the data set. Raises `UsageError`, `NoSpace`."""
        if not self._open:
            raise UsageError(f"{self.directory}: this writer was committed or aborted")
        length = memoryview(record).nbytes
        if self._writer is not None and len(self._writer) and not self._writer.fits(length):
            self._finish_shard()
        if self._writer is None:
            if len(self._shards) == MAX_SHARDS:
                raise UsageError(
                    f"{self.directory}: more than {MAX_SHARDS} shards; raise shard_bytes={self.shard_bytes}"
                )
            name = f"shard-{len(self._shards):05d}.ffr"
            self._writer = ShardWriter(os.path.join(self.directory, name), disk=self._disk, max_bytes=self.shard_bytes)
        return sum(shard.records for shard in self._shards) + self._writer.add(record)

    def commit(self) -> None:
        self._finish_shard()
        body = msgspec.json.encode(_Body(_FORMAT, 1, tuple(self._shards), self._meta))
        manifest = msgspec.json.encode(_Manifest(crc32c=crc32c(body), body=msgspec.Raw(body)))
        replace_file(os.path.join(self.directory, MANIFEST_NAME), manifest, disk=self._disk)
        self._open = False

    def abort(self) -> None:
        """Removes every shard that this writer wrote; harmless after `commit`."""
        if not self._open:
            return
        self._open = False
        if self._writer is not None:
            self._writer.abort()
        for shard in self._shards:
            self._disk.remove(os.path.join(self.directory, shard.name))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self.abort()
        elif self._open:
            self.commit()

    def _finish_shard(self) -> None:
        if self._writer is not None:
            self._shards.append(self._writer.commit())
            self._writer = None


class RecordSet:
    """All records of a data set: `records[i]` is a read-only view of record i, wherever it lies. Thread-safe.

    Shards are mapped when first needed; `max_open_shards` bounds how many stay mapped (one file descriptor each).
    """

    def __init__(
        self, directory: str, *, verify: Verify = "always", max_open_shards: int = 256, disk: Disk | None = None
    ) -> None:
        """Reads the manifest (through `disk`; shards are always mapped from the real one). Raises `NotFound`,
        `DataCorruption`."""
        if max_open_shards < 1:
            raise UsageError(f"max_open_shards={max_open_shards}; at least 1 is needed")
        self.directory = os.path.abspath(directory)
        self.verify: Verify = verify
        self.max_open_shards = max_open_shards
        body = _read_manifest(os.path.join(self.directory, MANIFEST_NAME), disk)
        self.shards = body.shards
        self.meta = body.meta
        self._ends = np.cumsum([shard.records for shard in self.shards], dtype=np.int64)
        self._lock = threading.Lock()
        self._process = os.getpid()
        self._open: OrderedDict[int, ShardReader] = OrderedDict()

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def locate(self, index: int) -> tuple[int, int]:
        """`(shard, record in the shard)` of record `index` (negative counts from the end). Raises `IndexError`."""
        number = index + len(self) if index < 0 else index
        if not 0 <= number < len(self):
            raise IndexError(f"{self.directory}: record {index} is out of range; there are {len(self)}")
        shard = int(np.searchsorted(self._ends, number, side="right"))
        return shard, number - (int(self._ends[shard - 1]) if shard else 0)

    def __getitem__(self, index: int) -> memoryview:
        """Raises `IndexError`, and `DataCorruption` naming file and record."""
        shard, record = self.locate(index)
        return self._reader(shard)[record]

    def array(self, index: int, dtype: np.dtype[Any] | type[np.generic]) -> NDArray[Any]:
        """Record `index` as a read-only array `[n]` of `dtype`, without a copy."""
        shard, record = self.locate(index)
        return self._reader(shard).array(record, dtype)

    def lengths(self) -> NDArray[np.int64]:
        """Length of every record in bytes, int64 `[len(self)]`. Opens every shard once."""
        parts = [self._reader(shard).lengths.astype(np.int64) for shard in range(len(self.shards))]
        return np.concatenate(parts) if parts else np.empty(0, np.int64)

    def __iter__(self) -> Iterator[memoryview]:
        return map(self.__getitem__, range(len(self)))

    def close(self) -> None:
        with self._lock:
            while self._open:
                self._open.popitem()[1].close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        return _reopen, (self.directory, self.verify, self.max_open_shards)

    def _reader(self, shard: int) -> ShardReader:
        if os.getpid() != self._process:  # forked, perhaps while a thread that is not here held the lock
            self._lock, self._process = threading.Lock(), os.getpid()
        with self._lock:
            reader = self._open.get(shard)
            if reader is None:
                reader = self._open_shard(self.shards[shard])
                self._open[shard] = reader
                if len(self._open) > self.max_open_shards:
                    # Dropped, not closed: another thread may be reading from it; the last reference unmaps.
                    self._open.popitem(last=False)
            else:
                self._open.move_to_end(shard)
            return reader

    def _open_shard(self, expected: ShardInfo) -> ShardReader:
        reader = ShardReader(os.path.join(self.directory, expected.name), verify=self.verify)
        if reader.info != expected:
            reader.close()
            raise DataCorruption(
                f"{reader.path}: a valid shard, but not the one that {MANIFEST_NAME} lists "
                f"({reader.info.records} records, {expected.records} listed); restore the data set from a copy"
            )
        return reader


def _reopen(directory: str, verify: Verify, max_open_shards: int) -> RecordSet:
    return RecordSet(directory, verify=verify, max_open_shards=max_open_shards)


def _read_manifest(path: str, disk: Disk | None) -> _Body:
    data = read_file(path, max_bytes=_MAX_MANIFEST_BYTES, disk=disk)
    advice = "restore it from a copy or rebuild the data set"
    try:
        manifest = msgspec.json.decode(data, type=_Manifest)
        if crc32c(bytes(manifest.body)) != manifest.crc32c:
            raise DataCorruption(f"{path}: does not match its CRC32C; {advice}")
        body = msgspec.json.decode(manifest.body, type=_Body)
    except DECODE_ERRORS as error:
        raise DataCorruption(f"{path}: not a manifest: {error}; {advice}") from error
    if body.format != _FORMAT or body.version != 1:
        raise DataCorruption(
            f"{path}: format {body.format!r} version {body.version}, not {_FORMAT!r} version 1; {advice}"
        )
    if len(body.shards) > MAX_SHARDS:
        raise DataCorruption(f"{path}: lists {len(body.shards)} shards, more than {MAX_SHARDS}; {advice}")
    for shard in body.shards:
        if os.path.basename(shard.name) != shard.name or shard.name in ("", ".", "..") or "\0" in shard.name:
            raise DataCorruption(f"{path}: shard name {shard.name!r} is not a plain file name; {advice}")
        if not 0 <= shard.records <= MAX_RECORDS:
            raise DataCorruption(f"{path}: shard {shard.name} is listed with {shard.records} records; {advice}")
    return body
