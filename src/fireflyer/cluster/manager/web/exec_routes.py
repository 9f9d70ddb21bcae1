"""Routes of exec sessions: one asks for a session, the other is its stream of frames."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Annotated, Any

from litestar import WebSocket, post, websocket
from litestar.datastructures import State
from litestar.di import NamedDependency
from litestar.exceptions import WebSocketDisconnect
from litestar.params import JSONBody, PathParameter

from fireflyer.base.decoding import DECODE_ERRORS
from fireflyer.cluster.manager.exec_session import ManagedExec
from fireflyer.cluster.manager.execs import Execs
from fireflyer.cluster.manager.web.routes import Who
from fireflyer.cluster.manager.web.sessions import Principal
from fireflyer.cluster.schema.execs import MAX_FRAME_BYTES, ExecAccepted, ExecRequest, decode_frame, encode_frame

__all__ = ["ROUTES", "SOCKET_MESSAGE_BYTES"]

SOCKET_MESSAGE_BYTES = MAX_FRAME_BYTES
LAST_S = 60.0
"""For what is left to be sent to a client."""
_Task = Annotated[int, PathParameter(ge=1, le=1 << 53)]
_Session = Annotated[str, PathParameter(pattern=r"^[0-9a-f]{32}$")]


@post("/tasks/{number:int}/exec", status_code=201)
async def ask_exec(
    request: Who, data: JSONBody[ExecRequest], execs: NamedDependency[Execs], number: _Task
) -> ExecAccepted:
    """Run a command, or reach a port, in a task that runs: for its user and administrators. Then connect by WebSocket
    to `/execs/ID` at this manager, with the same token, within 10 s: each binary message is a frame in msgpack. The
    session ends with that connection, with the program, and with the run."""
    client = request.client.host if request.client is not None else "unknown"
    return await execs.request(request.user, client, number, data)


@websocket("/execs/{session_id:str}")
async def exec_frames(
    socket: WebSocket[Principal, str, State], execs: NamedDependency[Execs], session_id: _Session
) -> None:
    """The frames of one session, both ways."""
    session = execs.attach(socket.user, session_id)
    await socket.accept()
    reading = asyncio.ensure_future(_read(socket, session, execs))
    writing = asyncio.ensure_future(_write(socket, session))
    ending = asyncio.ensure_future(execs.serve(session))
    try:
        await asyncio.wait({reading, writing, ending}, return_when=asyncio.FIRST_COMPLETED)
        if reading.done() or writing.done():
            execs.detach(session)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LAST_S):
                await asyncio.wait({reading, writing}, return_when=asyncio.FIRST_COMPLETED)
        await asyncio.wait({ending})
    finally:
        for task in (reading, writing, ending):
            task.cancel()
        await asyncio.gather(reading, writing, ending, return_exceptions=True)
        execs.forget(session)
    with contextlib.suppress(Exception):
        await socket.close()


async def _read(socket: WebSocket[Principal, str, State], session: ManagedExec, execs: Execs) -> None:
    with contextlib.suppress(WebSocketDisconnect):
        while True:
            try:
                frame = decode_frame(await socket.receive_data(mode="binary"))
            except DECODE_ERRORS:
                session.close("its client sent something that is no frame")
                return
            await session.from_client(frame, execs.now_ns())


async def _write(socket: WebSocket[Principal, str, State], session: ManagedExec) -> None:
    """A client that takes nothing keeps this waiting, and then the agent."""
    while frames := await session.to_client.get():
        for frame in frames:
            await socket.send_data(encode_frame(frame), mode="binary")


ROUTES: list[Any] = [ask_exec, exec_frames]
