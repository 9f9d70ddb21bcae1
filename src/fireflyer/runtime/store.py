"""The rendezvous store: how ranks that know nothing of each other find each other.

The launcher serves one (`StoreService` on its RPC server); ranks reach it through `StoreClient`; a process that is
alone has a `LocalStore`. `open_store` picks. Keys are text like `"attempt-2/comm/world/address/3"`, values are bytes.
The store lives as long as its launcher: it is for rendezvous, not for storage.

A wait for several keys is over when each of them has existed since the wait began.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
from typing import Final, Protocol

import msgspec

from fireflyer.base.errors import PermissionDenied, Timeout, UsageError
from fireflyer.base.launch import RankEnvironment
from fireflyer.base.units import SECOND, format_duration
from fireflyer.identity.handshake import NodeCredential
from fireflyer.identity.secrets import Secret, load_secret
from fireflyer.runtime.address import Address
from fireflyer.runtime.rpc import BlockingRpcClient, Caller, Method, RpcServer
from fireflyer.runtime.rpc.messages import check_timeout
from fireflyer.runtime.store_core import MAX_KEYS_PER_WAIT, StoreTable

__all__ = ["LocalStore", "Store", "StoreClient", "StoreService", "open_store"]

_REQUEST_TIMEOUT_NS: Final = 30 * SECOND
_CONNECT_TIMEOUT_NS: Final = 30 * SECOND
_WAIT_GRACE_NS: Final = 5 * SECOND


class Store(Protocol):
    """Blocking, and safe to share between threads. Raises `UsageError` over a limit, `Busy` when the store is full,
    `Unreachable` when its server is gone."""

    def set(self, key: str, value: bytes) -> None:
        """Creates or replaces."""

    def set_if_missing(self, key: str, value: bytes) -> bytes:
        """Creates, unless the key exists; returns the value that it has then. Atomic: of several callers with different
        values one wins, and all learn the winner's. Repeating it is harmless."""

    def get(self, key: str, timeout_ns: int) -> bytes:
        """Waits until the key exists. Raises `Timeout` naming it."""

    def try_get(self, key: str) -> bytes | None:
        """The value now, None if the key does not exist."""

    def add(self, key: str, amount: int) -> int:
        """Adds to the counter `key` (0 when missing) and returns its new value; atomic."""

    def wait(self, keys: list[str], timeout_ns: int) -> None:
        """Waits until all keys exist. Raises `Timeout` naming the first that are missing."""

    def get_all(self, keys: list[str], timeout_ns: int) -> list[bytes]:
        """Waits until all keys exist, and gets their values in the same order. Raises `Timeout` as `wait` does."""

    def keys(self, prefix: str) -> list[str]:
        """Sorted."""

    def delete_prefix(self, prefix: str) -> int:
        """Deletes every key that begins with `prefix`; returns how many."""

    def close(self) -> None: ...


class _Set(msgspec.Struct, frozen=True):
    key: str
    value: bytes


class _Key(msgspec.Struct, frozen=True):
    key: str


class _Value(msgspec.Struct, frozen=True):
    value: bytes | None


class _Add(msgspec.Struct, frozen=True):
    key: str
    amount: int


class _Number(msgspec.Struct, frozen=True):
    number: int


class _Wait(msgspec.Struct, frozen=True):
    keys: list[str]
    timeout_ns: int


class _Values(msgspec.Struct, frozen=True):
    """The value when a single key was waited for (saves a round trip), else None."""

    value: bytes | None


class _Found(msgspec.Struct, frozen=True):
    values: list[bytes | None]
    """Of the first of the keys, as many as an answer holds, and one at least; None where a key was deleted since."""


class _Prefix(msgspec.Struct, frozen=True):
    prefix: str


class _Names(msgspec.Struct, frozen=True):
    names: list[str]


class _Done(msgspec.Struct, frozen=True):
    pass


_SET = Method("store.set", _Set, _Done)
_SET_IF_MISSING = Method("store.set_if_missing", _Set, _Value)
_GET = Method("store.get", _Key, _Value)
_ADD = Method("store.add", _Add, _Number)
_WAIT = Method("store.wait", _Wait, _Values)
_GET_ALL = Method("store.get_all", _Wait, _Found)
_KEYS = Method("store.keys", _Prefix, _Names)
_DELETE = Method("store.delete_prefix", _Prefix, _Number)


