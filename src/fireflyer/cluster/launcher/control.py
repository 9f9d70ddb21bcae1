"""The control service: what supervisors and ranks call, turned into events for the gang."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from fireflyer.base.errors import PermissionDenied, UsageError
from fireflyer.base.units import MS, SECOND
from fireflyer.cluster.core.messages import (
    Event,
    LeaseRenewed,
    NodeAnswered,
    PointsCollected,
    RankEnded,
    RankReported,
    RanksGone,
    RanksPrinted,
    StorageFailed,
    SupervisorHeartbeat,
    SupervisorLost,
    SupervisorUp,
)
from fireflyer.cluster.launcher.collected import CollectedFiles, CollectedLogs
from fireflyer.cluster.schema.job import RankLine
from fireflyer.cluster.schema.wire import (
    CHECKED,
    EXITED,
    FETCH_FILES,
    GONE,
    HEARTBEAT,
    HELLO,
    KEEP_FILE,
    LOG,
    LOG_ERROR,
    NEXT,
    OUTPUT,
    POINTS,
    PORT,
    RENEW,
    STARTED,
    Checked,
    Command,
    Done,
    Gone,
    Heartbeat,
    LogBytes,
    LogError,
    Next,
    NumberedCommand,
    Output,
    Points,
    PortFound,
    RankEnd,
    RunFile,
    RunFiles,
    Started,
    SupervisorHello,
)
from fireflyer.runtime.reporter import REPORT, Acknowledged, Reports
from fireflyer.runtime.rpc import Caller, RpcServer

__all__ = ["ControlService", "SupervisorConnection"]

_NEXT_WAIT_NS = 10 * SECOND
_BETTER_REASON_NS = 100 * MS
"""A connection that breaks waits so long for whoever knows why: the guard says how its supervisor died."""


@dataclass(slots=True)
class SupervisorConnection:
    """One incarnation of one node's supervisor."""

    node: int
    incarnation: int
    supervisor_pid: int = 0
    rank_pids: dict[int, int] = field(default_factory=dict)
    """Of the attempt that was started last; a rank that has ended is taken out."""
    connection: int = 0
    commands: list[Command] = field(default_factory=list)
    arrived: asyncio.Event = field(default_factory=asyncio.Event)
    revoked: bool = False
    """It is being killed: no command and no lease any more."""

    def tell(self, command: Command) -> None:
        self.commands.append(command)
        self.arrived.set()


