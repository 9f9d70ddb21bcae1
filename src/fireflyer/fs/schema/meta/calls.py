"""The messages that carry several requests, and several answers."""

from __future__ import annotations

from typing import Annotated, TypeAlias

import msgspec

from fireflyer.fs.schema.ids import ClientId
from fireflyer.fs.schema.meta.answers import Answer
from fireflyer.fs.schema.meta.changing import Changing, Open
from fireflyer.fs.schema.meta.fields import MAX_CALLS, U63, Actor
from fireflyer.fs.schema.meta.reading import Reading

__all__ = ["Answers", "Call", "Calls", "Request"]

Request: TypeAlias = Reading | Open | Changing


class Call(msgspec.Struct, frozen=True, array_like=True):
    """`number`: of what changes something, one more with each; 0 of what only reads."""

    request: Request
    number: U63 = 0
    actor: Actor | None = None


class Calls(msgspec.Struct, frozen=True, array_like=True):
    client: ClientId
    """Its session at the manager. ESTALE when that is over: what it held is lost, and a new one must be opened."""
    done_below: U63
    """The answers to all numbers below have been received: they may be forgotten."""
    calls: Annotated[tuple[Call, ...], msgspec.Meta(min_length=1, max_length=MAX_CALLS)]


class Answers(msgspec.Struct, frozen=True, array_like=True):
    answers: Annotated[tuple[Answer, ...], msgspec.Meta(max_length=MAX_CALLS)]
