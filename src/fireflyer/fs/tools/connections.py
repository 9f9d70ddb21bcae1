"""One connection to each cluster for all of a process: what fsspec, record sets and others share.

`at("ff://host:7000/data/x")` is the file system and the path in it. The cluster of `ff:///path` and `ff://path` is the
one that the environment's FIREFLYER_FS names, else that of the working directory (`default_cluster`).
"""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
from collections.abc import Sequence
from typing import Any, Final, NamedTuple, Protocol, cast

from fireflyer.fs.tools.addresses import SCHEME, Address, clean_path, parse_address
from fireflyer.fs.tools.default_cluster import default_token_file, require_target
from fireflyer.fs.tools.trees import Tree

__all__ = ["Connected", "Location", "at", "close_all", "shared"]

_MAX_TOKEN_BYTES: Final = 4096
_lock = threading.Lock()
_shared: dict[tuple[int, str, str | None, str | None], Connected] = {}


def _in_child() -> None:
    """Another thread may have had the lock when this process was forked, and is not there to let it go."""
    global _lock
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_in_child)


class Connected(Tree, Protocol):
    def open_file(self, path: str, flags: int = os.O_RDONLY) -> Any: ...
    def read_batch(self, reads: Sequence[tuple[Any, int, memoryview]]) -> list[Any]: ...
    def close(self) -> None: ...


class Location(NamedTuple):
    files: Connected
    path: str
    url: str
    """That names its cluster, so it means the same in other processes of this machine."""


def at(url: str, *, token_file: str | None = None) -> Location:
    """The file system that `url` (`ff://…`) names, and the path there. Raises `UsageError`, and what connecting
    raises. `token_file`: with the token of a user, whichever way the cluster is named; else as `default_cluster` says,
    for one that is named by its managers."""
    address = parse_address(url)
    path = clean_path(address.path)
    if not address.target:
        address = _parse_target(require_target())
    if token_file is None and not address.directory:  # a local cluster lets in who may read its secret
        token_file = default_token_file()
    return Location(shared(address.target, token_file=token_file), path, f"{address.prefix}{path}")


def _parse_target(target: str) -> Address:
    if target.startswith(SCHEME + "/"):
        return Address(directory=target[len(SCHEME) :].rstrip("/"))
    return parse_address(target)


def shared(target: str, token: str | None = None, token_file: str | None = None) -> Connected:
    """This process's connection, made by the first who asks. A forked child makes its own. Raises `FireflyerError`."""
    key = os.getpid(), target, token, token_file
    with _lock:
        found = _shared.get(key)
        if found is None:
            if not _shared:
                atexit.register(close_all)
            found = _shared[key] = _connect(target, token, token_file)
        return found


def _connect(target: str, token: str | None, token_file: str | None) -> Connected:
    from fireflyer.fs import connect
    from fireflyer.identity.private_files import read_private_file

    if token_file is not None:
        token = read_private_file(token_file, _MAX_TOKEN_BYTES).decode(errors="replace").strip()
    return cast("Connected", connect(target, token=token))


def close_all() -> None:
    """Whoever asks from now on gets a new connection."""
    for (pid, *_), connected in list(_shared.items()):
        if pid == os.getpid():
            with contextlib.suppress(Exception):
                connected.close()
    _shared.clear()
