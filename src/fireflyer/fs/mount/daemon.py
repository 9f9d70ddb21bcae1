"""A mount's process from the first check to the unmounting.

*The end.* Unmounted by somebody: the kernel has sent what it had, and we finish what was asked. It says so when nobody
has the mount any more; who unmounts with `ff fs umount` therefore asks us to end as well. Asked to end (SIGTERM,
SIGINT): we unmount it, which comes to the same. Where programs are still in it, it leaves its place at once, so that
nothing stays there if we are killed while we store; requests are received no more, what was written is sent on, and
from then on programs get ENOTCONN. What others have mounted on the place meanwhile is left alone. Killed: the kernel
gives ENOTCONN at once, and what was written and neither flushed nor closed is lost, as with a machine that loses power.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import queue
import select
import shutil
import signal
import subprocess
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from shlex import quote
from typing import TYPE_CHECKING, Final, Protocol

from fireflyer.base.errors import Busy, NotFound, PermanentError, PermissionDenied, UsageError
from fireflyer.fs.mount.metrics import MountUsage
from fireflyer.fs.mount.mount_table import SUBTYPE, MountEntry, is_mounted, mounted_on
from fireflyer.fs.mount.operations import Operations
from fireflyer.fs.mount.serving import PROCESS_VALUE, Serving, process_name
from fireflyer.runtime.address import Address
from fireflyer.runtime.metrics import Series, serving_metrics

if TYPE_CHECKING:
    from fireflyer.native.fuse import FuseSession

__all__ = ["MountOptions", "Mounted", "check_place", "serve_mount", "unmount", "unmount_and_wait"]

_log = logging.getLogger(__name__)
_DEVICE: Final = "/dev/fuse"
_HELPER: Final = "fusermount3"
_CONFIG: Final = "/etc/fuse.conf"
_READAHEAD_KIB: Final = 4096
"""The kernel's 128 KiB would be a request for each 128 KiB; only root may set it."""
_ENDED_S: Final = 10.0
_ANSWER_S: Final = 10.0
"""It answers that itself, without the cluster."""
_STORED_S: Final = 300.0
_UNMOUNTED_S: Final = 1.0
"""For its process to be told by the kernel."""


class Mounted(Operations, Protocol):
    @property
    def held(self) -> MountUsage: ...

    async def finish(self) -> None:
        """Everything that was written is sent on, and everything open is closed. Called once, at the end."""
        ...


@dataclass(frozen=True, slots=True)
class MountOptions:
    """`name`: what `mount` shows as the source. `allow_other`: other users than who mounts, too. `check_rights`: by the
    kernel, from owner and mode. `metrics_listen`: HOST:PORT, for Prometheus; "": nowhere."""

    name: str = "fireflyer"
    allow_other: bool = False
    read_only: bool = False
    check_rights: bool = True
    metrics_listen: str = ""

    def words(self) -> list[str]:
        name = self.name.replace("\\", "\\\\").replace(",", "\\,")
        # Nobody keeps when a file was read: `mount` says so.
        words = [f"fsname={name}", f"subtype={SUBTYPE}", "noatime"]
        chosen = {"allow_other": self.allow_other, "ro": self.read_only, "default_permissions": self.check_rights}
        return words + [word for word, given in chosen.items() if given]


def check_place(directory: str, options: MountOptions) -> None:
    """Raises `FireflyerError` where it cannot be mounted, before anything is begun."""
    if not os.path.exists(_DEVICE):
        raise UsageError(
            f"{_DEVICE} does not exist; load the kernel module (modprobe fuse), or start the container with --device "
            f"{_DEVICE}"
        )
    if is_mounted(directory):  # before anything is asked of it: nobody may answer
        raise UsageError(
            f"{directory} is mounted by `ff fs mount` already, or its mount process has died; give another directory, "
            f"or unmount it first: ff fs umount {quote(directory)}"
        )
    try:
        found = os.listdir(directory)
    except FileNotFoundError:
        raise NotFound(f"{directory} does not exist; create it: mkdir {quote(directory)}") from None
    except NotADirectoryError:
        raise UsageError(f"{directory} is not a directory; give an empty directory") from None
    except OSError as error:
        raise PermissionDenied(f"{directory} cannot be read: {error.strerror}") from None
    if found:
        raise UsageError(f"{directory} is not empty ({found[0]!r}, …); give an empty directory")
    if os.geteuid() == 0:
        return
    if shutil.which(_HELPER) is None:
        raise UsageError(
            f"{_HELPER} is not installed, which users other than root need to mount; on Debian: apt-get install fuse3"
        )
    if options.allow_other and not _users_may_share():
        raise PermissionDenied(
            f"--allow-other is only for root unless {_CONFIG} has the line 'user_allow_other'; add it, or mount as root"
        )


def _users_may_share() -> bool:
    with contextlib.suppress(OSError), open(_CONFIG, encoding="utf-8", errors="replace") as file:
        return any(line.strip() == "user_allow_other" for line in file)
    return False


def unmount(directory: str, *, lazy: bool = False) -> None:
    """Raises `OSError` (EBUSY: programs are in it; EINVAL: it is no mount like ours)."""
    from fireflyer.native.fuse import detach

    if not is_mounted(directory):
        raise OSError(errno.EINVAL, "not mounted by Fire-Flyer")
    directory = os.path.abspath(directory)
    if os.geteuid() == 0:
        detach(directory, lazy=lazy)
        return
    command = [_HELPER, "-u", *(["-z"] if lazy else []), "--", directory]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, check=False)
    if done.returncode != 0:
        said = done.stderr.decode(errors="replace").strip().removeprefix(f"{_HELPER}: ")
        raise OSError(errno.EBUSY if "busy" in said else errno.EINVAL, said or "it cannot be unmounted")


