"""What the meta service keeps in the key-value store: keys and values.

    FI + id (8)                    an inode                      `Inode`
    FE + parent (8) + name         a name in a directory         `DentryRow`
    FV + id (8) + name             an extended attribute         the value
    FA + directory (8)             a quota tree                  `QuotaTreeRow`
    FT + time (8) + id (8)         what leaves the trash then    `TrashRow`
    FW FO FL FU                    writers, holds, locks, what is unlinked: `open_rows`, as FC FG FK FQ
    FP                             which files users may write to: `open_files.write_grants`
    FXtrash                        the clock of the trash        `TrashClockRow`
    FR FX                          the service's: replies; numbers given out, services, leases

Numbers are big-endian, so that ranges are in their order; the names of one directory are one range. A value is a byte,
the version of its format, and MessagePack (of extended attributes: the bytes themselves). What does not decode, or is
not the row of its key, is `DataCorruption` naming the key. The manager's rows, in the same store, begin with FM.
"""

from __future__ import annotations

from typing import Final, Generic, TypeVar

import msgspec

from fireflyer.base.decoding import DECODE_ERRORS, msgpack_decoder
from fireflyer.base.errors import DataCorruption
from fireflyer.fs.schema.inodes import Inode, InodeId, Kind

__all__ = ["AREAS", "ENTRIES", "FORMAT", "HOLDS", "INODES", "LOCKS", "TRASH", "UNLINKED", "VALUES", "WRITERS"]
__all__ += ["Coder", "DentryRow", "QuotaTreeRow", "TrashRow", "decode_entry", "decode_inode", "encode_entry"]
__all__ += ["encode_inode", "entries_end", "entry_key", "inode_key", "number_key", "pair_key", "prefix_end"]

FORMAT: Final = b"\x01"
INODES: Final = b"FI"
ENTRIES: Final = b"FE"
VALUES: Final = b"FV"
AREAS: Final = b"FA"
TRASH: Final = b"FT"
TRASH_CLOCK_KEY: Final = b"FXtrash"
UNLINKED: Final = b"FU"
WRITERS: Final = b"FW"
HOLDS: Final = b"FO"
LOCKS: Final = b"FL"
ENTRY_PREFIX_BYTES: Final = 10
"""Of the key of a name, before the name."""

R = TypeVar("R")


class DentryRow(msgspec.Struct, frozen=True, array_like=True):
    id: InodeId
    kind: Kind


class QuotaTreeRow(msgspec.Struct, frozen=True, array_like=True):
    """Limits and use of everything in a directory, the areas in it included and the directory too. Use counts what is
    unlinked until it is collected. It goes with its last inode."""

    head: InodeId
    outer: int
    """The next area around it; 0: none."""
    bytes: int = 0
    inodes: int = 0
    limit_bytes: int | None = None
    limit_inodes: int | None = None
    closed: bool = False
    """It is an area no more; what still counts in it is unlinked and waits to be collected."""


class TrashRow(msgspec.Struct, frozen=True, array_like=True):
    """`name` of `directory` was `id` when it was removed by this user; it is removed in their name at its time."""

    id: InodeId
    directory: InodeId
    name: bytes
    uid: int
    gid: int
    groups: tuple[int, ...] = ()


class TrashClockRow(msgspec.Struct, frozen=True, array_like=True):
    now_ns: int


class Coder(Generic[R]):
    """Values of one kind of row."""

    __slots__ = ("_decode", "_encode", "_what")

    def __init__(self, row_type: type[R]) -> None:
        self._decode = msgpack_decoder(row_type).decode
        self._encode = msgspec.msgpack.Encoder().encode
        self._what = row_type.__name__

    def encode(self, row: R) -> bytes:
        return FORMAT + self._encode(row)

    def decode(self, key: bytes, value: bytes) -> R:
        """Raises `DataCorruption` for what `encode` did not make."""
        if value[:1] != FORMAT:
            raise corrupt(key, f"is no {self._what} in format {FORMAT[0]}")
        try:
            return self._decode(value[1:])
        except DECODE_ERRORS as error:
            raise corrupt(key, f"is no {self._what}: {error}") from error


AREA_ROWS: Final = Coder(QuotaTreeRow)
TRASH_ROWS: Final = Coder(TrashRow)
TRASH_CLOCK_ROWS: Final = Coder(TrashClockRow)
_INODE: Final = Coder(Inode)
_ENTRY: Final = Coder(DentryRow)
__all__ += ["AREA_ROWS", "ENTRY_PREFIX_BYTES", "TRASH_CLOCK_KEY", "TRASH_CLOCK_ROWS", "TRASH_ROWS", "TrashClockRow"]
__all__ += ["corrupt"]

encode_inode: Final = _INODE.encode
encode_entry: Final = _ENTRY.encode
decode_entry: Final = _ENTRY.decode


def decode_inode(key: bytes, value: bytes) -> Inode:
    """Raises `DataCorruption`, also when it is the row of another inode."""
    inode = _INODE.decode(key, value)
    if inode.id.to_bytes(8, "big") != key[2:]:
        raise corrupt(key, f"is the row of inode {inode.id}")
    return inode


def inode_key(inode: InodeId) -> bytes:
    return INODES + inode.to_bytes(8, "big")


def entry_key(parent: InodeId, name: bytes) -> bytes:
    return ENTRIES + parent.to_bytes(8, "big") + name


def entries_end(parent: InodeId) -> bytes:
    """Behind all names of the directory."""
    return ENTRIES + (parent + 1).to_bytes(8, "big")


def number_key(table: bytes, number: int) -> bytes:
    """Of a table with one number in its keys."""
    return table + number.to_bytes(8, "big")


def pair_key(table: bytes, first: int, second: int) -> bytes:
    """Of a table with two."""
    return table + first.to_bytes(8, "big") + second.to_bytes(8, "big")


def prefix_end(prefix: bytes) -> bytes:
    """Behind all keys that begin with `prefix`, whose last byte is not 0xff."""
    return prefix[:-1] + bytes([prefix[-1] + 1])


def corrupt(key: bytes, what: str) -> DataCorruption:
    return DataCorruption(f"row {key.hex()} of the file system {what}; restore the store from a backup")
