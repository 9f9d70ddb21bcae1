"""Names of files that are being copied, so that nothing half-written ever has its final name. Pure but for `alive`.

A file is written beside its target under a name that says all that is needed to go on with it later, on any file
system and without a second file:

    .ff-part-KEY-HOST-PID-START-SYNCED

KEY is of the target's name and of which state of the source is copied. HOST, PID and START are the process that writes
it: another one takes the file over only when that process is known to be dead, by renaming it, which one of several
does. SYNCED is how many bytes are known to be right and on disk: after a crash there may be more bytes in the file,
with holes before them, so it is cut to SYNCED first. A copy that is interrupted, or fails, leaves PID 0: free for
anybody.
"""

from __future__ import annotations

import hashlib
import os
import re
import socket
from typing import Final

import msgspec

from fireflyer.fs.tools.trees import Attributes

__all__ = ["PREFIX", "Owner", "Partial", "alive", "is_partial", "key_of", "me", "parse_partial"]

PREFIX: Final = ".ff-part-"
_NAME: Final = re.compile(r"\.ff-part-([0-9a-f]{24})-([0-9a-f]{8})-([0-9]{1,10})-([0-9]{1,20})-([0-9]{1,20})")


class Owner(msgspec.Struct, frozen=True):
    host: str
    """Eight hexadecimal digits of its name."""
    pid: int
    start: int
    """When the process began, in ticks since its machine did: a number that comes again is another process."""


class Partial(msgspec.Struct, frozen=True):
    key: str
    owner: Owner
    synced_bytes: int

    @property
    def name(self) -> str:
        owner = self.owner
        return f"{PREFIX}{self.key}-{owner.host}-{owner.pid}-{owner.start}-{self.synced_bytes}"

    def free(self) -> Partial:
        return msgspec.structs.replace(self, owner=Owner(self.owner.host, 0, 0))


def is_partial(name: str) -> bool:
    return name.startswith(PREFIX) and _NAME.fullmatch(name) is not None


def parse_partial(name: str) -> Partial | None:
    found = _NAME.fullmatch(name)
    if found is None:
        return None
    key, host, pid, start, synced = found.groups()
    return Partial(key, Owner(host, int(pid), int(start)), int(synced))


def key_of(target_name: str, source: str, attributes: Attributes) -> str:
    """Of the copy of `source`, in the state that `attributes` say, to this name."""
    facts = (target_name, source, str(attributes.st_ino), str(attributes.st_size), str(attributes.st_mtime_ns))
    return hashlib.blake2b(b"\0".join(os.fsencode(fact) for fact in facts), digest_size=12).hexdigest()


def me(serial: int = 0) -> Owner:
    """This process; `serial` tells its copies of the same file to different places apart."""
    host = hashlib.blake2b(socket.gethostname().encode(), digest_size=4).hexdigest()
    return Owner(host, os.getpid(), (_start_of(os.getpid()) or 0) * 1_000_000 + serial)


def alive(owner: Owner) -> bool:
    """Whether the process may still write; of other machines nothing is known."""
    if owner.pid == 0:
        return False
    if owner.host != me().host:
        return True
    start = _start_of(owner.pid)
    return start is not None and start == owner.start // 1_000_000


def _start_of(pid: int) -> int | None:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return int(file.read().rpartition(b")")[2].split()[19])
    except (OSError, IndexError, ValueError):
        return None
