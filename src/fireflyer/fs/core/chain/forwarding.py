"""Requests to the successor: sent until they are answered, carried out at most once, whatever the network does.

A link has a fixed number of *slots*; of each, one request is under way. The sender numbers the requests of a slot and
sends a copy again when no answer came. The receiver remembers for each slot the last number and its answer:

    number above the last   a new request; the sender has closed the one before
    the last number         a copy: the same answer again; while it is under way, silence, or that it waits for others
    below                   a late copy: ignored

Data are not sent again unless they are missing: the copy of a request with data is a *reminder*, and who has not heard
of the request says so.

So a refused request is refused for ever, and a copy that arrives late changes nothing, with memory for the slots only.
Both ends forget everything when the chain's version changes or a resync session begins, and a request says to which
(version, session) it belongs: the process of either end cannot restart within one.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from fireflyer.fs.schema.chunks import Accepted, Declined, Page, Put, SyncCompletions, SyncDone, SyncList, SyncStart
from fireflyer.fs.schema.ids import ChunkId, ContentId

__all__ = ["AnswerBody", "PendingRequest", "RequestBody", "RequestReceiver", "RequestSender", "SlotNumber"]

RequestBody = Put | SyncStart | SyncCompletions | SyncList | SyncDone
AnswerBody = Accepted | Declined | Page
SlotNumber = tuple[int, int]
"""(slot, number)"""


@dataclass(slots=True)
class PendingRequest:
    """A request with what it needs to be sent again. `owner`: the chunk whose update it is, None for the session."""

    owner: ChunkId | None
    body: RequestBody
    handle: int
    content: ContentId | None
    place: SlotNumber
    first_sent_ns: int
    sent_ns: int


class RequestSender:
    """The sender's end."""

    def __init__(self, slots: int) -> None:
        self._numbers = [0] * slots
        self._pending: dict[int, PendingRequest] = {}
        self._free = list(range(slots))
        self._waiting: deque[tuple[ChunkId | None, RequestBody, int, ContentId | None]] = deque()

    def reset(self) -> None:
        """Nothing is under way; to be used with a new (chain version, session) only."""
        self._numbers = [0] * len(self._numbers)
        self._pending.clear()
        self._free = list(range(len(self._numbers)))
        self._waiting.clear()

    def post(self, owner: ChunkId | None, body: RequestBody, handle: int = 0, content: ContentId | None = None) -> None:
        """To be sent when a slot is free, in this order. At most one waits for each chunk under way."""
        self._waiting.append((owner, body, handle, content))

    @property
    def room(self) -> bool:
        """What is posted now gets a slot at once."""
        return len(self._free) > len(self._waiting)

    def fresh(self, now_ns: int) -> list[PendingRequest]:
        """Requests that got a slot now and are to be sent for the first time."""
        pending_requests = []
        while self._waiting and self._free:
            slot = self._free.pop()
            self._numbers[slot] += 1
            pending = PendingRequest(*self._waiting.popleft(), (slot, self._numbers[slot]), now_ns, now_ns)
            self._pending[slot] = pending
            pending_requests.append(pending)
        return pending_requests

    def overdue(self, now_ns: int, resend_ns: int) -> list[PendingRequest]:
        """Requests of which a copy is to be sent: the last one is older than `resend_ns`."""
        pending_requests = [one for one in self._pending.values() if now_ns - one.sent_ns >= resend_ns]
        for pending in pending_requests:
            pending.sent_ns = now_ns
        return pending_requests

    def find(self, place: SlotNumber) -> PendingRequest | None:
        """What is under way there."""
        pending = self._pending.get(place[0])
        return pending if pending is not None and pending.place == place else None

    def hurry(self, due_ns: int, resend_ns: int) -> None:
        """What is under way is overdue at `due_ns` at the latest: it is known to be lost, or not to have been taken."""
        for pending in self._pending.values():
            pending.sent_ns = min(pending.sent_ns, due_ns - resend_ns)

    def close(self, place: SlotNumber) -> PendingRequest | None:
        """The request that was answered; None when the answer is to none that is under way."""
        pending = self.find(place)
        if pending is None:
            return None
        del self._pending[place[0]]
        self._free.append(place[0])
        return pending

    def oldest_ns(self) -> int | None:
        """When the request that has waited longest was first sent."""
        return min((one.first_sent_ns for one in self._pending.values()), default=None)

    def __len__(self) -> int:
        return len(self._pending) + len(self._waiting)


class RequestReceiver:
    """The receiver's end."""

    def __init__(self) -> None:
        self._last: dict[int, tuple[int, AnswerBody | None]] = {}

    def reset(self) -> None:
        self._last.clear()

    def admit(self, place: SlotNumber) -> bool:
        """Whether this request is new; from now on it is under way."""
        if not self.is_new(place):
            return False
        self._last[place[0]] = (place[1], None)
        return True

    def is_new(self, place: SlotNumber) -> bool:
        return place[1] > self._last.get(place[0], (0, None))[0]

    def is_last(self, place: SlotNumber) -> bool:
        """Whether this is a copy of the slot's last request."""
        return self._last.get(place[0], (0, None))[0] == place[1]

    def answer(self, place: SlotNumber, body: AnswerBody) -> bool:
        """Keeps the answer for copies. False when the sender has gone on meanwhile: nobody waits for it."""
        slot, number = place
        if self._last.get(slot, (0, None))[0] != number:
            return False
        self._last[slot] = (number, body)
        return True

    def answered(self, place: SlotNumber) -> AnswerBody | None:
        """What was answered to this very request, if anything."""
        number, body = self._last.get(place[0], (0, None))
        return body if number == place[1] else None
