"""Clients with sessions in a simulated cluster: what replicas must remember of them, and for how long.

A client's update leaves a row at every target that has it. A retry of it may come at any time, to any head: where it is
admitted, the row must be there, or it would be done twice. Here only the rows are kept, one per client and target.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from fireflyer.base.units import MS, SECOND
from fireflyer.fs.core.manager.sessions import LiveSessions
from fireflyer.fs.core.manager.state_machine import Settings
from fireflyer.fs.core.rows import SESSIONS
from fireflyer.fs.schema.ids import ClientId, TargetId
from fireflyer.fs.schema.manager import Answer, Request
from fireflyer.fs.schema.sessions import EndSession, KeepSession, OpenSession, Session, SessionKept, SessionOver
from fireflyer.sim import SimNode, World

__all__ = ["SESSION_NS", "Connect", "FakeClient", "SessionOracle"]

SESSION_NS = Settings("", "").session_ns // 10
BEAT_NS = 700 * MS
Rows = dict[ClientId, None]
Connect = Callable[[SimNode, list[str]], tuple[Callable[[Request], int], Callable[[bytes], tuple[int, Answer] | None]]]
"""How a process asks managers, and reads what they answer."""


class SessionOracle:
    def __init__(self) -> None:
        self.given: Rows = {}
        """Every id that was ever given."""
        self.living: Rows = {}
        self.rows: dict[TargetId, Rows] = {}
        self.ended = 0
        """Sessions that are over."""
        self._flushed: dict[TargetId, Rows] = {}
        self._done: dict[int, Rows] = {}
        """Of each chain, clients of which an update was acknowledged."""
        self._excused: Rows = {}
        self._heard_ns: dict[ClientId, int] = {}

    # --- clients ---

    def heard(self, client: ClientId, sent_ns: int) -> None:
        """A primary has answered what the client said at that time."""
        self._heard_ns[client] = max(sent_ns, self._heard_ns.get(client, 0))

    def ends(self, client: ClientId) -> None:
        """It has asked for its end."""
        self._excused[client] = None

    # --- the store ---

    def committed(self, now_ns: int, key: bytes, before: bytes | None, value: bytes | None) -> None:
        client = int.from_bytes(key[len(SESSIONS.prefix) :], "big")
        if value is None:
            silent_ns = now_ns - self._heard_ns.get(client, 0)
            early = silent_ns < SESSION_NS * 0.98
            assert client in self._excused or not early, f"session {client} was ended {silent_ns} ns after it was heard"
            self.ended += self.living.pop(client, 0) is None
        elif before is None:
            assert client not in self.given, f"client {client} was there before"
            self.given[client] = self.living[client] = None

    # --- data ---

    def wrote(self, chain: int, targets: Iterable[TargetId], client: ClientId, *, flush: bool) -> None:
        self._done.setdefault(chain, {})[client] = None
        for target in targets:
            self.rows.setdefault(target, {})[client] = None
            if flush:
                self.flush(target)

    def flush(self, target: TargetId) -> None:
        self._flushed[target] = dict(self.rows.get(target, {}))

    def copy(self, source: TargetId, target: TargetId) -> None:
        """In the place of all that it had."""
        self.rows[target] = dict(self.rows.get(source, {}))
        self.flush(target)

    def lose_unflushed(self, target: TargetId) -> None:
        self.rows[target] = dict(self._flushed.get(target, {}))

    def accept_loss(self, chain: int, target: TargetId) -> None:
        self._done[chain] = dict(self.rows.get(target, {}))

    def learn(self, targets: Iterable[TargetId], sessions: LiveSessions) -> None:
        """A process has taken the list: it forgets who is over."""
        for target in targets:
            for rows in (self.rows.get(target, {}), self._flushed.get(target, {})):
                for client in [one for one in rows if sessions.over(one)]:
                    del rows[client]

    # --- checks ---

    def check(self, who: str, chain: int, target: TargetId, sessions: LiveSessions) -> None:
        """Of a target that serves: whose retries it would admit, it remembers."""
        rows = self.rows.get(target, {})
        for client in self._done.get(chain, {}):
            assert client in rows or not sessions.admits(client), f"{who} has forgotten client {client}, and admits it"


class FakeClient:
    """Opens a session and keeps it; now and then it falls silent, ends it, or is started again."""

    def __init__(self, world: World, name: str, oracle: SessionOracle, managers: list[str], connect: Connect) -> None:
        self._world, self._oracle, self._managers, self._connect = world, oracle, managers, connect
        self._random = world.fork_random(name)
        self._name = name
        self.client: ClientId = 0
        world.node(name, self._boot)

    def _boot(self, node: SimNode) -> None:
        ask, told = self._connect(node, self._managers)
        sent_ns: dict[int, int] = {}
        opened = 0

        def turn() -> None:
            pause_ns = BEAT_NS
            if self.client and self._random.random() < 0.01:
                pause_ns = SESSION_NS + self._random.randrange(3 * SECOND)
            elif self.client and self._random.random() < 0.01:
                self._oracle.ends(self.client)
                ask(EndSession(self.client))
            else:
                request = KeepSession(self.client, 1 << 40) if self.client else OpenSession(f"{self._name}/{opened}")
                sent_ns[ask(request)] = self._world.now_ns
            node.after(pause_ns, turn)

        def hear(_source: str, payload: bytes) -> None:
            nonlocal opened
            answer = told(payload)
            if answer is None:
                return
            match answer[1]:
                case Session(client) if not self.client:
                    self.client = client
                    self._oracle.heard(client, sent_ns[answer[0]])
                case SessionKept():
                    self._oracle.heard(self.client, sent_ns[answer[0]])
                case SessionOver(client) if client == self.client:
                    self.client = 0
                    opened += 1

        node.on_message(hear)
        node.after(self._random.randrange(BEAT_NS), turn)
