"""Which attempt may change a checkpoint directory: the newest one that has begun, and no other.

A launcher that lost sight of a rank 0 (a network cut) starts the next attempt elsewhere, while the old process may go
on saving into the same directory. Each attempt therefore has a *writer directory* of its own in the checkpoint
directory, and all that it changes there it changes by a rename out of that directory (a commit) or into it (a
removal). An attempt begins like this:

    1. list the names; refuse to begin if an attempt of the same launch with a larger number is there   (`check_start`)
    2. mkdir `.writer-TOKEN-…` with a token above all others; sync
    3. list again: with a larger one there, remove ours and go back to 1                                (`overtaken_by`)
    4. of each smaller one: move what is in it into ours; sync; rmdir; sync                             (`smaller`)

Why no old attempt can commit after 4. A file system gives a removed directory no new names and lets nothing be renamed
out of it: a rename and the rmdir of a directory it touches happen one after the other. So a commit or a removal of an
old attempt either came before the rmdir, and the new attempt, which restores afterwards, sees it; or it fails, as its
source or target is gone. There is no moment between a check and an act. That also holds where a client of the file
system has looked the directory up long before (a handle of NFS, the walk of a path in the kernel), which is why the
directory is emptied and removed and not only renamed. Names are never used twice: they carry a random tag.

Why two that start at once do not both begin. Each makes its directory before it lists: the one with the smaller name
sees the larger, or its directory is removed by it. Attempts of one launch (`ff run`) have numbers that tell which is
newer, so one that starts too late is refused in step 1 or 3. Different launches have no order but that of their
starts: the one that starts last has the directory. A launch that is not known (torchrun) is different from every other.

Needed of the file system: atomic mkdir, rmdir (of an empty directory only) and rename of a directory. POSIX file
systems, NFS and 3FS have them; an object store behind FUSE often has not.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import msgspec

from fireflyer.base.errors import Fenced

__all__ = [
    "UNKNOWN_LAUNCH",
    "Writer",
    "check_start",
    "fenced",
    "next_writer",
    "overtaken_by",
    "parse_writer",
    "smaller",
    "writers",
]

UNKNOWN_LAUNCH = "0" * 16
MAX_TOKEN = 10**10
MAX_ATTEMPT = 10**10

_WRITER = re.compile(r"\.writer-([0-9]{8,11})-([0-9]{5,11})-([0-9a-f]{16})-([0-9a-f]{1,16})")


class Writer(msgspec.Struct, frozen=True, order=True):
    """An attempt that has begun in the directory, or is about to. Orders by age: the largest has the directory."""

    token: int
    """The fencing token: larger than that of every attempt before."""
    tag: str
    """Random, hexadecimal: no two writers have the same name."""
    attempt: int
    """Its number in its launch."""
    launch: str
    """16 hexadecimal digits, equal for the attempts of one `ff run`; `UNKNOWN_LAUNCH` is equal to none."""

    @property
    def name(self) -> str:
        """Of its directory."""
        return f".writer-{self.token:08d}-{self.attempt:05d}-{self.launch}-{self.tag}"

    def __str__(self) -> str:
        launch = "" if self.launch == UNKNOWN_LAUNCH else f" of launch {self.launch}"
        return f"attempt {self.attempt}{launch} (token {self.token})"


def parse_writer(name: str) -> Writer | None:
    """The writer whose directory is called `name`; None for every other name."""
    match = _WRITER.fullmatch(name)
    if match is None or not name.isascii():
        return None
    writer = Writer(int(match[1]), match[4], int(match[2]), match[3])
    return writer if writer.name == name and writer.token <= MAX_TOKEN and writer.attempt <= MAX_ATTEMPT else None


def writers(names: Sequence[str]) -> list[Writer]:
    """Among the names of a checkpoint directory, oldest first."""
    return sorted(writer for name in names if (writer := parse_writer(name)) is not None)


def check_start(names: Sequence[str], *, launch: str, attempt: int, root: str) -> None:
    """Raises `Fenced` where a later attempt of the same launch has the directory already."""
    for other in writers(names):
        if launch != UNKNOWN_LAUNCH and other.launch == launch and other.attempt > attempt:
            raise fenced(root, f"attempt {attempt}", other)


def next_writer(names: Sequence[str], *, launch: str, attempt: int, tag: str) -> Writer:
    """Newer than all that are there."""
    return Writer(max((other.token for other in writers(names)), default=0) + 1, tag, attempt, launch)


def overtaken_by(names: Sequence[str], writer: Writer) -> Writer | None:
    """The newest writer, if that is another than `writer`."""
    newest = max(writers(names), default=writer)
    return newest if newest > writer else None


def smaller(names: Sequence[str], writer: Writer) -> list[Writer]:
    """Those that `writer` fences, oldest first."""
    return [other for other in writers(names) if other < writer]


def fenced(root: str, who: str, newer: Writer) -> Fenced:
    return Fenced(
        f"{who} may no longer change {root}: {newer} has begun there; this process is left over, end it "
        "(a second job needs a directory of its own)"
    )
