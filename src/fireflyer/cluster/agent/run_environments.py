"""The Python environments that this node builds for runs, from lock files that travel in their snapshots.

Each account has a cache of its own. Its environments belong to the account, which may change them; so a user can spoil
what runs of their own account use, and nothing of anybody else's. The directory in which caches are is the agent's.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import shutil
import threading
from collections.abc import Callable
from typing import Final

from fireflyer.base.errors import FireflyerError, UsageError
from fireflyer.base.os_errors import translate_os_error
from fireflyer.base.units import SECOND
from fireflyer.cluster.agent.accounts import Account
from fireflyer.cluster.core.objects.blobs import hash_of
from fireflyer.cluster.core.objects.manifest import FileEntry, Manifest
from fireflyer.cluster.objects import MAX_LOCK_BYTES, Environment, EnvironmentCache, LockFile, hold_environment
from fireflyer.cluster.objects.node_cache import Fetch

__all__ = ["KEEP_UNUSED_NS", "RunEnvironments", "held_by_link", "link_environment", "read_lock"]

_log = logging.getLogger(__name__)
KEEP_UNUSED_NS: Final = 14 * 86_400 * SECOND
"""Environments that no run has used for so long are removed."""
_OWN: Final = "own"


class RunEnvironments:
    def __init__(self, root: str) -> None:
        """`root`: directory of the caches, in which only this agent may write."""
        self._root = root

    def get(
        self,
        lock: LockFile,
        account: Account | None,
        *,
        stopped: threading.Event,
        on_build: Callable[[], None],
    ) -> Environment:
        """As `EnvironmentCache.get`."""
        lock.check_hashes()
        return self._cache_of(account).get(lock, stopped=stopped, on_build=on_build)

    def collect(self) -> None:
        """Of all accounts. What is in use stays."""
        try:
            names = os.listdir(self._root)
        except FileNotFoundError:
            return
        for name in sorted(names):
            try:
                removed = EnvironmentCache(os.path.join(self._root, name), keep_mode=True).collect(KEEP_UNUSED_NS)
            except (FireflyerError, OSError) as error:
                _log.error("environments were not collected account=%s reason=%s", name, error)
            else:
                if removed:
                    _log.info("unused environments were removed account=%s count=%d", name, removed)

    def _cache_of(self, account: Account | None) -> EnvironmentCache:
        try:
            os.makedirs(self._root, mode=0o711, exist_ok=True)
        except OSError as error:
            raise translate_os_error(error, f"make {self._root}") from error
        return EnvironmentCache(
            os.path.join(self._root, _OWN if account is None else str(account.uid)),
            uv=shutil.which("uv"),
            account=None if account is None else (account.uid, account.gid),
            require_hashes=True,
        )


def read_lock(manifest: Manifest, blob: str, fetch: Fetch) -> LockFile:
    """The file of a snapshot with these contents. Raises `UsageError`, and as `fetch` does."""
    entry = next((one for one in manifest.entries if isinstance(one, FileEntry) and one.blob == blob), None)
    if entry is None:
        raise UsageError("the lock file of the environment is not in the task's directory; submit the task again")
    kind = LockFile.kind_of(entry.path)
    if entry.size_bytes > MAX_LOCK_BYTES:
        raise UsageError(f"{entry.path} is longer than {MAX_LOCK_BYTES} bytes, so it is no lock file")
    data = bytearray()
    for piece in fetch(blob, entry.size_bytes):
        data += piece
        if len(data) > entry.size_bytes:
            break
    if hash_of(data) != blob:
        raise UsageError(f"{entry.path} came with other bytes than were submitted; submit the task again")
    return LockFile(kind, bytes(data))


def link_environment(environment: Environment, path: str) -> None:
    part = f"{path}.{secrets.token_hex(8)}.part"
    try:
        os.symlink(environment.path, part)
        os.rename(part, path)
    except OSError as error:
        raise translate_os_error(error, f"make {path}") from error


def held_by_link(path: str) -> Environment | None:
    """The environment of a run that an earlier agent began."""
    with contextlib.suppress(OSError):
        return hold_environment(os.readlink(path))
    return None
