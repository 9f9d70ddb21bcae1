"""What a save machine hears and what it asks for. Each effect, performed, gives exactly one event."""

from __future__ import annotations

import msgspec

from fireflyer.checkpoint.core.manifest import ShardRecord

__all__ = [
    "Await",
    "Begin",
    "Commit",
    "Committed",
    "Discard",
    "Done",
    "Effect",
    "Event",
    "Failed",
    "Finish",
    "Forget",
    "KeyReceived",
    "Listed",
    "Listing",
    "Open",
    "Publish",
    "ShardWritten",
    "TakeSnapshot",
    "WriteShard",
]


class Begin(msgspec.Struct, frozen=True, tag="Begin"):
    """Start. Given once."""


class Done(msgspec.Struct, frozen=True, tag="Done"):
    """The effect succeeded and has nothing else to say."""


class Failed(msgspec.Struct, frozen=True, tag="Failed"):
    """The effect failed; `code` and `message` as in `fireflyer.base.errors`."""

    code: str
    message: str


class ShardWritten(msgspec.Struct, frozen=True, tag="ShardWritten"):
    """The shard and its name are durable; those of a rank that is alone will be when it commits."""

    record: ShardRecord


class KeyReceived(msgspec.Struct, frozen=True, tag="Heard"):
    payload: bytes


class Committed(msgspec.Struct, frozen=True, tag="Committed"):
    """The checkpoint is durable under `name`."""

    name: str


class Listed(msgspec.Struct, frozen=True, tag="Listed"):
    names: tuple[str, ...]


Event = Begin | Done | Failed | ShardWritten | KeyReceived | Committed | Listed


class TakeSnapshot(msgspec.Struct, frozen=True, tag="TakeSnapshot"):
    """Copy this rank's share, so that training may go on. Done."""


class Open(msgspec.Struct, frozen=True, tag="Open"):
    """Make the temporary directory. Done."""

    directory: str


class WriteShard(msgspec.Struct, frozen=True, tag="WriteShard"):
    """Write the snapshot into `directory`/`file` and make it durable, where other ranks are. ShardWritten."""

    directory: str
    file: str


class Publish(msgspec.Struct, frozen=True, tag="Publish"):
    """Set a key of the store. Done."""

    key: str
    payload: bytes


class Await(msgspec.Struct, frozen=True, tag="Await"):
    """Wait for a key of the store. Heard."""

    key: str
    timeout_ns: int


class Commit(msgspec.Struct, frozen=True, tag="Commit"):
    """Write the manifest, make durable what is not, and rename the directory to its final name, durably. Committed."""

    directory: str
    step: int
    manifest: bytes
    first: bool = False
    """No checkpoint of this step or a later one can be there."""


class Finish(msgspec.Struct, frozen=True, tag="Finish"):
    """Tell whoever waits for this save. Done."""

    name: str | None
    size_bytes: int
    error: Failed | None


class Listing(msgspec.Struct, frozen=True, tag="Listing"):
    """List the checkpoint directory. Listed."""


class Discard(msgspec.Struct, frozen=True, tag="Discard"):
    """Move `name` into the writer's directory and remove it. Done, also when it is gone already."""

    name: str
    writer_directory: str = ""


class Forget(msgspec.Struct, frozen=True, tag="Forget"):
    """Delete the keys below `prefix` from the store. Done."""

    prefix: str


Effect = TakeSnapshot | Open | WriteShard | Publish | Await | Commit | Finish | Listing | Discard | Forget
