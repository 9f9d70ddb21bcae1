"""Makes a data set: shards one after another, and the manifest when all of them are there.

The manifest is written last, atomically: a directory without it holds no data set, whatever shards are in it.
"""

from __future__ import annotations

import posixpath
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Self

from fireflyer.base.errors import Exists, NotFound, UsageError
from fireflyer.base.ports import Data, Disk
from fireflyer.base.units import MIB
from fireflyer.data.files import replace_file
from fireflyer.data.manifest import MANIFEST_NAME, MAX_SHARDS, encode_manifest, names_file, shard_file
from fireflyer.data.places import disk_of
from fireflyer.data.shard_format import ShardInfo
from fireflyer.data.shard_writer import ShardWriter

__all__ = ["DEFAULT_SHARD_BYTES", "RecordSetWriter"]

DEFAULT_SHARD_BYTES: Final = 64 * MIB


class RecordSetWriter:
    """Fills a directory with shards of about `shard_bytes` each; `commit` writes the manifest. Not thread-safe.

    As a context manager it commits at the end and removes what it wrote on an exception.
    """

    def __init__(
        self,
        path: str,
        *,
        shard_bytes: int = DEFAULT_SHARD_BYTES,
        meta: Mapping[str, Any] | None = None,
        named: bool = False,
        done: tuple[Sequence[ShardInfo], Sequence[ShardInfo]] = ((), ()),
        disk: Disk | None = None,
        token_file: str | None = None,
        before_publish: Callable[[], None] | None = None,
    ) -> None:
        """`path`: a directory, or `ff://…`, which must exist and hold no data set yet (`NotFound`, `Exists`). `meta`:
        JSON-able, the caller's. `named`: each record has a name. `done`: shards of records, and of names, that are
        there already; it goes on after them. `disk`: on which `path` is, instead of what `path` says. `before_publish`
        is called before each file gets its name, and may raise."""
        self._disk, self.directory, self.path = disk_of(path, disk=disk, token_file=token_file)
        self.shard_bytes = shard_bytes
        self.meta = dict(meta or {})
        self.named = named
        self._shards: list[ShardInfo] = list(done[0])
        self._names: list[ShardInfo] = list(done[1])
        self._records = sum(shard.records for shard in self._shards)
        self._before_publish = before_publish
        self._writer: ShardWriter | None = None
        self._names_writer: ShardWriter | None = None
        self._open = True
        if not self._disk.is_dir(self.directory):
            raise NotFound(f"{self.path} is not a directory; create it first")
        if MANIFEST_NAME in self._disk.list(self.directory):
            raise Exists(f"{self.path} holds a data set already; choose an empty directory")

    @property
    def shards(self) -> tuple[ShardInfo, ...]:
        """Shards that are complete."""
        return tuple(self._shards)

    @property
    def names(self) -> tuple[ShardInfo, ...]:
        return tuple(self._names)

    @property
    def records(self) -> int:
        """Number of records in the shards that are complete."""
        return self._records

    def fits(self, length: int) -> bool:
        """Whether a record of `length` bytes can be added without beginning another shard."""
        return self._writer is None or not len(self._writer) or self._writer.fits(length)

    def add(self, record: Data, name: str | None = None) -> int:
        """Appends a record and returns its number in the data set; `name` where records are named. Raises
        `UsageError`, `NoSpace`."""
        if not self._open:
            raise UsageError(f"{self.path}: this writer was committed or aborted")
        if (name is not None) != self.named:
            raise UsageError(f"{self.path}: name={name!r}; give {'a name' if self.named else 'names'} to all or none")
        if not self.fits(memoryview(record).nbytes):
            self.finish_shard()
        if self._writer is None:
            self._begin_shard()
        assert self._writer is not None  # noqa: S101 - made just before
        number = self._records + self._writer.add(record)
        if name is not None and self._names_writer is not None:
            self._names_writer.add(name.encode("utf-8", "surrogateescape"))
        return number

    def _begin_shard(self) -> None:
        number = len(self._shards)
        if number == MAX_SHARDS:
            raise UsageError(f"{self.path}: more than {MAX_SHARDS} shards; raise shard_bytes={self.shard_bytes}")
        checked = self._before_publish
        self._writer = ShardWriter(
            self._at(shard_file(number)), disk=self._disk, max_bytes=self.shard_bytes, before_publish=checked
        )
        if self.named:
            self._names_writer = ShardWriter(self._at(names_file(number)), disk=self._disk, before_publish=checked)

    def finish_shard(self) -> None:
        """Complete the shard: what was added until now is durable. The next record begins another one."""
        if self._names_writer is not None:
            self._names.append(self._names_writer.commit())
            self._names_writer = None
        if self._writer is not None:
            self._shards.append(self._writer.commit())
            self._records += self._shards[-1].records
            self._writer = None

    def commit(self) -> None:
        self.finish_shard()
        manifest = encode_manifest(self._shards, self._names, self.meta)
        replace_file(self._at(MANIFEST_NAME), manifest, disk=self._disk, before_publish=self._before_publish)
        self._open = False

    def abort(self) -> None:
        """Removes every shard that this writer wrote; harmless after `commit`."""
        if not self._open:
            return
        self.suspend()
        for shard in (*self._shards, *self._names):
            self._disk.remove(self._at(shard.name))

    def suspend(self) -> None:
        """Gives up the shard that is not finished, and leaves the others: another writer may go on after them."""
        if not self._open:
            return
        self._open = False
        for writer in (self._writer, self._names_writer):
            if writer is not None:
                writer.abort()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self.abort()
        elif self._open:
            self.commit()

    def _at(self, name: str) -> str:
        return posixpath.join(self.directory, name)