class ControlService:
    def __init__(
        self,
        *,
        feed: Callable[[Event], None],
        on_line: Callable[[RankLine], None],
        on_port: Callable[[PortFound], None],
        on_asks: Callable[[], None],
        local_rank: Callable[[int, int], int],
        logs: CollectedLogs,
        files: CollectedFiles,
    ) -> None:
        self._feed = feed
        self._on_line = on_line
        self._on_port = on_port
        self._on_asks = on_asks
        self._local_rank = local_rank
        """Of an attempt and a rank."""
        self._logs = logs
        self._files = files
        self._members: dict[int, SupervisorConnection] = {}
        self._reporters: dict[str, Reports] = {}
        self._dropped_before = 0

    def serve(self, server: RpcServer) -> None:
        server.register(HELLO, self._hello)
        server.register(NEXT, self._next)
        server.register(HEARTBEAT, self._heartbeat)
        server.register(STARTED, self._started)
        server.register(EXITED, self._exited)
        server.register(GONE, self._gone)
        server.register(CHECKED, self._checked)
        server.register(LOG_ERROR, self._log_error)
        server.register(OUTPUT, self._output)
        server.register(REPORT, self._report)
        server.register(RENEW, self._renew)
        server.register(PORT, self._port)
        server.register(POINTS, self._points)
        server.register(LOG, self._log)
        server.register(FETCH_FILES, self._fetch_files)
        server.register(KEEP_FILE, self._keep_file)

    @property
    def reports_dropped(self) -> int:
        return self._dropped_before + sum(last.dropped for last in self._reporters.values())

    def expect(self, node: int, incarnation: int) -> None:
        """From now on the node is this incarnation and no other."""
        self._members[node] = SupervisorConnection(node, incarnation)

    def member(self, node: int, incarnation: int) -> SupervisorConnection | None:
        member = self._members.get(node)
        return member if member is not None and member.incarnation == incarnation else None

    def was_up(self, node: int, incarnation: int) -> bool:
        """Whether its supervisor has connected. One that has not is not let in any more after this answer."""
        member = self.member(node, incarnation)
        if member is None or member.connection:
            return member is not None
        member.revoked = True
        return False

    def revoke(self, node: int, incarnation: int) -> None:
        member = self.member(node, incarnation)
        if member is not None:
            member.revoked = True
            member.arrived.set()

    def current(self, node: int) -> SupervisorConnection | None:
        return self._members.get(node)

    def forget_reporters(self) -> None:
        """An attempt is over and its ranks are gone."""
        self._dropped_before = self.reports_dropped
        self._reporters.clear()

    def disconnected(self, caller: Caller) -> None:
        for member in self._members.values():
            if member.connection == caller.connection:
                lost = SupervisorLost(member.node, member.incarnation, "the connection to its supervisor was lost")
                asyncio.get_running_loop().call_later(_BETTER_REASON_NS / SECOND, self._feed, lost)

    # -- methods -------------------------------------------------------------------------------------------------------

    def _who(self, caller: Caller) -> SupervisorConnection:
        for member in self._members.values():
            if member.connection == caller.connection:
                return member
        raise PermissionDenied("not the connection of a supervisor: it sent no hello, or its node counts as lost")

    async def _hello(self, request: SupervisorHello, caller: Caller) -> Done:
        if caller.role != "node":
            raise PermissionDenied("only holders of the node secret may run a supervisor")
        member = self.member(request.node, request.incarnation)
        if member is None or member.connection or member.revoked:
            raise UsageError(f"no supervisor of node {request.node}, incarnation {request.incarnation}, is expected")
        member.connection, member.supervisor_pid = caller.connection, request.pid
        self._feed(SupervisorUp(member.node, member.incarnation))
        return Done()

    async def _next(self, request: Next, caller: Caller) -> NumberedCommand:
        member = self._who(caller)
        if request.after > len(member.commands):
            raise UsageError(f"there is no command {request.after}")
        if member.revoked:
            raise PermissionDenied("this node counts as lost")
        if request.after == len(member.commands):
            member.arrived.clear()
            try:
                async with asyncio.timeout(_NEXT_WAIT_NS / SECOND):
                    await member.arrived.wait()
            except TimeoutError:
                return NumberedCommand(request.after, None)
            if member.revoked:
                raise PermissionDenied("this node counts as lost")
        return NumberedCommand(request.after + 1, member.commands[request.after])

    async def _heartbeat(self, request: Heartbeat, caller: Caller) -> Done:
        member = self._who(caller)
        self._feed(SupervisorHeartbeat(member.node, member.incarnation))
        if request.asks:
            self._on_asks()
        return Done()

    async def _renew(self, _: Done, caller: Caller) -> Done:
        member = self._who(caller)
        self._feed(LeaseRenewed(member.node, member.incarnation))
        if member.revoked:
            raise PermissionDenied("this node counts as lost; its lease is not renewed")
        return Done()

    async def _port(self, request: PortFound, caller: Caller) -> Done:
        if self._who(caller).node == 0:
            self._on_port(request)
        return Done()

    async def _points(self, request: Points, caller: Caller) -> Done:
        member = self._who(caller)
        self._feed(PointsCollected(member.node, member.incarnation, request))
        return Done()

    async def _fetch_files(self, _: Done, caller: Caller) -> RunFiles:
        self._who(caller)
        return await asyncio.to_thread(self._files.all_plans)

    async def _keep_file(self, request: RunFile, caller: Caller) -> Done:
        self._who(caller)
        await asyncio.to_thread(self._files.keep, request)
        return Done()

    async def _log(self, request: LogBytes, caller: Caller) -> Done:
        self._who(caller)
        await self._logs.write(request.name, request.data)
        return Done()

    async def _started(self, request: Started, caller: Caller) -> Done:
        self._who(caller).rank_pids[request.rank] = request.pid
        return Done()

    async def _exited(self, request: RankEnd, caller: Caller) -> Done:
        member = self._who(caller)
        member.rank_pids.pop(request.rank, None)
        self._feed(RankEnded(member.node, member.incarnation, request))
        return Done()

    async def _gone(self, request: Gone, caller: Caller) -> Done:
        member = self._who(caller)
        self._feed(RanksGone(member.node, member.incarnation, request.attempt, request.ends, request.port_taken))
        return Done()

    async def _checked(self, request: Checked, caller: Caller) -> Done:
        member = self._who(caller)
        self._feed(NodeAnswered(member.node, member.incarnation, request))
        return Done()

    async def _log_error(self, request: LogError, caller: Caller) -> Done:
        self._who(caller)
        self._feed(StorageFailed(request.reason))
        return Done()

    async def _output(self, request: Output, caller: Caller) -> Done:
        node = self._who(caller).node
        self._feed(RanksPrinted())
        for line in request.lines:
            local_rank = self._local_rank(line.attempt, line.rank)
            self._on_line(RankLine(line.rank, node, line.attempt, line.stream, line.text, line.cut, local_rank))
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
