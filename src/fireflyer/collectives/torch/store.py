"""Where the ranks of a torch process group meet: the c10d store that torch already has, seen as ours.

What a rank must know before it can join (which ranks share its node, and the secret of the job) is agreed there once
per world:

1. every rank writes where it is: the node that its launcher named, and the machine on which it finds itself;
2. rank 0 reads them all, numbers the nodes by first appearance and publishes the list, or the reason why there is none.

The secret is the launcher's where there is one (`ff run`, or any file named by FF_SECRET_FILE). Otherwise rank 0 makes
one and puts it into the store: then whoever can talk to the store, which torch does not protect, can join the group.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Final

import msgspec
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store as TorchStore

from fireflyer.base.decoding import decode_published
from fireflyer.base.errors import Timeout, Unreachable, UsageError
from fireflyer.base.launch import RankEnvironment
from fireflyer.base.units import SECOND, format_duration
from fireflyer.identity.secrets import Secret, load_secret, new_secret
from fireflyer.runtime.address import own_address_towards
from fireflyer.runtime.store import Store

__all__ = ["C10dStore", "WorldNodes", "agree_on_world_nodes", "number_nodes", "own_address", "store_of"]

_MICROSECOND_NS: Final = 1000
_GRACE_NS: Final = 5 * SECOND
_MAX_NAMES: Final = 16
_BOOT_ID: Final = "/proc/sys/kernel/random/boot_id"
_NETWORK_NAMESPACE: Final = "/proc/self/ns/net"


def store_of(group: dist.ProcessGroup) -> TorchStore:
    """That of a process group, with the keys of its own."""
    store: TorchStore = dist.distributed_c10d._get_process_group_store(group)  # noqa: SLF001 - there is no public way to it
    return store


class C10dStore(Store):
    """A `torch.distributed` store with the methods and errors of ours, but for empty values, which `set_if_missing`
    replaces. `close` leaves it open: it is torch's. A wait holds a connection until its end; with `for_threads` each
    thread has a connection of its own, so that none waits for what another one waits for."""

    def __init__(self, store: TorchStore, *, for_threads: bool = False) -> None:
        self._shared = store
        self._own = threading.local() if for_threads else None

    @property
    def _store(self) -> TorchStore:
        if self._own is None:
            return self._shared
        found: TorchStore | None = getattr(self._own, "store", None)
        if found is None:
            shared: Any = self._shared  # the stubs know no `clone`
            found = self._own.store = _calling(shared.clone)
        return found

    def set(self, key: str, value: bytes) -> None:
        # Bytes are what the binding takes; its annotation says text.
        _calling(self._store.set, key, value)

    def set_if_missing(self, key: str, value: bytes) -> bytes:
        # Torch takes an empty value for a missing one, on both sides.
        return bytes(_calling(self._store.compare_set, key, "", value))

    def get(self, key: str, timeout_ns: int) -> bytes:
        self.wait([key], timeout_ns)
        return bytes(_calling(self._store.get, key))

    def try_get(self, key: str) -> bytes | None:
        return bytes(_calling(self._store.get, key)) if _calling(self._store.check, [key]) else None

    def add(self, key: str, amount: int) -> int:
        return int(_calling(self._store.add, key, amount))

    def wait(self, keys: list[str], timeout_ns: int) -> None:
        try:
            self._store.wait(keys, timedelta(microseconds=max(1, timeout_ns // _MICROSECOND_NS)))
        except dist.DistStoreError as error:
            missing = [key for key in keys if not _calling(self._store.check, [key])]
            if not missing:
                raise Unreachable(f"the c10d store failed: {_first_line(error)}") from error
            names = ", ".join(missing[:_MAX_NAMES])
            raise Timeout(f"{names} did not appear in the c10d store within {format_duration(timeout_ns)}") from None
        except RuntimeError as error:
            raise Unreachable(f"the c10d store failed: {_first_line(error)}") from error

    def get_all(self, keys: list[str], timeout_ns: int) -> list[bytes]:
        self.wait(keys, timeout_ns)
        extended: Any = self._store  # the stubs know neither method
        if not extended.has_extended_api():
            return [bytes(_calling(extended.get, key)) for key in keys]
        return [bytes(value) for value in _calling(extended.multi_get, keys)]

    def keys(self, prefix: str) -> list[str]:
        return sorted(key for key in _calling(self._store.list_keys) if key.startswith(prefix))

    def delete_prefix(self, prefix: str) -> int:
        return sum(bool(_calling(self._store.delete_key, key)) for key in self.keys(prefix))

    def close(self) -> None:
        pass


def _calling(function: Any, *arguments: Any) -> Any:
    try:
        return function(*arguments)
    except RuntimeError as error:
        raise Unreachable(f"the c10d store failed: {_first_line(error)}") from error


def _first_line(error: BaseException) -> str:
    return str(error).split("\n", 1)[0]


class WorldNodes(msgspec.Struct, frozen=True):
    """What the ranks of a world agreed on. `secret` is for this process alone."""

    node_of_rank: tuple[int, ...]
    secret: Secret

    def part(self, ranks: Sequence[int]) -> WorldNodes:
        """Of the subgroup of these ranks."""
        return WorldNodes(number_nodes([self.node_of_rank[rank] for rank in ranks]), self.secret)


class _Published(msgspec.Struct, frozen=True):
    node_of_rank: tuple[int, ...] = ()
    secret: bytes | None = None
    error: str | None = None


def agree_on_world_nodes(
    store: Store, env: RankEnvironment, *, rank: int, world_size: int, node: int | None, timeout_ns: int
) -> WorldNodes:
    """Collective. `node` is what the caller knows better than the environment.

    Ranks share a node if the same node was named for them and they run on one machine in one network namespace.
    Raises `UsageError` naming ranks that did not come, `Timeout` where rank 0 did not.
    """
    declared = env.node if node is None else node
    store.set(f"place/{rank}", f"{declared} {_machine()}".encode())
    own = None if env.secret_file is None else load_secret(env.secret_file)
    if rank == 0:
        published = _collect(store, world_size, own is None, timeout_ns)
        store.set("places", msgspec.json.encode(published))
    else:
        try:
            data = store.get("places", timeout_ns + _GRACE_NS)
        except Timeout:
            raise Timeout(f"rank 0 did not join within {format_duration(timeout_ns)}; see its log") from None
        published = decode_published(data, _Published, "rank 0")
    if published.error is not None:
        raise UsageError(published.error)
    if (own is None) != (published.secret is not None):
        raise UsageError("some ranks have FF_SECRET_FILE and others not; start all of them by one launcher")
    return WorldNodes(published.node_of_rank, own or Secret(published.secret or b""))


def _collect(store: Store, world_size: int, shares_secret: bool, timeout_ns: int) -> _Published:
    keys = [f"place/{rank}" for rank in range(world_size)]
    try:
        places = store.get_all(keys, timeout_ns)
    except Timeout:
        missing = [str(rank) for rank, key in enumerate(keys) if store.try_get(key) is None]
        names = ", ".join(missing[:_MAX_NAMES])
        return _Published(error=f"rank {names} did not join within {format_duration(timeout_ns)}; see its log")
    nodes = number_nodes(places)
    return _Published(nodes, new_secret().reveal() if shares_secret else None)


def number_nodes(places: Sequence[object]) -> tuple[int, ...]:
    """Equal places get equal numbers, counted from 0 by first appearance.

    >>> number_nodes([7, 7, 3])
    (0, 0, 1)
    """
    numbers: dict[object, int] = {}
    return tuple(numbers.setdefault(place, len(numbers)) for place in places)


def _machine() -> str:
    """The same text for processes that can reach each other by Unix sockets and shared memory."""
    try:
        with open(_BOOT_ID) as file:
            boot = file.read().strip()
        return f"{boot} {os.stat(_NETWORK_NAMESPACE).st_ino}"
    except OSError:
        return socket.gethostname()


def own_address(env: RankEnvironment) -> str:
    """FF_ADDRESS, else the address of this machine from which packets to the world's master leave. Sends nothing."""
    if env.address is not None:
        return env.address
    try:
        return own_address_towards(env.master_addr, env.master_port or 1)
    except OSError as error:
        raise UsageError(
            f"no local address can reach MASTER_ADDR={env.master_addr}: {error}; "
            "pass pg_options=HfreduceOptions(host=...)"
        ) from error
