"""What is said on a data connection, beside the reads that native code answers by itself.

The connection is authenticated first (`PURPOSE`), then carries the frames of `storage/wire/wire.hpp`. The body of a
frame of kind `message` is one of these, in msgpack; its payload is the data that the message speaks of.

    Ask      ──>                  a client: an update, a look (never READ: that has frames of its own), …
             <──  Told            its answer, by the number that the client gave; in any order
    Between  ──>  <──  Between    one replica to another, either way

Whoever sends what cannot be decoded loses the connection; what can be decoded but is not allowed is answered.
"""

from __future__ import annotations

from typing import Annotated, Final, TypeAlias

import msgspec

from fireflyer.base.decoding import DECODE_ERRORS, msgpack_decoder
from fireflyer.base.errors import DataCorruption, UsageError
from fireflyer.base.units import KIB
from fireflyer.fs.schema.chunks import PeerMessage, Query, QueryReply, Update, UpdateReply
from fireflyer.fs.schema.ids import ChainId, ChunkId, NodeId, TargetId

__all__ = [
    "MAX_BODY_BYTES",
    "MAX_CAPABILITY_BYTES",
    "PURPOSE",
    "CorruptionHint",
    "DataReply",
    "DataRequest",
    "Granted",
    "Message",
    "PeerEnvelope",
    "Present",
    "decode",
    "encode",
    "node_identity",
]

PURPOSE: Final = "fs data"
"""Of the handshake."""
MAX_BODY_BYTES: Final = 256 * KIB
MAX_CAPABILITY_BYTES: Final = 512

_Number = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]


class Present(msgspec.Struct, frozen=True, tag="Present", array_like=True):
    """A capability, as `fireflyer.fs.core.capability` signs it. It counts for this connection until it expires."""

    capability: Annotated[bytes, msgspec.Meta(max_length=MAX_CAPABILITY_BYTES)]


class CorruptionHint(msgspec.Struct, frozen=True, tag="Doubt", array_like=True):
    """What was read of this chunk did not match its checksum: look whether it is damaged. Not answered."""

    chain: ChainId
    chunk: ChunkId


class Granted(msgspec.Struct, frozen=True, tag="Granted", array_like=True):
    """The capability that was presented is good for so long."""

    left_ns: _Number


class DataRequest(msgspec.Struct, frozen=True, tag=1, array_like=True):
    number: _Number
    body: Update | Query | Present | CorruptionHint


class DataReply(msgspec.Struct, frozen=True, tag=2, array_like=True):
    number: _Number
    body: UpdateReply | QueryReply | Granted


class PeerEnvelope(msgspec.Struct, frozen=True, tag=3, array_like=True):
    source: TargetId
    target: TargetId
    message: PeerMessage


Message: TypeAlias = DataRequest | DataReply | PeerEnvelope


def node_identity(node: NodeId) -> str:
    """The name that the storage process of this node proves, to whom it connects and who connects to it."""
    return f"fs node {node}"


_encoder = msgspec.msgpack.Encoder()
_decoder = msgpack_decoder(Message)


def encode(message: Message) -> bytes:
    """Raises `UsageError` where it would not fit into a frame."""
    body = _encoder.encode(message)
    if len(body) > MAX_BODY_BYTES:
        raise UsageError(f"a message of {len(body)} bytes is longer than a frame's body ({MAX_BODY_BYTES} bytes)")
    return body


def decode(body: bytes) -> Message:
    """Raises `DataCorruption` for everything that `encode` cannot have made."""
    if len(body) > MAX_BODY_BYTES:
        raise DataCorruption(f"a message of {len(body)} bytes is longer than a frame's body ({MAX_BODY_BYTES} bytes)")
    try:
        message: Message = _decoder.decode(body)
        return message
    except DECODE_ERRORS as error:
        raise DataCorruption(f"malformed message of {len(body)} bytes: {error}") from None
