"""Small files with names, beside the blobs: in a directory, or behind a URL of fsspec.

A name is written once, whole or not at all, and is never written again: who changes something writes another name and
removes the old one. So it does not matter that few object stores can replace a file only if it is still the one that
was read. All calls block; they raise `FireflyerError`.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
from typing import NamedTuple, Protocol

from fireflyer.base.errors import DataCorruption, NotFound
from fireflyer.base.os_errors import translate_os_error
from fireflyer.cluster.objects.url import fsspec_at, modified_ns, translated
from fireflyer.identity.private_files import read_private_file, write_private_file

__all__ = ["DirectoryFiles", "NamedFile", "NamedFiles", "UrlFiles", "open_files"]


class NamedFile(NamedTuple):
    name: str
    """Without the folder."""
    changed_ns: int
    """Unix time."""


class NamedFiles(Protocol):
    """Names are relative paths, `a/b/c`, that callers have made of numbers and checked words."""

    def put(self, name: str, data: bytes) -> None:
        """Durable when it returns; its folders are made."""

    def get(self, name: str, max_bytes: int) -> bytes:
        """Raises `NotFound`, `DataCorruption` where it is longer."""

    def list(self, folder: str) -> list[NamedFile]:
        """Files and folders in it, sorted; none where it is not there. `folder` empty: the whole."""

    def remove(self, name: str) -> None:
        """A file, or a folder with all in it. Nothing happens where there is none."""


class DirectoryFiles(NamedFiles):
    def __init__(self, root: str) -> None:
        self._root = os.path.abspath(root)

    def put(self, name: str, data: bytes) -> None:
        path = os.path.join(self._root, name)
        try:
            os.makedirs(self._root, mode=0o700, exist_ok=True)  # others do not come in
            os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
        except OSError as error:
            raise translate_os_error(error, f"make {os.path.dirname(path)}") from error
        write_private_file(path, data)

    def get(self, name: str, max_bytes: int) -> bytes:
        return read_private_file(os.path.join(self._root, name), max_bytes)

    def list(self, folder: str) -> list[NamedFile]:
        path = os.path.join(self._root, folder)
        found = []
        try:
            with os.scandir(path) as entries:
                for entry in entries:
                    with contextlib.suppress(FileNotFoundError):
                        found.append(NamedFile(entry.name, entry.stat(follow_symlinks=False).st_mtime_ns))
        except FileNotFoundError:
            return []
        except OSError as error:
            raise translate_os_error(error, f"read directory {path}") from error
        return sorted(found)

    def remove(self, name: str) -> None:
        path = os.path.join(self._root, name)
        try:
            if os.path.isdir(path):
                shutil.rmtree(path)
            else:
                os.unlink(path)
        except FileNotFoundError:
            return
        except OSError as error:
            raise translate_os_error(error, f"remove {path}") from error


class UrlFiles(NamedFiles):
    def __init__(self, url: str) -> None:
        """Raises `UsageError` where fsspec or what it needs is not installed."""
        self._url = url
        self._fs, self._root = fsspec_at(url, {})

    def put(self, name: str, data: bytes) -> None:
        path = f"{self._root}/{name}"
        part = f"{self._root}/parts/{secrets.token_hex(12)}"
        with translated(f"put {name} into {self._url}"):
            self._fs.makedirs(f"{self._root}/parts", exist_ok=True)
            self._fs.makedirs(path.rpartition("/")[0], exist_ok=True)
            try:
                with self._fs.open(part, "wb") as file:
                    file.write(data)
                self._fs.mv(part, path)
            except BaseException:
                with contextlib.suppress(Exception):
                    self._fs.rm_file(part)
                raise

    def get(self, name: str, max_bytes: int) -> bytes:
        with translated(f"read {name} from {self._url}"):
            try:
                with self._fs.open(f"{self._root}/{name}", "rb") as file:
                    data = bytes(file.read(max_bytes + 1))
            except FileNotFoundError:
                raise NotFound(f"{name} is not in {self._url}") from None
        if len(data) > max_bytes:
            raise DataCorruption(f"{name} in {self._url} is longer than {max_bytes} bytes, so it is not what was put")
        return data

    def list(self, folder: str) -> list[NamedFile]:
        path = f"{self._root}/{folder}".rstrip("/")
        with translated(f"list {folder} of {self._url}"):
            self._fs.invalidate_cache()
            try:
                found = self._fs.ls(path, detail=True)
            except (FileNotFoundError, NotADirectoryError):
                return []
        named = [NamedFile(str(one["name"]).rstrip("/").rpartition("/")[2], modified_ns(one)) for one in found]
        return sorted(one for one in named if one.name != path.rpartition("/")[2])

    def remove(self, name: str) -> None:
        with translated(f"remove {name} from {self._url}"), contextlib.suppress(NotFound, FileNotFoundError):
            self._fs.invalidate_cache()
            self._fs.rm(f"{self._root}/{name}", recursive=True)


def open_files(where: str) -> NamedFiles:
    """Of a directory (an absolute path) or a URL of fsspec. Raises `UsageError`."""
    return UrlFiles(where) if "://" in where else DirectoryFiles(where)
