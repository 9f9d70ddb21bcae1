"""What writers were told is stored, and what must therefore be there. Pure.

A writer notes an operation when it was acknowledged, never before; it repeats one that failed until it is acknowledged,
so at the end nothing is of unknown outcome. The content of each write follows from the seed and its number.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import TypeAlias

import msgspec
import numpy as np

from fireflyer.base.decoding import json_decoder
from fireflyer.base.errors import InvariantViolation
from fireflyer.recipes.testbed.facts import FileFact

__all__ = ["Noted", "Remove", "Replace", "Write", "content_of", "decode_notes", "encode_note", "twins_of_notes"]


class Write(msgspec.Struct, frozen=True, tag="write"):
    """`bytes` bytes at `offset` of a file, forced to disk."""

    number: int
    path: str
    offset: int
    bytes: int
    new: bool = False
    """It is the first of its file."""


class Replace(msgspec.Struct, frozen=True, tag="replace"):
    """A whole file, written beside it and renamed over it."""

    number: int
    path: str
    bytes: int


class Remove(msgspec.Struct, frozen=True, tag="remove"):
    number: int
    path: str


Noted: TypeAlias = Write | Replace | Remove


def content_of(seed: int, writer: str, number: int, size: int) -> bytes:
    """What operation `number` of a writer stores."""
    return np.random.default_rng([seed, *writer.encode(), number]).bytes(size)


def encode_note(note: Noted) -> bytes:
    """A line."""
    return msgspec.json.encode(note) + b"\n"


def decode_notes(lines: Iterable[bytes]) -> list[Noted]:
    decoder = json_decoder(Noted)
    return [decoder.decode(line) for line in lines]


def twins_of_notes(seed: int, writer: str, notes: Iterable[Noted]) -> list[FileFact]:
    """The files that must be there, and nothing else of this writer. Raises `InvariantViolation` for notes that no
    writer makes."""
    files: dict[str, bytearray] = {}
    for note in notes:
        match note:
            case Write(number, path, offset, size, new):
                file = files.setdefault(path, bytearray())
                if new == bool(file) or offset > len(file):
                    raise InvariantViolation(f"note {number} of writer {writer} does not follow from those before it")
                file[offset : offset + size] = content_of(seed, writer, number, size)
            case Replace(number, path, size):
                files[path] = bytearray(content_of(seed, writer, number, size))
            case Remove(number, path):
                if files.pop(path, None) is None:
                    raise InvariantViolation(f"note {number} of writer {writer} removes {path}, which is not there")
    return [
        FileFact(path=path, bytes=len(data), digest=hashlib.sha256(data).hexdigest())
        for path, data in sorted(files.items())
    ]
