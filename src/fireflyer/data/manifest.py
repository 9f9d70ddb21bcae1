"""The manifest of a data set, `dataset.json`: which shards it has, and what each of them is.

    {"crc32c": n, "body": {"format", "version", "shards": [...], "meta": {...}, "names": [...]}}

`crc32c` is that of the bytes of `body` as they stand in the file. Each shard is listed with its record count and index
CRC, so a shard of another data set under the right name is refused. `names` lists for each shard one more, whose record
i is the name of record i; it is left out where records have no names.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from fireflyer.base.decoding import DECODE_ERRORS, decode_json
from fireflyer.base.errors import DataCorruption
from fireflyer.base.units import MIB
from fireflyer.data.shard_format import MAX_RECORDS, ShardInfo
from fireflyer.native import crc32c

__all__ = ["MANIFEST_NAME", "MAX_MANIFEST_BYTES", "MAX_SHARDS", "Manifest", "ManifestBody", "decode_manifest"]
__all__ += ["encode_manifest", "is_shard_file", "names_file", "shard_file"]

MANIFEST_NAME: Final = "dataset.json"
MAX_SHARDS: Final = 1 << 16
MAX_MANIFEST_BYTES: Final = 64 * MIB
_SHARD_FILE: Final = re.compile(r"(shard|names)-\d{5}\.ffr")
_FORMAT = "fireflyer-dataset"
_ADVICE = "restore it from a copy or rebuild the data set"


class ManifestBody(msgspec.Struct, frozen=True, omit_defaults=True):
    format: str
    version: int
    shards: tuple[ShardInfo, ...]
    meta: dict[str, Any]
    names: tuple[ShardInfo, ...] = ()


class Manifest(msgspec.Struct, frozen=True):
    crc32c: int
    body: msgspec.Raw


def shard_file(number: int) -> str:
    return f"shard-{number:05d}.ffr"


def names_file(number: int) -> str:
    return f"names-{number:05d}.ffr"


def is_shard_file(name: str) -> bool:
    """Whether `shard_file` or `names_file` makes such names."""
    return _SHARD_FILE.fullmatch(name) is not None


def encode_manifest(shards: Sequence[ShardInfo], names: Sequence[ShardInfo], meta: Mapping[str, Any]) -> bytes:
    body = msgspec.json.encode(ManifestBody(_FORMAT, 1, tuple(shards), dict(meta), tuple(names)))
    return msgspec.json.encode(Manifest(crc32c=crc32c(body), body=msgspec.Raw(body)))


def decode_manifest(path: str, data: bytes) -> ManifestBody:
    """Raises `DataCorruption` naming `path`."""
    try:
        manifest = decode_json(data, Manifest)
        if crc32c(bytes(manifest.body)) != manifest.crc32c:
            raise DataCorruption(f"{path}: does not match its CRC32C; {_ADVICE}")
        body = decode_json(manifest.body, ManifestBody)
    except DECODE_ERRORS as error:
        raise DataCorruption(f"{path}: not a manifest: {error}; {_ADVICE}") from error
    if body.format != _FORMAT or body.version != 1:
        raise DataCorruption(
            f"{path}: format {body.format!r} version {body.version}, not {_FORMAT!r} version 1; {_ADVICE}"
        )
    if len(body.shards) > MAX_SHARDS:
        raise DataCorruption(f"{path}: lists {len(body.shards)} shards, more than {MAX_SHARDS}; {_ADVICE}")
    if body.names and [one.records for one in body.names] != [one.records for one in body.shards]:
        raise DataCorruption(f"{path}: lists names of other records than it has; {_ADVICE}")
    for shard in (*body.shards, *body.names):
        if posixpath.basename(shard.name) != shard.name or shard.name in ("", ".", "..") or "\0" in shard.name:
            raise DataCorruption(f"{path}: shard name {shard.name!r} is not a plain file name; {_ADVICE}")
        if not 0 <= shard.records <= MAX_RECORDS:
            raise DataCorruption(f"{path}: shard {shard.name} is listed with {shard.records} records; {_ADVICE}")
    return body
