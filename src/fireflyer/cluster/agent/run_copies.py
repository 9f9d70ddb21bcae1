"""Copies of users' directories on a node: one for each run that has a snapshot, made before anything of it starts.

    orders name a run with a snapshot ──begin──> a thread fetches blobs from the leader, builds the environment, copies
    the launcher of the run ──wait──> its path      tickets of the run ──find──> its path, or `Busy`
    the run is gone ──remove──> the copy is removed, or what is made of it

A copy belongs to the account of the run; the directory in which all are is the agent's, or, for other accounts, below
`accounts_dir`, which is root's. A copy that is there is complete, so the next agent uses it. Beside it is a link to the
run's environment where it has one (`ENVIRONMENT_END`): made first, so it is there when the copy is.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import stat
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final

from fireflyer.base.errors import Aborted, Busy, FireflyerError, InvariantViolation, TransientError
from fireflyer.base.os_errors import translate_os_error
from fireflyer.base.units import SECOND
from fireflyer.cluster.agent.accounts import Account
from fireflyer.cluster.agent.run_environments import RunEnvironments, held_by_link, link_environment, read_lock
from fireflyer.cluster.objects import Environment, LockFile, NodeCache
from fireflyer.cluster.objects.trees import remove_tree
from fireflyer.cluster.schema.runner import ENVIRONMENT_END
from fireflyer.cluster.schema.sync import FETCH_BLOB, BlobPiece, FetchBlob
from fireflyer.identity.handshake import UserCredential
from fireflyer.runtime.rpc import BlockingRpcClient

__all__ = ["Leaders", "RunCopies"]

_log = logging.getLogger(__name__)
_AT_ONCE: Final = 4
_CALL_NS: Final = 30 * SECOND
_CONNECT_NS: Final = 3 * SECOND
_PAUSE_S: Final = 0.5
_GIVE_UP_S: Final = 60.0
"""Without one answer of a manager that leads."""

Leaders = Callable[[], tuple[UserCredential, list[str]]]
"""The node's credential, and `host:port` of all managers, the one first that answered last."""


class _RunCopy:
    def __init__(self, token: str, path: str) -> None:
        self.token = token
        self.path = path
        self.doing = ""
        self.environment: Environment | None = None
        """In use by this run."""
        self.stopped = threading.Event()
        self.made: Future[str] = Future()


class RunCopies:
    """By run tokens. `cache`: directory of the blobs, which only the agent may read. Calls do not block, but `wait`."""

    def __init__(
        self,
        root: str,
        cache: str,
        leaders: Leaders,
        environments: RunEnvironments,
        on_doing: Callable[[str], None] = lambda _: None,
    ) -> None:
        """`on_doing` is called, in a thread, with the token of a run for which `doing` says something else."""
        self._environments = environments
        self._on_doing = on_doing
        self._root = root
        self._cache = cache
        self._leaders = leaders
        self._copies: dict[str, _RunCopy] = {}
        self._threads = ThreadPoolExecutor(_AT_ONCE, "copies")

    @property
    def tokens(self) -> tuple[str, ...]:
        return tuple(self._copies)

    def adopt(self, token: str) -> None:
        """Of a run that an earlier agent began: it may have a copy, which `remove` removes."""
        path = os.path.join(self._root, token)
        if token not in self._copies and os.path.isdir(path):
            self._copies[token] = copy = _RunCopy(token, path)
            copy.environment = held_by_link(path + ENVIRONMENT_END)
            copy.made.set_result(path)

    def begin(self, token: str, snapshot: str, account: Account | None, environment: str = "") -> None:
        """Nothing happens where it was begun before. `environment`: of its lock file, a file of the snapshot."""
        self.adopt(token)
        if token not in self._copies:
            self._copies[token] = copy = _RunCopy(token, os.path.join(self._root, token))
            self._threads.submit(self._make, copy, snapshot, account, environment)

    def find(self, token: str) -> str:
        """The path of the copy. Raises `Busy` while it is made, or why it was not."""
        copy = self._copies.get(token)
        if copy is None or not copy.made.done():
            doing = copy.doing if copy is not None else ""
            raise Busy(f"run {token} is not ready there: {doing or 'its directory is being copied'}; ask again")
        return copy.made.result()

    def doing(self, token: str) -> str:
        """What takes long there, for people; empty: nothing."""
        copy = self._copies.get(token)
        return copy.doing if copy is not None else ""

    def wait(self, token: str) -> str:
        """As `find`; blocks until the copy is made."""
        copy = self._copies.get(token)
        if copy is None:
            raise Aborted(f"the directory of run {token} was removed")
        return copy.made.result()

    def stop(self, token: str) -> None:
        """What is not made yet is given up."""
        if token in self._copies:
            self._copies[token].stopped.set()

    def remove(self, token: str) -> None:
        copy = self._copies.pop(token, None)
        if copy is not None:
            copy.stopped.set()
            self._threads.submit(_remove, copy)

    def close(self) -> None:
        for copy in self._copies.values():
            copy.stopped.set()
        self._threads.shutdown(wait=False)

    def collect(self) -> None:
        """Environments that no run has used for long."""
        self._threads.submit(self._environments.collect)

    def _make(self, copy: _RunCopy, snapshot: str, account: Account | None, environment: str) -> None:
        source = _Source(snapshot, self._leaders, copy.stopped)
        try:
            try:
                os.makedirs(self._root, mode=0o711, exist_ok=True)
            except OSError as error:
                raise translate_os_error(error, f"make {self._root}") from error
            cache = NodeCache(self._cache)
            if environment:
                lock = read_lock(cache.manifest(snapshot, source.fetch), environment, source.fetch)
                self._build(copy, lock, account)
            owner = None if account is None else (account.uid, account.gid)
            cache.materialise(snapshot, copy.path, source.fetch, account=owner)
        except FireflyerError as error:
            _log.warning("a snapshot was not copied snapshot=%s reason=%s", snapshot, error)
            copy.made.set_exception(error)
        except BaseException as error:
            _log.error("a snapshot was not copied snapshot=%s", snapshot, exc_info=error)
            copy.made.set_exception(InvariantViolation(f"the agent failed: {type(error).__name__}: {error}"))
        else:
            copy.made.set_result(copy.path)
        finally:
            source.close()

    def _build(self, copy: _RunCopy, lock: LockFile, account: Account | None) -> None:
        def say(doing: str) -> None:
            copy.doing = doing
            self._on_doing(copy.token)

        try:
            copy.environment = self._environments.get(
                lock, account, stopped=copy.stopped, on_build=lambda: say("building the environment")
            )
        finally:
            say("")
        link_environment(copy.environment, copy.path + ENVIRONMENT_END)


