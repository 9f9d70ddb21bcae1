"""One incarnation of a node, as its launcher asks the agent of a machine for it. Pure.

    ORDERING ──the agent has it──> WAITING ──ended──> OVER
        │                            ^  │              ^
        ├───────to be killed─────────┘  └──refused─────┤
        └──────refused, not answered for START_NS──────┘

An agent may be away, so each call is made again until it is answered: a start for `START_NS`, the others for as long as
it takes. That is safe because of what agents promise (`agent`): a token is started once, and a stop that comes before
its start prevents it. An agent that was started anew does not know that an earlier one was told to stop a guard, so it
is told again whenever it says that the guard, which is to be killed, is not being stopped.

`GaveUp` says nothing about what runs on the machine: a start whose answer was lost may have been done, or be done
later. So whoever gives up lets no supervisor of this incarnation connect any more, and where one has connected the
node's lease is waited for.
"""

from __future__ import annotations

from enum import Enum
from typing import Final, Literal

import msgspec

from fireflyer.base.units import SECOND
from fireflyer.cluster.schema.agent import GuardStatus

__all__ = [
    "START_NS",
    "Answered",
    "Ask",
    "Begin",
    "Call",
    "Effect",
    "Ended",
    "Event",
    "GaveUp",
    "GuardCalls",
    "KillWanted",
    "NotAnswered",
    "Pause",
    "PauseOver",
    "Refused",
]

START_NS: Final = 10 * SECOND
"""An agent that cannot be reached for so long starts nothing."""

Call = Literal["start", "wait", "stop", "forget"]
"""`wait` is held until the guard has ended, or for a while."""


class Begin(msgspec.Struct, frozen=True):
    """First event of all."""


class Answered(msgspec.Struct, frozen=True):
    """`status` is that of `wait`."""

    call: Call
    status: GuardStatus | None = None


class NotAnswered(msgspec.Struct, frozen=True):
    """The agent cannot be reached, is busy, or the outcome is unknown."""

    call: Call
    reason: str


class Refused(msgspec.Struct, frozen=True):
    """For good."""

    call: Call
    reason: str


class PauseOver(msgspec.Struct, frozen=True):
    call: Call


class KillWanted(msgspec.Struct, frozen=True):
    """Nothing of the incarnation is to live any more."""


Event = Begin | Answered | NotAnswered | Refused | PauseOver | KillWanted


class Ask(msgspec.Struct, frozen=True):
    """Answered by `Answered`, `NotAnswered` or `Refused`; the outcome of `forget` is not waited for."""

    call: Call


class Pause(msgspec.Struct, frozen=True):
    """Before the call is made again. Answered by `PauseOver`."""

    call: Call


class Ended(msgspec.Struct, frozen=True):
    """Where the status says `clean`, nothing of the incarnation is left on the machine."""

    status: GuardStatus


class GaveUp(msgspec.Struct, frozen=True):
    """Nobody knows what runs there."""

    reason: str


Effect = Ask | Pause | Ended | GaveUp


class _State(Enum):
    ORDERING = "ordering"
    WAITING = "waiting"
    OVER = "over"


class GuardCalls:
    """The last effects of all are `Ended` or `GaveUp`, and what a stop that is under way still needs."""

    def __init__(self) -> None:
        self._state = _State.ORDERING
        self._now_ns = 0
        self._begun_ns = 0
        self._killed = False
        self.stopping = False
        """A stop is asked for, and the agent has not answered."""
        self._effects: list[Effect] = []

    def handle(self, now_ns: int, event: Event) -> list[Effect]:
        self._now_ns, self._effects = now_ns, []
        match event:
            case Begin():
                self._begun_ns = now_ns
                self._effects.append(Ask("start"))
            case Answered():
                self._on_answer(event)
            case NotAnswered(call, reason):
                self._on_silence(call, reason)
            case Refused(call, reason):
                self._on_refusal(call, reason)
            case PauseOver(call):
                self._again(call)
            case KillWanted():
                self._killed = True
                self._stop()
        return self._effects

    def _on_answer(self, event: Answered) -> None:
        if event.call == "stop":
            self.stopping = False
        elif self._state is _State.ORDERING and event.call == "start":
            self._wait()
        elif self._state is _State.WAITING and event.status is not None:
            self._on_status(event.status)

    def _on_status(self, status: GuardStatus) -> None:
        if status.state == "ended":
            self._state = _State.OVER
            self._effects += [Ask("forget"), Ended(status)]
            return
        if self._killed and status.state != "stopping":
            self._stop()
        self._effects.append(Ask("wait"))

    def _on_silence(self, call: Call, reason: str) -> None:
        if call == "start" and self._state is _State.ORDERING:
            if self._killed:
                self._wait()
            elif self._now_ns >= self._begun_ns + START_NS:
                self._give_up(reason)
            else:
                self._effects.append(Pause(call))
        elif call == "stop" or (call == "wait" and self._state is _State.WAITING):
            self._effects.append(Pause(call))

    def _on_refusal(self, call: Call, reason: str) -> None:
        if call == "stop":
            self.stopping = False
        elif call != "forget" and self._state is not _State.OVER:
            self._give_up(reason)

    def _again(self, call: Call) -> None:
        if call == "start" and self._state is _State.ORDERING and self._killed:
            self._wait()
        elif call == "stop" or self._state is not _State.OVER:
            self._effects.append(Ask(call))

    def _wait(self) -> None:
        self._state = _State.WAITING
        self._effects.append(Ask("wait"))

    def _stop(self) -> None:
        if not self.stopping and self._state is not _State.OVER:
            self.stopping = True
            self._effects.append(Ask("stop"))

    def _give_up(self, reason: str) -> None:
        self._state = _State.OVER
        self._effects.append(GaveUp(reason))