class StoreService:
    """Serves one store on `server`. Only nodes may use it."""

    def __init__(self, server: RpcServer) -> None:
        self._table = StoreTable()
        self._waiting: dict[int, asyncio.Future[None]] = {}
        self._numbers = itertools.count(1)
        server.register(_SET, self._set)
        server.register(_SET_IF_MISSING, self._set_if_missing)
        server.register(_GET, self._get)
        server.register(_ADD, self._add)
        server.register(_WAIT, self._wait)
        server.register(_GET_ALL, self._get_all)
        server.register(_KEYS, self._keys)
        server.register(_DELETE, self._delete)

    def delete_prefix(self, prefix: str) -> int:
        """Delete, for the launcher itself, what an attempt left behind."""
        return self._table.delete_prefix(prefix)

    def set(self, key: str, value: bytes) -> None:
        """Set a value, for the launcher itself."""
        self._wake(self._table.set(key, value))

    def _wake(self, ready: list[int]) -> None:
        for number in ready:
            waiting = self._waiting.pop(number)
            if not waiting.done():  # cancelled already, but its task has not run since
                waiting.set_result(None)

    async def _set(self, request: _Set, caller: Caller) -> _Done:
        _check_node(caller)
        self.set(request.key, request.value)
        return _Done()

    async def _set_if_missing(self, request: _Set, caller: Caller) -> _Value:
        _check_node(caller)
        held, ready = self._table.set_if_missing(request.key, request.value)
        self._wake(ready)
        return _Value(held)

    async def _get(self, request: _Key, caller: Caller) -> _Value:
        _check_node(caller)
        return _Value(self._table.get(request.key))

    async def _add(self, request: _Add, caller: Caller) -> _Number:
        _check_node(caller)
        total, ready = self._table.add(request.key, request.amount)
        self._wake(ready)
        return _Number(total)

    async def _wait(self, request: _Wait, caller: Caller) -> _Values:
        _check_node(caller)
        await self._until_all_exist(request)
        return _Values(self._table.get(request.keys[0]) if len(request.keys) == 1 else None)

    async def _get_all(self, request: _Wait, caller: Caller) -> _Found:
        _check_node(caller)
        await self._until_all_exist(request)
        return _Found(self._table.get_first(request.keys))

    async def _until_all_exist(self, request: _Wait) -> None:
        number = next(self._numbers)
        if not self._table.wait(number, request.keys):
            ready = self._waiting[number] = asyncio.get_running_loop().create_future()
            try:
                async with asyncio.timeout(check_timeout(request.timeout_ns) / SECOND):
                    await ready
            except TimeoutError:
                raise _missing(self._table.missing(request.keys) or request.keys, request.timeout_ns) from None
            finally:
                self._table.forget(number)
                self._waiting.pop(number, None)

    async def _keys(self, request: _Prefix, caller: Caller) -> _Names:
        _check_node(caller)
        return _Names(self._table.keys(request.prefix))

    async def _delete(self, request: _Prefix, caller: Caller) -> _Number:
        _check_node(caller)
        return _Number(self._table.delete_prefix(request.prefix))


class StoreClient(Store):
    """The store of a launcher. Connects at once; raises as `RpcClient.connect` does."""

    def __init__(
        self,
        address: Address | str,
        secret: Secret,
        *,
        identity: str = "rank",
        connect_timeout_ns: int = _CONNECT_TIMEOUT_NS,
    ) -> None:
        self._client = BlockingRpcClient.connect(address, NodeCredential(secret, identity), connect_timeout_ns)

    def set(self, key: str, value: bytes) -> None:
        self._client.call(_SET, _Set(key, value), _REQUEST_TIMEOUT_NS)

    def set_if_missing(self, key: str, value: bytes) -> bytes:
        held = self._client.call(_SET_IF_MISSING, _Set(key, value), _REQUEST_TIMEOUT_NS).value
        return value if held is None else held

    def get(self, key: str, timeout_ns: int) -> bytes:
        while (value := self._wait_for([key], timeout_ns)) is None:
            pass  # deleted between its arrival and the answer
        return value

    def try_get(self, key: str) -> bytes | None:
        return self._client.call(_GET, _Key(key), _REQUEST_TIMEOUT_NS).value

    def add(self, key: str, amount: int) -> int:
        return self._client.call(_ADD, _Add(key, amount), _REQUEST_TIMEOUT_NS).number

    def wait(self, keys: list[str], timeout_ns: int) -> None:
        self._wait_for(keys, timeout_ns)

    def get_all(self, keys: list[str], timeout_ns: int) -> list[bytes]:
        check_timeout(timeout_ns)
        found: list[bytes] = []
        while len(found) < len(keys):
            rest = keys[len(found) : len(found) + MAX_KEYS_PER_WAIT]
            answer = self._client.call(_GET_ALL, _Wait(rest, timeout_ns), timeout_ns + _WAIT_GRACE_NS)
            for value in answer.values:
                if value is None:
                    break  # deleted between its arrival and the answer: waited for again
                found.append(value)
        return found

    def keys(self, prefix: str) -> list[str]:
        return self._client.call(_KEYS, _Prefix(prefix), _REQUEST_TIMEOUT_NS).names

    def delete_prefix(self, prefix: str) -> int:
        return self._client.call(_DELETE, _Prefix(prefix), _REQUEST_TIMEOUT_NS).number

    def close(self) -> None:
        self._client.close()

    def _wait_for(self, keys: list[str], timeout_ns: int) -> bytes | None:
        check_timeout(timeout_ns)
        # The server keeps the time, since it can name the missing keys; the call's own deadline is for a dead server.
        return self._client.call(_WAIT, _Wait(keys, timeout_ns), timeout_ns + _WAIT_GRACE_NS).value


