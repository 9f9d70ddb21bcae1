"""A disk that forgets what was not synced.

A `SimDisk` is the device (or the cluster file system); a `MountedDisk` is one process's view of it and implements the
`Disk` port. Every operation that changes something or makes it durable is a *fault point*: it has a number, counted
over all mounts, and a `Fault` can crash the process before or after it or make it fail. A crash is in two parts, so
that one run can be continued in several ways:

    try: program(disk.mount("a"))           # dies with SimCrash at the fault point
    except SimCrash: ...
    for outcome in enumerate_outcomes(disk.pending(), limit=64):
        survivor = disk.clone()
        survivor.crash(outcome)             # power is lost; this is what the device has
        check(survivor.mount("b"))

`crash(outcome, owner="a")` is a node that dies while others go on: only what it had not synced is at stake.
Without `crash`, a dead process loses nothing: the page cache outlives it.
"""

from __future__ import annotations

import enum
import errno
import hashlib
import threading
from collections.abc import Callable, Iterator

import msgspec

from fireflyer.base.errors import FireflyerError, UsageError
from fireflyer.base.os_errors import translate_os_error
from fireflyer.base.ports import Data, Disk, DiskFile, DiskLock, Held, Transfer
from fireflyer.sim.files import (
    Change,
    DataFate,
    DirectoryNode,
    FateKind,
    FileNode,
    Node,
    Outcome,
    Pending,
    PendingFile,
    Write,
    copy_node,
)
from fireflyer.sim.world import SimCrash

__all__ = ["Fault", "FaultKind", "MountedDisk", "OperationRecord", "SimDisk", "SimFile"]


class FaultKind(enum.Enum):
    """Kind of a fault that a simulated disk has."""

    CRASH_BEFORE = "crash before"
    CRASH_AFTER = "crash after"
    EIO = "EIO"
    NO_SPACE = "no space"
    DENIED = "permission denied"


_ERRNO = {FaultKind.EIO: errno.EIO, FaultKind.NO_SPACE: errno.ENOSPC, FaultKind.DENIED: errno.EACCES}


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    """Fault of one place. Every given condition must hold; `operation` is a name from `Disk` or `DiskFile`."""

    kind: FaultKind
    index: int | None = None
    operation: str | None = None
    path_contains: str = ""
    owner: str | None = None


class OperationRecord(msgspec.Struct, frozen=True):
    """Operation that a simulated disk carried out."""

    index: int
    """0 for the first; reads have none and are recorded as -1 only when a fault hits them."""
    owner: str
    operation: str
    path: str


def _failure(number: int, what: str) -> FireflyerError:
    return translate_os_error(OSError(number, errno.errorcode[number]), what)


