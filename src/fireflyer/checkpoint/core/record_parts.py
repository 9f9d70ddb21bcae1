"""Records of shards that are too long for one value of the store: compressed, and cut into parts.

The store takes values of 4 MiB. A record has some 150 bytes of JSON for each tensor, a fifth of that when compressed.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Final

from fireflyer.base.errors import DataCorruption
from fireflyer.base.units import MIB
from fireflyer.checkpoint.core.manifest import MAX_MANIFEST_BYTES

__all__ = ["MAX_PARTS", "WHOLE_BYTES", "join_parts", "split_record"]

WHOLE_BYTES: Final = MIB
"""A record that is not longer is sent as it is."""
PART_BYTES: Final = 2 * MIB
MAX_PARTS: Final = MAX_MANIFEST_BYTES // PART_BYTES
_LEVEL: Final = 1


def split_record(record: bytes) -> list[bytes]:
    """Parts that `join_parts` takes."""
    packed = zlib.compress(record, _LEVEL)
    return [packed[at : at + PART_BYTES] for at in range(0, len(packed), PART_BYTES)]


def join_parts(parts: Sequence[bytes], what: str) -> bytes:
    """Raises `DataCorruption`, also for what would become longer than a manifest may be."""
    unpacking = zlib.decompressobj()
    try:
        record = unpacking.decompress(b"".join(parts), MAX_MANIFEST_BYTES)
    except zlib.error as error:
        raise DataCorruption(f"{what} cannot be unpacked: {error}") from error
    if not unpacking.eof or unpacking.unused_data:
        raise DataCorruption(f"{what} does not end where its parts do, or has more than {MAX_MANIFEST_BYTES} bytes")
    return record
