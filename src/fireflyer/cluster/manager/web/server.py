"""Serves the application: uvicorn on a socket that is bound here."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import AsyncIterator, Iterator
from typing import Final

import uvicorn
from litestar.types import ASGIApp

from fireflyer.base.errors import UsageError
from fireflyer.cluster.manager.web.exec_routes import SOCKET_MESSAGE_BYTES
from fireflyer.cluster.manager.web.tls import Certificate
from fireflyer.runtime.address import Address

__all__ = ["bind", "serving"]

MAX_CONNECTIONS: Final = 4096
BACKLOG: Final = 1024
IDLE_S: Final = 75
END_S: Final = 3


class _Server(uvicorn.Server):
    """Signals belong to the process."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def bind(host: str, port: int) -> socket.socket:
    """A socket that listens when it is served. Raises `UsageError` where the port is taken."""
    listener = socket.socket(
        socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM | socket.SOCK_CLOEXEC
    )
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        reason = error.strerror or str(error)
        raise UsageError(f"cannot listen at {Address(host, port)}: {reason.lower()}; give another address") from None
    return listener


@contextlib.asynccontextmanager
async def serving(app: ASGIApp, listener: socket.socket, certificate: Certificate | None) -> AsyncIterator[None]:
    """While the block runs. The socket is closed at its end."""
    config = uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        lifespan="off",
        loop="none",
        http="h11",
        ws="wsproto",
        ws_max_size=SOCKET_MESSAGE_BYTES,
        ws_per_message_deflate=False,
        server_header=False,
        date_header=False,
        limit_concurrency=MAX_CONNECTIONS,
        timeout_keep_alive=IDLE_S,
        timeout_graceful_shutdown=END_S,
        h11_max_incomplete_event_size=64 << 10,
        ssl_certfile=None if certificate is None else certificate.certificate_file,
        ssl_keyfile=None if certificate is None else certificate.key_file,
    )
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
    server = _Server(config)
    task = asyncio.get_running_loop().create_task(server.serve(sockets=[listener]))
    try:
        yield
    finally:
        server.should_exit = True
        await asyncio.wait([task])
        listener.close()