class SimDisk:
    """The device. `capacity_bytes` bounds the sum of file lengths; None is endless. `durable_names`: as 3FS, it keeps
    every creation, rename and removal at once, and forgets only data."""

    def __init__(self, *, capacity_bytes: int | None = None, durable_names: bool = False) -> None:
        self.capacity_bytes = capacity_bytes
        self.durable_names = durable_names
        self.operations: list[OperationRecord] = []
        self.faults: list[Fault] = []
        self.on_operation: Callable[[OperationRecord], None] | None = None
        self.generation = 0
        self.lock = threading.RLock()
        """One operation at a time: the device also serves tests that use real threads."""
        self.holders: dict[str, MountedDisk] = {}
        """Who holds the lock of which path."""
        self._inodes = 1
        self._root = DirectoryNode(0)
        self._changes: list[Change] = []

    def mount(self, owner: str = "") -> MountedDisk:
        return MountedDisk(self, owner)

    def clone(self) -> SimDisk:
        """An equal device with the same past, no faults, and no mounts."""
        twin = SimDisk(capacity_bytes=self.capacity_bytes, durable_names=self.durable_names)
        twin.operations = list(self.operations)
        twin.generation = self.generation
        twin._inodes = self._inodes
        copies: dict[int, Node] = {}
        root = copy_node(self._root, copies)
        assert isinstance(root, DirectoryNode)  # noqa: S101 - a copy is of its original's kind
        twin._root = root
        twin._changes = [change.copy(copies) for change in self._changes]
        return twin

    # What a crash decides about.

    def pending(self, owner: str | None = None) -> Pending:
        """Changes that are not durable now; with `owner`, only of that mount."""
        files = [_pending_file(path, node, owner) for path, node in self._pending_files(owner)]
        return Pending(tuple(files), tuple(change.what for change in self._pending_changes(owner)))

    def crash(self, outcome: Outcome | None = None, *, owner: str | None = None) -> None:
        """Power loss of the device (or of `owner`'s machine). None: nothing unsynced survives. Mounts die."""
        files, changes = self._pending_files(owner), self._pending_changes(owner)
        if outcome is None:
            outcome = Outcome(tuple(DataFate(FateKind.LOST) for _ in files), (False,) * len(changes))
        if (len(files), len(changes)) != (len(outcome.files), len(outcome.changes)):
            raise UsageError("the outcome is not one of this moment; take it from pending() of the same disk and owner")
        for (_, node), fate in zip(files, outcome.files, strict=True):
            node.settle(fate, owner)
        lost = [change for change, kept in zip(changes, outcome.changes, strict=True) if not kept]
        self._changes = [change for change in self._changes if change not in lost]
        self._rebuild_entries()
        if owner is None:
            for change in self._changes:
                change.apply(durable=True)
            self._changes = []
            self.generation += 1

    def _pending_changes(self, owner: str | None) -> list[Change]:
        return [change for change in self._changes if owner is None or change.owner == owner]

    def _pending_files(self, owner: str | None) -> list[tuple[str, FileNode]]:
        nodes = {id(node): (path, node) for path, node in _walk(self._root, "") if isinstance(node, FileNode)}
        for change in self._changes:  # a file that only a pending change would bring back
            for _, name, node in change.edits:
                for path, inner in ((name, node), *(_walk(node, name) if isinstance(node, DirectoryNode) else ())):
                    if isinstance(inner, FileNode):
                        nodes.setdefault(id(inner), (path, inner))
        for path, node in _walk(self._root, "", durable=True):
            if isinstance(node, FileNode):
                nodes.setdefault(id(node), (path, node))
        found = [
            (path, node)
            for path, node in nodes.values()
            if node.pending and (owner is None or any(write.owner == owner for write in node.pending))
        ]
        return sorted(found, key=lambda item: item[1].number)

    def _rebuild_entries(self) -> None:
        directories = [self._root]
        for directory in directories:
            directory.entries = dict(directory.durable)
            reachable = [node for where, _, node in self._edits() if where is directory]
            for node in (*directory.durable.values(), *reachable):
                if isinstance(node, DirectoryNode) and not any(node is known for known in directories):
                    directories.append(node)
        for change in self._changes:
            change.apply(durable=False)

    def _edits(self) -> Iterator[tuple[DirectoryNode, str, Node | None]]:
        for change in self._changes:
            yield from change.edits

    # The hand of a test.

    def corrupt(self, path: str, offset: int, *, mask: int = 0xFF) -> None:
        """Flips the bits of `mask` in one byte, on the medium."""
        content = bytearray(self.read(path))
        content[offset] ^= mask
        self.replace(path, bytes(content))

    def replace(self, path: str, content: bytes) -> None:
        """Makes `content` the durable content of an existing file."""
        node = self.file(path)
        node.content, node.durable, node.pending = bytearray(content), content, []

    def read(self, path: str) -> bytes:
        return bytes(self.file(path).content)

    def digest(self) -> bytes:
        """Equal for disks with equal names and contents, as programs see them."""
        state = hashlib.blake2b(digest_size=16)
        for path, node in _walk(self._root, ""):
            content = node.content if isinstance(node, FileNode) else None
            state.update(f"{path}\0{-1 if content is None else len(content)}\0".encode("utf-8", "surrogateescape"))
            state.update(content or b"")
        return state.digest()

    def used_bytes(self) -> int:
        return sum(len(node.content) for _, node in _walk(self._root, "") if isinstance(node, FileNode))

    # The tree.

    def lookup(self, path: str) -> Node | None:
        node: Node | None = self._root
        for part in _parts(path):
            if not isinstance(node, DirectoryNode):
                return None
            node = node.entries.get(part)
        return node

    def file(self, path: str) -> FileNode:
        node = self.lookup(path)
        if not isinstance(node, FileNode):
            raise _failure(errno.ENOENT if node is None else errno.EISDIR, f"open {path}")
        return node

    def directory(self, path: str, what: str) -> DirectoryNode:
        node = self.lookup(path)
        if not isinstance(node, DirectoryNode):
            raise _failure(errno.ENOENT if node is None else errno.ENOTDIR, what)
        return node

    def parent(self, path: str, what: str) -> tuple[DirectoryNode, str]:
        parts = _parts(path)
        if not parts:
            raise _failure(errno.EINVAL, what)
        return self.directory("/" + "/".join(parts[:-1]), what), parts[-1]

    def new_number(self) -> int:
        self._inodes += 1
        return self._inodes

    def change(self, owner: str, what: str, *edits: tuple[DirectoryNode, str, Node | None]) -> None:
        change = Change(owner, what, edits)
        change.apply(durable=False)
        if self.durable_names:
            change.apply(durable=True)
        else:
            self._changes.append(change)

    def sync_directory(self, directory: DirectoryNode) -> None:
        """Makes all changes of this directory durable, and with a rename across directories all of the other's."""
        synced = [directory]
        for where in synced:
            for change in self._changes:
                if change.touches(where):
                    synced += [other for other, _, _ in change.edits if not any(other is known for known in synced)]
        for change in [change for change in self._changes if any(change.touches(where) for where in synced)]:
            change.apply(durable=True)
            self._changes.remove(change)

    def room_bytes(self) -> int:
        return 1 << 60 if self.capacity_bytes is None else max(0, self.capacity_bytes - self.used_bytes())

    # Fault points.

    def begin(self, owner: str, operation: str, path: str, *, counted: bool = True) -> Fault | None:
        """Counts the operation and lets it fail. Returns a fault that strikes after it."""
        record = OperationRecord(len(self.operations) if counted else -1, owner, operation, path)
        if counted:
            self.operations.append(record)
            if self.on_operation is not None:
                self.on_operation(record)
        for fault in self.faults:
            if _hits(fault, record):
                if fault.kind is FaultKind.CRASH_AFTER:
                    return fault
                if fault.kind is FaultKind.CRASH_BEFORE:
                    raise SimCrash
                raise _failure(_ERRNO[fault.kind], f"{operation} {path}")
        return None


