"""Mutants of the client, each the real machine with one thing wrong. The simulation must find all in `MUTANTS`.

The others are too rare for chance, or show in nothing that is seen; `test_requests` plays them by hand.
"""

from __future__ import annotations

from typing import NamedTuple

from tests.support.fs.chain_sim.request_world import ExchangingClient, RequestClient, RequestWorld, WholeWorld, run_seed
from tests.support.fs.chain_sim.world import ReplicaWorld

from fireflyer.fs.core.requests.channels import Channel, Channels, Place
from fireflyer.fs.core.requests.effects import Effect, Event, Failed, Finish, Limits, ReplyReceived
from fireflyer.fs.core.requests.state import PendingOperation
from fireflyer.fs.core.requests.state_machine import Requests
from fireflyer.fs.schema.chunks import Missing, NotCommitted, RefusalReason, Refused
from fireflyer.fs.schema.ids import ClientId
from fireflyer.fs.schema.sessions import OpenSession

__all__ = ["MUTANTS", "BelievesThatStaleIsNotDone", "Mutant", "OneChannelForAll", "attempt"]


class _NumbersEachAttempt(Requests):
    """A retry looks like another update."""

    def _ask(self, request: PendingOperation) -> None:
        if request.channel is not None and request.attempts:
            request.channel.sequence += 1
            request.sequence = request.channel.sequence
        super()._ask(request)


class _BelievesTheLastRefusal(Requests):
    """What earlier attempts may yet do is forgotten."""

    def _fail(self, request: PendingOperation, code: str, message: str) -> None:
        super()._fail(request, code, message)
        if request.refusals:
            at, said = next(
                (at, one) for at, one in reversed(list(enumerate(self._effects))) if isinstance(one, Finish)
            )
            assert isinstance(said.result, Failed)
            self._effects[at] = Finish(said.operation, Failed(code, said.result.message))


class BelievesThatStaleIsNotDone(Requests):
    def _refused(self, request: PendingOperation, refused: Refused, *, newest: bool) -> None:
        maybe_done = request.maybe_done
        super()._refused(request, refused, newest=newest)
        if refused.refusal is RefusalReason.STALE:
            request.maybe_done = maybe_done


class _BelievesThatLostIsNotDone(Requests):
    def _lost(self, node: int, reason: str, *, sent: bool) -> None:
        super()._lost(node, reason, sent=False)


class _TakesPendingForAbsent(Requests):
    def handle(self, now_ns: int, event: Event) -> list[Effect]:
        if isinstance(event, ReplyReceived) and isinstance(event.reply, NotCommitted):
            event = ReplyReceived(event.ask, Missing())
        return super().handle(now_ns, event)


class _AnyChannel(Channels):
    """Channels go back although the outcome of their last update is not known."""

    def leave(self, place: Place, operation: int, *, done: bool, unknown: bool) -> list[tuple[int, Channel]]:
        return super().leave(place, operation, done=done, unknown=False)


class _OldNumbers(_AnyChannel):
    """... and the next update gets the number of one that was given up."""

    def leave(self, place: Place, operation: int, *, done: bool, unknown: bool) -> list[tuple[int, Channel]]:
        turn = self._turns.get(place)
        if unknown and turn is not None and turn.channel is not None and turn.active == operation:
            turn.channel.sequence -= 1
        return super().leave(place, operation, done=done, unknown=unknown)


class _OneForAll(Channels):
    """Updates that are under way together have one channel."""

    def _next(self, place: Place, turn: object) -> list[tuple[int, Channel]]:
        begun = super()._next(place, turn)  # type: ignore[arg-type]
        shared = self.__dict__.setdefault("shared", Channel(0))
        for _, channel in begun:
            shared.sequence += 1
            channel.number, channel.sequence = 0, shared.sequence
        return begun


def _with_channels(kind: type[Channels]) -> type[Requests]:
    class Machine(Requests):
        def __init__(self, client: ClientId, limits: Limits | None = None, *, seed: int) -> None:
            super().__init__(client, limits, seed=seed)
            self._channels = kind(self._limits.channels, self._limits.unknown)

    return Machine


OneChannelForAll = _with_channels(_OneForAll)


class _UsesAskNumbersAgain(Requests):
    """An answer that was withdrawn is taken for that to a later request."""

    def _ask(self, request: PendingOperation) -> None:
        free = next(number for number in range(1, 1000) if number not in self._asks)
        self._numbers = free - 1
        super()._ask(request)


class _SendsAgain(Requests):
    """What had been sent in a session that is over is begun anew in the next one."""

    def _lose_session(self) -> None:
        for request in self._requests.values():
            for ask in list(request.asks) if request.update else []:
                self._close(ask, request)
            request.maybe_done = False
        super()._lose_session()


class _EndsNothing(ExchangingClient):
    def exchange(self, client: ClientId) -> None:
        self.exchanges += 1
        self._retry(OpenSession(f"client {self._number} {self.exchanges}"))


class Mutant(NamedTuple):
    """`within`: so many seeds find it, from the first; about five times as many as it took."""

    machine: type[Requests]
    within: int
    client: type[RequestClient] = RequestClient
    world: type[ReplicaWorld] = RequestWorld


MUTANTS: dict[str, Mutant] = {
    "a retry has a new number": Mutant(_NumbersEachAttempt, 120),
    "the last refusal speaks for all attempts": Mutant(_BelievesTheLastRefusal, 90),
    "a lost connection is taken for not done": Mutant(_BelievesThatLostIsNotDone, 1500),
    "pending is taken for absent": Mutant(_TakesPendingForAbsent, 20),
    "an unresolved channel is used again": Mutant(_with_channels(_AnyChannel), 2500),
    "a number is used again": Mutant(_with_channels(_OldNumbers), 20),
    "ask numbers are used again": Mutant(_UsesAskNumbersAgain, 30),
    "a session is never ended": Mutant(Requests, 700, _EndsNothing, WholeWorld),
    "what was sent before the session's end is sent again": Mutant(_SendsAgain, 200, ExchangingClient, WholeWorld),
}


def attempt(mutant: str, seed: int) -> str | None:
    """What the simulation found, or None."""
    chosen = MUTANTS[mutant]
    client = type("Client", (chosen.client,), {"machine_type": chosen.machine})
    world = type("World", (chosen.world,), {"make_client": client})
    try:
        run_seed(seed, world)
    except (AttributeError, NameError, TypeError):  # of the mutant itself, as when what it replaces was renamed
        raise
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None
