"""Exec sessions on this node: asked for at the manager that leads, served each on a connection of its own.

A session ends when its program has ended, when the client is gone, when the run ends, and when the connection to the
manager is lost: it is not taken up again by another manager. In all cases its processes are killed before the run may
be reported as gone (`core.runs`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from typing import Final, NamedTuple

from fireflyer.base.errors import FireflyerError, UsageError
from fireflyer.base.units import SECOND
from fireflyer.cluster.agent.accounts import Accounts
from fireflyer.cluster.agent.exec_process import ExecProcess
from fireflyer.cluster.agent.runs import Runs
from fireflyer.cluster.core.exec_session import ExecEnd, ExecSide
from fireflyer.cluster.schema.execs import (
    EXEC_HOLD_NS,
    RECEIVE_FRAMES,
    SEND_FRAMES,
    WAIT_EXECS,
    Data,
    Eof,
    ExecOrder,
    Frame,
    FramesHere,
    FramesWanted,
    Resize,
    Signal,
    WaitExecs,
)
from fireflyer.identity.handshake import UserCredential
from fireflyer.runtime.rpc import RpcClient

__all__ = ["Execs"]

_log = logging.getLogger(__name__)
MAX_SESSIONS: Final = 64
_HELD_NS: Final = EXEC_HOLD_NS + 10 * SECOND
_SEND_NS: Final = 24 * 3600 * SECOND
"""A client may take nothing for long; the manager ends the session when that is too long."""
_CONNECT_NS: Final = 5 * SECOND
_PAUSE_S: Final = 1.0
_OLD_MANAGER_S: Final = 60.0
_LAST_S: Final = 5.0
_BATCH_BYTES: Final = 128 << 10
_BATCH_FRAMES: Final = 200
_INPUT_BYTES: Final = 32 << 10
"""That are written at a time."""


class _Running(NamedTuple):
    run_token: str
    end: Callable[[str], None]


class Execs:
    """Lives in the loop of the agent; `run` until it is cancelled."""

    def __init__(self, runs: Runs, accounts: Accounts, lease_file: str, incarnation: int) -> None:
        self._runs = runs
        self._accounts = accounts
        self._lease_file = lease_file
        self._incarnation = incarnation
        self._leader: RpcClient | None = None
        self._credential: UserCredential | None = None
        self._wake = asyncio.Event()
        self._sessions: dict[str, _Running] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        runs.on_stop(self._stop_run)

    def leader_is(self, client: RpcClient | None, credential: UserCredential | None) -> None:
        """The connection to the manager that leads; None: there is none."""
        self._leader, self._credential = client, credential
        self._wake.set()

    def look(self) -> None:
        """Runs have come or gone."""
        self._wake.set()

    async def run(self) -> None:
        try:
            await self._runs.kill_old_execs()
            while True:
                self._wake.clear()
                leader, credential = self._leader, self._credential
                if leader is None or credential is None or not self._runs.lives():
                    await self._wake.wait()
                    continue
                try:
                    orders = await leader.call(WAIT_EXECS, WaitExecs(incarnation=self._incarnation), _HELD_NS)
                except UsageError:  # a manager of an older release
                    await asyncio.sleep(_OLD_MANAGER_S)
                    continue
                except FireflyerError:
                    await asyncio.sleep(_PAUSE_S)
                    continue
                for order in orders.sessions:
                    task = asyncio.get_running_loop().create_task(self._serve(order, leader, credential))
                    self._tasks.add(task)
                    task.add_done_callback(self._tasks.discard)
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def _stop_run(self, run_token: str) -> None:
        for session in [one for one in self._sessions.values() if one.run_token == run_token]:
            session.end("the run of the task has ended on this node")

    async def _serve(self, order: ExecOrder, leader: RpcClient, credential: UserCredential) -> None:
        try:
            client = await RpcClient.connect(leader.address, credential, _CONNECT_NS)
        except FireflyerError as error:
            _log.warning("an exec session is not served session=%s reason=%s", order.id[:8], error)
            return
        session = _Session(order, client)
        try:
            refusal = self._refusal(order)
            if refusal:
                session.close(refusal)
                await session.flush()
                return
            self._sessions[order.id] = _Running(order.run_token, session.close)
            self._runs.execs_changed(order.run_token, self._count(order.run_token))
            _log.info("exec session begins run=%s session=%s user=%s", order.run_token, order.id[:8], order.user)
            await session.serve(self._accounts, self._lease_file)
        except FireflyerError as error:
            session.close(str(error))
            await session.flush()
        finally:
            try:
                await asyncio.shield(asyncio.ensure_future(session.end()))
            finally:
                if self._sessions.pop(order.id, None) is not None:
                    _log.info("exec session ended run=%s session=%s", order.run_token, order.id[:8])
                    self._runs.execs_changed(order.run_token, self._count(order.run_token))
                await client.close()

    def _count(self, run_token: str) -> int:
        return sum(one.run_token == run_token for one in self._sessions.values())

    def _refusal(self, order: ExecOrder) -> str:
        if len(self._sessions) >= MAX_SESSIONS:
            return f"this node has {MAX_SESSIONS} exec sessions already; end some"
        return self._runs.exec_refusal(order.run_token)


class _Session:
    """One session: reads frames, pumps input and output, sends frames."""

    def __init__(self, order: ExecOrder, client: RpcClient) -> None:
        self._order = order
        self._client = client
        self._end = ExecEnd(ExecSide.AGENT)
        self._out: list[Frame] = []
        self._news = asyncio.Event()
        self._input = bytearray()
        """No more than the window; a frame of each byte would cost a hundred times as much."""
        self._input_ends = False
        self._input_news = asyncio.Event()
        self._process: ExecProcess | None = None
        self._paused = False

    def close(self, reason: str) -> None:
        self._say(self._end.close(reason))

    async def serve(self, accounts: Accounts, lease_file: str) -> None:
        """Until it is over and the client was told. Raises `FireflyerError`."""
        order = self._order
        account = accounts.of_user(order.user, order.account)
        self._process = process = ExecProcess(order, account, lease_file)
        self._say(self._end.start())
        # The sender ends when all is said, the receiver when nothing can be said any more.
        deciding = [asyncio.ensure_future(work) for work in (self._send(), self._receive())]
        pumps = [asyncio.ensure_future(work) for work in (self._write_input(process), self._read_output(process))]
        for pump in pumps:
            pump.add_done_callback(self._pump_ended)
        try:
            await asyncio.wait(deciding, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (*deciding, *pumps):
                task.cancel()
            for result in await asyncio.gather(*deciding, *pumps, return_exceptions=True):
                if isinstance(result, Exception):
                    _log.info("an exec session broke session=%s reason=%s", order.id[:8], result)

    def _pump_ended(self, pump: asyncio.Future[None]) -> None:
        if not pump.cancelled() and pump.exception() is not None:
            self.close(f"the agent failed: {pump.exception()}")

    async def flush(self) -> None:
        """Tells the manager what is to be told, if it hears that."""
        with contextlib.suppress(FireflyerError, TimeoutError):
            async with asyncio.timeout(_LAST_S):
                while self._out:
                    await self._send_batch()

    async def end(self) -> None:
        if self._process is not None:
            await self._process.end()

    # --- the parts ---

    async def _receive(self) -> None:
        try:
            while not self._end.over:
                here = await self._client.call(RECEIVE_FRAMES, FramesWanted(self._order.id), _HELD_NS)
                for frame in here.frames:
                    self._hear(frame)
        except FireflyerError as error:
            self._end.lose(f"the manager cannot be reached: {error}")
            self._news.set()

    def _hear(self, frame: Frame) -> None:
        self._say(self._end.hear(frame))
        process = self._process
        if self._end.over or process is None:
            self._news.set()
            return
        match frame:
            case Data(_, data):
                self._input += data
                self._input_news.set()
            case Eof():
                self._input_ends = True
                self._input_news.set()
            case Resize(rows, columns):
                process.resize(rows, columns)
            case Signal(name):
                process.signal(name)
            case _:
                self._unpause(process)

    async def _write_input(self, process: ExecProcess) -> None:
        while not self._input_ends or self._input:
            await self._input_news.wait()
            self._input_news.clear()
            while data := bytes(self._input[:_INPUT_BYTES]):
                del self._input[: len(data)]
                await process.write(data)  # what nobody reads any more is taken, as by a pipe that is closed
                self._say(self._end.take(len(data)))
        process.end_input()

    def _unpause(self, process: ExecProcess) -> None:
        if self._paused and self._may_read():
            self._paused = False
            process.resume()

    def _may_read(self) -> bool:
        """What a program writes in small pieces stays in its pipe, which joins them, while a batch waits to be sent."""
        return self._end.may_send > 0 and len(self._out) < _BATCH_FRAMES

    async def _read_output(self, process: ExecProcess) -> None:
        """The last frame is the exit code: all that was written comes before it."""
        while process.outputs:
            await process.readable.wait()
            if not self._may_read():
                self._paused = True
                process.pause()
                process.readable.clear()
                continue
            found = process.read(self._end.may_send)
            if found is None:
                continue
            stream, data = found
            self._say(self._end.send(stream, data) if data else self._end.end_stream(stream))
            await asyncio.sleep(0)  # others, too
        self._say(self._end.exit(await process.exit_code()))

    def _say(self, frames: list[Frame]) -> None:
        self._out += frames
        if frames:
            self._news.set()

    async def _send(self) -> None:
        while True:
            while self._out:
                await self._send_batch()
            if self._end.over:
                return
            self._news.clear()
            await self._news.wait()

    async def _send_batch(self) -> None:
        batch: list[Frame] = []
        size = 0
        while self._out and size < _BATCH_BYTES and len(batch) < _BATCH_FRAMES:
            frame = self._out.pop(0)
            batch.append(frame)
            size += len(frame.data) if isinstance(frame, Data) else 16
        await self._client.call(SEND_FRAMES, FramesHere(self._order.id, tuple(batch)), _SEND_NS)
        if self._process is not None:
            self._unpause(self._process)
