"""Whatever bytes arrive, handshake, frames and RPC messages answer with one of our errors or with the right value."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fireflyer.base.errors import DataCorruption, PermissionDenied, UsageError
from fireflyer.identity.handshake import Accepts, ClientHandshake, NodeCredential, ServerHandshake
from fireflyer.identity.secrets import Secret
from fireflyer.runtime.address import Address
from fireflyer.runtime.framing import HEADER_BYTES, TAG_BYTES, FrameOpener, FrameSealer, frame_keys
from fireflyer.runtime.rpc.messages import from_client_decoder, from_server_decoder

SECRET = Secret(b"s" * 32)
MAX_BYTES = 4096

_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 63), (1 << 64) - 1) | st.text(max_size=40) | st.binary(max_size=40),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=10), inner, max_size=4),
    max_leaves=8,
)
_KEYS = st.sampled_from(["type", "version", "role", "identity", "purpose", "nonce", "proof", "code", "message"])
_LIKELY = st.sampled_from(["hello", "challenge", "proof", "verdict", "refused", "node", "user", "test", 1, bytes(32)])
_MESSAGES = st.dictionaries(_KEYS, _LIKELY | _VALUES, max_size=9).map(msgspec.msgpack.encode)
_DEEP = st.builds(
    lambda first, depth: first + b"\x91" * depth,
    st.sampled_from([b"", b"\x81\xa0", b"\x82\xa7version\x01\xa1x", b"\x82\xa4type\xa5proof\xa1x"]),
    st.just(1010) | st.integers(1, 1010),
)
_HOSTILE = st.binary(max_size=2000) | _MESSAGES | _VALUES.map(msgspec.msgpack.encode) | _DEEP


def _client() -> ClientHandshake:
    return ClientHandshake(NodeCredential(SECRET, "rank 0"), purpose="test", nonce=b"c" * 32)


def _server() -> ServerHandshake:
    return ServerHandshake(Accepts(SECRET), identity="hub", purpose="test", nonce=b"n" * 32)


@settings(max_examples=400)
@given(data=_HOSTILE)
def test_no_bytes_pass_the_handshake_and_none_break_it(data: bytes) -> None:
    try:
        _server().on_hello(data)  # a challenge for a well-formed hello gives nothing away
    except PermissionDenied:
        pass
    one, other = _client(), _server()
    with pytest.raises(PermissionDenied):
        one.on_challenge(data)
    proof = one.on_challenge(other.on_hello(one.hello()) or b"")
    with pytest.raises(PermissionDenied):
        one.on_verdict(data)
    if data != proof:
        with pytest.raises(PermissionDenied):
            other.on_proof(data)


@settings(max_examples=200)
@given(at=st.integers(0, 10_000), bit=st.integers(0, 7), turn=st.integers(0, 3))
def test_one_flipped_bit_keeps_the_connection_shut_unless_it_means_nothing(at: int, bit: int, turn: int) -> None:
    def through(number: int, message: bytes) -> bytes:
        if number != turn:
            return message
        flipped = bytearray(message)
        flipped[at % len(message)] ^= 1 << bit
        return bytes(flipped)

    one, other = _client(), _server()
    try:
        challenge = other.on_hello(through(0, one.hello()))
        if challenge is None:
            raise AssertionError("a user, at a server that lets in nodes alone")
        proof = one.on_challenge(through(1, challenge))
        theirs, verdict = other.on_proof(through(2, proof))
        ours = one.on_verdict(through(3, verdict))
    except PermissionDenied:
        return
    # A bit of a field's name that nobody looks at; all that was agreed on is what was sent.
    assert (ours.peer, theirs.peer, ours.key) == ("hub", "rank 0", theirs.key)


def _frames(payloads: list[bytes]) -> list[bytes]:
    sealer = FrameSealer(frame_keys(b"k" * 32)[0], MAX_BYTES)
    return [b"".join(sealer.seal(payload)) for payload in payloads]


def _open_all(stream: bytes) -> list[bytes]:
    opener = FrameOpener(frame_keys(b"k" * 32)[0], MAX_BYTES)
    payloads = []
    while stream:
        header, stream = stream[:HEADER_BYTES], stream[HEADER_BYTES:]
        length = opener.body_bytes(header)
        body, stream = stream[:length], stream[length:]
        if len(body) < length:
            break  # the reader waits for more
        payloads.append(bytes(opener.open(header, body)))
    return payloads


@given(payloads=st.lists(st.binary(max_size=300), max_size=6))
def test_frames_arrive_as_they_were_sent(payloads: list[bytes]) -> None:
    assert _open_all(b"".join(_frames(payloads))) == payloads


@settings(max_examples=300)
@given(payloads=st.lists(st.binary(max_size=60), min_size=1, max_size=4), data=st.data())
def test_an_altered_stream_yields_at_most_the_frames_before_the_change(
    payloads: list[bytes], data: st.DataObject
) -> None:
    stream = bytearray(b"".join(_frames(payloads)))
    at = data.draw(st.integers(0, len(stream) - 1))
    stream[at] ^= 1 << data.draw(st.integers(0, 7))
    try:
        received = _open_all(bytes(stream))
    except DataCorruption:
        return
    assert received == payloads[: len(received)]
    assert len(received) < len(payloads)


@given(payloads=st.lists(st.binary(max_size=30), min_size=2, max_size=5, unique=True), data=st.data())
def test_repeated_dropped_and_swapped_frames_are_noticed(payloads: list[bytes], data: st.DataObject) -> None:
    frames = _frames(payloads)
    order = data.draw(st.lists(st.integers(0, len(frames) - 1), min_size=1, max_size=6))
    prefix = 0
    while prefix < len(order) and order[prefix] == prefix:
        prefix += 1
    if prefix == len(order):
        return
    with pytest.raises(DataCorruption, match="altered, repeated or lost"):
        _open_all(b"".join(frames[index] for index in order))


def test_frames_of_one_direction_are_refused_in_the_other() -> None:
    to_server, to_client = frame_keys(b"k" * 32)
    header, payload, tag = FrameSealer(to_server).seal(b"x")
    with pytest.raises(DataCorruption):
        FrameOpener(to_client).open(header, payload + tag)


def test_frames_over_the_limit_are_refused_on_both_ends_and_the_sender_may_go_on() -> None:
    sealer, opener = FrameSealer(b"k", MAX_BYTES), FrameOpener(b"k", MAX_BYTES)
    with pytest.raises(UsageError, match="4097 bytes is longer than the limit of 4096"):
        sealer.seal(bytes(MAX_BYTES + 1))
    header, payload, tag = sealer.seal(bytes(MAX_BYTES))
    assert opener.body_bytes(header) == MAX_BYTES + TAG_BYTES
    assert bytes(opener.open(header, payload + tag)) == bytes(MAX_BYTES)
    with pytest.raises(DataCorruption, match="4097 bytes, the limit is 4096"):
        opener.body_bytes((MAX_BYTES + 1).to_bytes(4, "big"))
    with pytest.raises(DataCorruption):
        opener.body_bytes(b"\xff\xff\xff\xff")


@settings(max_examples=300)
@given(data=st.binary(max_size=200) | st.lists(_VALUES, max_size=5).map(msgspec.msgpack.encode))
def test_rpc_messages_decode_or_are_refused(data: bytes) -> None:
    for decoder in (from_client_decoder, from_server_decoder):
        try:
            decoder.decode(data)
        except msgspec.DecodeError:
            pass


@given(text=st.text(max_size=40) | st.from_regex(r"\[?[0-9a-f:.]{0,9}\]?:[0-9]{0,6}", fullmatch=True))
def test_an_address_is_read_as_it_is_written_or_refused(text: str) -> None:
    try:
        address = Address.parse(text)
    except UsageError:
        return
    assert Address.parse(str(address)) == address
    assert 0 < address.port < 65536
