"""The name of a blob: the BLAKE2b-256 of its bytes, as 64 hexadecimal digits."""

from __future__ import annotations

import hashlib
import re
from typing import Annotated, Final, NamedTuple

import msgspec

from fireflyer.base.errors import UsageError
from fireflyer.base.ports import Data

__all__ = ["HASH_PATTERN", "BlobHash", "StoredBlob", "check_hash", "hash_of", "new_hasher"]

HASH_PATTERN: Final = r"^[0-9a-f]{64}\Z"
BlobHash = Annotated[str, msgspec.Meta(pattern=HASH_PATTERN)]
_HASH: Final = re.compile(HASH_PATTERN)


class StoredBlob(NamedTuple):
    blob: str
    size_bytes: int
    renewed_ns: int
    """When it was put, or last renewed: wall time."""


def new_hasher() -> hashlib.blake2b:
    return hashlib.blake2b(digest_size=32)


def hash_of(data: Data) -> str:
    return hashlib.blake2b(data, digest_size=32).hexdigest()


def check_hash(text: str) -> str:
    """Raises `UsageError` for what is no name of a blob, and could be a path."""
    if _HASH.match(text) is None:
        raise UsageError(f"{text[:80]!r} is not the name of a blob; it has 64 digits of 0-9 and a-f")
    return text
