"""The file system that `ff up` runs beside the platform, in DIR/storage: made, started, and ended after it."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Awaitable, Callable, Coroutine
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import msgspec

from fireflyer.base.errors import UsageError

if TYPE_CHECKING:
    from fireflyer.cluster.local.config import StorageWish
    from fireflyer.cluster.local.layout import AccountsAt, PlatformLayout
    from fireflyer.fs.schema.manager import Status
    from fireflyer.fs.service.local.layout import Layout, LocalCluster
    from fireflyer.runtime.processes.run_lock import RunLock

__all__ = ["LocalStorage", "check_storage", "storage_of"]

_Platform: TypeAlias = Callable[[Callable[[], Awaitable[None]]], Coroutine[Any, Any, None]]
HERE: Final = "127.0.0.1"
NODES: Final = 3
REPLICAS: Final = 2
TARGETS: Final = 4
FAILURE_TIMEOUT_MS: Final = 6000


class LocalStorage:
    """Of which the configuration is on disk; `run` starts its processes."""

    def __init__(self, layout: Layout, cluster: LocalCluster, lock: RunLock, *, had_own_users: bool = False) -> None:
        """`had_own_users`: at its last start, as an earlier release made it."""
        self.had_own_users = had_own_users
        self.layout = layout
        self.cluster = cluster
        self._lock = lock
        self._up: asyncio.Future[Status] | None = None

    @property
    def accounts(self) -> AccountsAt:
        """Where the platform says whose token it is."""
        from fireflyer.cluster.local.layout import AccountsAt

        return AccountsAt(self.cluster.accounts, self.layout.secret_file)

    def task_environment(self) -> dict[str, str]:
        """By which tasks find it, once it is up; they prove themselves with the token of their run."""
        return {"FIREFLYER_FS": f"ff://{','.join(self.cluster.managers)}"}

    async def run(self, platform: _Platform, say: Callable[[str], None], admin_token: Callable[[], str]) -> None:
        """With `platform`, which waits with what it was given before anything uses the file system. Both begin at once;
        whatever ends one ends the other, the platform first. `admin_token`: of the platform's administrator, once it
        runs. Raises what either raises."""
        from fireflyer.fs.service.local.run import run_local

        if self.had_own_users:
            say(
                f"the file system in {self.layout.directory} has the users of the platform from now on, and tasks no "
                "longer get its secret: they are their users, so give these what tasks have written before (ff fs "
                "chown UID PATH, with the UID that `ff user list` shows)"
            )
        loop = asyncio.get_running_loop()
        up = self._up = loop.create_future()

        def on_up(cluster: LocalCluster, status: Status) -> None:
            self.cluster = cluster
            up.set_result(status)

        async def serves() -> None:
            self.layout.write_admin_token(admin_token())
            await asyncio.shield(up)

        files = loop.create_task(run_local(self.layout, self.cluster, lock=self._lock, say=say, on_up=on_up))
        tasks = loop.create_task(platform(serves))
        try:
            await asyncio.wait((files, tasks), return_when=asyncio.FIRST_COMPLETED)
        finally:
            try:
                await _ended(tasks)
            finally:
                await _ended(files)

    @property
    def status(self) -> Status | None:
        """As it was when it came up."""
        return self._up.result() if self._up is not None and self._up.done() and not self._up.cancelled() else None


async def _ended(task: asyncio.Task[None]) -> None:
    """Raises what it raised."""
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


def check_storage(layout: PlatformLayout, wanted: StorageWish) -> None:
    """Raises `UsageError` for a new file system that cannot be made. Nothing is written."""
    from fireflyer.fs.service.local.layout import Layout

    if _is_new(Layout(layout.storage_directory), wanted, new=not layout.exists()):
        _made(wanted)


def _is_new(files: Layout, wanted: StorageWish, *, new: bool) -> bool:
    """Whether the start makes one."""
    return wanted.nodes != 0 and not files.exists() and (new or _names_any(wanted))


def storage_of(layout: PlatformLayout, wanted: StorageWish, *, new: bool) -> LocalStorage | None:
    """None: without one. `new`: the platform is; one that was made without a file system gets one only where `wanted`
    says so. The lock of its directory is held until this process ends. Raises `UsageError` for what cannot be changed,
    `Busy` where it runs already."""
    from fireflyer.fs.service.local.layout import Layout
    from fireflyer.runtime.processes.run_lock import RunLock

    files = Layout(layout.storage_directory)
    if wanted.nodes == 0:
        return None
    if not files.exists():
        if not _is_new(files, wanted, new=new):
            return None
        cluster, had_own_users = _made(wanted), False
        files.make_directory()
        lock = RunLock(files.lock_file)
        files.make_secret()
    else:
        lock = RunLock(files.lock_file)
        cluster = files.load()
        had_own_users = not cluster.accounts
        _check_same(layout, cluster, wanted)
        if wanted.durable is not None:
            cluster = msgspec.structs.replace(cluster, durable=wanted.durable)
    cluster = msgspec.structs.replace(cluster, accounts=_free(cluster.accounts))
    files.save(cluster)
    return LocalStorage(files, cluster, lock, had_own_users=had_own_users)


def _free(last: str) -> str:
    """Where the platform is to say whose token it is: as at the last start, or where that is taken at another port."""
    for port in (int(last.rpartition(":")[2]) if last else 0, 0):
        with contextlib.suppress(OSError), socket.create_server((HERE, port)) as listener:
            return f"{HERE}:{listener.getsockname()[1]}"
    raise UsageError(f"no port of {HERE} is free; end what holds them")


def _names_any(wanted: StorageWish) -> bool:
    return any(getattr(wanted, name) is not None for name in wanted.__struct_fields__)


def _made(wanted: StorageWish) -> LocalCluster:
    """Raises `UsageError`, with the key of the file."""
    from fireflyer.fs.service.local.layout import new_cluster

    nodes = wanted.nodes or NODES
    try:
        return new_cluster(
            nodes=nodes,
            replicas=wanted.replicas or min(REPLICAS, nodes),
            targets_per_node=wanted.targets_per_node or TARGETS,
            managers=1,
            store=wanted.store or "",
            durable=wanted.durable is not False,
            failure_timeout_ms=FAILURE_TIMEOUT_MS,
        )
    except UsageError as error:
        raise UsageError(f"storage: {error.message.removeprefix('--')}") from None


def _check_same(layout: PlatformLayout, cluster: LocalCluster, wanted: StorageWish) -> None:
    there = {
        "nodes": len(cluster.nodes),
        "replicas": cluster.replicas,
        "targets_per_node": len(cluster.nodes[0].targets) if cluster.nodes else 0,
        "store": cluster.store,
    }
    for name, found in there.items():
        value = getattr(wanted, name)
        if value is not None and value != found:
            shown = "another one" if name == "store" else str(found)
            more = f"; add nodes: ff fs admin add-node --dir {layout.storage_directory}" if name == "nodes" else ""
            raise UsageError(
                f"storage.{name} = {value!r}: the file system in {layout.storage_directory} has {shown}; leave it "
                f"out{more}"
            )
