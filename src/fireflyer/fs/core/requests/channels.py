"""Channels and turns: which update may begin, and under which number.

A replica tells a retry from a new update by `(client, channel) → sequence`, one row for each channel and chain. So of a
channel one update is under way, its retries have its number, and the next one has a higher number.

*Turns.* Updates of one chunk go one after the other, in the order in which they were begun: the chain does not do two
at once anyway, and it makes the following possible.

*Unknown outcomes.* An update that was given up without an answer may still be under way: an attempt may lie in the
buffers of a connection, or wait at the head. Its channel stays with its chunk. The next update of this chunk takes the
channel and the next number; it stands behind the lost one in the chunk's queue at the head, and what comes later than
its row is refused as a duplicate. So when it is done, the lost one has happened before it, or never will. On another
channel it could be overwritten by the lost one a minute later. A channel that were given to another chunk meanwhile
would not help, either.

*Few channels.* Which of the free channels an update gets is all the same to the above: nothing of theirs is under way,
and their numbers go on. But replicas have room for few rows of each client when they have much to remember, and a new
row beyond gets `BUSY`. So the channel that was free last is taken first, and of a client that does little at a time
only that many have rows. Those whose last update was not done come after all others: they may be the ones that there
is no row for, and whoever took one would be told the same, with rows of others unused.

*Another session.* The number of channels with an unknown outcome is bounded. When there are `Limits.unknown` of them no
update begins any more, and when none is under way the session is ended, and then another one opened, in which all
channels are new. That is safe because of the order: a process admits updates of those sessions alone that are in the
list that it has. One that admits the new session has a list that was made after the old one's end, so it has dropped
what waited of the old one, and admits nothing more of it; what it had begun comes before what comes later, for each
chunk. So it is, too, where the manager has ended the session, because it had heard nothing of this client for long.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TypeAlias

from fireflyer.fs.schema.ids import ChainId, ChunkId
from fireflyer.fs.schema.ids import Channel as ChannelNumber

__all__ = ["Channel", "Channels", "Place"]

Place: TypeAlias = tuple[ChainId, ChunkId]


@dataclass(slots=True)
class Channel:
    number: ChannelNumber
    sequence: int = 0
    """Of its last update."""
    unresolved: int = 0
    """The last sequence number whose outcome is not known; 0: of all of them it is."""
    several: bool = False
    """There are others like it before it."""
    done: bool = False
    """Its last update was, so it has a row."""

    def learn(self, sequence: int, *, done: bool, unknown: bool = False) -> None:
        """What became of this update. That one is done says the same of all before it: they were, or never will be."""
        self.done = done
        if done and sequence >= self.unresolved:
            self.unresolved, self.several = 0, False
        elif unknown:
            self.unresolved, self.several = sequence, self.unresolved > 0
        elif sequence == self.unresolved and not self.several:
            self.unresolved = 0


@dataclass(slots=True)
class _Turn:
    """Of one chunk. `channel`: of the update under way, or of those whose outcome is not known."""

    active: int
    channel: Channel | None = None
    waiting: deque[int] = field(default_factory=deque)


class Channels:
    """Operations are known by their numbers here."""

    def __init__(self, count: int, unknown: int) -> None:
        """`unknown`: channels with an unknown outcome, and nothing begins any more."""
        self._count, self._bound = count, unknown
        self._unknown = 0
        self._under_way = 0
        self._closed = False
        self._made = 0
        self._free: deque[Channel] = deque()
        """The next one is at the end."""
        self._turns: dict[Place, _Turn] = {}
        self._without: dict[int, Place] = {}
        """Operations whose turn it is, and for which there is no channel yet."""

    @property
    def unresolved(self) -> int:
        """Channels that wait for the outcome of an update that was given up."""
        return self._unknown

    @property
    def used_up(self) -> bool:
        """Nothing is under way, and nothing begins until `renew`."""
        return self._closed and not self._under_way

    def close(self) -> None:
        """Nothing begins until `renew`."""
        self._closed = True

    def renew(self) -> list[tuple[int, Channel]]:
        """For another session: no outcome of the last one is unknown any more. What has not ended begins anew, so it
        must not have been sent."""
        self._free.clear()
        self._made = self._unknown = self._under_way = 0
        self._closed = False
        begun: list[tuple[int, Channel]] = []
        for place, turn in self._turns.items():
            turn.channel = None
            if turn.active:
                self._without[turn.active] = place
        for place, turn in list(self._turns.items()):
            begun += self._next(place, turn)
        return begun

    def enter(self, place: Place, operation: int) -> list[tuple[int, Channel]]:
        """Returns which operations may begin now, and on which channel; `leave` and `resolve` do so too."""
        turn = self._turns.get(place)
        if turn is None:
            turn = self._turns[place] = _Turn(0)
        turn.waiting.append(operation)
        return self._next(place, turn)

    def leave(self, place: Place, operation: int, *, done: bool, unknown: bool) -> list[tuple[int, Channel]]:
        """The operation is over. `done`: by its own number. `unknown`: it may be done yet; neither: never."""
        turn = self._turns.get(place)
        if turn is None or turn.active != operation:
            if turn is not None and operation in turn.waiting:
                turn.waiting.remove(operation)
            return []
        turn.active = 0
        self._without.pop(operation, None)
        if turn.channel is not None:
            self._under_way -= 1
            self._learn(turn.channel, turn.channel.sequence, done=done, unknown=unknown)
        return self._next(place, turn)

    def resolve(self, place: Place, channel: Channel, sequence: int, *, done: bool) -> list[tuple[int, Channel]]:
        """The update with this number, which was given up, is done after all, or never will be."""
        turn = self._turns.get(place)
        if turn is None or turn.channel is not channel or not channel.unresolved:
            return []
        self._learn(channel, sequence, done=done)
        return [] if turn.active else self._next(place, turn)

    def _learn(self, channel: Channel, sequence: int, *, done: bool, unknown: bool = False) -> None:
        before = bool(channel.unresolved)
        channel.learn(sequence, done=done, unknown=unknown)
        self._unknown += bool(channel.unresolved) - before
        self._closed = self._closed or self._unknown >= self._bound

    def _next(self, place: Place, turn: _Turn) -> list[tuple[int, Channel]]:
        begun: list[tuple[int, Channel]] = []
        if not turn.active:
            if turn.waiting:
                if self._closed:
                    return begun
                turn.active = turn.waiting.popleft()
                if turn.channel is not None:
                    begun.append((turn.active, self._number(turn.channel)))
                else:
                    self._without[turn.active] = place
            elif turn.channel is None:
                del self._turns[place]
            elif not turn.channel.unresolved:
                if turn.channel.done:
                    self._free.append(turn.channel)
                else:
                    self._free.appendleft(turn.channel)
                del self._turns[place]
        while self._without and not self._closed and (self._free or self._made < self._count):
            operation, where = next(iter(self._without.items()))
            del self._without[operation]
            if self._free:
                channel = self._free.pop()
            else:
                channel, self._made = Channel(self._made), self._made + 1
            self._turns[where].channel = channel
            begun.append((operation, self._number(channel)))
        return begun

    def _number(self, channel: Channel) -> Channel:
        self._under_way += 1
        channel.sequence += 1
        return channel
