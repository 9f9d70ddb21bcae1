"""The IO shell: real clock and disk, the asyncio driver of machines, RPC, authenticated sockets, the rendezvous store.

Names are imported when they are first used, so that a small process which needs one module does not pay for asyncio.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fireflyer.runtime.address import Address
    from fireflyer.runtime.clock import MonotonicClock
    from fireflyer.runtime.disk import RealDisk, translate_os_error
    from fireflyer.runtime.driver import Driver, Machine, run
    from fireflyer.runtime.environment import read_environment
    from fireflyer.runtime.rpc import BlockingRpcClient, Caller, Method, RpcClient, RpcServer, ServerLimits
    from fireflyer.runtime.sockets import authenticate_client
    from fireflyer.runtime.store import LocalStore, Store, StoreClient, StoreService, open_store

__all__ = [
    "Address",
    "BlockingRpcClient",
    "Caller",
    "Driver",
    "LocalStore",
    "Machine",
    "Method",
    "MonotonicClock",
    "RealDisk",
    "RpcClient",
    "RpcServer",
    "ServerLimits",
    "Store",
    "StoreClient",
    "StoreService",
    "authenticate_client",
    "open_store",
    "read_environment",
    "run",
    "translate_os_error",
]

_HOME = {
    "Address": "address",
    "BlockingRpcClient": "rpc",
    "Caller": "rpc",
    "Driver": "driver",
    "LocalStore": "store",
    "Machine": "driver",
    "Method": "rpc",
    "MonotonicClock": "clock",
    "RealDisk": "disk",
    "RpcClient": "rpc",
    "RpcServer": "rpc",
    "ServerLimits": "rpc",
    "Store": "store",
    "StoreClient": "store",
    "StoreService": "store",
    "authenticate_client": "sockets",
    "open_store": "store",
    "read_environment": "environment",
    "run": "driver",
    "translate_os_error": "disk",
}


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{home}"), name)
    globals()[name] = value
    return value
