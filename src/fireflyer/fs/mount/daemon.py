"""A mount's process from the first check to the unmounting.

*The end.* Unmounted by somebody: the kernel has sent what it had, and we finish what was asked. Asked to end (SIGTERM,
SIGINT): we unmount it, which comes to the same; where programs are still in it, requests are received no more, what
they wrote is sent on, and from then on they get ENOTCONN. Killed: the kernel gives ENOTCONN at once, and what was
written and neither flushed nor closed is lost, as with a machine that loses power.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import select
import shutil
import signal
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from shlex import quote
from typing import TYPE_CHECKING, Final, Protocol

from fireflyer.base.errors import NotFound, PermanentError, PermissionDenied, UsageError
from fireflyer.fs.mount.operations import Operations
from fireflyer.fs.mount.serving import PROCESS_VALUE, Serving, process_name

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
_STORED_S: Final = 300.0


class Mounted(Operations, Protocol):
    async def finish(self) -> None:
        """Everything that was written is sent on, and everything open is closed. Called once, at the end."""
        ...


@dataclass(frozen=True, slots=True)
class MountOptions:
    """`name`: what `mount` shows as the source. `allow_other`: other users than who mounts, too. `check_rights`: by the
    kernel, from owner and mode."""

    name: str = "fireflyer"
    allow_other: bool = False
    read_only: bool = False
    check_rights: bool = True

    def words(self) -> list[str]:
        name = self.name.replace("\\", "\\\\").replace(",", "\\,")
        words = [f"fsname={name}", "subtype=fireflyer"]
        chosen = {"allow_other": self.allow_other, "ro": self.read_only, "default_permissions": self.check_rights}
        return words + [word for word, given in chosen.items() if given]


def check_place(directory: str, options: MountOptions) -> None:
    """Raises `FireflyerError` where it cannot be mounted, before anything is begun."""
    if not os.path.exists(_DEVICE):
        raise UsageError(f"there is no {_DEVICE}; load it (modprobe fuse), or give it to the container (--device)")
    try:
        found = os.listdir(directory)
    except FileNotFoundError:
        raise NotFound(f"{directory} is not there; make it: mkdir {quote(directory)}") from None
    except NotADirectoryError:
        raise UsageError(f"{directory} is no directory; give an empty one") from None
    except OSError as error:
        if error.errno == errno.ENOTCONN:
            raise UsageError(
                f"{directory} is a mount whose process is gone; first: ff fs umount {quote(directory)}"
            ) from None
        raise PermissionDenied(f"{directory} cannot be read: {error.strerror}") from None
    if found:
        raise UsageError(f"{directory} is not empty ({found[0]!r}, …); give an empty directory")
    if os.geteuid() == 0:
        return
    if shutil.which(_HELPER) is None:
        raise UsageError(f"users need {_HELPER} to mount; on Debian: apt-get install fuse3")
    if options.allow_other and not _users_may_share():
        raise PermissionDenied(f"--allow-other is only for root, until {_CONFIG} has a line 'user_allow_other'")


def _users_may_share() -> bool:
    with contextlib.suppress(OSError), open(_CONFIG, encoding="utf-8", errors="replace") as file:
        return any(line.strip() == "user_allow_other" for line in file)
    return False


def unmount(directory: str, *, lazy: bool = False) -> None:
    """Raises `OSError` (EBUSY: programs are in it; EINVAL: it is no mount)."""
    from fireflyer.native.fuse import detach

    directory = os.path.abspath(directory)
    if os.geteuid() == 0:
        detach(directory, lazy=lazy)
        return
    command = [_HELPER, "-u", *(["-z"] if lazy else []), "--", directory]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, check=False)
    if done.returncode != 0:
        said = done.stderr.decode(errors="replace").strip().removeprefix(f"{_HELPER}: ")
        raise OSError(errno.EBUSY if "busy" in said else errno.EINVAL, said or "it cannot be unmounted")


def unmount_and_wait(directory: str, wait_s: float = _STORED_S) -> bool:
    """Until its process has stored what was written, and ended. False: that takes longer, or cannot be known. Raises as
    `unmount`."""
    with contextlib.ExitStack() as stack:
        process = -1
        with contextlib.suppress(OSError, ValueError):
            name = os.getxattr(directory, PROCESS_VALUE).decode("ascii")
            process = os.pidfd_open(int(name.partition(" ")[0]))
            stack.callback(os.close, process)
            if process_name(int(name.partition(" ")[0])) != name:
                process = -1  # it is of another namespace of processes
        unmount(directory)
        if process < 0:
            return False
        return bool(select.select([process], [], [], wait_s)[0])


async def serve_mount(
    directory: str, operations: Mounted, options: MountOptions, *, on_ready: Callable[[], None]
) -> None:
    """Runs until it is unmounted, or asked to end. `on_ready`: programs can use it. `operations` is finished in any
    case. Raises `FireflyerError`."""
    try:
        session = await asyncio.to_thread(_mount, directory, options)
        try:
            await _serve(directory, session, operations, on_ready)
        finally:
            await asyncio.to_thread(session.close)
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
            raise PermissionDenied(f"{directory}: {reason}; mount as root, or use fusermount3 (set-user-id)") from None
        raise PermanentError(f"{directory} cannot be mounted: {reason}") from None
    return session


def _read_ahead(directory: str) -> None:
    """More than the kernel's own; where that is not permitted, reads are only smaller."""
    device = os.stat(directory).st_dev
    with contextlib.suppress(OSError):
        name = f"/sys/class/bdi/{os.major(device)}:{os.minor(device)}/read_ahead_kb"
        with open(name, "w", encoding="ascii") as file:
            file.write(str(_READAHEAD_KIB))


async def _serve(directory: str, session: FuseSession, operations: Mounted, on_ready: Callable[[], None]) -> None:
    serving = Serving(session, operations)
    asked_to_end = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, asked_to_end.set)
    serving.start()
    try:
        await asyncio.to_thread(_read_ahead, directory)
        on_ready()
        ended, asked = loop.create_task(serving.ended.wait()), loop.create_task(asked_to_end.wait())
        await asyncio.wait([ended, asked], return_when=asyncio.FIRST_COMPLETED)
        if not ended.done():
            await _leave(directory, session, ended)
        asked.cancel()
        await serving.drain()
    finally:
        await serving.close()


async def _leave(directory: str, session: FuseSession, ended: asyncio.Task[bool]) -> None:
    try:
        await asyncio.to_thread(unmount, directory)
        async with asyncio.timeout(_ENDED_S):
            await ended
    except (OSError, TimeoutError) as error:
        _log.warning("%s is still in use (%s): programs in it get errors from now on", directory, error)
    await asyncio.to_thread(session.stop)
