"""Tickets: what one allows, who can make one, and what is done with text that is none."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fireflyer.base.errors import DataCorruption, PermissionDenied, UsageError
from fireflyer.cluster.schema.sync import LaunchOrder, RunNode
from fireflyer.cluster.schema.tasks import Program, TaskSpec
from fireflyer.cluster.schema.tickets import (
    MAX_LIFE_S,
    SLACK_S,
    Claims,
    open_launch,
    read_claims,
    seal_launch,
    ticket_key,
)
from fireflyer.identity.handshake import MAX_IDENTITY_BYTES

NOW_S = 1_000_000
CLAIMS = Claims("0a0b0c0d", 7, "ada", 2, NOW_S + 60, "adal")
KEYS = {"a": b"a" * 32, "b": b"b" * 32}
NODES = tuple(RunNode(name=name, address="127.0.0.1", port=1) for name in KEYS)
ORDER = LaunchOrder(
    task=7, run=0, user="ada", account="adal", spec=TaskSpec(name="t", program=Program(script="x.py")), nodes=NODES
)


def sealed(claims: Claims = CLAIMS, order: LaunchOrder = ORDER) -> LaunchOrder:
    return seal_launch(order, claims, KEYS, nonce=b"n" * 32, user_token="fft1.run.secret")


def test_the_lead_opens_tickets_whose_keys_the_agents_of_the_nodes_compute_from_their_claims() -> None:
    order = sealed()
    opened = open_launch(order, KEYS["a"])
    assert opened.token == "fft1.run.secret"
    assert b"secret" not in msgspec.msgpack.encode(order)
    for ticket, name in zip(opened.tickets, KEYS, strict=True):
        assert ticket_key(ticket.identity, KEYS[name], NOW_S) == ticket.key
        assert ticket.key not in msgspec.msgpack.encode(order)
        assert read_claims(ticket.identity) == CLAIMS
    assert opened.tickets[0].key != opened.tickets[1].key


def test_who_changes_a_claim_has_another_key() -> None:
    (ticket, _) = open_launch(sealed(), KEYS["a"]).tickets
    (other, _) = open_launch(sealed(Claims("ffffffff", 7, "ada", 2, NOW_S + 60, "adal")), KEYS["a"]).tickets
    assert ticket_key(other.identity, KEYS["a"], NOW_S) != ticket.key


def test_a_ticket_expires_and_none_lives_for_ever() -> None:
    identity = open_launch(sealed(), KEYS["a"]).tickets[0].identity
    assert ticket_key(identity, KEYS["a"], NOW_S + 60 + SLACK_S) is not None
    assert ticket_key(identity, KEYS["a"], NOW_S + 61 + SLACK_S) is None
    assert ticket_key(identity, KEYS["a"], NOW_S - MAX_LIFE_S - SLACK_S) is None


def test_tickets_of_another_account_or_node_are_refused() -> None:
    with pytest.raises(PermissionDenied, match="not for its user and account"):
        open_launch(sealed(order=msgspec.structs.replace(ORDER, account="root")), KEYS["a"])
    with pytest.raises(UsageError, match="node b has no credential"):
        seal_launch(ORDER, CLAIMS, {"a": KEYS["a"]}, nonce=b"n" * 32)
    short = msgspec.structs.replace(NODES[0], ticket=b"short")
    with pytest.raises(DataCorruption, match="malformed"):
        open_launch(msgspec.structs.replace(ORDER, nodes=(short,)), KEYS["a"])
    with pytest.raises(UsageError, match="cannot be in a ticket"):
        sealed(Claims("../../etc", 7, "ada", 2, NOW_S))


def test_the_longest_claims_fit_into_an_identity() -> None:
    claims = Claims("f" * 64, 1 << 53, "u" * 64, 1024, (1 << 32) - 1, "a" * 32)
    order = msgspec.structs.replace(ORDER, task=1 << 53, user="u" * 64, account="a" * 32)
    identity = open_launch(sealed(claims, order), KEYS["a"]).tickets[0].identity
    assert len(identity) <= MAX_IDENTITY_BYTES
    assert read_claims(identity) == claims


@given(st.text(max_size=300) | st.binary(max_size=200).map(lambda data: "ticket:" + data.hex()))
def test_text_that_is_no_ticket_opens_nothing(text: str) -> None:
    assert ticket_key(text, b"k" * 32, NOW_S) is None or read_claims(text) is not None


@given(st.integers(0, 255), st.integers(0, 200))
def test_a_ticket_with_one_changed_character_has_another_key_or_none(code: int, at: int) -> None:
    ticket = open_launch(sealed(), KEYS["a"]).tickets[0]
    at %= len(ticket.identity)
    changed = ticket.identity[:at] + chr(code) + ticket.identity[at + 1 :]
    if changed != ticket.identity:
        assert ticket_key(changed, KEYS["a"], NOW_S) != ticket.key
