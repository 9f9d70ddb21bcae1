"""Both ends of a connection prove themselves, and nothing but the key lets anyone through."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

import msgspec
import pytest

from fireflyer.base.errors import Busy, PermissionDenied, UsageError
from fireflyer.identity.handshake import (
    BEARER_MARK,
    HANDSHAKE_VERSION,
    MAX_IDENTITY_BYTES,
    MAX_MESSAGE_BYTES,
    Accepts,
    ClientHandshake,
    Credential,
    HandshakeRefused,
    NodeCredential,
    ServerHandshake,
    Session,
    UserCredential,
    UserKey,
    message_length,
    pack_message,
    refusal_message,
    token_key,
)
from fireflyer.identity.secrets import Secret

SECRET = Secret(b"s" * 32)
OTHER = Secret(b"o" * 32)
TOKEN = f"{BEARER_MARK}.0011223344556677.the-secret-part"
USERS = {"0011223344556677": UserKey("ada", token_key(TOKEN))}
_nonces = (number.to_bytes(32, "big") for number in itertools.count())


def client(credential: Credential | None = None, purpose: str = "test") -> ClientHandshake:
    return ClientHandshake(credential or NodeCredential(SECRET, "rank 0"), purpose=purpose, nonce=next(_nonces))


def server(accepts: Accepts | None = None, purpose: str = "test", decoy: bytes | None = b"d" * 32) -> ServerHandshake:
    return ServerHandshake(
        accepts or Accepts(SECRET, find_user), identity="hub", purpose=purpose, nonce=next(_nonces), decoy_key=decoy
    )


async def find_user(_token_id: str) -> UserKey | None:
    raise AssertionError("what is pure only looks whether there is somebody to ask")


def challenged(by: ServerHandshake, hello: bytes, users: Mapping[str, UserKey] = USERS) -> bytes:
    """The challenge: at once for nodes, for users when it was found out whose token it is."""
    challenge = by.on_hello(hello)
    return by.on_found(users.get(by.token_id)) if challenge is None else challenge


def converse(one: ClientHandshake, other: ServerHandshake) -> tuple[Session, Session]:
    session, verdict = other.on_proof(one.on_challenge(challenged(other, one.hello())))
    return one.on_verdict(verdict), session


def test_nodes_with_the_same_secret_learn_names_and_share_a_key() -> None:
    ours, theirs = converse(client(), server())
    assert (ours.role, ours.peer, ours.purpose) == ("node", "hub", "test")
    assert (theirs.role, theirs.peer, theirs.purpose) == ("node", "rank 0", "test")
    assert ours.key == theirs.key
    assert len(ours.key) == 32


def test_a_user_is_known_by_the_name_that_the_server_keeps() -> None:
    ours, theirs = converse(client(UserCredential(TOKEN)), server())
    assert (theirs.role, theirs.peer) == ("user", "ada")
    assert (ours.role, ours.peer) == ("user", "hub")
    assert ours.key == theirs.key


def test_every_conversation_has_its_own_key() -> None:
    assert converse(client(), server())[0].key != converse(client(), server())[0].key


def test_a_server_with_another_secret_is_not_believed() -> None:
    with pytest.raises(PermissionDenied, match="the server has another node secret"):
        converse(client(), server(Accepts(OTHER)))


def test_a_client_that_ignores_that_is_refused() -> None:
    one, other = client(NodeCredential(OTHER, "rank 0")), server()
    challenged(other, one.hello())
    forger = server(Accepts(OTHER))
    proof = one.on_challenge(challenged(forger, one.hello()))
    with pytest.raises(HandshakeRefused, match="the proof of the client is wrong"):
        other.on_proof(proof)


def test_a_proof_sent_back_to_its_author_proves_nothing() -> None:
    one, other = client(), server()
    challenge = challenged(other, one.hello())
    servers_proof = msgspec.msgpack.decode(challenge)["proof"]
    with pytest.raises(HandshakeRefused):
        other.on_proof(msgspec.msgpack.encode({"type": "proof", "proof": servers_proof}))


def test_a_verdict_made_of_earlier_proofs_is_forged() -> None:
    one, other = client(), server()
    challenge = challenged(other, one.hello())
    clients_proof = msgspec.msgpack.decode(one.on_challenge(challenge))["proof"]
    for proof in (clients_proof, msgspec.msgpack.decode(challenge)["proof"], bytes(32)):
        with pytest.raises(PermissionDenied, match="forged"):
            one.on_verdict(msgspec.msgpack.encode({"type": "verdict", "proof": proof}))


def test_a_replayed_conversation_is_refused_by_either_side() -> None:
    one, other = client(), server()
    hello = one.hello()
    challenge = challenged(other, hello)
    proof = one.on_challenge(challenge)
    other.on_proof(proof)
    again = server()
    challenged(again, hello)
    with pytest.raises(HandshakeRefused):
        again.on_proof(proof)
    with pytest.raises(PermissionDenied, match="another node secret"):
        client().on_challenge(challenge)


def test_a_proof_made_for_another_service_is_of_no_use_here() -> None:
    with pytest.raises(HandshakeRefused, match="this port serves 'store', and the client asked for 'test'"):
        converse(client(), server(purpose="store"))
    one = client(purpose="store")
    carried_over = msgspec.msgpack.decode(one.hello()) | {"purpose": "test"}
    challenge = challenged(server(), msgspec.msgpack.encode(carried_over))
    with pytest.raises(PermissionDenied, match="another node secret"):
        one.on_challenge(challenge)


@pytest.mark.parametrize("field", ["identity", "role", "nonce"])
def test_nothing_in_the_hello_can_be_changed_on_the_way(field: str) -> None:
    one, other, users = client(), server(), {"rank 0": UserKey("mallory", SECRET.reveal())}
    changed = {"identity": "rank 1", "role": "user", "nonce": b"n" * 32}[field]
    hello = msgspec.msgpack.encode(msgspec.msgpack.decode(one.hello()) | {field: changed})
    with pytest.raises(PermissionDenied, match="another node secret"):
        one.on_challenge(challenged(other, hello, users))


@pytest.mark.parametrize("field", ["identity", "nonce", "proof"])
def test_nothing_in_the_challenge_can_be_changed_on_the_way(field: str) -> None:
    one, other = client(), server()
    changed = {"identity": "another hub", "nonce": b"n" * 32, "proof": b"p" * 32}[field]
    challenge = msgspec.msgpack.decode(challenged(other, one.hello())) | {field: changed}
    with pytest.raises(PermissionDenied, match="another node secret"):
        one.on_challenge(msgspec.msgpack.encode(challenge))


def test_who_asks_for_an_unknown_token_cannot_tell_it_from_a_wrong_one() -> None:
    unknown = client(UserCredential(f"{BEARER_MARK}.ffffffffffffffff.x"))
    wrong = client(UserCredential(f"{BEARER_MARK}.0011223344556677.x"))
    said = []
    for one in (unknown, wrong):
        challenge = challenged(server(), one.hello())
        assert len(challenge) == len(challenged(server(), client(UserCredential(TOKEN)).hello()))
        with pytest.raises(PermissionDenied, match="the server does not accept this token") as caught:
            one.on_challenge(challenge)
        said.append(str(caught.value))
    assert said[0] == said[1]


def test_the_decoy_key_opens_nothing_even_if_it_were_known() -> None:
    decoy = token_key(f"{BEARER_MARK}.ffffffffffffffff.x")
    other = server(decoy=decoy)
    one = client(UserCredential(f"{BEARER_MARK}.ffffffffffffffff.x"))
    proof = one.on_challenge(challenged(other, one.hello()))
    with pytest.raises(HandshakeRefused):
        other.on_proof(proof)


def test_services_say_whom_they_do_not_serve() -> None:
    with pytest.raises(HandshakeRefused, match="no tokens; check the address"):
        converse(client(UserCredential(TOKEN)), server(Accepts(SECRET)))
    with pytest.raises(HandshakeRefused, match="use a user token"):
        converse(client(), server(Accepts(None, find_user)))


def test_another_version_is_told_which_one_is_needed() -> None:
    hello = msgspec.msgpack.encode({"type": "hello", "version": 2, "shape": "unknown to us"})
    with pytest.raises(HandshakeRefused, match="version 2, this side 1; install the same release") as caught:
        challenged(server(), hello)
    with pytest.raises(PermissionDenied, match="refused by the server: the peer speaks handshake version 2"):
        client().on_challenge(caught.value.reply)
    one = client()
    challenge = msgspec.msgpack.decode(challenged(server(), one.hello())) | {"version": HANDSHAKE_VERSION + 1}
    with pytest.raises(PermissionDenied, match="install the same release"):
        one.on_challenge(msgspec.msgpack.encode(challenge))


def test_a_refusal_reaches_the_client_at_either_turn() -> None:
    full = refusal_message(Busy("the server is full"))
    with pytest.raises(Busy, match="refused by the server: the server is full"):
        client().on_challenge(full)
    one, other = client(), server()
    one.on_challenge(challenged(other, one.hello()))
    with pytest.raises(PermissionDenied, match="refused"):
        one.on_verdict(refusal_message(PermissionDenied("no")))


@pytest.mark.parametrize("cut", [0, 1, 5, 40, -1])
def test_a_truncated_message_is_refused(cut: int) -> None:
    one, other = client(), server()
    hello = one.hello()
    with pytest.raises(PermissionDenied, match="malformed"):
        challenged(server(), hello[:cut])
    challenge = challenged(other, hello)
    with pytest.raises(PermissionDenied, match="malformed"):
        one.on_challenge(challenge[:cut])
    proof = one.on_challenge(challenge)
    with pytest.raises(PermissionDenied, match="malformed"):
        other.on_proof(proof[:cut])


def test_messages_and_fields_are_bounded() -> None:
    fields = msgspec.msgpack.decode(client().hello())
    with pytest.raises(PermissionDenied, match="more than 1024"):
        challenged(server(), msgspec.msgpack.encode(fields | {"padding": bytes(MAX_MESSAGE_BYTES)}))
    for name, value in (("identity", "x" * 257), ("identity", "ä" * 200), ("identity", "a\nb"), ("nonce", bytes(31))):
        with pytest.raises(PermissionDenied):
            challenged(server(), msgspec.msgpack.encode(fields | {name: value}))
    with pytest.raises(UsageError, match="256 bytes"):
        client(NodeCredential(SECRET, "ä" * (MAX_IDENTITY_BYTES // 2 + 1)))
    with pytest.raises(UsageError, match="128 bytes"):
        client(purpose="p" * 129)
    longest = NodeCredential(SECRET, "i" * MAX_IDENTITY_BYTES)
    assert converse(client(longest, "p" * 128), server(purpose="p" * 128))[1].peer == longest.identity


def test_lengths_on_the_wire() -> None:
    assert message_length(pack_message(b"abc")[:2]) == 3
    for header in (b"\0\0", b"\xff\xff", b"GE", b"\x04\x01", b"\x01"):
        with pytest.raises(PermissionDenied, match="does not speak this protocol"):
            message_length(header)


def test_steps_out_of_order_are_the_callers_fault() -> None:
    with pytest.raises(UsageError):
        server().on_proof(msgspec.msgpack.encode({"type": "proof", "proof": bytes(32)}))
    with pytest.raises(UsageError):
        client().on_verdict(msgspec.msgpack.encode({"type": "verdict", "proof": bytes(32)}))


def test_credentials_do_not_show_what_they_hold() -> None:
    _, session = converse(client(), server())
    shown = f"{NodeCredential(SECRET, 'rank 0')} {UserCredential(TOKEN)} {session} {USERS['0011223344556677']}"
    assert "ssss" not in shown
    assert "the-secret-part" not in shown
    assert repr(session.key) not in shown
    with pytest.raises(UsageError, match="not a user token"):
        client(UserCredential("hunter2"))
