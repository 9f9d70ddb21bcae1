"""Again is once: the answers to numbered requests, kept until their client has them.

    FR + client (8)                  the *floor*: numbers below it were answered, and the client has the answers
    FR + client (8) + number (8)     the *digest* of the request (8), an answer, as it was given

A request that changes something is carried out in one transaction with its answer, which is stored whatever it is: a
refusal too, or a late copy of a request that was refused would be done after the client was told that it was not. So a
number is in one of three states, and what comes again meets the second or the third:

    new ──done, answer stored──> answered ──the client says that it has it──> below the floor: refused

The floor is moved when it is `STEP` behind, which bounds the rows of a client and spares a write for each request.
`numbers_allowed` is what a client may use; a client that does not keep to it stores no more rows by it.

The session is looked at after the stored answer: one that is over changes nothing any more, but the answer to what it
has changed is still told, to the user whose session it was: the row of the client (`holds`) outlives the session and
says who that is. Who reaps sessions calls `forget_client` some time after their end; from then on nobody knows what had
been done, and the answer says that as well.

The digest tells requests apart: another request under a number that was used is refused, and does not get the answer to
the first one. Zeros: it was not known to whoever stored the answer.

Nothing is done either for a client that was evicted because it sent no heartbeat: see `open_files.garbage_collection`.
"""

from __future__ import annotations

import errno
from functools import lru_cache
from hashlib import blake2b
from typing import Final, Protocol

import msgspec

from fireflyer.base.decoding import DECODE_ERRORS, msgpack_decoder
from fireflyer.base.errors import DataCorruption, PermissionDenied
from fireflyer.fs.core.meta.context import Page, Rows
from fireflyer.fs.core.meta.open_rows import CLIENT_ROWS, CLIENTS, ClientRow
from fireflyer.fs.core.meta.tables import number_key
from fireflyer.fs.core.rows import SESSIONS
from fireflyer.fs.schema.errors import FileError, file_error
from fireflyer.fs.schema.ids import ClientId
from fireflyer.fs.schema.meta import MAX_NUMBERS, Actor, Answer, Request

__all__ = [
    "SESSION_EVICTED",
    "SESSION_FORGOTTEN",
    "SESSION_OVER",
    "STEP",
    "SessionEnded",
    "SessionEvicted",
    "SessionForgotten",
    "admit",
    "check_session",
    "forget_client",
    "keep",
    "keep_late",
]
__all__ += ["digest_of", "number_allowed", "store_answer"]

PREFIX: Final = b"FR"
STEP: Final = 64
"""Answers beyond those that the client may still want, before some are forgotten."""
SESSION_OVER: Final = "session_over"
"""The code of `Refused` for `SessionEnded`: what has no answer was not done, nor will be."""
SESSION_EVICTED: Final = "session_struck"
"""For `SessionEvicted`: not done either, and the session is to be exchanged for another."""
SESSION_FORGOTTEN: Final = "session_forgotten"
"""For `SessionForgotten`: of what had been sent before it is not known whether it was done."""
DIGEST_BYTES: Final = 8
_FORMAT: Final = b"\x01"
_FORMAT_OF_ANSWERS: Final = b"\x02"
_NO_DIGEST: Final = bytes(DIGEST_BYTES)

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Answer] = msgpack_decoder(Answer)


class Looks(Protocol):
    """What can be read."""

    async def get(self, key: bytes) -> bytes | None: ...

    async def get_range(self, begin: bytes, end: bytes | None, *, limit: int) -> Page: ...


class SessionEnded(FileError):
    """Nothing is done for this client any more. Not an answer that is stored."""

    def __init__(self, client: ClientId) -> None:
        super().__init__(errno.ESTALE, f"session {client} has ended; open another one")


class SessionEvicted(SessionEnded):
    """It lives at the manager, but its client has sent no heartbeat for long, and needs another one."""


class SessionForgotten(SessionEnded):
    """Long ago, or it never was: no answers to its requests are kept."""


def number_allowed(number: int, done_below: int) -> bool:
    """Whether a client that has all answers below `done_below` may use it."""
    return done_below <= number < done_below + MAX_NUMBERS


def _floor_key(client: ClientId) -> bytes:
    return PREFIX + client.to_bytes(8, "big")


def digest_of(request: Request, actor: Actor | None) -> bytes:
    """`DIGEST_BYTES` long."""
    return blake2b(_encoder.encode((request, actor)), digest_size=DIGEST_BYTES).digest()


