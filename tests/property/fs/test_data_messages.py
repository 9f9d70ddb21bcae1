"""Whatever bytes arrive on a data connection, they are one message or one error."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fireflyer.base.errors import DataCorruption, UsageError
from fireflyer.fs.schema import chunks, data
from fireflyer.fs.schema.ids import ChunkId, ContentId

_HELD = chunks.ChunkVersion(ContentId(1, 2), 3, 4)
_ROW = chunks.CompletionRecord(1, 2, 3, ChunkId(4, 5), ContentId(6, 7))
_CHANGE = chunks.Change(chunks.Operation.WRITE, 0, 3, 9)
_PUT = chunks.Put(ChunkId(1, 2), ContentId(3, 4), None, _CHANGE, _HELD, _ROW)
MESSAGES: list[data.Message] = [
    data.DataRequest(1, chunks.Update(1, 2, 3, 4, 5, ChunkId(1, 2), _CHANGE)),
    data.DataRequest(2, chunks.Query(1, 2, chunks.QueryKind.STAT, ChunkId(1, 2))),
    data.DataRequest(3, data.Present(b"capability")),
    data.DataRequest(4, data.CorruptionHint(1, ChunkId(1, 2))),
    data.DataReply(1, chunks.Done(ContentId(1, 2), _HELD)),
    data.DataReply(2, chunks.Found((chunks.ChunkEntry(ChunkId(1, 2), _HELD),))),
    data.DataReply(3, chunks.Missing()),
    data.DataReply(3, chunks.NotCommitted(7)),
    data.DataReply(4, data.Granted(5)),
    data.DataReply(5, chunks.Refused(chunks.RefusalReason.DENIED, "no capability", 3)),
    data.PeerEnvelope(1, 2, chunks.Request(1, 2, 0, 3, 4, _PUT)),
    data.PeerEnvelope(1, 2, chunks.Request(1, 2, 1, 3, 4, chunks.SyncCompletions((_ROW,) * chunks.MAX_PAGE))),
    data.PeerEnvelope(2, 1, chunks.Answer(1, 2, 0, 3, 4, chunks.Declined(chunks.RefusalReason.NO_SPACE, "full"))),
    data.PeerEnvelope(1, 2, chunks.Request(1, 2, 0, 3, 4, chunks.Reminder(ChunkId(1, 2)))),
    data.PeerEnvelope(2, 1, chunks.Answer(1, 2, 0, 3, 4, chunks.InProgress())),
    data.PeerEnvelope(2, 1, chunks.StaleChainVersion(1, 2)),
]
_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 63), (1 << 64) - 1) | st.text(max_size=20) | st.binary(max_size=20),
    lambda inner: st.lists(inner, max_size=9) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=20,
)


@pytest.mark.parametrize("message", MESSAGES, ids=lambda one: type(one).__name__)
def test_what_is_encoded_is_decoded(message: data.Message) -> None:
    assert data.decode(data.encode(message)) == message


def _is_one_or_refused(body: bytes) -> None:
    try:
        message = data.decode(body)
    except DataCorruption:
        return
    assert isinstance(message, data.DataRequest | data.DataReply | data.PeerEnvelope)
    assert data.decode(data.encode(message)) == message


@settings(max_examples=150)
@given(body=st.binary(max_size=400) | _VALUES.map(msgspec.msgpack.encode))
def test_nonsense_is_refused(body: bytes) -> None:
    _is_one_or_refused(body)


@settings(max_examples=200)
@given(message=st.sampled_from(MESSAGES), at=st.integers(0, 1 << 30), byte=st.integers(0, 255), cut=st.booleans())
def test_an_altered_message_is_another_one_or_refused(message: data.Message, at: int, byte: int, cut: bool) -> None:
    body = bytearray(data.encode(message))
    body[at % len(body)] = byte
    _is_one_or_refused(bytes(body[: at % len(body)] if cut else body))


def _leaves(value: Any, path: tuple[int, ...] = ()) -> list[tuple[int, ...]]:
    if not isinstance(value, list):
        return [path]
    return [leaf for at, one in enumerate(value[:30]) for leaf in _leaves(one, (*path, at))]


@settings(max_examples=200)
@given(message=st.sampled_from(MESSAGES), which=st.integers(0, 1 << 30), value=_VALUES)
def test_a_field_of_another_kind_or_out_of_bounds_is_refused(message: data.Message, which: int, value: Any) -> None:
    plain = msgspec.msgpack.decode(data.encode(message))
    leaves = _leaves(plain)
    *path, last = leaves[which % len(leaves)]
    inner = plain
    for at in path:
        inner = inner[at]
    inner[last] = value
    _is_one_or_refused(msgspec.msgpack.encode(plain))


def test_deep_and_long_messages_are_refused() -> None:
    with pytest.raises(DataCorruption):
        data.decode(b"\x91" * 100_000)
    with pytest.raises(DataCorruption, match="longer than"):
        data.decode(bytes(data.MAX_BODY_BYTES + 1))
    with pytest.raises(DataCorruption):
        data.decode(msgspec.msgpack.encode([1, 1, ["Present", bytes(data.MAX_CAPABILITY_BYTES + 1)]]))
    completions = chunks.SyncCompletions((_ROW,) * 40000)
    with pytest.raises(UsageError, match="longer than"):
        data.encode(data.PeerEnvelope(1, 2, chunks.Request(1, 2, 1, 3, 4, completions)))
