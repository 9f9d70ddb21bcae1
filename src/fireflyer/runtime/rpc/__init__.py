"""RPC between the processes of a cluster: authenticated, bounded, with deadlines that both ends keep.

    method = Method("counter.add", AddRequest, AddReply)          # shared by both sides

    server = RpcServer(Accepts(secret))                           # the serving side
    server.register(method, handler)                              # async def handler(request, caller) -> AddReply
    address = await server.start("127.0.0.1", 0)

    client = await RpcClient.connect(address, NodeCredential(secret, "rank 0"), 5 * SECOND)
    reply = await client.call(method, AddRequest(1), 2 * SECOND)

A connection is a mutual handshake (`fireflyer.identity.handshake`), then authenticated frames
(`fireflyer.runtime.framing`) of msgpack messages. Errors cross as a code and a message and come out as the same class.
Contents are not hidden from who listens on the network: use a tunnel where that matters.

Names are imported when they are first used: a process that needs the messages alone does not pay for asyncio.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fireflyer.identity.handshake import Accepts, Credential, NodeCredential, UserCredential
    from fireflyer.runtime.address import Address
    from fireflyer.runtime.rpc.blocking import BlockingRpcClient
    from fireflyer.runtime.rpc.client import RpcClient
    from fireflyer.runtime.rpc.messages import Method
    from fireflyer.runtime.rpc.server import Caller, RpcServer, ServerLimits

__all__ = [
    "Accepts",
    "Address",
    "BlockingRpcClient",
    "Caller",
    "Credential",
    "Method",
    "NodeCredential",
    "RpcClient",
    "RpcServer",
    "ServerLimits",
    "UserCredential",
]

_HOME = {
    "Accepts": "fireflyer.identity.handshake",
    "Address": "fireflyer.runtime.address",
    "BlockingRpcClient": "fireflyer.runtime.rpc.blocking",
    "Caller": "fireflyer.runtime.rpc.server",
    "Credential": "fireflyer.identity.handshake",
    "Method": "fireflyer.runtime.rpc.messages",
    "NodeCredential": "fireflyer.identity.handshake",
    "RpcClient": "fireflyer.runtime.rpc.client",
    "RpcServer": "fireflyer.runtime.rpc.server",
    "ServerLimits": "fireflyer.runtime.rpc.server",
    "UserCredential": "fireflyer.identity.handshake",
}


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value