class LocalStore(Store):
    """A store inside one process, shared by its threads."""

    def __init__(self) -> None:
        self._table = StoreTable()
        self._lock = threading.Lock()
        self._waiting: dict[int, threading.Event] = {}
        self._numbers = itertools.count(1)

    def set(self, key: str, value: bytes) -> None:
        with self._lock:
            self._wake(self._table.set(key, bytes(value)))

    def set_if_missing(self, key: str, value: bytes) -> bytes:
        with self._lock:
            held, ready = self._table.set_if_missing(key, bytes(value))
            self._wake(ready)
            return held

    def get(self, key: str, timeout_ns: int) -> bytes:
        self.wait([key], timeout_ns)
        while (value := self.try_get(key)) is None:
            self.wait([key], timeout_ns)  # deleted between its arrival and the answer
        return value

    def get_all(self, keys: list[str], timeout_ns: int) -> list[bytes]:
        if keys:
            self.wait(keys, timeout_ns)
        return [self.get(key, timeout_ns) for key in keys]

    def try_get(self, key: str) -> bytes | None:
        with self._lock:
            return self._table.get(key)

    def add(self, key: str, amount: int) -> int:
        with self._lock:
            total, ready = self._table.add(key, amount)
            self._wake(ready)
            return total

    def wait(self, keys: list[str], timeout_ns: int) -> None:
        check_timeout(timeout_ns)
        number = next(self._numbers)
        ready = threading.Event()
        with self._lock:
            if self._table.wait(number, keys):
                return
            self._waiting[number] = ready
        done = ready.wait(timeout_ns / SECOND)
        with self._lock:
            self._table.forget(number)
            self._waiting.pop(number, None)
            if not done and not ready.is_set():
                raise _missing(self._table.missing(keys) or keys, timeout_ns)

    def keys(self, prefix: str) -> list[str]:
        with self._lock:
            return self._table.keys(prefix)

    def delete_prefix(self, prefix: str) -> int:
        with self._lock:
            return self._table.delete_prefix(prefix)

    def close(self) -> None:
        pass

    def _wake(self, ready: list[int]) -> None:
        for number in ready:
            self._waiting.pop(number).set()


def open_store(env: RankEnvironment) -> Store:
    """The store that this rank shares with the others of its job. Raises `UsageError` when there is none to share."""
    if env.control is not None:
        if env.secret_file is None:
            raise UsageError("FF_CONTROL is set but FF_SECRET_FILE is not; start the job with `ff run`")
        return StoreClient(env.control, load_secret(env.secret_file), identity=f"{env.job}/rank {env.rank}")
    if env.world_size == 1:
        return LocalStore()
    raise UsageError(
        f"rank {env.rank} of {env.world_size} was not started by `ff run`, so it has no rendezvous store; "
        "start the job with: ff run --nodes N --ranks-per-node M script.py (a PyTorch program under torchrun makes "
        "its communicator with fireflyer.collectives.torch_join.communicator_of)"
    )


def _check_node(caller: Caller) -> None:
    if caller.role != "node":
        raise PermissionDenied("only holders of the node secret may use the rendezvous store, not users with a token")


def _missing(keys: list[str], timeout_ns: int) -> Timeout:
    shown = ", ".join(repr(key) for key in keys[:3]) + (f" and {len(keys) - 3} more" if len(keys) > 3 else "")
    return Timeout(
        f"store key {shown} was not set within {format_duration(timeout_ns)}; "
        "the rank that sets it is late or has ended, see its log"
    )
