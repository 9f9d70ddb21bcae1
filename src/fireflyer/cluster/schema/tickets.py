"""Tickets: how the launcher of a run shows the agents of the run's nodes that it may start ranks there.

The manager makes one for each node of a run, from that node's credential. A ticket is a `DerivedCredential`: its
identity is what the ticket allows (`Claims`, as text), its key HMAC(credential of the node, identity). The agent of the
node computes the same key from the identity that it is told in the handshake, so it keeps nothing of tickets, and who
changes a claim has another key. The claims of a run's tickets are all the same; the keys differ by node.

    manager:  seal_launch(order, claims, keys of the nodes)      keys sealed for the node of the launcher
    agent of that node:  open_launch(order, its key)  ──> launcher of the run, as the account of the task
    launcher: RpcClient.connect(agent, DerivedCredential)
    agent:    ticket_key(identity, its key, now) in the handshake; read_claims(caller.identity) in each call

No node's credential leaves its agent, and the launcher of a run is given keys for that run alone.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
from collections.abc import Mapping
from typing import Annotated, Final, NamedTuple

import msgspec

from fireflyer.base.decoding import DECODE_ERRORS, convert, msgpack_decoder
from fireflyer.base.errors import DataCorruption, PermissionDenied, UsageError
from fireflyer.cluster.schema.job import MAX_NODES
from fireflyer.cluster.schema.sync import LaunchOrder
from fireflyer.identity.derived import apply_pad, derive_key
from fireflyer.identity.handshake import MAX_IDENTITY_BYTES, DerivedCredential

__all__ = ["MAX_LIFE_S", "Claims", "OpenedLaunch", "open_launch", "read_claims", "seal_launch", "ticket_key"]

MAX_LIFE_S: Final = 60 * 24 * 3600
"""An agent takes no ticket that expires later than so long from now."""
SLACK_S: Final = 120
"""Clocks of managers and agents differ by less."""
_PREFIX: Final = "ticket:"
_KEY_BYTES: Final = 32
_TOKEN_NONCE: Final = b"token of the user"


class Claims(msgspec.Struct, frozen=True, array_like=True):
    """What a ticket allows: to start, watch and stop guards whose tokens begin with `run_token`, as `account`."""

    run_token: Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{8,64}$")]
    task: Annotated[int, msgspec.Meta(ge=1, le=1 << 53)]
    user: Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
    nodes: Annotated[int, msgspec.Meta(ge=1, le=MAX_NODES)]
    """Of the run."""
    expires_s: Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]
    """Unix time."""
    account: Annotated[str, msgspec.Meta(pattern=r"^([A-Za-z_][A-Za-z0-9_.-]{0,31})?$")] = ""
    """Local account; empty: as the agent decides."""


class OpenedLaunch(NamedTuple):
    """What the launcher of a run is given of a sealed order. `tickets`: in the order of its nodes."""

    tickets: tuple[DerivedCredential, ...]
    token: str
    """Of the user, for this run; empty: none."""


_encoder = msgspec.msgpack.Encoder()
_decoder = msgpack_decoder(Claims)


def _identity(claims: Claims) -> str:
    """Raises `UsageError` where the claims are too long."""
    try:
        packed = _encoder.encode(convert(msgspec.to_builtins(claims), Claims))
    except DECODE_ERRORS as error:
        raise UsageError(f"these claims cannot be in a ticket: {error}") from None
    identity = _PREFIX + base64.urlsafe_b64encode(packed).decode().rstrip("=")
    if len(identity) > MAX_IDENTITY_BYTES:
        raise UsageError(f"the claims of a ticket of {claims.user} are too long; use a shorter name of user or account")
    return identity


def read_claims(identity: str) -> Claims | None:
    """The claims of a caller that has proven its identity; None where it is no ticket's."""
    text = identity.removeprefix(_PREFIX)
    if text == identity or len(identity) > MAX_IDENTITY_BYTES:
        return None
    try:
        packed = base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
        claims = _decoder.decode(packed)
    except (binascii.Error, ValueError, *DECODE_ERRORS):
        return None
    return claims if _identity(claims) == identity else None  # one text for each set of claims


def ticket_key(identity: str, key: bytes, now_s: float) -> bytes | None:
    """For the agent in a handshake: the key of the ticket of this identity, from `token_key` of its credential. None
    where it is no ticket, or has expired."""
    claims = read_claims(identity)
    if claims is None or not now_s - SLACK_S <= claims.expires_s <= now_s + MAX_LIFE_S + SLACK_S:
        return None
    return derive_key(key, identity)


def seal_launch(
    order: LaunchOrder, claims: Claims, keys: Mapping[str, bytes], *, nonce: bytes, user_token: str = ""
) -> LaunchOrder:
    """The order with a ticket for each node. `keys`: `token_key` of the credential of each node, by its name. `nonce`:
    32 bytes that were never used. Raises `UsageError`."""
    missing = [node.name for node in order.nodes if node.name not in keys]
    if missing:
        raise UsageError(f"node {missing[0]} has no credential; let it join again")
    identity = _identity(claims)
    lead = keys[order.nodes[0].name]
    nodes = tuple(
        msgspec.structs.replace(
            node,
            ticket=apply_pad(derive_key(keys[node.name], identity), lead, _nonce_of(nonce, node.name.encode()))
            + identity.encode(),
        )
        for node in order.nodes
    )
    token = apply_pad(user_token.encode(), lead, _nonce_of(nonce, _TOKEN_NONCE))
    return msgspec.structs.replace(order, nodes=nodes, tickets_nonce=nonce, token=token)


def open_launch(order: LaunchOrder, key: bytes) -> OpenedLaunch:
    """For the agent of the first node. `key`: `token_key` of its credential. Raises `DataCorruption`,
    `PermissionDenied` where a ticket is for another account than the order."""
    tickets = tuple(
        _open_ticket(node.ticket, key, _nonce_of(order.tickets_nonce, node.name.encode())) for node in order.nodes
    )
    for ticket in tickets:
        claims = read_claims(ticket.identity)
        if claims is None or (claims.task, claims.user, claims.account) != (order.task, order.user, order.account):
            raise PermissionDenied(f"a ticket of the run of task {order.task} is not for its user and account")
    try:
        token = apply_pad(order.token, key, _nonce_of(order.tickets_nonce, _TOKEN_NONCE)).decode()
    except UnicodeDecodeError:
        raise DataCorruption("the token of the user cannot be opened; was it sealed for another node?") from None
    return OpenedLaunch(tickets, token)


def _open_ticket(ticket: bytes, key: bytes, nonce: bytes) -> DerivedCredential:
    sealed, identity = ticket[:_KEY_BYTES], ticket[_KEY_BYTES:]
    if len(sealed) != _KEY_BYTES or not 0 < len(identity) <= MAX_IDENTITY_BYTES or not identity.isascii():
        raise DataCorruption("a ticket is malformed; are manager and agent of the same release?")
    return DerivedCredential(identity.decode(), apply_pad(sealed, key, nonce))


def _nonce_of(nonce: bytes, what: bytes) -> bytes:
    """A nonce of its own for each sealed text of an order."""
    return hashlib.sha256(len(nonce).to_bytes(4, "big") + nonce + what).digest()
