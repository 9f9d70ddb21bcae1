"""What readers of inputs give the packer: one record after another, and where the next one begins."""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from fireflyer.base.errors import PermanentError

__all__ = ["InvalidInput", "Item", "Position"]


class Position(msgspec.Struct, frozen=True):
    """Where to go on. All before it was read."""

    input: int = 0
    """Which of the inputs."""
    at: int = 0
    """JSONL: the byte at which the next line begins; Parquet: the row; of whole files always 0."""
    line: int = 0
    """JSONL: lines before it."""
    crc: int = 0
    """JSONL: CRC32C of the bytes before it: whether a file that was changed is still the same up to here."""


class Item(NamedTuple):
    record: bytes | None
    """None: the value cannot be a record, as `problem` says."""
    after: Position
    name: str | None = None
    source_bytes: int = 0
    """How much of the inputs it is, for the progress."""
    problem: str = ""
    """`FILE:LINE: what is wrong`."""


class InvalidInput(PermanentError):
    """An input holds what cannot be a record. What was packed before stays, and the same command goes on after it."""
