"""Users at an acceptor, in any order of events: connections come, are searched for, break, expire and make room, and
numbers of connections are used again. Each is admitted as the user whose token it has shown, or not at all."""

from __future__ import annotations

import itertools
import random
from typing import Final

import pytest

from fireflyer.base.errors import Unreachable
from fireflyer.base.units import SECOND
from fireflyer.identity.acceptor import (
    AcceptorEffect,
    Close,
    Find,
    HandOver,
    HandshakeAcceptor,
    HandshakeLimits,
    Refuse,
    Send,
)
from fireflyer.identity.conversation import ClientConversation
from fireflyer.identity.handshake import BEARER_MARK, Accepts, UserCredential, UserKey, token_key
from fireflyer.identity.secrets import Secret

NUMBERS: Final = 8
"""Of connections: more than may be half-open."""


async def _nobody(_token_id: str) -> UserKey | None:
    raise AssertionError("what is pure asks its owner")


def _token(name: str) -> str:
    return f"{BEARER_MARK}.{name}.secret of {name}"


class World:
    """Both ends of all connections, and the searches that were not answered."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        self._nonces = itertools.count()
        self._now_ns = 0
        self.server = HandshakeAcceptor(
            Accepts(Secret(b"s" * 32), _nobody),
            identity="hub",
            purpose="test",
            random_bytes=self._fresh,
            limits=HandshakeLimits(total=6, per_source=4, handshake_ns=SECOND, refusal_ns=SECOND // 4),
        )
        self._clients: dict[int, tuple[ClientConversation, str]] = {}
        self.searches: dict[int, str] = {}
        self._answered: dict[int, None] = {}
        self.admitted = 0

    def _fresh(self, count: int) -> bytes:
        return next(self._nonces).to_bytes(count, "big")

    def step(self) -> None:
        self._now_ns += self._rng.randrange(SECOND // 16)
        self._perform(self.server.expire(self._now_ns))
        self._rng.choice([self._connect, self._connect, self._find, self._find, self._fail, self._break])()

    def end(self) -> None:
        """All that is half-open expires."""
        for _ in range(2):
            self._now_ns += 2 * SECOND
            self._perform(self.server.expire(self._now_ns))

    def _connect(self) -> None:
        free = [one for one in range(NUMBERS) if one not in self._clients and not self.server.wanted(one)]
        if not free:
            return
        connection, name = self._rng.choice(free), f"u{self._rng.randrange(4)}"
        client = ClientConversation(UserCredential(_token(name)), purpose="test", nonce=self._fresh(32))
        self._perform(self.server.opened(self._now_ns, connection, self._rng.choice("ab")))
        self._clients[connection] = client, name
        self._say(connection, client.hello())

    def _find(self) -> None:
        if (number := self._any_search()) is not None:
            name = self.searches.pop(number)
            user = UserKey(name, token_key(_token(name)))
            self._perform(self.server.found(self._now_ns, number, user))

    def _fail(self) -> None:
        if (number := self._any_search()) is not None:
            del self.searches[number]
            self._perform(self.server.not_found(self._now_ns, number, Unreachable("away")))

    def _any_search(self) -> int | None:
        if not self.searches:
            return None
        number = self._rng.choice(list(self.searches))
        self._answered[number] = None
        return number

    def _break(self) -> None:
        if self._clients:
            connection = self._rng.choice(list(self._clients))
            self._perform(self.server.lost(self._now_ns, connection, Unreachable("it broke")))

    def _say(self, connection: int, data: bytes) -> None:
        while data and (count := min(len(data), self.server.wanted(connection))):
            self._perform(self.server.received(self._now_ns, connection, data[:count]))
            data = data[count:]

    def _perform(self, effects: list[AcceptorEffect]) -> None:
        for effect in effects:
            if isinstance(effect, Find):
                assert effect.number not in self.searches
                assert effect.number not in self._answered, "the number of a search is used once"
                self.searches[effect.number] = effect.token_id
            elif isinstance(effect, Send):
                self._hear(effect.connection, effect.data)
            elif isinstance(effect, HandOver):
                assert effect.session.peer == self._clients.pop(effect.connection)[1]
                self.admitted += 1
            elif isinstance(effect, Close | Refuse):
                self._clients.pop(effect.connection, None)

    def _hear(self, connection: int, data: bytes) -> None:
        client, said = self._clients[connection][0], b""
        while data:
            count = client.wanted
            said += client.receive(data[:count])
            data = data[count:]
        self._say(connection, said)


@pytest.mark.parametrize("seed", range(20))
def test_an_answer_reaches_the_connection_that_waits_for_it_and_no_other(seed: int) -> None:
    world = World(seed)
    for _ in range(400):
        world.step()
    assert world.admitted > 10
    assert set(world.server._searches) <= set(world.searches), "nothing is kept of searches that were answered"
    world.end()
    assert len(world.server) == 0
    assert not world.server._searches
