"""What was seen on a node."""

from __future__ import annotations

import msgspec

from fireflyer.base.node_counters import NodeCounters

__all__ = ["DirectoryTest", "Evidence", "MemoryTest", "PeerTest"]


class MemoryTest(msgspec.Struct, frozen=True, kw_only=True):
    """Patterns were written to a share of free memory and read back."""

    tested_bytes: int
    wrong_words: int = 0
    """That were read back other than they were written."""
    first: str = ""
    """The first of them, for people."""


class DirectoryTest(msgspec.Struct, frozen=True, kw_only=True):
    """A file was written to a directory, synced and read back."""

    path: str
    kind: str = ""
    """Of its file system."""
    local: bool = True
    """False: other machines serve it, so what is wrong with it is not this node's fault."""
    free_bytes: int | None = None
    free_inodes: int | None = None
    """None: not known, or without a limit."""
    read_only: bool = False
    finished: bool = True
    """Within its time."""
    error: str = ""
    """Name of the errno with which it failed, as `EIO`; empty: it did not."""
    same: bool = True
    """What was read back is what was written."""


class PeerTest(msgspec.Struct, frozen=True):
    address: str
    error: str = ""
    """Why no connection was made; empty: one was."""


class Evidence(msgspec.Struct, frozen=True, kw_only=True):
    before: NodeCounters
    now: NodeCounters
    since: str = ""
    """When `before` was read, as in `since the run began`; empty: nothing is known but `now`."""
    total_bytes: int = 0
    """Of memory; 0: not known."""
    available_bytes: int = 0
    """That programs could get without swapping."""
    memory: MemoryTest | None = None
    directories: tuple[DirectoryTest, ...] = ()
    peers: tuple[PeerTest, ...] = ()
