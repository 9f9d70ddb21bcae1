"""A port of this machine that leads to a port of a node of a task: each connection is an exec session of its own."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Final

from fireflyer.base.errors import FireflyerError, UsageError
from fireflyer.cluster.client import Client
from fireflyer.cluster.exec_stream import ExecStream
from fireflyer.cluster.schema.execs import Data, Eof, ExecRequest, Port

__all__ = ["MAX_CONNECTIONS", "forwarding"]

MAX_CONNECTIONS: Final = 32
"""At a time; more wait."""
_READ_BYTES: Final = 32 << 10


@contextlib.asynccontextmanager
async def forwarding(
    client: Client, task: int, here: int, there: int, on_error: Callable[[str], None]
) -> AsyncIterator[int]:
    """While the block runs `127.0.0.1:here` leads to port `there` of the task's first node; `here` 0 takes a free one,
    which is what is given. `client` is used here alone. Raises `UsageError`."""
    forward = _Forward(client, task, there, on_error)
    try:
        server = await asyncio.start_server(forward.serve, "127.0.0.1", here)
    except OSError as error:
        raise UsageError(
            f"port {here} of this machine cannot be used: {error.strerror}; give another: --port N:{there}"
        ) from None
    async with server:
        yield server.sockets[0].getsockname()[1]
        server.close()
        await forward.end()


class _Forward:
    def __init__(self, client: Client, task: int, port: int, on_error: Callable[[str], None]) -> None:
        self._client, self._task, self._port, self._on_error = client, task, port, on_error
        self._asking = asyncio.Lock()
        self._places = asyncio.Semaphore(MAX_CONNECTIONS)
        self._tasks: set[asyncio.Task[None]] = set()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        if task is not None:
            self._tasks.add(task)
        try:
            async with self._places:
                await self._carry(reader, writer)
        except asyncio.CancelledError:
            pass  # the end of all of them
        except (FireflyerError, OSError) as error:
            self._on_error(f"port {self._port}: {error}")
        finally:
            if task is not None:
                self._tasks.discard(task)
            writer.close()

    async def end(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async with self._asking:
            asked = ExecRequest(port=Port(self._port))
            accepted = await asyncio.to_thread(self._client.ask_exec, self._task, asked)
            manager, token = self._client.manager, self._client.connection.token
        async with ExecStream.open(manager, token, accepted) as stream:
            sending = asyncio.ensure_future(_send(reader, stream))
            errors = b""
            try:
                async for frame in stream.frames():
                    if isinstance(frame, Data):
                        if frame.stream == 1:
                            writer.write(frame.data)
                            await writer.drain()
                        else:
                            errors = (errors + frame.data)[-1000:]
                        stream.taken(len(frame.data))
                    elif isinstance(frame, Eof) and frame.stream == 1 and writer.can_write_eof():
                        writer.write_eof()
            finally:
                sending.cancel()
                await asyncio.gather(sending, return_exceptions=True)
            if stream.end.exit_code != 0:
                said = errors.decode(errors="replace").removeprefix("error: ").strip()
                self._on_error(said or stream.end.reason or f"port {self._port} was not reached")


async def _send(reader: asyncio.StreamReader, stream: ExecStream) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(_READ_BYTES):
            await stream.send(data)
        stream.end_input()