def _serving_process(directory: str) -> str:
    """As `process_name`. In a thread, which may have to be left alone with its question."""
    answers: queue.SimpleQueue[bytes | OSError] = queue.SimpleQueue()

    def ask() -> None:
        try:
            answers.put(os.getxattr(directory, PROCESS_VALUE))
        except OSError as error:
            answers.put(error)

    threading.Thread(target=ask, daemon=True, name="mount-process").start()
    try:
        answer = answers.get(timeout=_ANSWER_S)
    except queue.Empty:
        raise Busy(
            f"the mount process of {directory} does not answer; end it, or unmount without waiting for unwritten "
            f"data: ff fs umount --lazy {quote(directory)}"
        ) from None
    if isinstance(answer, OSError):
        raise answer
    return answer.decode("ascii")


def unmount_and_wait(directory: str, wait_s: float = _STORED_S) -> bool:
    """Until its process has stored what was written, and ended. False: that takes longer, or cannot be known. Raises as
    `unmount`, and `Busy` where its process answers nothing: programs in it wait for ever, and so would we."""
    with contextlib.ExitStack() as stack:
        process, gone = -1, False
        try:
            name = _serving_process(directory)
            process = os.pidfd_open(int(name.partition(" ")[0]))
            stack.callback(os.close, process)
            if process_name(int(name.partition(" ")[0])) != name:
                process = -1  # it is of another namespace of processes
        except OSError as error:
            gone = error.errno in (errno.ENOTCONN, errno.ESRCH)
        except ValueError:
            pass  # another file system has such a value
        unmount(directory)
        if process < 0:
            return gone
        if not select.select([process], [], [], _UNMOUNTED_S)[0]:
            # A process with a mount namespace of its own (a container, a service) that was started meanwhile has the
            # mount too, so the kernel does not tell its process that it is over.
            with contextlib.suppress(OSError):
                signal.pidfd_send_signal(process, signal.SIGTERM)
        return bool(select.select([process], [], [], wait_s)[0])


@dataclass(frozen=True, slots=True)
class _MountPoint:
    """Where a mount of this process was made. It may have been unmounted since, and another one be there."""

    directory: str
    mounted: MountEntry | None

    def is_ours(self) -> bool:
        return mounted_on(self.directory) == self.mounted

    def free(self) -> None:
        """Programs that are in it stay in it."""
        if self.is_ours():
            with contextlib.suppress(OSError):
                unmount(self.directory, lazy=True)


async def serve_mount(
    directory: str, operations: Mounted, options: MountOptions, *, on_ready: Callable[[Address | None], None]
) -> None:
    """Runs until it is unmounted, or asked to end. `on_ready`: programs can use it; where its metrics are.
    `operations` is finished in any case. Raises `FireflyerError`."""
    served: list[Serving] = []

    async def metrics() -> Sequence[Series]:
        if not served:
            raise Busy("the mount is not ready yet")
        return served[0].series(operations.held)

    try:
        async with serving_metrics(options.metrics_listen, metrics) as address:
            session = await asyncio.to_thread(_mount, directory, options)
            place = _MountPoint(directory, mounted_on(directory))
            try:
                served.append(Serving(session, operations))
                await _serve(place, session, served[0], lambda: on_ready(address))
            finally:
                await asyncio.to_thread(lambda: session.close(unmount=place.is_ours()))
    finally:
        await operations.finish()


def _mount(directory: str, options: MountOptions) -> FuseSession:
    from fireflyer.native.fuse import FuseSession

    check_place(directory, options)
    try:
        session = FuseSession(os.path.abspath(directory), options.words())
    except RuntimeError as error:
        reason = str(error).removeprefix("fuse: ")
        if "ermission" in reason or "ermitted" in reason:
            raise PermissionDenied(
                f"{directory} cannot be mounted: {reason}; mount as root, or install fusermount3 set-user-id"
            ) from None
        raise PermanentError(f"{directory} cannot be mounted: {reason}") from None
    return session


def _read_ahead(directory: str) -> None:
    """More than the kernel's own; where that is not permitted, reads are only smaller."""
    device = os.stat(directory).st_dev
    with contextlib.suppress(OSError):
        name = f"/sys/class/bdi/{os.major(device)}:{os.minor(device)}/read_ahead_kb"
        with open(name, "w", encoding="ascii") as file:
            file.write(str(_READAHEAD_KIB))


async def _serve(place: _MountPoint, session: FuseSession, serving: Serving, on_ready: Callable[[], None]) -> None:
    asked_to_end = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, asked_to_end.set)
    serving.start()
    try:
        await asyncio.to_thread(_read_ahead, place.directory)
        on_ready()
        ended, asked = loop.create_task(serving.ended.wait()), loop.create_task(asked_to_end.wait())
        await asyncio.wait([ended, asked], return_when=asyncio.FIRST_COMPLETED)
        if not ended.done():
            await _leave(place, session, ended)
        asked.cancel()
        await serving.drain()
    finally:
        await serving.close()


async def _leave(place: _MountPoint, session: FuseSession, ended: asyncio.Task[bool]) -> None:
    if await asyncio.to_thread(place.is_ours):
        try:
            await asyncio.to_thread(unmount, place.directory)
            async with asyncio.timeout(_ENDED_S):
                await ended
        except (OSError, TimeoutError) as error:
            _log.warning(
                "%s is still in use (%s); it is unmounted anyway, and programs that use it get errors from now on",
                place.directory,
                error,
            )
            await asyncio.to_thread(place.free)
    await asyncio.to_thread(session.stop)
