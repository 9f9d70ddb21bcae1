"""The file system of a machine: a tmpfs as its root, the host's directories in it read-only, its own ones beside them.

Runs in the machine's own mount namespace, so that all of it ends with the machine. What a program writes outside of the
private and the shared directories fails with "Read-only file system" on purpose: it would be seen by all machines.
"""

from __future__ import annotations

import os
import re
import shutil
import stat
import uuid
from collections.abc import Container, Iterable
from typing import Final

from tests.support.machines.kernel import bind, change_root, make_read_only, mount, unmount
from tests.support.machines.plan import HOME, USER_ID, Order

__all__ = ["KEPT", "empty_private", "fill_homes", "finish_root", "mounts", "move_into_root", "unmount_new"]

KEPT: Final = "/.machine"
"""What a machine needs again after a reset; for its root only."""
_REPLACED: Final = ("proc", "sys")
_ESCAPED: Final = re.compile(rb"\\([0-7]{3})")
"""Blanks and backslashes in a path of mountinfo."""


def move_into_root(order: Order, name: str) -> None:
    """`order.base` holds what the supervisor prepared: `NAME/etc` with files for /etc, `NAME/ssh`, and `keys`."""
    os.umask(0o022)
    root = f"{order.base}/root"
    os.makedirs(root, exist_ok=True)
    mount("tmpfs", root, "tmpfs", options="mode=755")
    _show_host(root, skipped=order.base)
    _mount_kernel(root)
    _make_private(root, order)
    _own_etc(root, f"{order.base}/{name}")
    _own_identity(root)
    for path in order.visible:
        _show(path, root, read_only=True)
    for path in order.shared:
        _show(path, root, read_only=False)
    shutil.copytree(f"{order.base}/{name}/home", f"{root}{KEPT}/home")
    change_root(root)
    fill_homes()


def _show_host(root: str, *, skipped: str) -> None:
    with os.scandir("/") as entries:
        for entry in entries:
            inside = f"{root}/{entry.name}"
            if entry.is_symlink():
                os.symlink(os.readlink(entry.path), inside)
            elif entry.is_dir():
                os.mkdir(inside)
                if entry.path != skipped and entry.name not in _REPLACED:
                    bind(entry.path, inside, read_only=True)
            elif entry.is_file():
                os.close(os.open(inside, os.O_CREAT | os.O_WRONLY))
                bind(entry.path, inside, read_only=True)


def _mount_kernel(root: str) -> None:
    """What the kernel says of this machine's processes, interfaces and terminals."""
    mount("proc", f"{root}/proc", "proc")
    mount("sysfs", f"{root}/sys", "sysfs")
    if os.path.isdir("/sys/fs/cgroup"):
        bind("/sys/fs/cgroup", f"{root}/sys/fs/cgroup", read_only=True)
    mount("devpts", f"{root}/dev/pts", "devpts", options="newinstance,ptmxmode=0666,mode=620")


def _make_private(root: str, order: Order) -> None:
    os.makedirs(f"{root}{KEPT}/private", 0o755)
    os.chmod(f"{root}{KEPT}", 0o711)
    for path, mode in order.private_modes.items():
        own = f"{root}{KEPT}/private/{path.strip('/').replace('/', '-')}"
        os.mkdir(own)
        os.chmod(own, mode)
        if not os.path.isdir(f"{root}{path}"):
            os.mkdir(f"{root}{path}")
        bind(own, f"{root}{path}")


def _own_etc(root: str, prepared: str) -> None:
    shutil.copytree(f"{prepared}/etc", f"{root}{KEPT}/etc")
    os.chmod(f"{root}{KEPT}/etc/shadow", 0o600)
    for name in os.listdir(f"{root}{KEPT}/etc"):
        if os.path.exists(f"{root}/etc/{name}"):  # a file that the host lacks cannot be added
            bind(f"{root}{KEPT}/etc/{name}", f"{root}/etc/{name}")


def _own_identity(root: str) -> None:
    """Programs that ask whether two processes are on one machine compare these."""
    for path, text in (
        ("/etc/machine-id", uuid.uuid4().hex),
        ("/proc/sys/kernel/random/boot_id", str(uuid.uuid4())),
    ):
        own = f"{root}{KEPT}/{os.path.basename(path)}"
        with open(own, "w", encoding="ascii") as file:
            file.write(text + "\n")
        if os.path.exists(f"{root}{path}"):
            bind(own, f"{root}{path}", read_only=True)


def _show(path: str, root: str, *, read_only: bool) -> None:
    """A directory of the host at its own path."""
    os.makedirs(f"{root}{path}", exist_ok=True)
    bind(path, f"{root}{path}", read_only=read_only)


def fill_homes() -> None:
    """Keys of root and the user."""
    for home, owner in (("/root", 0), (HOME, USER_ID)):
        os.makedirs(home, exist_ok=True)
        shutil.copytree(f"{KEPT}/home", home, dirs_exist_ok=True)
        for path in (home, f"{home}/.ssh", *(f"{home}/.ssh/{name}" for name in os.listdir(f"{home}/.ssh"))):
            os.chown(path, owner, owner)
        os.chmod(f"{home}/.ssh", 0o700)
        os.chmod(f"{home}/.ssh/id_ed25519", 0o600)


def mounts() -> dict[int, str]:
    """Place of each mount by its number, in the order in which they were made."""
    with open("/proc/self/mountinfo", "rb") as file:
        lines = [line.split() for line in file]
    return {int(fields[0]): os.fsdecode(_ESCAPED.sub(_unescaped, fields[4])) for fields in lines}


def _unescaped(found: re.Match[bytes]) -> bytes:
    return bytes([int(found[1], 8)])


def finish_root() -> None:
    """When all is mounted: remembers what, for `unmount_new`; the root itself becomes read-only."""
    with open(f"{KEPT}/mounts", "w", encoding="ascii") as file:
        file.writelines(f"{number}\n" for number in mounts())
    make_read_only("/", recursive=False)


def unmount_new() -> None:
    """What was mounted since `finish_root`, the newest first."""
    with open(f"{KEPT}/mounts", encoding="ascii") as file:
        old = {int(line) for line in file}
    for number, place in reversed(mounts().items()):
        if number not in old:
            unmount(place)


def empty_private(paths: Iterable[str], kept: Container[str] = ()) -> None:
    """Removes all that is on the machine's own file system in these directories: not what is mounted there, and not the
    paths `kept`."""
    device = os.stat(KEPT).st_dev
    for path in paths:
        _empty(path, device, kept)


def _empty(path: str, device: int, kept: Container[str]) -> bool:
    """True when nothing is left in it."""
    left = False
    with os.scandir(path) as entries:
        for entry in entries:
            status = entry.stat(follow_symlinks=False)
            if status.st_dev != device or entry.path in kept:
                left = True
            elif not stat.S_ISDIR(status.st_mode):
                os.unlink(entry.path)
            elif _empty(entry.path, device, kept):
                os.rmdir(entry.path)
            else:
                left = True
    return not left
