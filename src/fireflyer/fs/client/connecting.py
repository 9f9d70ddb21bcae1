"""Where a file system is, and how it is reached.

ff://host:port[,host:port]     managers, with a user's token or a credential; in a task, by default that of its run
ff://%2Fdirectory, ff:///directory   what `ff fs up --dir /directory` made, with the secret that lies there
"""

from __future__ import annotations

import asyncio
from typing import Final
from urllib.parse import unquote

from fireflyer.base.errors import UsageError
from fireflyer.fs.client.chunks import DEFAULT_TIMEOUT_NS, Chunks
from fireflyer.fs.client.chunks import connect as connect_chunks
from fireflyer.fs.client.control.control_thread import ControlThread
from fireflyer.fs.client.files.asyncio_files import Files
from fireflyer.fs.client.files.engine import ThreadPort
from fireflyer.fs.client.files.file_system import FileSystem
from fireflyer.fs.client.files.open_file_table import FileOptions
from fireflyer.fs.client.files.port import LoopPort
from fireflyer.fs.client.local import access_of, running
from fireflyer.fs.client.meta import MetaClient
from fireflyer.fs.client.ring import ring_of
from fireflyer.fs.tools.default_cluster import default_token_file
from fireflyer.identity.handshake import Credential, UserCredential
from fireflyer.identity.private_files import read_private_file

__all__ = ["connect", "connect_async", "parse"]

_SCHEME: Final = "ff://"


def connect(
    where: str, *, token: str | None = None, credential: Credential | None = None, name: str = "",
    options: FileOptions | None = None, timeout_ns: int = DEFAULT_TIMEOUT_NS,
) -> FileSystem:  # fmt: skip
    """Opens a session. `token`: of a user; `credential`: another proof of who asks. Raises `UsageError`, `Timeout`,
    `PermissionDenied`, and for a directory `NotFound`. Close it, or use it with `with`."""
    managers, proof, directory = parse(where, token, credential)
    chosen = options or FileOptions()
    with running(directory, timeout_ns) as limit_ns:
        background = ControlThread(managers, proof, name=name)
        ring = ring_of(background, chosen.chunks, limit_ns)
    try:
        meta = background.call(_started(background))
        engine = ThreadPort(ring, background, meta)

        def close() -> None:
            background.call(meta.close())
            ring.close()

        files = Files(engine, chosen, _nothing)
        engine.start(files.open_files.maintain)
    except BaseException:
        ring.close()
        raise
    return FileSystem(engine, files, close)


async def connect_async(
    where: str, *, token: str | None = None, credential: Credential | None = None, name: str = "",
    options: FileOptions | None = None, timeout_ns: int = DEFAULT_TIMEOUT_NS,
) -> Files:  # fmt: skip
    """Connect as `connect` does, for the event loop that runs."""
    managers, proof, directory = parse(where, token, credential)
    chosen = options or FileOptions()
    with running(directory, timeout_ns) as limit_ns:
        chunks = await connect_chunks(managers, proof, name=name, options=chosen.chunks, timeout_ns=limit_ns)
    return files_over(chunks, chosen)


def files_over(chunks: Chunks, options: FileOptions, meta: MetaClient | None = None) -> Files:
    """`chunks` is closed with it. `meta`: of the same session."""
    client = meta or MetaClient(chunks.control)
    client.start()

    async def close() -> None:
        await client.close()
        await chunks.close()

    files = Files(LoopPort(chunks, client, chunks.control), options, close)
    files.start()
    return files


def parse(
    where: object, token: str | None = None, credential: Credential | None = None
) -> tuple[tuple[str, ...], Credential, str | None]:
    """Managers, who asks, and the directory that says so. Raises `UsageError`, also for what is no str."""
    if not isinstance(where, str) or not where.startswith(_SCHEME):
        raise UsageError(
            f"{where!r} is not an address of a file system; write ff://host:port[,host:port] or ff:///directory"
        )
    if token is not None and credential is not None:
        raise UsageError("token and credential are both given; give one of them")
    rest = where.removeprefix(_SCHEME)
    proof = credential if token is None else UserCredential(token.strip())  # files end with a line's end
    if rest.startswith("%2F"):  # as in the paths of `ff fs`
        rest = unquote(rest.rstrip("/"))
    if rest.startswith("/"):
        managers, secret = access_of(rest)
        return managers, proof or secret, rest
    addresses = tuple(one for one in rest.rstrip("/").split(",") if one)
    if not addresses or "/" in rest.rstrip("/"):
        raise UsageError(f"{where!r} names no managers; write ff://host:port[,host:port]")
    return addresses, proof or _of_task(where), None


def _of_task(where: str) -> Credential:
    """Raises `UsageError` outside of a task."""
    path = default_token_file()
    if path is None:
        raise UsageError(f"{where!r}: the managers ask who you are; give token= (of a user) or credential=")
    return UserCredential(read_private_file(path, 4096).decode(errors="replace").strip())


async def _started(background: ControlThread) -> MetaClient:
    meta = MetaClient(background.control)
    meta.start()
    return meta


async def _nothing() -> None:
    await asyncio.sleep(0)