def _hits(fault: Fault, record: OperationRecord) -> bool:
    return (
        (fault.index is None or fault.index == record.index)
        and (fault.operation is None or fault.operation == record.operation)
        and (fault.owner is None or fault.owner == record.owner)
        and fault.path_contains in record.path
    )


def _parts(path: str) -> list[str]:
    parts = [part for part in path.split("/") if part and part != "."]
    if not path.startswith("/") or "\0" in path or ".." in parts:
        raise UsageError(f"path {path!r} is not a plain absolute POSIX path")
    return parts


def _walk(node: Node, path: str, *, durable: bool = False) -> list[tuple[str, Node]]:
    """What is below `node`: each directory before what is in it, in the order of names."""
    found: list[tuple[str, Node]] = []
    _walk_into(found, node, path, durable=durable)
    return found


def _walk_into(found: list[tuple[str, Node]], node: Node, path: str, *, durable: bool) -> None:
    if isinstance(node, DirectoryNode):
        names = node.durable if durable else node.entries
        for name in sorted(names):
            inner = names[name]
            found.append((f"{path}/{name}", inner))
            if isinstance(inner, DirectoryNode):
                _walk_into(found, inner, f"{path}/{name}", durable=durable)


def _pending_file(path: str, node: FileNode, owner: str | None) -> PendingFile:
    cuts: list[int] = []
    total = 0
    for write in node.pending:
        if owner is None or write.owner == owner:
            cuts += [total + len(write.data) // 2, total + len(write.data)]
            total += len(write.data)
    return PendingFile(path, total, tuple(dict.fromkeys(cuts)))


class MountedDisk(Disk):
    """One process's view. After it crashed, or the device lost power, every call raises `SimCrash`."""

    def __init__(self, device: SimDisk, owner: str) -> None:
        self._device = device
        self._owner = owner
        self._generation = device.generation
        self._dead = False
        self.durable_names = device.durable_names

    def _alive(self) -> SimDisk:
        if not self.lives:
            raise SimCrash
        return self._device

    def operate(self, operation: str, path: str, effect: Callable[[SimDisk], None], *, counted: bool = True) -> None:
        """Performs one operation at its fault point."""
        device = self._alive()
        with device.lock:
            try:
                after = device.begin(self._owner, operation, path, counted=counted)
                try:
                    effect(device)
                finally:
                    if after is not None:
                        raise SimCrash  # also after an operation that failed
            except SimCrash:
                self._dead = True
                raise

    def create(self, path: str, *, direct: bool = False) -> SimFile:  # noqa: ARG002 - there is no page cache to go past
        node = FileNode(self._device.new_number())
        self.operate("create", path, lambda device: self._add(device, "create", path, node))
        return SimFile(self, node, path, writable=True)

    def open(self, path: str, *, direct: bool = False) -> SimFile:  # noqa: ARG002
        nodes: list[FileNode] = []

        def find(device: SimDisk) -> None:
            if isinstance(device.lookup(path), DirectoryNode):
                raise UsageError(f"open {path}: it is a directory, a file is needed")
            nodes.append(device.file(path))

        self.operate("open", path, find, counted=False)
        return SimFile(self, nodes[0], path, writable=False)

    def mkdir(self, path: str) -> None:
        node = DirectoryNode(self._device.new_number())
        self.operate("mkdir", path, lambda device: self._add(device, "mkdir", path, node))

    def _add(self, device: SimDisk, what: str, path: str, node: Node) -> None:
        directory, name = device.parent(path, f"{what} {path}")
        if name in directory.entries:
            raise _failure(errno.EEXIST, f"{what} {path}")
        if device.room_bytes() == 0:
            raise _failure(errno.ENOSPC, f"{what} {path}")
        device.change(self._owner, f"{what} {path}", (directory, name, node))

    def rename(self, source: str, target: str) -> None:
        self.operate("rename", f"{source} to {target}", lambda device: self._rename(device, source, target))

    def _rename(self, device: SimDisk, source: str, target: str) -> None:
        what = f"rename {source} to {target}"
        old_directory, old_name = device.parent(source, what)
        new_directory, new_name = device.parent(target, what)
        node = old_directory.entries.get(old_name)
        if node is None:
            raise _failure(errno.ENOENT, what)
        existing = new_directory.entries.get(new_name)
        if isinstance(existing, DirectoryNode):
            raise _failure(errno.EEXIST, what)
        if isinstance(existing, FileNode) and isinstance(node, DirectoryNode):
            raise _failure(errno.ENOTDIR, what)
        if existing is not node:
            device.change(self._owner, what, (old_directory, old_name, None), (new_directory, new_name, node))

    def remove(self, path: str) -> None:
        def effect(device: SimDisk) -> None:
            directory, name = device.parent(path, f"remove {path}")
            node = directory.entries.get(name)
            if not isinstance(node, FileNode):
                raise _failure(errno.ENOENT if node is None else errno.EISDIR, f"remove {path}")
            device.change(self._owner, f"remove {path}", (directory, name, None))

        self.operate("remove", path, effect)

    def rmdir(self, path: str) -> None:
        def effect(device: SimDisk) -> None:
            directory, name = device.parent(path, f"rmdir {path}")
            if device.directory(path, f"rmdir {path}").entries:
                raise _failure(errno.ENOTEMPTY, f"rmdir {path}")
            device.change(self._owner, f"rmdir {path}", (directory, name, None))

        self.operate("rmdir", path, effect)

    def list(self, path: str) -> list[str]:
        names: list[str] = []
        self.operate(
            "list", path, lambda device: names.extend(device.directory(path, f"list {path}").entries), counted=False
        )
        return sorted(names)

    def exists(self, path: str) -> bool:
        return self._alive().lookup(path) is not None

    def is_dir(self, path: str) -> bool:
        return isinstance(self._alive().lookup(path), DirectoryNode)

    def hold(self, path: str, *, wait: bool = True) -> DiskLock:  # noqa: ARG002
        node = FileNode(self._device.new_number())

        def effect(device: SimDisk) -> None:
            holder = device.holders.get(path)
            if holder is not None and holder.lives:
                raise Held(f"lock {path}: another process holds it")
            if device.lookup(path) is None:
                self._add(device, "hold", path, node)
            device.holders[path] = self
            held.append(device.lookup(path))

        held: list[object] = []
        self.operate("hold", path, effect)
        return _SimLock(self, path, held[-1])

    def let_go(self, path: str, file: object) -> None:
        """Lock of `file` that `hold` took, which is free from now on. Where another file has its place, that stays."""
        device = self._alive()
        with device.lock:
            if device.lookup(path) is not file:
                return
            try:
                self.remove(path)
            finally:
                device.holders.pop(path, None)

    @property
    def lives(self) -> bool:
        return not self._dead and self._generation == self._device.generation

    def sync_dir(self, path: str) -> None:
        self.operate(
            "sync_dir", path, lambda device: device.sync_directory(device.directory(path, f"sync directory {path}"))
        )

    def free_bytes(self, path: str) -> int:
        device = self._alive()
        device.directory(path, f"statvfs {path}")
        return device.room_bytes()

    @property
    def owner(self) -> str:
        return self._owner


class _SimLock(DiskLock):
    def __init__(self, disk: MountedDisk, path: str, file: object) -> None:
        self._disk, self._path, self._file, self._held = disk, path, file, True

    def release(self) -> None:
        if self._held:
            self._held = False
            self._disk.let_go(self._path, self._file)


class _SimTransfer(Transfer):
    """Happens as late as it may: when it is waited for, with what is in its memory then. One that is never waited for
    never happens."""

    def __init__(self, operation: Callable[[], int]) -> None:
        self._operation = operation
        self._result: int | None = None

    def wait(self) -> int:
        if self._result is None:
            self._result = self._operation()
        return self._result


class SimFile(DiskFile):
    """An open file. Like the real one it is unusable after a failed fsync."""

    def __init__(self, mount: MountedDisk, node: FileNode, path: str, *, writable: bool) -> None:
        self._mount = mount
        self._node = node
        self._path = path
        self._writable = writable
        self._open = True

    def pwrite(self, data: Data, offset: int) -> None:
        with memoryview(data) as view:
            content = view.tobytes()

        def effect(device: SimDisk) -> None:
            self._usable("write")
            if not self._writable:
                raise _failure(errno.EBADF, f"write {self._path}")
            if offset < 0:
                raise UsageError(f"offset {offset} in {self._path} is negative")
            growth = max(0, offset + len(content) - len(self._node.content))
            fits = len(content) if growth <= device.room_bytes() else max(0, len(content) - growth)
            if fits < len(content) and offset <= len(self._node.content):
                fits += device.room_bytes()
            self._node.write(Write(offset, content[:fits], self._mount.owner))
            if fits < len(content):
                raise _failure(errno.ENOSPC, f"write {self._path}")

        self._mount.operate("pwrite", self._path, effect)

    def pread(self, length: int, offset: int) -> bytes:
        if length < 0 or offset < 0:
            raise UsageError(f"length {length} or offset {offset} in {self._path} is negative")
        self._mount.operate("pread", self._path, lambda _device: self._usable("read"), counted=False)
        return bytes(self._node.content[offset : offset + length])

    def start_pwrite(self, data: memoryview, offset: int) -> Transfer:
        return _SimTransfer(lambda: self._write_all(data, offset))

    def _write_all(self, data: memoryview, offset: int) -> int:
        self.pwrite(data, offset)
        return len(data)

    def start_pread(self, target: memoryview, offset: int) -> Transfer:
        return _SimTransfer(lambda: self._read_into(target, offset))

    def _read_into(self, target: memoryview, offset: int) -> int:
        data = self.pread(len(target), offset)
        target[: len(data)] = data
        return len(data)

    def allocate(self, size_bytes: int) -> None:
        def effect(device: SimDisk) -> None:
            self._usable("allocate")
            if not self._writable:
                raise _failure(errno.EBADF, f"allocate {self._path}")
            growth = size_bytes - len(self._node.content)
            if growth > device.room_bytes():
                raise _failure(errno.ENOSPC, f"allocate {self._path}")
            if growth > 0:
                self._node.write(Write(len(self._node.content), bytes(growth), self._mount.owner))

        self._mount.operate("allocate", self._path, effect)

    def size(self) -> int:
        self._mount.operate("size", self._path, lambda _device: self._usable("stat"), counted=False)
        return len(self._node.content)

    def fsync(self) -> None:
        def effect(_device: SimDisk) -> None:
            self._usable("fsync")
            self._node.sync()

        try:
            self._mount.operate("fsync", self._path, effect)
        except Exception:
            self._node.given_up = self._node.given_up or self._open
            raise

    def close(self) -> None:
        self._open = False

    def _usable(self, what: str) -> None:
        if not self._open:
            raise UsageError(f"{what} {self._path}: it is closed")
        if self._node.given_up and self._writable:
            raise _failure(errno.EIO, f"{what} {self._path}")
