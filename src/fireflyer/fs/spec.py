"""fsspec's protocol `ff`: pandas, pyarrow, DuckDB, `torch.distributed.checkpoint` and others read and write through it.

`fsspec.open("ff://host:7000/data/x.parquet", token_file="…")`; the forms of addresses are in `fs.tools.addresses`. The
cluster of `ff:///path` and `ff://path` is the option `target` (`ff://host:7000`, or `ff:///directory` of a local
cluster), else what the environment's FIREFLYER_FS says, else that in the working directory
(`fs.tools.default_cluster`). A cluster that is named by its managers asks who you are: the option `token` or
`token_file` says it, else, in a task of the platform, the token of its run. Installed with `pip install
fireflyer[fsspec]`; fsspec finds it by its entry point.

fsspec makes an instance for each thread and copies instances to other processes by their options; all instances of a
process that name the same cluster in the same way share one connection. Nothing is cached: each call asks.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import posixpath
import stat
import uuid
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import Any, Final

from fsspec.callbacks import DEFAULT_CALLBACK
from fsspec.spec import AbstractFileSystem
from fsspec.utils import isfilelike, stringify_path

from fireflyer.fs.tools.addresses import SCHEME, Address, clean_path, parse_address
from fireflyer.fs.tools.connections import Connected, shared
from fireflyer.fs.tools.copying import CopyOptions, copy_file
from fireflyer.fs.tools.default_cluster import require_target
from fireflyer.fs.tools.trees import NO_REPLACE, Attributes, LocalTree, OpenFile

__all__ = ["FireflyerFile", "FireflyerFileSystem"]

MAX_READS: Final = 1024
"""Most reads in one `read_batch` of `cat_ranges`."""
MAX_ATTEMPTS: Final = 8
"""Most attempts to write a file whose directories others make and remove at the same time."""


class FireflyerFileSystem(AbstractFileSystem):
    """`target`: which cluster, where the URL does not say. `token`, or better `token_file`: a user's, needed for a
    cluster that is named by its managers. `auto_mkdir`: writing a file makes the directories above it, which readers
    and writers of data sets expect of every file system; they are looked for only when they are missing."""

    protocol = "ff"
    root_marker = "/"

    def __init__(
        self,
        target: str | None = None,
        token: str | None = None,
        token_file: str | None = None,
        auto_mkdir: bool = True,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self._target, self._auto_mkdir = require_target(target), auto_mkdir
        self._token, self._token_file = token, token_file

    @property
    def files(self) -> Connected:
        """The file system itself, for what fsspec has no words for."""
        return shared(self._target, self._token, self._token_file)

    @property
    def fsid(self) -> str:
        return f"ff_{self._target}"

    # --- names ---

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        if isinstance(path, list):
            return [cls._strip_protocol(one) for one in path]
        path = stringify_path(path)
        if path.startswith(SCHEME):
            path = parse_address(path).path
        return clean_path(path.removeprefix("ff::"))

    @staticmethod
    def _get_kwargs_from_urls(path: str) -> dict[str, str]:
        target = parse_address(path).target if path.startswith(SCHEME) else ""
        return {"target": target} if target else {}

    def unstrip_protocol(self, name: str) -> str:
        """The URL that says where: good in any process that may connect to the cluster."""
        if name.startswith(SCHEME):
            return name
        if self._target.startswith(SCHEME + "/"):
            prefix = Address(directory=self._target[len(SCHEME) :]).prefix
        else:
            prefix = parse_address(self._target).prefix
        return prefix + clean_path(name)

    @classmethod
    def _parent(cls, path: Any) -> str:
        return posixpath.dirname(str(cls._strip_protocol(path)))

    # --- looking ---

    def info(self, path: Any, **_: Any) -> dict[str, Any]:
        path = self._strip_protocol(path)
        return self._described(path, self.files.stat(path, False), resolve=True)

    def _described(self, path: str, attributes: Attributes, *, resolve: bool) -> dict[str, Any]:
        """`resolve`: a link to a directory is one. In listings it is not, or walks might never end."""
        link = stat.S_ISLNK(attributes.st_mode)
        destination = None
        if link:
            destination = self.files.readlink(path)
            try:
                attributes = self.files.stat(path)
            except OSError:
                resolve = False
        kind = _kind(attributes.st_mode)
        found: dict[str, Any] = {
            "name": path,
            "size": attributes.st_size,
            "type": "other" if link and kind == "directory" and not resolve else kind,
            "islink": link,
            "created": attributes.st_ctime_ns / 1e9,
            "mtime": attributes.st_mtime_ns / 1e9,
            "mode": attributes.st_mode,
            "uid": attributes.st_uid,
            "gid": attributes.st_gid,
            "ino": attributes.st_ino,
            "nlink": attributes.st_nlink,
        }
        if link:
            found["destination"] = destination
        return found

    def ls(self, path: Any, detail: bool = True, **_: Any) -> list[Any]:
        path = self._strip_protocol(path)
        try:
            entries = sorted(self.files.scandir(path), key=lambda entry: os.fsencode(entry.name))
        except NotADirectoryError:
            return [self.info(path)] if detail else [path]
        base = path.rstrip("/")
        if not detail:
            return [f"{base}/{entry.name}" for entry in entries]
        return [self._described(f"{base}/{entry.name}", entry.attributes, resolve=False) for entry in entries]

    def exists(self, path: Any, **_: Any) -> bool:
        try:
            self.files.stat(self._strip_protocol(path))
        except (FileNotFoundError, NotADirectoryError):
            return False
        return True

    def lexists(self, path: Any, **_: Any) -> bool:
        try:
            self.files.stat(self._strip_protocol(path), False)
        except (FileNotFoundError, NotADirectoryError):
            return False
        return True

    def isdir(self, path: Any) -> bool:
        return self._is(path, stat.S_ISDIR)

    def isfile(self, path: Any) -> bool:
        return self._is(path, stat.S_ISREG)

    def _is(self, path: Any, kind: Any) -> bool:
        try:
            return bool(kind(self.files.stat(self._strip_protocol(path)).st_mode))
        except OSError:
            return False

    def islink(self, path: Any) -> bool:
        try:
            return stat.S_ISLNK(self.files.stat(self._strip_protocol(path), False).st_mode)
        except OSError:
            return False

    def created(self, path: Any) -> datetime:
        """Time when its attributes last changed: the file system does not keep when a file was made."""
        return datetime.fromtimestamp(self.info(path)["created"], tz=UTC)

    def modified(self, path: Any) -> datetime:
        return datetime.fromtimestamp(self.info(path)["mtime"], tz=UTC)

    # --- changing names ---

    def mkdir(self, path: Any, create_parents: bool = True, **_: Any) -> None:
        path = self._strip_protocol(path)
        if create_parents:
            self.files.makedirs(path)
        else:
            self.files.mkdir(path)

    def makedirs(self, path: Any, exist_ok: bool = False) -> None:
        self.files.makedirs(self._strip_protocol(path), exist_ok=exist_ok)

    def rmdir(self, path: Any) -> None:
        self.files.rmdir(self._strip_protocol(path))

    def rm_file(self, path: Any) -> None:
        self.files.unlink(self._strip_protocol(path))

    def _rm(self, path: Any) -> None:
        self.rm_file(path)

    def rm(self, path: Any, recursive: bool = False, maxdepth: int | None = None) -> None:
        """Directories only when `recursive`; patterns as in `glob`."""
        for one in reversed(self.expand_path(path, recursive=False, maxdepth=maxdepth)):
            if not stat.S_ISDIR(self.files.stat(one, False).st_mode):
                self.files.unlink(one)
            elif recursive:
                self.files.rmtree(one)
            else:
                raise IsADirectoryError(errno.EISDIR, "is a directory; recursive=True removes it", one)

    def mv(self, path1: Any, path2: Any, recursive: bool = False, maxdepth: int | None = None, **options: Any) -> None:
        """Move one path: a rename, which is atomic and replaces a file; into a directory that is there."""
        from glob import has_magic

        if (
            not isinstance(path1, str | os.PathLike)
            or not isinstance(path2, str | os.PathLike)
            or has_magic(str(path1))
        ):
            super().mv(path1, path2, recursive=recursive, maxdepth=maxdepth, **options)
            return
        source, target = self._strip_protocol(path1), self._strip_protocol(path2)
        if source == target:
            return
        if self.isdir(target):
            target = f"{target.rstrip('/')}/{posixpath.basename(source)}"
        self._making_room(target, lambda: self.files.rename(source, target))

    def link(self, src: Any, dst: Any, **_: Any) -> None:
        self.files.link(self._strip_protocol(src), self._strip_protocol(dst))

    def symlink(self, src: Any, dst: Any, **_: Any) -> None:
        """`src` is kept as it is written, without `ff://`."""
        text = stringify_path(src)
        text = self._strip_protocol(text) if text.startswith(SCHEME) else text
        self.files.symlink(text, self._strip_protocol(dst))

    def chmod(self, path: Any, mode: int) -> None:
        self.files.chmod(self._strip_protocol(path), mode)

    def touch(self, path: Any, truncate: bool = True, **_: Any) -> None:
        path = self._strip_protocol(path)
        self.open(path, "wb" if truncate else "ab").close()
        self.files.utime(path)

    # --- content ---

    def _making_room(self, path: str, action: Any) -> Any:
        """Again with the directories above, where they were missing. Others make and remove them at the same time:
        they may be there by now, or be gone again."""
        parent = posixpath.dirname(path)
        there = False
        for _ in range(MAX_ATTEMPTS - 1):
            try:
                return action()
            except FileNotFoundError:
                if not self._auto_mkdir or there:
                    raise
            there = self.isdir(parent)
            if not there:
                with contextlib.suppress(FileNotFoundError):  # one above is gone again
                    self.files.makedirs(parent, exist_ok=True)
        return action()

    def _open(self, path: str, mode: str = "rb", autocommit: bool = True, **_: Any) -> FireflyerFile:
        """Without `autocommit` (in a transaction of fsspec) a new file is written under another name until then."""
        path = self._strip_protocol(path)
        place = path
        if not autocommit and mode[0] in "wx":
            if mode[0] == "x" and self.lexists(path):
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)
            place = f"{posixpath.dirname(path).rstrip('/')}/.ff-commit-{uuid.uuid4().hex}"
        if mode[0] == "r":
            opened = self.files.open(place, mode)
        else:
            opened = self._making_room(place, lambda: self.files.open(place, mode))
        return FireflyerFile(self, path, place, mode, opened)

    def cat_file(self, path: Any, start: int | None = None, end: int | None = None, **_: Any) -> bytes:
        with self._open(path) as file:
            first, last = slice(start, end).indices(file.size)[:2]
            file.seek(first)
            return file.read() if end is None else file.read(max(0, last - first))

    def pipe_file(self, path: Any, value: Any, mode: str = "overwrite", **_: Any) -> None:
        with self.open(path, "xb" if mode == "create" else "wb") as file:
            file.write(value)

    def cat_ranges(
        self,
        paths: list[Any],
        starts: Any,
        ends: Any,
        max_gap: int | None = None,  # noqa: ARG002
        on_error: str = "return",
        **_: Any,
    ) -> list[Any]:
        """All reads of a batch are under way together. Raises, or has the errors in their places."""
        if not isinstance(starts, Iterable):
            starts = [starts] * len(paths)
        if not isinstance(ends, Iterable):
            ends = [ends] * len(paths)
        wanted = list(zip(paths, starts, ends, strict=True))
        found: list[Any] = []
        for first in range(0, len(wanted), MAX_READS):
            found += self._ranges(wanted[first : first + MAX_READS])
        if on_error == "raise":
            for one in found:
                if isinstance(one, Exception):
                    raise one
        return found

    def _ranges(self, wanted: Sequence[tuple[Any, int | None, int | None]]) -> list[Any]:
        opened: dict[str, Any] = {}
        reads: list[tuple[int, tuple[Any, int, memoryview]]] = []
        found: list[Any] = [b""] * len(wanted)
        try:
            for index, (path, start, end) in enumerate(wanted):
                try:
                    path = self._strip_protocol(path)
                    file = opened.get(path) or opened.setdefault(path, self._open(path))
                except OSError as error:
                    found[index] = error
                    continue
                first, last = slice(start, end).indices(file.size)[:2]
                buffer = memoryview(bytearray(max(0, last - first)))
                reads.append((index, (file.opened, first, buffer)))
            try:
                counts = self.files.read_batch([read for _, read in reads])
            except OSError as error:
                counts = [error] * len(reads)
            for (index, (_, _, buffer)), count in zip(reads, counts, strict=True):
                found[index] = count if isinstance(count, Exception) else bytes(buffer[:count])
        finally:
            for file in opened.values():
                file.close()
        return found

    def cp_file(self, path1: Any, path2: Any, **_: Any) -> None:
        """Copy a file through this process. A directory is made, without what is in it."""
        source, target = self._strip_protocol(path1), self._strip_protocol(path2)
        if self.isdir(source):
            self.files.makedirs(target, exist_ok=True)
            return
        files = self.files
        self._making_room(target, lambda: copy_file(files, source, files, target, options=CopyOptions()))

    def get_file(
        self, rpath: Any, lpath: Any = None, callback: Any = DEFAULT_CALLBACK, outfile: Any = None, **options: Any
    ) -> None:
        """The local file has its name when it is whole."""
        source = self._strip_protocol(rpath)
        if outfile is not None or isfilelike(lpath):
            super().get_file(source, lpath, callback=callback, outfile=outfile, **options)
            return
        target = os.path.abspath(stringify_path(lpath))
        if self.isdir(source):
            os.makedirs(target, exist_ok=True)
            return
        os.makedirs(os.path.dirname(target), exist_ok=True)
        callback.set_size(self.files.stat(source).st_size)
        copy_file(self.files, source, LocalTree(), target, advanced=callback.relative_update)

    def put_file(
        self, lpath: Any, rpath: Any, callback: Any = DEFAULT_CALLBACK, mode: str = "overwrite", **_: Any
    ) -> None:
        """The file has its name when it is whole."""
        source, target = os.path.abspath(stringify_path(lpath)), self._strip_protocol(rpath)
        if os.path.isdir(source):
            self.files.makedirs(target, exist_ok=True)
            return
        if mode == "create" and self.lexists(target):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), target)
        if self._intrans:
            super().put_file(source, target, callback=callback)
            return
        callback.set_size(os.stat(source).st_size)

        def copy() -> None:
            copy_file(LocalTree(), source, self.files, target, advanced=callback.relative_update)

        self._making_room(target, copy)


def _kind(mode: int) -> str:
    if stat.S_ISDIR(mode):
        return "directory"
    return "file" if stat.S_ISREG(mode) else "other"


class FireflyerFile(io.BufferedIOBase):
    """An open file with what fsspec's users ask of one. `opened`: the file system's own."""

    def __init__(self, fs: FireflyerFileSystem, path: str, place: str, mode: str, opened: OpenFile) -> None:
        super().__init__()
        self.fs, self.path, self.mode = fs, path, mode
        self.opened = opened
        self._place = place
        self._reads = "r" in mode or "+" in mode
        self._writes = mode[0] in "wxa" or "+" in mode

    @property
    def size(self) -> int:
        """Bytes, with those written here."""
        at = self.opened.tell()
        end = self.opened.seek(0, os.SEEK_END)
        self.opened.seek(at)
        return end

    @property
    def full_name(self) -> str:
        return self.fs.unstrip_protocol(self.path)

    def info(self) -> dict[str, Any]:
        return self.fs.info(self._place)

    def readable(self) -> bool:
        return self._reads

    def writable(self) -> bool:
        return self._writes

    def seekable(self) -> bool:
        return True

    def read(self, size: int | None = -1, /) -> bytes:
        """Less than asked for only at the end of the file."""
        size = -1 if size is None else size
        data = self.opened.read(size) or b""
        if size < 0 or len(data) == size or not data:
            return data
        parts = [data]
        while data and (left := size - sum(map(len, parts))) > 0:
            data = self.opened.read(left) or b""
            parts.append(data)
        return b"".join(parts)

    def readline(self, size: int | None = -1, /) -> bytes:
        return self.opened.readline(-1 if size is None else size)

    def read1(self, size: int = -1, /) -> bytes:
        return self.read(size)

    def readinto(self, buffer: Any, /) -> int:
        view = memoryview(buffer).cast("B")
        filled = 0
        while filled < len(view):
            count = self.opened.readinto(view[filled:])
            if not count:
                break
            filled += count
        return filled

    def readinto1(self, buffer: Any, /) -> int:
        return self.readinto(buffer)

    def write(self, data: Any, /) -> int:
        view = memoryview(data).cast("B")
        total = len(view)
        while view:
            written = self.opened.write(view)
            if not written:
                raise OSError(errno.EIO, os.strerror(errno.EIO), self.path)
            view = view[written:]
        return total

    def seek(self, offset: int, whence: int = 0, /) -> int:
        return self.opened.seek(offset, whence)

    def tell(self) -> int:
        return self.opened.tell()

    def truncate(self, size: int | None = None, /) -> int:
        return self.opened.truncate(size)

    def flush(self) -> None:
        """Everything is at the storage nodes then. Also after `close`, where there is nothing to flush."""
        if self._writes and not self.opened.closed:
            self.opened.flush()

    def fsync(self) -> None:
        self.opened.fsync()

    def close(self) -> None:
        if not self.closed:
            try:
                self.opened.close()
            finally:
                super().close()

    def commit(self) -> None:
        """The end of a transaction: the file gets its name."""
        self.fs.files.rename(self._place, self.path, NO_REPLACE if self.mode[0] == "x" else 0)

    def discard(self) -> None:
        self.fs.files.unlink(self._place)
