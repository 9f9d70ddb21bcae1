"""Exec sessions of a manager that leads: who may have one, on which node it is, when it ends.

    client ──request──> rights, limits, the audit's row ──> ExecAccepted
           ──attach───> the order goes to the node's agent, which holds a call for it
           <──frames──> ManagedExec <──frames── agent, on a connection of the session's own

Sessions are in the memory of one manager. When it leads no more, they end: the client is told so, and the agent kills
what they started.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import shlex
from collections import deque
from typing import Final

from fireflyer.base.errors import Busy, FireflyerError, NotFound, PermissionDenied, UsageError
from fireflyer.base.units import SECOND
from fireflyer.cluster.core.exec_deadlines import IDLE_NS, TERMINAL_IDLE_NS, ExecTimes, ShellWatch, why_over
from fireflyer.cluster.core.platform.access import ADMIN, check_exec
from fireflyer.cluster.core.platform.commands import StopTask
from fireflyer.cluster.core.platform.views import RunView, TaskView
from fireflyer.cluster.manager.exec_session import ManagedExec
from fireflyer.cluster.manager.platform import Platform
from fireflyer.cluster.manager.web.sessions import Principal, Sessions
from fireflyer.cluster.schema.api import Change
from fireflyer.cluster.schema.execs import (
    EXEC_HOLD_NS,
    ExecAccepted,
    ExecOrder,
    ExecOrders,
    ExecRequest,
    FramesHere,
    FramesWanted,
    Taken,
)
from fireflyer.cluster.schema.tasks import TaskState
from fireflyer.runtime.clock import BootClock

__all__ = ["MAX_OF_USER", "Execs"]

_log = logging.getLogger(__name__)
MAX_SESSIONS: Final = 1024
MAX_OF_USER: Final = 64
MAX_ORDERS: Final = 64
"""That wait for one node."""
LOOK_S: Final = 1.0
RECHECK_S: Final = 4.0
"""So often it is looked whether tokens are still valid."""
PLATFORM: Final = "platform"
"""Who stops tasks, in the audit."""


class Execs:
    """Lives in the loop in which it is made; `run` beside the platform."""

    def __init__(self, platform: Platform, tokens: Sessions) -> None:
        self._platform = platform
        self._tokens = tokens
        self._clock = BootClock()
        self._sessions: dict[str, ManagedExec] = {}
        self._orders: dict[str, deque[ExecOrder]] = {}
        self._waiting: dict[str, asyncio.Event] = {}
        self._watch = ShellWatch()
        self._interactive: dict[int, bool] = {}
        """Tasks that run or have just run: whether they are interactive."""
        self._led = False

    @property
    def sessions(self) -> int:
        return len(self._sessions)

    async def run(self) -> None:
        """Until it is cancelled."""
        checked_s = asyncio.get_running_loop().time()
        try:
            while True:
                await asyncio.sleep(LOOK_S)
                self._look()
                if asyncio.get_running_loop().time() - checked_s >= RECHECK_S:
                    checked_s = asyncio.get_running_loop().time()
                    try:
                        await self._recheck()
                        await self._stop_without_shell()
                    except FireflyerError as error:
                        _log.warning("exec sessions could not be checked reason=%s", error)
        finally:
            self._close_all("the manager is stopped; open the session again")

    # --- from clients ---

    async def request(self, who: Principal, client: str, number: int, asked: ExecRequest) -> ExecAccepted:
        """Raises `PermissionDenied`, `NotFound`, `UsageError`, `Busy`, `Elsewhere`."""
        if who.csrf:
            raise PermissionDenied("exec sessions take a token, and not the session of a browser")
        progress = self._platform.progress(number)
        view = progress.view
        check_exec(number, view.user, who.user, who.roles)
        run = _run_of(view, progress.runs)
        node = _node_of(view, run, asked)
        interactive = view.spec is not None and view.spec.kind == "interactive"
        if asked.ends_task and not interactive:
            raise UsageError(f"task {number} is no interactive task, so it does not end with a session")
        self._check_limits(who.user)
        terminal = asked.program is not None and asked.program.terminal
        idle_ns = TERMINAL_IDLE_NS if terminal else IDLE_NS
        order = ExecOrder(
            id=secrets.token_hex(16),
            run_token=run.token,
            user=view.user,
            rank=asked.rank if asked.rank is not None or asked.node is not None else 0,
            program=asked.program,
            port=asked.port,
        )
        session = ManagedExec(
            order,
            node=node,
            task=number,
            user=who.user,
            token_id=who.token_id,
            ends_task=asked.ends_task,
            times=ExecTimes(
                asked_ns=self._clock.now_ns(),
                idle_ns=idle_ns if asked.idle_s is None else asked.idle_s * SECOND,
            ),
        )
        self._sessions[order.id] = session
        try:
            await self._platform.audit(who.user, "exec", str(number), f"on {node} from {client}: {_shown(asked)}")
        except BaseException:
            self._drop(session)
            raise
        session.times.asked_ns = self._clock.now_ns()
        return ExecAccepted(id=order.id, task=number, run=run.number, node=node, rank=order.rank)

    def attach(self, who: Principal, session_id: str) -> ManagedExec:
        """Its client is there, with the token that asked: that is the one which is looked at again. Raises `NotFound`,
        `Busy`."""
        session = self._sessions.get(session_id)
        fresh = session is not None and session.times.attached_ns is None and not session.reason
        if session is None or not fresh or who.csrf or (session.user, session.token_id) != (who.user, who.token_id):
            raise NotFound("there is no such exec session; ask for another one")
        orders = self._orders.setdefault(session.node, deque())
        if len(orders) >= MAX_ORDERS:
            raise Busy(f"{len(orders)} sessions wait for node {session.node}; try again later")
        session.times.attached_ns = self._clock.now_ns()
        orders.append(session.order)
        self._waiting.pop(session.node, asyncio.Event()).set()
        return session

    def detach(self, session: ManagedExec) -> None:
        """Its client is gone."""
        session.close("its client is gone")

    def now_ns(self) -> int:
        return self._clock.now_ns()

    def _check_limits(self, user: str) -> None:
        mine = sum(session.user == user for session in self._sessions.values())
        if mine >= MAX_OF_USER:
            raise Busy(f"{user} has {mine} exec sessions, and at most {MAX_OF_USER} are open at a time; end some")
        if len(self._sessions) >= MAX_SESSIONS:
            raise Busy(f"{MAX_SESSIONS} exec sessions are open, the maximum of this manager; try again later")

    # --- from agents ---

    async def wait(self, node: str) -> ExecOrders:
        """Held until there is one for the node."""
        self._platform.require_lead()
        if not self._orders.get(node):
            news = self._waiting.setdefault(node, asyncio.Event())
            try:
                async with asyncio.timeout(EXEC_HOLD_NS / SECOND):
                    await news.wait()
            except TimeoutError:
                return ExecOrders()
        orders = self._orders.pop(node, deque())
        return ExecOrders(tuple(order for order in orders if order.id in self._sessions))

    async def wanted(self, node: str, connection: int, asked: FramesWanted) -> FramesHere:
        session = self._of_agent(node, connection, asked.id)
        session.times.agent_waits = True
        try:
            async with asyncio.timeout(EXEC_HOLD_NS / SECOND):
                return FramesHere(asked.id, await session.to_agent.get())
        except TimeoutError:
            return FramesHere(asked.id)
        finally:
            session.times.agent_waits = False
            session.times.agent_ns = self._clock.now_ns()

    async def here(self, node: str, connection: int, frames: FramesHere) -> Taken:
        session = self._of_agent(node, connection, frames.id)
        await session.from_agent(frames.frames, self._clock.now_ns())
        return Taken()

    def disconnected(self, connection: int) -> None:
        for session in self._sessions.values():
            if session.connection == connection:
                session.close(f"the connection to node {session.node} is lost")

    def _of_agent(self, node: str, connection: int, session_id: str) -> ManagedExec:
        session = self._sessions.get(session_id)
        if session is None or session.node != node or session.connection not in (None, connection):
            raise NotFound("there is no such exec session any more")
        session.connection = connection
        session.times.agent_ns = self._clock.now_ns()
        return session

    # --- how sessions end ---

    def _look(self) -> None:
        now_ns = self._clock.now_ns()
        leads = self._platform.leads
        if not leads:
            self._close_all("this manager leads no more; open the session again")
            self._orders.clear()
        if leads and not self._led:
            self._read_running()
        self._led = leads
        for session in list(self._sessions.values()):
            if not session.reason:
                reason = why_over(session.times, now_ns)
                if reason:
                    session.close(reason)

    async def serve(self, session: ManagedExec) -> None:
        """Returns when it is over, and is then forgotten."""
        try:
            await session.over.wait()
        finally:
            session.close("its client is gone")
            _log.info(
                "exec session ended session=%s task=%d user=%s reason=%s",
                session.order.id[:8], session.task, session.user, session.reason,
            )  # fmt: skip
            if session.ends_task and session.exit_code is not None:
                await self._stop(session.task, "its shell has ended")

    def forget(self, session: ManagedExec) -> None:
        """Its agent is told by the next call, if not yet."""
        self._drop(session)

    def _drop(self, session: ManagedExec) -> None:
        session.close("it was forgotten")
        self._sessions.pop(session.order.id, None)
        waiting = self._orders.get(session.node)
        if waiting is not None and session.order in waiting:
            waiting.remove(session.order)

    def _close_all(self, reason: str) -> None:
        for session in self._sessions.values():
            session.close(reason)

    async def _recheck(self) -> None:
        """Whoever lost their token, or the right to be here, is ended."""
        for session in list(self._sessions.values()):
            if session.reason:
                if session.times.attached_ns is None:
                    self._drop(session)
                continue
            found = await self._tokens.still(session.token_id)
            if found is None:
                session.close("the token with which it began is not valid any more")
            elif found.user != session.order.user and ADMIN not in found.roles:
                session.close(f"{found.user} is no administrator any more")

    # --- interactive tasks without a shell ---

    def on_change(self, change: Change) -> None:
        if change.what == "task":
            task = int(change.name)
            if change.state == TaskState.RUNNING.value:
                self._note_running(task)
            else:
                self._interactive.pop(task, None)

    def _read_running(self) -> None:
        page = self._platform.tasks(user="", state="running", name="", before=None, limit=1 << 20)
        self._interactive = {}
        for view in page.tasks:
            self._note_running(view.id)

    def _note_running(self, task: int) -> None:
        try:
            spec = self._platform.progress(task).view.spec
        except FireflyerError:
            return
        if spec is not None and spec.kind == "interactive":
            self._interactive[task] = True

    async def _stop_without_shell(self) -> None:
        if not self._platform.leads:
            self._watch = ShellWatch()
            return
        open_in = frozenset(session.task for session in self._sessions.values() if not session.reason)
        for task in self._watch.due(list(self._interactive), open_in, self._clock.now_ns()):
            await self._stop(task, "no shell was open in it for 2 minutes")

    async def _stop(self, task: int, reason: str) -> None:
        try:
            await self._platform.command(PLATFORM, (ADMIN,), StopTask(task, reason))
        except FireflyerError as error:
            _log.warning("an interactive task could not be stopped task=%d reason=%s", task, error)


def _run_of(view: TaskView, runs: tuple[RunView, ...]) -> RunView:
    run = next((one for one in runs if one.number == view.runs - 1), None)
    if view.state is not TaskState.RUNNING or run is None or run.leaving or run.ended_ns is not None:
        raise UsageError(f"task {view.id} does not run now (it is {view.state.value}); `ff show {view.id}` says why")
    return run


def _node_of(view: TaskView, run: RunView, asked: ExecRequest) -> str:
    """Raises `UsageError`, `NotFound`."""
    if asked.node is not None:
        if asked.node not in run.nodes:
            raise UsageError(f"task {view.id} does not run on {asked.node}; it runs on {', '.join(run.nodes[:8])}")
        return asked.node
    ranks_per_node = 1 if view.spec is None else view.spec.program.ranks_per_node
    rank = asked.rank or 0
    if rank >= ranks_per_node * len(run.nodes):
        raise UsageError(f"task {view.id} has ranks 0 to {ranks_per_node * len(run.nodes) - 1}, and no rank {rank}")
    return run.nodes[rank // ranks_per_node]


def _shown(asked: ExecRequest) -> str:
    """For the audit, one line."""
    if asked.port is not None:
        return f"port {asked.port.port}"
    argv = () if asked.program is None else asked.program.argv
    text = shlex.join(argv) or "a shell"
    return "".join(char if char.isprintable() else "?" for char in text)[:400]
