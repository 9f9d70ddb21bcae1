"""Where checkpoints lie, chosen by path: a directory of this machine, or one of the file system 3FS.

    open_storage("run/checkpoints")                     # on this machine, or what is mounted there
    open_storage("ff://host:7000,other:7000/ckpt/run1") # of the cluster with these managers
    open_storage("ff:///ckpt/run1")                     # of the cluster that FIREFLYER_FS names, else the default one

Everything below works through the `Disk` port, so it does not know which it is.
"""

from __future__ import annotations

import os
import threading
from typing import Final, NamedTuple

import msgspec

from fireflyer.base.errors import UsageError
from fireflyer.base.ports import Disk
from fireflyer.fs.tools.addresses import SCHEME, Address, clean_path, parse_address
from fireflyer.fs.tools.default_cluster import TOKEN_FILE_VARIABLE, default_token_file, require_target
from fireflyer.identity.private_files import read_private_file
from fireflyer.runtime.disk import RealDisk

__all__ = ["CheckpointPath", "Storage", "is_remote", "open_storage", "wait_for_chunks"]

CheckpointPath = str | os.PathLike[str]
_MAX_TOKEN_BYTES: Final = 4096


class Storage(NamedTuple):
    disk: Disk
    root: str
    """The directory as `disk` knows it: an absolute path."""
    name: str
    """The same for people: of 3FS the address that was given."""


def is_remote(path: CheckpointPath) -> bool:
    """Of 3FS: the same for all ranks, wherever they were started."""
    return os.fspath(path).startswith(SCHEME)


def open_storage(path: CheckpointPath, *, disk: Disk | None = None, token_file: str | None = None) -> Storage:
    """The storage that `path` names, connected. `disk`: on which it is a directory, where that is known. `token_file`:
    with the token of a user of 3FS, for clusters that are named by their managers; else FIREFLYER_FS_TOKEN_FILE names
    it, or in a task FF_TOKEN_FILE. A process connects to each cluster once, and stays connected. Raises `UsageError`
    for a path that names no directory below /, and what `fireflyer.fs.connect` raises."""
    given = os.fspath(path)
    if disk is not None or not is_remote(given):
        root = os.path.abspath(given)
        _require_below_root(given, root if given else "")
        return Storage(disk or RealDisk(), root, root)
    address = parse_address(given)
    root = clean_path(address.path)
    if any(part in (".", "..") for part in root.split("/")):
        raise UsageError(f"checkpoint directory {given!r} contains . or ..; write the path without them")
    _require_below_root(given, root)
    target = require_target(address.target)
    return Storage(_connected(target, token_file), root, f"{_prefix_of(target)}{root}")


def _require_below_root(given: str, root: str) -> None:
    if not root.strip("/"):
        raise UsageError(f"checkpoint directory {given!r} must be a directory below /")


def _prefix_of(target: str) -> str:
    if target.startswith(SCHEME + "/"):
        return Address(directory=target[len(SCHEME) :]).prefix
    return parse_address(target).prefix


# Connections of this process.

_lock = threading.Lock()
_disks: dict[tuple[int, str, str | None, int | None], Disk] = {}
_patience_ns: int | None = None


def wait_for_chunks(at_most_ns: int) -> None:
    """How long connections that this process makes from now on wait for data that no storage node serves, instead of
    the five minutes of jobs: somebody sits in front of a command."""
    global _patience_ns
    _patience_ns = at_most_ns


def _in_child() -> None:
    """Another thread may have had the lock when this process was forked."""
    global _lock
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_in_child)


def _connected(target: str, token_file: str | None) -> Disk:
    from fireflyer.fs import connect  # who saves to a directory needs no client of 3FS
    from fireflyer.fs.client.files.disk import DISK_OPTIONS, FileSystemDisk

    prefix = _prefix_of(target)
    if token_file is None and not parse_address(prefix).directory:  # a local cluster lets in who may read its secret
        token_file = default_token_file()
    key = os.getpid(), target, token_file, _patience_ns
    with _lock:
        if key not in _disks:
            token = None
            if token_file is not None:
                token = read_private_file(token_file, _MAX_TOKEN_BYTES).decode(errors="replace").strip()
            elif not parse_address(prefix).directory:
                raise UsageError(
                    f"{prefix} asks who you are: name a file with your token in {TOKEN_FILE_VARIABLE} (made by `ff fs "
                    "admin user add --token`); in Python also by token_file"
                )
            options = DISK_OPTIONS
            if _patience_ns is not None:
                chunks = msgspec.structs.replace(options.chunks, timeout_ns=_patience_ns)
                options = msgspec.structs.replace(options, chunks=chunks)
            files = connect(target, token=token, name="checkpoint", options=options)
            _disks[key] = FileSystemDisk(files, prefix)
        return _disks[key]
