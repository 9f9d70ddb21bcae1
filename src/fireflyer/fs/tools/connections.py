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
from typing import Any, Final, Protocol, cast

from fireflyer.base.errors import UsageError
from fireflyer.fs.tools.addresses import clean_path, parse_address
from fireflyer.fs.tools.default_cluster import default_target
from fireflyer.fs.tools.trees import Tree

__all__ = ["TARGET_VARIABLE", "Connected", "at", "close_all", "default_cluster", "shared"]

TARGET_VARIABLE: Final = "FIREFLYER_FS"
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


def default_cluster() -> str:
    """As `fireflyer.fs.connect` wants it. Raises `UsageError` where there is none."""
    target = os.environ.get(TARGET_VARIABLE) or default_target()
    if not target:
        raise UsageError(
            "no cluster is named, and none was started here (`ff fs up -d`); use ff://host:7000/path, the option "
            f"target, or the environment variable {TARGET_VARIABLE}"
        )
    return target


def at(url: str, *, token_file: str | None = None) -> tuple[Connected, str]:
    """The file system that `url` (`ff://…`) names, and the path there. Raises `UsageError`, and what connecting
    raises. `token_file`: of a user, where the URL names managers."""
    address = parse_address(url)
    return shared(address.target or default_cluster(), token_file=token_file), clean_path(address.path)


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
        token = read_private_file(token_file, 4096).decode(errors="replace").strip()
    return cast("Connected", connect(target, token=token))


def close_all() -> None:
    """Whoever asks from now on gets a new connection."""
    for (pid, *_), connected in list(_shared.items()):
        if pid == os.getpid():
            with contextlib.suppress(Exception):
                connected.close()
    _shared.clear()
