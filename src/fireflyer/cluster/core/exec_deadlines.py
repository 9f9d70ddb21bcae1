"""When an exec session, or an interactive task without one, has lasted too long. Pure.

An interactive task keeps its nodes for the shell in it. When no shell was open for `SHELL_GRACE_NS`, the task is to be
stopped: the client may have been killed, or its manager have failed, and nobody comes back.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import msgspec

from fireflyer.base.units import SECOND, format_duration

__all__ = ["SHELL_GRACE_NS", "ExecTimes", "ShellWatch", "why_over"]

ATTACH_NS: Final = 10 * SECOND
"""From the request until the client is there."""
ANSWER_NS: Final = 15 * SECOND
"""From then until the agent is there."""
SILENT_NS: Final = 45 * SECOND
"""Longer than an agent that lives ever says nothing: its calls are answered after `EXEC_HOLD_NS`."""
LAST_NS: Final = 7 * 24 * 3600 * SECOND
IDLE_NS: Final = 12 * 3600 * SECOND
TERMINAL_IDLE_NS: Final = 3600 * SECOND
SHELL_GRACE_NS: Final = 120 * SECOND


class ExecTimes(msgspec.Struct, kw_only=True):
    """Of one session; nanoseconds of one clock."""

    asked_ns: int
    idle_ns: int
    """It may be without data for so long."""
    attached_ns: int | None = None
    agent_ns: int | None = None
    """When the agent was heard last; None: not yet."""
    agent_waits: bool = False
    """A call of the agent is held, so that it cannot say anything."""
    data_ns: int = 0
    """When data came or went last."""


def why_over(times: ExecTimes, now_ns: int) -> str:
    """Why the session is to end now; empty: it goes on."""
    if times.attached_ns is None:
        return "nobody connected to it" if now_ns - times.asked_ns >= ATTACH_NS else ""
    if times.agent_ns is None:
        late = now_ns - times.attached_ns >= ANSWER_NS
        return "the node does not answer; its agent may be away, or of an older release" if late else ""
    if not times.agent_waits and now_ns - times.agent_ns >= SILENT_NS:
        return "the node does not answer any more"
    if now_ns - max(times.data_ns, times.attached_ns) >= times.idle_ns:
        return f"nothing was typed or printed for {format_duration(times.idle_ns)}"
    if now_ns - times.attached_ns >= LAST_NS:
        return f"a session lasts {format_duration(LAST_NS)} at most"
    return ""


class ShellWatch:
    """Which interactive tasks have had no session for too long."""

    def __init__(self) -> None:
        self._without_ns: dict[int, int] = {}

    def due(self, running: Iterable[int], with_session: frozenset[int], now_ns: int) -> list[int]:
        """`running`: interactive tasks that run now. A new leader gives each the whole time."""
        without = [task for task in running if task not in with_session]
        self._without_ns = {task: self._without_ns.get(task, now_ns) for task in without}
        return [task for task, since_ns in self._without_ns.items() if now_ns - since_ns >= SHELL_GRACE_NS]