class _Source:
    """Blobs of one snapshot, from whichever manager leads. Used by one thread."""

    def __init__(self, snapshot: str, leaders: Leaders, stopped: threading.Event) -> None:
        self._snapshot = snapshot
        self._leaders = leaders
        self._stopped = stopped
        self._client: BlockingRpcClient | None = None

    def fetch(self, blob: str, _size_bytes: int) -> Iterator[bytes]:
        offset = 0
        while True:
            piece = self._ask(FetchBlob(snapshot=self._snapshot, blob=blob, offset=offset))
            if piece.data:
                yield piece.data
            offset += len(piece.data)
            if not piece.data or offset >= piece.size_bytes:
                return

    def _ask(self, asked: FetchBlob) -> BlobPiece:
        until_s = time.monotonic() + _GIVE_UP_S
        reason = "none is known"
        while not self._stopped.is_set():
            credential, addresses = self._leaders()
            for address in addresses:
                try:
                    if self._client is None:
                        self._client = BlockingRpcClient.connect(address, credential, _CONNECT_NS)
                    return self._client.call(FETCH_BLOB, asked, _CALL_NS)
                except TransientError as error:
                    self.close()
                    reason = str(error)
            if time.monotonic() > until_s:
                raise Busy(f"no manager gave the files of the task: {reason}")
            self._stopped.wait(_PAUSE_S)
        raise Aborted("the run was stopped while its directory was copied")

    def close(self) -> None:
        if self._client is not None:
            self._client.close()
            self._client = None


def _remove(copy: _RunCopy) -> None:
    copy.made.exception()  # when it is made, or given up
    with contextlib.suppress(FileNotFoundError):
        os.unlink(copy.path + ENVIRONMENT_END)
    if copy.environment is not None:
        copy.environment.close()
    if os.geteuid() == 0:
        remove_tree(copy.path)
        return
    try:
        shutil.rmtree(copy.path, onerror=_make_writable)
    except FileNotFoundError:
        return
    except OSError as error:
        _log.error("the copy of a snapshot was not removed path=%s reason=%s", copy.path, error)


def _make_writable(function: Callable[..., object], path: str, error: object) -> None:
    """For directories that the user has made read-only. An agent of root is refused nothing, and so never comes here
    with a path of another account."""
    if os.geteuid() == 0:
        raise OSError(f"{path} cannot be removed: {error}")
    for one in (os.path.dirname(path), path):
        if not os.path.islink(one):
            os.chmod(one, stat.S_IRWXU)
    if function in (os.unlink, os.rmdir):
        function(path)
    else:
        shutil.rmtree(path)