async def admit(rows: Looks, client: ClientId, user: str, number: int, digest: bytes = b"") -> Answer | None:
    """The stored answer to this number; None: it is new, and may be carried out in this transaction. `user`: whose
    session it must be; empty: a service. Raises `FileError` (EINVAL) for a number that was answered long ago, or of
    another request; `SessionEnded`, `PermissionDenied` for another user's session."""
    head = _floor_key(client)
    stored = await rows.get(head + number.to_bytes(8, "big"))
    if stored is not None:
        await check_session(rows, client, user, ended=True)
        kept, answer = _decoded(head, stored)
        if digest and kept != _NO_DIGEST and kept != digest:
            raise file_error(
                errno.EINVAL, f"request number {number} was used for a different request before; use a new number"
            )
        return answer
    await check_session(rows, client, user)
    if number < await _floor(rows, head):
        raise file_error(errno.EINVAL, f"request {number} was answered before, and the answer is no longer stored")
    return None


async def store_answer(
    rows: Rows, client: ClientId, number: int, done_below: int, answer: Answer, digest: bytes = b""
) -> None:
    """Of what `admit` has let through, in the same transaction; forgets what the client has below `done_below`."""
    head = _floor_key(client)
    keep(rows, client, number, answer, digest)
    floor = await _floor(rows, head)
    if done_below - floor >= STEP:
        rows.clear_range(head + floor.to_bytes(8, "big"), head + done_below.to_bytes(8, "big"))
        rows.set(head, _FORMAT + done_below.to_bytes(8, "big"))


def rows_of(client: ClientId, number: int) -> tuple[bytes, ...]:
    """Keys that `admit` and `store_answer` read."""
    head = _floor_key(client)
    return head, head + number.to_bytes(8, "big"), SESSIONS.key(client), number_key(CLIENTS, client)


def keep(rows: Rows, client: ClientId, number: int, answer: Answer, digest: bytes = b"") -> None:
    """The answer to a request that another one's has found unfinished, and has finished."""
    rows.set(
        _floor_key(client) + number.to_bytes(8, "big"),
        _FORMAT_OF_ANSWERS + (digest or _NO_DIGEST) + _encoder.encode(answer),
    )


async def keep_late(rows: Rows, client: ClientId, number: int, answer: Answer) -> None:
    """As `keep`, long after it was asked: not what the client has been told already, nor for one of whom nothing is
    kept any more; nobody would ever clear that row."""
    if await rows.get(number_key(CLIENTS, client)) is not None and number >= await _floor(rows, _floor_key(client)):
        keep(rows, client, number, answer)


async def check_session(rows: Looks, client: ClientId, user: str, *, ended: bool = False) -> None:
    """Raises `SessionEnded` unless it lives (or `ended`), `PermissionDenied` where it is another user's."""
    key, own_key = SESSIONS.key(client), number_key(CLIENTS, client)
    row, own = await rows.get(key), await rows.get(own_key)
    known = None if own is None else _client_row(own_key, own)
    if row is None and known is None:
        raise SessionForgotten(client)
    whose = _user_of(key, row) if row is not None else known.user if known is not None else ""
    if user and whose != user:
        raise PermissionDenied(f"session {client} belongs to another user; open your own")
    if not ended and row is None:
        raise SessionEnded(client)
    if not ended and known is not None and known.evicted:
        raise SessionEvicted(client)


def forget_client(rows: Rows, client: ClientId) -> None:
    """All that is kept of it."""
    rows.clear_range(_floor_key(client), _floor_key(client + 1) if client + 1 < 1 << 63 else PREFIX[:1] + b"S")


async def _floor(rows: Looks, head: bytes) -> int:
    row = await rows.get(head)
    if row is None:
        return 0
    if len(row) != 9 or row[:1] != _FORMAT:
        raise DataCorruption(
            f"row {head.hex()} of the duplicate request cache is damaged; restore the store from a backup"
        )
    return int.from_bytes(row[1:], "big")


def _decoded(head: bytes, row: bytes) -> tuple[bytes, Answer]:
    """And the digest of its request."""
    try:
        if row[:1] == _FORMAT_OF_ANSWERS:
            return row[1 : 1 + DIGEST_BYTES], _decoder.decode(row[1 + DIGEST_BYTES :])
    except DECODE_ERRORS:
        pass
    raise DataCorruption(
        f"a row of the duplicate request cache of client {head.hex()} is damaged; restore the store from a backup"
    )


@lru_cache(maxsize=4096)
def _client_row(key: bytes, row: bytes) -> ClientRow:
    return CLIENT_ROWS.decode(key, row)


@lru_cache(maxsize=4096)
def _user_of(key: bytes, row: bytes) -> str:
    return SESSIONS.decode(key, row)[1].user
