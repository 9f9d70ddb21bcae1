"""`.packing.json` beside the shards of an unfinished data set: how far the pack is, so that it can go on there.

It is written before the first shard, and again after each. Shards that are not counted in it are removed by who goes
on: they were finished just before their packer ended. `owner` is drawn by each packer; one that finds another's there
was replaced, and stops (`fireflyer.data.packing.claim`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import msgspec

from fireflyer.base.decoding import DECODE_ERRORS, decode_json
from fireflyer.base.errors import DataCorruption, NotFound
from fireflyer.base.ports import Disk
from fireflyer.data.files import read_file, replace_file
from fireflyer.data.packing.items import Position
from fireflyer.native import crc32c

__all__ = ["STATE_NAME", "State", "load_state", "save_state"]

STATE_NAME: Final = ".packing.json"
_MAX_BYTES: Final = 1 << 20


class State(msgspec.Struct, frozen=True, kw_only=True):
    version: int = 1
    owner: str
    options: str
    """Digest of what was asked for."""
    inputs: str
    """Digest of the inputs before `position.input`, and of that too unless it is JSONL."""
    shards: int
    records: int
    """In those shards."""
    skipped: int
    source_bytes: int
    """How much of the inputs is in them."""
    position: Position


class _File(msgspec.Struct, frozen=True):
    crc32c: int
    body: msgspec.Raw


def save_state(disk: Disk, path: str, state: State, before_publish: Callable[[], None] | None = None) -> None:
    """`before_publish`: as of `replace_file`."""
    body = msgspec.json.encode(state)
    data = msgspec.json.encode(_File(crc32c(body), msgspec.Raw(body)))
    replace_file(path, data, disk=disk, before_publish=before_publish)


def load_state(disk: Disk, path: str, shown: str) -> State | None:
    """None where there is none. Raises `DataCorruption`."""
    advice = "remove it together with the shards beside it, or use --restart"
    try:
        file = decode_json(read_file(path, max_bytes=_MAX_BYTES, disk=disk), _File)
        if crc32c(bytes(file.body)) != file.crc32c:
            raise DataCorruption(f"{shown}: does not match its CRC32C; {advice}")
        state = decode_json(file.body, State)
    except NotFound:
        return None
    except DECODE_ERRORS as error:
        raise DataCorruption(f"{shown}: not the state of a pack: {error}; {advice}") from error
    if state.version != 1 or min(state.shards, state.records, state.position.input, state.position.at) < 0:
        raise DataCorruption(f"{shown}: version {state.version} is not 1, or a number is negative; {advice}")
    return state
