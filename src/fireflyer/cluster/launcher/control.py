"""The control service: what agents and ranks call, turned into events for the gang."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from fireflyer.base.errors import PermissionDenied, UsageError
from fireflyer.base.units import MS, SECOND
from fireflyer.cluster.core.messages import (
    AgentHeartbeat,
    AgentLost,
    AgentUp,
    Event,
    RankEnd,
    RankExited,
    RankReported,
    RanksGone,
    StorageFailed,
)
from fireflyer.cluster.schema.job import RankLine
from fireflyer.cluster.schema.wire import (
    EXITED,
    GONE,
    HEARTBEAT,
    HELLO,
    LOG_ERROR,
    NEXT,
    OUTPUT,
    STARTED,
    AgentHello,
    Command,
    Done,
    Exited,
    Gone,
    LogError,
    Next,
    NumberedCommand,
    Output,
    Started,
)
from fireflyer.runtime.reporter import REPORT, Acknowledged, Reports
from fireflyer.runtime.rpc import Caller, RpcServer

__all__ = ["AgentConnection", "ControlService"]

_NEXT_WAIT_NS = 10 * SECOND
_BETTER_REASON_NS = 100 * MS
"""A connection that breaks waits so long for whoever knows why: the guard says how its agent died."""


@dataclass(slots=True)
class AgentConnection:
    """One incarnation of one node's agent."""

    node: int
    incarnation: int
    agent_pid: int = 0
    rank_pids: dict[int, int] = field(default_factory=dict)
    """Of the attempt that was started last; a rank that has ended is taken out."""
    connection: int = 0
    commands: list[Command] = field(default_factory=list)
    arrived: asyncio.Event = field(default_factory=asyncio.Event)

    def tell(self, command: Command) -> None:
        self.commands.append(command)
        self.arrived.set()


class ControlService:
    def __init__(self, *, feed: Callable[[Event], None], on_line: Callable[[RankLine], None]) -> None:
        self._feed = feed
        self._on_line = on_line
        self._members: dict[int, AgentConnection] = {}
        self._reporters: dict[str, Reports] = {}
        self._dropped_before = 0

    def serve(self, server: RpcServer) -> None:
        server.register(HELLO, self._hello)
        server.register(NEXT, self._next)
        server.register(HEARTBEAT, self._heartbeat)
        server.register(STARTED, self._started)
        server.register(EXITED, self._exited)
        server.register(GONE, self._gone)
        server.register(LOG_ERROR, self._log_error)
        server.register(OUTPUT, self._output)
        server.register(REPORT, self._report)

    @property
    def reports_dropped(self) -> int:
        return self._dropped_before + sum(last.dropped for last in self._reporters.values())

    def expect(self, node: int, incarnation: int) -> None:
        """From now on the node is this incarnation and no other."""
        self._members[node] = AgentConnection(node, incarnation)

    def member(self, node: int, incarnation: int) -> AgentConnection | None:
        member = self._members.get(node)
        return member if member is not None and member.incarnation == incarnation else None

    def current(self, node: int) -> AgentConnection | None:
        return self._members.get(node)

    def forget_reporters(self) -> None:
        """An attempt is over and its ranks are gone."""
        self._dropped_before = self.reports_dropped
        self._reporters.clear()

    def disconnected(self, caller: Caller) -> None:
        for member in self._members.values():
            if member.connection == caller.connection:
                lost = AgentLost(member.node, member.incarnation, "the connection to its agent was lost")
                asyncio.get_running_loop().call_later(_BETTER_REASON_NS / SECOND, self._feed, lost)

    # -- methods -------------------------------------------------------------------------------------------------------

    def _who(self, caller: Caller) -> AgentConnection:
        for member in self._members.values():
            if member.connection == caller.connection:
                return member
        raise PermissionDenied("not the connection of an agent: it sent no hello, or its node counts as lost")

    async def _hello(self, request: AgentHello, caller: Caller) -> Done:
        if caller.role != "node":
            raise PermissionDenied("only holders of the node secret may run an agent")
        member = self.member(request.node, request.incarnation)
        if member is None or member.connection:
            raise UsageError(f"no agent of node {request.node}, incarnation {request.incarnation}, is expected")
        member.connection, member.agent_pid = caller.connection, request.pid
        self._feed(AgentUp(member.node, member.incarnation))
        return Done()

    async def _next(self, request: Next, caller: Caller) -> NumberedCommand:
        member = self._who(caller)
        if request.after > len(member.commands):
            raise UsageError(f"there is no command {request.after}")
        if request.after == len(member.commands):
            member.arrived.clear()
            try:
                async with asyncio.timeout(_NEXT_WAIT_NS / SECOND):
                    await member.arrived.wait()
            except TimeoutError:
                return NumberedCommand(request.after, None)
        return NumberedCommand(request.after + 1, member.commands[request.after])

    async def _heartbeat(self, _: Done, caller: Caller) -> Done:
        member = self._who(caller)
        self._feed(AgentHeartbeat(member.node, member.incarnation))
        return Done()

    async def _started(self, request: Started, caller: Caller) -> Done:
        self._who(caller).rank_pids[request.rank] = request.pid
        return Done()

    async def _exited(self, request: Exited, caller: Caller) -> Done:
        member = self._who(caller)
        member.rank_pids.pop(request.rank, None)
        self._feed(RankExited(member.node, member.incarnation, request.attempt, _end(request)))
        return Done()

    async def _gone(self, request: Gone, caller: Caller) -> Done:
        member = self._who(caller)
        ends = tuple(_end(end) for end in request.ends)
        self._feed(RanksGone(member.node, member.incarnation, request.attempt, ends))
        return Done()

    async def _log_error(self, request: LogError, caller: Caller) -> Done:
        self._who(caller)
        self._feed(StorageFailed(request.reason))
        return Done()

    async def _output(self, request: Output, caller: Caller) -> Done:
        node = self._who(caller).node
        for line in request.lines:
            self._on_line(RankLine(line.rank, node, line.attempt, line.stream, line.text, line.cut))
        return Done()

    async def _report(self, request: Reports, caller: Caller) -> Acknowledged:
        if caller.role != "node":
            raise PermissionDenied("only holders of the node secret may send reports")
        last = self._reporters.get(caller.identity)
        if last is not None and request.number <= last.number:
            return Acknowledged()
        self._reporters[caller.identity] = Reports((), request.number, request.dropped)
        for report in request.reports:
            self._feed(RankReported(report))
        return Acknowledged()


def _end(exited: Exited) -> RankEnd:
    return RankEnd(exited.rank, exited.exit_code, exited.told, exited.note)
