"""What a simulated disk holds: inodes, the changes that are not durable yet, and what may become of them.

Every inode has a *durable* and a *volatile* side. Programs see the volatile side. For a file the difference is a list
of `Write`s since the last fsync; for directories it is one list of `Change`s for the whole disk, in the order in which
they were made. A `Change` touches one directory, or two in a rename across directories, and is atomic.

An `Outcome` says for each pending item what a crash makes of it. The model is deliberately harsher than ext4 or XFS:
a later directory change may survive an earlier one, an fsync of a file does not keep its name, and the length of a file
may survive without its data.
"""

from __future__ import annotations

import enum
import random
from dataclasses import dataclass, field

import msgspec

__all__ = [
    "BLOCK_BYTES",
    "Change",
    "DataFate",
    "DirectoryNode",
    "FateKind",
    "FileNode",
    "Node",
    "Outcome",
    "Pending",
    "PendingFile",
    "Write",
    "copy_node",
    "surviving_writes",
]

BLOCK_BYTES = 512
"""What a device writes in one piece; a torn write may nevertheless be cut anywhere."""


class FateKind(enum.Enum):
    LOST = "lost"
    """Nothing since the last fsync survives."""
    KEPT = "kept"
    TORN = "torn"
    """The first `cut` unsynced bytes survive, in the order of writing."""
    ZEROS = "zeros"
    """The length survives, the unsynced data reads as zeros."""
    GARBAGE = "garbage"
    """The length survives, the unsynced data is noise."""
    SCATTERED = "scattered"
    """The length survives; of the unsynced blocks some are there and the others are zeros, chosen by `cut` as seed."""


class DataFate(msgspec.Struct, frozen=True):
    """Fate of data that were not durable when the power went; `cut`: bytes that are left of a torn file."""

    kind: FateKind
    cut: int = 0


class Outcome(msgspec.Struct, frozen=True):
    """One fate per pending file, one bit per pending change, in the order of `Pending`."""

    files: tuple[DataFate, ...]
    changes: tuple[bool, ...]


class PendingFile(msgspec.Struct, frozen=True):
    path: str
    unsynced_bytes: int
    cuts: tuple[int, ...]
    """Interesting places to tear: write boundaries, and the middle of each write."""


class Pending(msgspec.Struct, frozen=True):
    """Changes that are not durable at this moment: the files and the directory changes whose fate a crash decides."""

    files: tuple[PendingFile, ...]
    changes: tuple[str, ...]


class Write(msgspec.Struct, frozen=True):
    offset: int
    data: bytes
    owner: str


@dataclass(eq=False)
class FileNode:
    number: int
    durable: bytes = b""
    content: bytearray = field(default_factory=bytearray)
    pending: list[Write] = field(default_factory=list)
    given_up: bool = False
    """An fsync failed: what was pending then and what comes later will never be durable."""

    def write(self, write: Write) -> None:
        self.pending.append(write)
        _apply(self.content, write)

    def sync(self) -> None:
        if not self.given_up:
            self.durable = bytes(self.content)
            self.pending.clear()

    def settle(self, fate: DataFate, owner: str | None) -> None:
        """Decides the fate of the writes of `owner` (None: everybody's). Other owners' writes stay pending."""
        mine = [write for write in self.pending if owner is None or write.owner == owner]
        others = [write for write in self.pending if not (owner is None or write.owner == owner)]
        survivors = surviving_writes(mine, fate, salt=self.number)
        self.content = bytearray(self.durable)
        for write in survivors:
            _apply(self.content, write)
        self.durable = bytes(self.content)
        for write in others:
            _apply(self.content, write)
        self.pending = others
        self.given_up = self.given_up and owner is not None


@dataclass(eq=False)
class DirectoryNode:
    number: int
    durable: dict[str, Node] = field(default_factory=dict)
    entries: dict[str, Node] = field(default_factory=dict)


Node = FileNode | DirectoryNode


@dataclass(eq=False)
class Change:
    """Names that are set (or, with None, taken away) together."""

    owner: str
    what: str
    edits: tuple[tuple[DirectoryNode, str, Node | None], ...]

    def touches(self, directory: DirectoryNode) -> bool:
        return any(where is directory for where, _, _ in self.edits)

    def apply(self, *, durable: bool) -> None:
        for directory, name, node in self.edits:
            names = directory.durable if durable else directory.entries
            if node is None:
                names.pop(name, None)
            else:
                names[name] = node

    def copy(self, copies: dict[int, Node]) -> Change:
        edits: list[tuple[DirectoryNode, str, Node | None]] = []
        for directory, name, node in self.edits:
            where = copy_node(directory, copies)
            assert isinstance(where, DirectoryNode)  # noqa: S101 - a copy is of its original's kind
            edits.append((where, name, None if node is None else copy_node(node, copies)))
        return Change(self.owner, self.what, tuple(edits))


def copy_node(node: Node, copies: dict[int, Node]) -> Node:
    """A copy of the tree below `node`, durable and volatile side; `copies` remembers, by identity, what is copied."""
    known = copies.get(id(node))
    if known is not None:
        return known
    if isinstance(node, FileNode):
        file = FileNode(node.number, node.durable, bytearray(node.content), list(node.pending), node.given_up)
        copies[id(node)] = file
        return file
    directory = DirectoryNode(node.number)
    copies[id(node)] = directory
    known_copy = copies.get  # of most: a name is in both
    directory.durable = {name: known_copy(id(it)) or copy_node(it, copies) for name, it in node.durable.items()}
    directory.entries = {name: known_copy(id(it)) or copy_node(it, copies) for name, it in node.entries.items()}
    return directory


def _apply(content: bytearray, write: Write) -> None:
    if not write.data:
        return
    if len(content) < write.offset:
        content.extend(bytes(write.offset - len(content)))
    content[write.offset : write.offset + len(write.data)] = write.data


def surviving_writes(writes: list[Write], fate: DataFate, *, salt: int) -> list[Write]:
    """The writes as the device has them after the crash. `salt` makes the noise of two files differ."""
    if fate.kind is FateKind.LOST:
        return []
    if fate.kind is FateKind.KEPT:
        return writes
    if fate.kind is FateKind.TORN:
        return _torn(writes, fate.cut)
    if fate.kind is FateKind.ZEROS:
        return [Write(write.offset, bytes(len(write.data)), write.owner) for write in writes]
    noise = random.Random(f"{salt}/{fate.cut}")
    if fate.kind is FateKind.GARBAGE:
        return [Write(write.offset, noise.randbytes(len(write.data)), write.owner) for write in writes]
    return [_scattered(write, noise) for write in writes]


def _torn(writes: list[Write], cut: int) -> list[Write]:
    survivors: list[Write] = []
    left = cut
    for write in writes:
        if left <= 0:
            break
        survivors.append(Write(write.offset, write.data[:left], write.owner))
        left -= len(write.data)
    return survivors


def _scattered(write: Write, noise: random.Random) -> Write:
    data = bytearray(write.data)
    for start in range(0, len(data), BLOCK_BYTES):
        if noise.random() < 0.5:
            end = min(start + BLOCK_BYTES, len(data))
            data[start:end] = bytes(end - start)
    return Write(write.offset, bytes(data), write.owner)
