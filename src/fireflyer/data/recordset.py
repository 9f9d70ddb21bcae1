"""All records of a data set, numbered through its shards in the order of the manifest (`fireflyer.data.manifest`).

    with RecordSet("ff:///corpora/web") as records:      # or a directory
        batch = records.read_batch([7, 3_000_000, 12])    # one batch of reads

Shards are opened when they are first needed. How many stay open, with their indexes, is bounded by `max_open_shards`
and `max_index_bytes`; those that were not used for the longest time are closed. A batch from more shards than that is
read in several parts, so each thread that reads has no more of them open, either.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Any, Final, Self

import numpy as np
from numpy.typing import NDArray

from fireflyer.base.errors import DataCorruption, NotFound, UsageError
from fireflyer.base.units import GIB
from fireflyer.data.manifest import MANIFEST_NAME, MAX_MANIFEST_BYTES, decode_manifest
from fireflyer.data.places import Place, place_of, read_whole
from fireflyer.data.read_plan import split_by_bytes
from fireflyer.data.shard_format import INDEX_ENTRY_BYTES, ShardInfo
from fireflyer.data.shard_reader import (
    SEQUENTIAL_BYTES,
    SEQUENTIAL_RECORDS,
    ShardReader,
    Verify,
    as_array,
    check_numbers,
    read_records,
)

__all__ = ["DEFAULT_OPEN_SHARDS", "RecordSet"]

DEFAULT_OPEN_SHARDS: Final = 256
DEFAULT_INDEX_BYTES: Final = GIB
_Integers = NDArray[np.int64]


class _Opened:
    def __init__(self, reader: ShardReader) -> None:
        self.reader = reader
        self.users = 0
        """Calls that read from it now."""
        self.dropped = False


class _OpenShards:
    """The shards that are open, the least recently used first. Thread-safe; those in use are closed by their last
    user."""

    def __init__(self, max_open: int, max_index_bytes: int) -> None:
        self._max_open, self._max_index_bytes = max_open, max_index_bytes
        self._lock = threading.Lock()
        self._opening: dict[str, threading.Lock] = {}
        self._open: OrderedDict[str, _Opened] = OrderedDict()
        self._index_bytes = 0

    @contextlib.contextmanager
    def using(self, wanted: Sequence[str], open_it: Any) -> Iterator[list[ShardReader]]:
        """`open_it(name)` opens those that are not open."""
        held: list[_Opened] = []
        try:
            for name in wanted:
                held.append(self._acquire(name, open_it))  # noqa: PERF401 - those before one that fails are given back
            yield [one.reader for one in held]
        finally:
            with self._lock:
                for one in held:
                    one.users -= 1
                    if one.dropped and not one.users:
                        one.reader.close()

    def _acquire(self, name: str, open_it: Any) -> _Opened:
        with self._lock:
            found = self._find(name)
            opening = self._opening.setdefault(name, threading.Lock())
        if found is not None:
            return found
        with opening:  # one thread opens it; the others go on with other shards, or wait for this one
            with self._lock:
                found = self._find(name)
            if found is not None:
                return found
            reader = open_it(name)
            with self._lock:
                return self._insert(name, _Opened(reader))

    def _find(self, name: str) -> _Opened | None:
        found = self._open.get(name)
        if found is not None:
            self._open.move_to_end(name)
            found.users += 1
        return found

    def _insert(self, name: str, opened: _Opened) -> _Opened:
        there = self._find(name)
        if there is not None:  # it was dropped and opened by another thread in the meantime
            opened.reader.close()
            return there
        opened.users += 1
        self._open[name] = opened
        self._index_bytes += opened.reader.index_bytes
        while len(self._open) > 1 and (len(self._open) > self._max_open or self._index_bytes > self._max_index_bytes):
            self._drop(next(iter(self._open)))
        return opened

    def _drop(self, name: str) -> None:
        one = self._open.pop(name)
        self._opening.pop(name, None)
        self._index_bytes -= one.reader.index_bytes
        one.dropped = True
        if not one.users:
            one.reader.close()

    def close(self) -> None:
        with self._lock:
            for name in list(self._open):
                self._drop(name)

    def abandon(self) -> None:
        """In a forked child, where nobody uses them: the lock may be held by a thread that is not here."""
        for one in self._open.values():
            one.reader.close()


class RecordSet:
    """`records[i]` is a read-only view of record i, `records.read_batch([…])` are many at once. Thread-safe.

    Pickled by path: another process opens it itself, and so does a forked child.
    """

    def __init__(
        self,
        path: str | Place,
        *,
        verify: Verify = "always",
        max_open_shards: int = DEFAULT_OPEN_SHARDS,
        max_index_bytes: int = DEFAULT_INDEX_BYTES,
        token_file: str | None = None,
    ) -> None:
        """`path`: a directory, or `ff://…`, or a place in a file system that is connected already. Reads the manifest.
        `token_file`: of a user, where the URL names managers.
        Raises `NotFound`, `DataCorruption`, `UsageError`."""
        if max_open_shards < 1:
            raise UsageError(f"max_open_shards={max_open_shards}; at least 1 is needed")
        self._place = place_of(path, token_file=token_file) if isinstance(path, str) else path
        self.path = self._place.name
        """Absolute, or an URL that names its cluster."""
        self.verify: Verify = verify
        self._options = (max_open_shards, max_index_bytes)
        self._token_file = token_file
        manifest = self._place.below(MANIFEST_NAME)
        try:
            data = read_whole(manifest, MAX_MANIFEST_BYTES)
        except NotFound:
            raise NotFound(
                f"{self.path} is no data set: there is no {MANIFEST_NAME} in it; `ff data pack` makes one, and writes "
                "that last"
            ) from None
        body = decode_manifest(manifest.name, data)
        self.shards = body.shards
        self.names = body.names
        """Shards of the names of records; none where they have no names."""
        self.meta = body.meta
        self._listed = {one.name: one for one in (*body.shards, *body.names)}
        self._ends = np.cumsum([shard.records for shard in self.shards], dtype=np.int64)
        self._process = os.getpid()
        self._open = _OpenShards(*self._options)

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def locate(self, index: int) -> tuple[int, int]:
        """`(shard, record in the shard)` of record `index` (negative counts from the end). Raises `IndexError`."""
        shards, records = self._locate(check_numbers([index], len(self), self.path))
        return int(shards[0]), int(records[0])

    def _locate(self, numbers: _Integers) -> tuple[_Integers, _Integers]:
        shards = np.searchsorted(self._ends, numbers, side="right")
        firsts = np.concatenate((np.zeros(1, np.int64), self._ends))
        return shards, numbers - firsts[shards]

    def __getitem__(self, index: int) -> memoryview:
        """Raises `IndexError`, and `DataCorruption` naming file and record."""
        return self.read_batch([index])[0]

    def read_batch(self, indices: Sequence[int] | _Integers) -> list[memoryview]:
        """Read-only bytes of each of these records, in their order: one batch of reads for each `max_open_shards`, into
        one buffer that lives as long as one of the views. Raises `IndexError`, and `DataCorruption` naming file and
        record."""
        return self._read(self.shards, indices)

    __getitems__ = read_batch
    """Batched read under the name by which loaders of torch call it."""

    def name(self, index: int) -> str:
        """Name of record `index`: the path that it was packed from. Raises `IndexError`, `UsageError` where records
        have no names."""
        return self.read_names([index])[0]

    def read_names(self, indices: Sequence[int] | _Integers) -> list[str]:
        """Names of these records, in one batch as of `read_batch`. Raises as `name`."""
        self._require_names()
        return [bytes(one).decode("utf-8", "surrogateescape") for one in self._read(self.names, indices)]

    def _require_names(self) -> None:
        if not self.names:
            raise UsageError(f"{self.path}: its records have no names; only records of whole files have")

    def _read(self, listed: Sequence[ShardInfo], indices: Sequence[int] | _Integers) -> list[memoryview]:
        numbers = check_numbers(indices, len(self), self.path)
        if not len(numbers):
            return []
        shards, records = self._locate(numbers)
        wanted, of = np.unique(shards, return_inverse=True)
        of = of.reshape(-1)
        max_open_shards, max_index_bytes = self._options
        indexes = np.array([listed[shard].records for shard in wanted], np.int64) * INDEX_ENTRY_BYTES
        found: list[Any] = [None] * len(numbers)
        for first, end in split_by_bytes(indexes, max_index_bytes, max_open_shards):
            mine = np.flatnonzero((of >= first) & (of < end))
            with self._readers().using([listed[shard].name for shard in wanted[first:end]], self._open_shard) as some:
                read = read_records(some, of[mine] - first, records[mine])
            for place, record in zip(mine.tolist(), read, strict=True):
                found[place] = record
        return found

    def array(self, index: int, dtype: np.dtype[Any] | type[np.generic]) -> NDArray[Any]:
        """Record `index` as a read-only array `[n]` of `dtype`. Raises `DataCorruption`."""
        return as_array(self[index], dtype, f"{self.path}: record {index}")

    def lengths(self) -> NDArray[np.int64]:
        """Length of every record in bytes, int64 `[len(self)]`. Opens every shard once."""
        parts = [self.lengths_of(shard) for shard in range(len(self.shards))]
        return np.concatenate(parts) if parts else np.empty(0, np.int64)

    def lengths_of(self, shard: int) -> NDArray[np.int64]:
        """Length of every record of one shard in bytes, int64 `[records of the shard]`."""
        return self._lengths_of(self.shards[shard])

    def lengths_of_names(self, shard: int) -> NDArray[np.int64]:
        """Length of the name of every record of one shard in bytes, int64 `[records of the shard]`. Raises
        `UsageError` where records have no names."""
        self._require_names()
        return self._lengths_of(self.names[shard])

    def _lengths_of(self, listed: ShardInfo) -> NDArray[np.int64]:
        with self._readers().using([listed.name], self._open_shard) as (reader,):
            return reader.lengths.astype(np.int64)

    def __iter__(self) -> Iterator[memoryview]:
        for number, shard in enumerate(self.shards):
            begin = int(self._ends[number]) - shard.records
            for first, end in split_by_bytes(self.lengths_of(number), SEQUENTIAL_BYTES, SEQUENTIAL_RECORDS):
                yield from self.read_batch(np.arange(begin + first, begin + end))

    def close(self) -> None:
        """Closes all shards; one that is wanted afterwards is opened again."""
        self._readers().close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        return _reopen, (self.path, self.verify, *self._options, self._token_file)

    def _readers(self) -> _OpenShards:
        if os.getpid() != self._process:
            # Forked, perhaps while a thread that is not here held the lock, and the client of 3FS is the parent's.
            self._open.abandon()
            self._place = place_of(self.path, token_file=self._token_file)
            self._open, self._process = _OpenShards(*self._options), os.getpid()
        return self._open

    def _open_shard(self, name: str) -> ShardReader:
        reader, expected = ShardReader(self._place.below(name), verify=self.verify), self._listed[name]
        if reader.info != expected:
            reader.close()
            raise DataCorruption(
                f"{reader.path}: a valid shard, but not the one that {MANIFEST_NAME} lists "
                f"({reader.info.records} records, {expected.records} listed); restore the data set from a copy"
            )
        return reader


def _reopen(path: str, verify: Verify, max_open_shards: int, max_index_bytes: int, token_file: str | None) -> RecordSet:
    return RecordSet(
        path,
        verify=verify,
        max_open_shards=max_open_shards,
        max_index_bytes=max_index_bytes,
        token_file=token_file,
    )
