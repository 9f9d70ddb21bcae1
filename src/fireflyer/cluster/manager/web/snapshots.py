"""Routes by which a user's directory comes to the manager: begin, blobs, seal. The task that names it comes then."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Annotated, Any

from litestar import post, put
from litestar.di import NamedDependency
from litestar.params import PathParameter

from fireflyer.cluster.core.objects.manifest import MAX_MANIFEST_BYTES
from fireflyer.cluster.manager.snapshots import Snapshots
from fireflyer.cluster.manager.web.routes import Who
from fireflyer.cluster.schema.api import MAX_SENT_BYTES, Commanded, MissingBlobs

__all__ = ["ROUTES"]

_Snapshot = Annotated[str, PathParameter(pattern=r"^[0-9a-f]{64}$")]


@post("/snapshots/{snapshot:str}", status_code=200, request_max_body_size=MAX_MANIFEST_BYTES)
async def begin_snapshot(request: Who, snapshot: _Snapshot, snapshots: NamedDependency[Snapshots]) -> MissingBlobs:
    """Begin to send a snapshot. The body is its manifest, the path its hash. Answers which blobs to send."""
    manifest = b"".join([piece async for piece in _pieces(request)])
    return MissingBlobs(await snapshots.begin(request.user.user, snapshot, manifest))


@put("/snapshots/{snapshot:str}/blobs", status_code=200, request_max_body_size=MAX_SENT_BYTES)
async def send_blobs(request: Who, snapshot: _Snapshot, snapshots: NamedDependency[Snapshots]) -> Commanded:
    """Send blobs of a snapshot that was begun: for each 32 bytes of its hash, 8 of its size (big-endian), and it."""
    count = await snapshots.send(request.user.user, snapshot, _pieces(request))
    return Commanded(f"{count} blobs are there")


@post("/snapshots/{snapshot:str}/seal", status_code=200)
async def seal_snapshot(request: Who, snapshot: _Snapshot, snapshots: NamedDependency[Snapshots]) -> Commanded:
    """All blobs were sent: from now on a task may name the snapshot."""
    await snapshots.seal(request.user.user, snapshot)
    return Commanded(f"snapshot {snapshot[:12]}… is complete")


async def _pieces(request: Who) -> AsyncIterator[bytes]:
    async for piece in request.stream():
        yield piece


ROUTES: list[Any] = [begin_snapshot, send_blobs, seal_snapshot]
