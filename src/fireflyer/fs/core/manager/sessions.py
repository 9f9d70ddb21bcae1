"""Sessions of clients: who lives, as the primary knows it and as storage processes are told.

    OpenSession ──> a row with the next id ──committed──> living ──silent, or ended──> the row is removed ──> over

A replica remembers of each channel of a client the last update that was done (0025, dedup): a retry that comes late
finds it. When the session is over these rows may go, as soon as no retry can be admitted any more. Storage processes
are told of the *list of living sessions*; who is not in it, and whose id was given before it was made, is over. So:

1. An update is admitted by a process only if its client is in the list that the process has (`LiveSessions.admits`).
2. A process that learns that a client is over drops what of it waits in queues, and then forgets its rows: one step.
3. The list comes in the answers to heartbeats, together with the routing and before it: a process never knows a
   routing that was committed after a list that it does not know. (`NodeMembership` takes both or neither.)

Why a retry is never admitted where its row is missing. A replica lacks the row because its own process has forgotten
it: then it admits nothing of that client, by 1. Or because it was synced from a replica whose process had: that
process had been told of the list, so it was committed; the replica serves by a routing that was committed later, and
came with that list or a later one, by 3. Or it is a new process of its node: it has no list, so it admits nobody, until
its first answer. Nobody needs to acknowledge anything, and who was away for a year learns everything from one list.

Rows may come back (by an update that was under way between replicas, by a resync from one that has not heard yet).
They do no harm, since nothing of that client is admitted; a process sweeps now and then what belongs to nobody alive.

When a session was heard is in memory: a new primary counts each of them as heard at the moment when it begins."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from fireflyer.base.errors import Busy, PermissionDenied, StaleVersion
from fireflyer.base.units import counted
from fireflyer.fs.core.manager.ledger import Ledger
from fireflyer.fs.core.rows import SessionRow
from fireflyer.fs.schema.ids import ClientId
from fireflyer.fs.schema.manager import Done
from fireflyer.fs.schema.sessions import (
    MAX_SESSIONS,
    EndSession,
    OpenSession,
    Session,
    SessionsDelta,
    SessionStatus,
    SessionsVersion,
)

__all__ = ["MAX_ENDED_AT_ONCE", "LiveSessions", "SessionTable", "apply_sessions"]

MAX_LOGGED: Final = 4096
"""Changes that are remembered: who knows less gets the whole list."""
MAX_ENDED_AT_ONCE: Final = 1024
"""Sessions that one transaction ends because they are silent."""


@dataclass(frozen=True, slots=True)
class LiveSessions:
    """The list as a storage process has it."""

    version: SessionsVersion = 0
    next_client: ClientId = 0
    clients: Mapping[ClientId, None] = field(default_factory=dict)

    def admits(self, client: ClientId) -> bool:
        return client in self.clients

    def over(self, client: ClientId) -> bool:
        """Its id has been given, and it lives no more. Neither this nor `admits`: this list is older than it."""
        return client < self.next_client and client not in self.clients


def apply_sessions(live: LiveSessions, delta: SessionsDelta) -> LiveSessions:
    """The list after `delta`; the same object if that is not newer. Raises `StaleVersion` when changes between are
    missing."""
    if delta.version <= live.version:
        return live
    if delta.base > live.version:
        raise StaleVersion(
            f"changes of sessions since {delta.base} do not apply to version {live.version}; get the list again"
        )
    clients = dict(live.clients) if delta.base else {}
    for client in delta.ended:
        clients.pop(client, None)
    clients.update(dict.fromkeys(delta.opened))
    return LiveSessions(delta.version, delta.next_client, clients)


class SessionTable:
    """The primary's."""

    def __init__(self, ledger: Ledger, lifetime_ns: int, now_ns: int) -> None:
        self._ledger = ledger
        self._lifetime_ns = lifetime_ns
        self._heard_ns: dict[ClientId, int] = dict.fromkeys(ledger.sessions.committed, now_ns)
        self._by_nonce = {(row.user, row.nonce): row.id for row in ledger.sessions.committed.values()}
        self._of_user = Counter(row.user for row in ledger.sessions.committed.values())
        self._base = ledger.state.sessions
        self._log: deque[tuple[SessionsVersion, ClientId, bool]] = deque()

    # --- what happens ---

    def heard(self, client: ClientId, now_ns: int) -> None:
        if client in self._heard_ns:
            self._heard_ns[client] = now_ns

    def restart_clocks(self, slept_ns: int) -> None:
        """The manager's process stood still for so long."""
        for client in self._heard_ns:
            self._heard_ns[client] += slept_ns

    def silent(self, now_ns: int) -> list[ClientId]:
        """Whose lifetime is over, `MAX_ENDED_AT_ONCE` at most."""
        found = [one for one, heard_ns in self._heard_ns.items() if now_ns - heard_ns >= self._lifetime_ns]
        return found[:MAX_ENDED_AT_ONCE]

    def committed(self, changes: Mapping[ClientId, SessionRow | None], now_ns: int) -> None:
        """The ledger has committed them, as its present version of the list."""
        for client, row in changes.items():
            self._log.append((self._ledger.state.sessions, client, row is not None))
            if row is not None:
                self._heard_ns[client] = now_ns
                self._by_nonce[row.user, row.nonce] = client
                self._of_user[row.user] += 1
            else:
                self._heard_ns.pop(client, None)
        if any(row is None for row in changes.values()):
            self._by_nonce = {key: one for key, one in self._by_nonce.items() if one in self._heard_ns}
            self._of_user = Counter(user for user, _ in self._by_nonce)
        while len(self._log) > MAX_LOGGED:
            self._base = self._log.popleft()[0]

    # --- requests, into the draft ---

    def open(self, request: OpenSession, user: str, now_ns: int) -> Session:
        """Raises `Busy` when there are `MAX_SESSIONS`, or when this user has more than would be left for others: one
        takes half of them at most, the next one half of the rest. Services ("") may take all."""
        known = self._by_nonce.get((user, request.nonce))
        if known is not None and self._ledger.sessions.get(known) is not None:
            self.heard(known, now_ns)
            return Session(known, self._lifetime_ns)
        for client, row in self._ledger.sessions.changes():
            if row is not None and (row.user, row.nonce) == (user, request.nonce):
                return Session(client, self._lifetime_ns)
        if len(self._ledger.sessions) >= MAX_SESSIONS:
            raise Busy(
                f"the cluster has {MAX_SESSIONS} client sessions, the maximum; end some (ff fs admin end-session), or "
                "try again later"
            )
        own = self._of_user[user] + sum(
            row is not None and row.user == user for _, row in self._ledger.sessions.changes()
        )
        if user and own >= MAX_SESSIONS - len(self._ledger.sessions):
            raise Busy(
                f"user {user} has {counted(own, 'session')}, as many as all others have free; close some clients"
            )
        client = self._ledger.new_client()
        self._ledger.sessions.put(client, SessionRow(client, user, request.nonce, request.name))
        return Session(client, self._lifetime_ns)

    def end(self, request: EndSession, user: str, *, trusted: bool) -> Done:
        """Raises `PermissionDenied` for another user's."""
        row = self._ledger.sessions.get(request.client)
        if row is None:
            return Done(f"there is no session {request.client}: it has ended, or never existed")
        if not trusted and row.user != user:
            raise PermissionDenied(
                f"session {request.client} belongs to another user; only they and administrators can end it"
            )
        self._ledger.sessions.put(request.client, None)
        return Done(f"session {request.client} has ended")

    # --- what is known ---

    def living(self, client: ClientId, user: str, *, trusted: bool) -> bool:
        """Whether there is such a session of this user."""
        row = self._ledger.sessions.committed.get(client)
        return row is not None and (trusted or row.user == user)

    def delta(self, known: SessionsVersion) -> SessionsDelta | None:
        state, rows = self._ledger.state, self._ledger.sessions.committed
        if known == state.sessions:
            return None
        if known < self._base or known > state.sessions:
            return SessionsDelta(0, state.sessions, state.next_client, tuple(sorted(rows)))
        changed: dict[ClientId, bool] = {}
        for version, client, lives in reversed(self._log):
            if version <= known:
                break
            changed.setdefault(client, lives)
        opened = tuple(sorted(one for one, lives in changed.items() if lives))
        ended = tuple(sorted(one for one, lives in changed.items() if not lives))
        return SessionsDelta(known, state.sessions, state.next_client, opened, ended)

    def status(self, now_ns: int) -> tuple[SessionStatus, ...]:
        rows = self._ledger.sessions.committed
        return tuple(
            SessionStatus(one, rows[one].user, rows[one].name, now_ns - self._heard_ns.get(one, now_ns))
            for one in sorted(rows)
        )
