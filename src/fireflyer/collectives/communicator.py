"""The group of ranks that a program computes with. The work is done by native threads; see cpp/include/fireflyer.

Operations of one communicator run one after the other in the order of the calls, which must be the same on all ranks.
A call with `async_op=True` returns at once with a `Work`; until it is done the array belongs to the communicator.

Failure: when a rank dies, hangs for longer than `timeout_ns` or calls something else than the others, every pending and
later operation raises the same error on every rank, naming the rank where there is one to blame (`PeerFailed.rank`).
The arrays of broken operations hold garbage, and the communicator is of no further use: close it, make another.
Bounds on how long that takes are in docs/design/0002-collectives.md.
"""

from __future__ import annotations

import os
import socket
import threading
import time
import weakref
from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any, Final, Literal, NamedTuple, Self, overload

from fireflyer.base.errors import (
    Aborted,
    Busy,
    DataCorruption,
    FireflyerError,
    PeerFailed,
    Timeout,
    UsageError,
)
from fireflyer.base.launch import RankEnvironment
from fireflyer.base.units import MS, SECOND, format_duration
from fireflyer.collectives.arrays import FlatArray, flatten
from fireflyer.collectives.doors import Doors
from fireflyer.collectives.exchange import Flight, RankExchange
from fireflyer.collectives.meeting import Equipment, meet
from fireflyer.collectives.plan import Plan
from fireflyer.collectives.programs import native_programs, native_routes
from fireflyer.identity.secrets import Secret, load_secret, new_secret
from fireflyer.native import Executor, NativeWork
from fireflyer.runtime.address import Address
from fireflyer.runtime.store import Store, open_store

__all__ = ["Communicator", "Stats", "Work"]

DEFAULT_TIMEOUT_NS: Final = 30 * SECOND
DEFAULT_JOIN_TIMEOUT_NS: Final = 120 * SECOND
_SIGNAL_CHECK_NS: Final = 100 * MS
_EMPTY: Final = FlatArray(0, 0, "f8e4m3", None)


class Stats(NamedTuple):
    """What this rank has finished so far."""

    bytes: int
    """Of the arrays of finished operations."""
    in_flight_ns: int
    """Time in which at least one operation was pending."""
    allreduces: int
    reduces: int
    broadcasts: int
    barriers: int


class Work:
    """An operation under way. Keeps its array alive."""

    def __init__(self, native: NativeWork, name: str, keeper: object) -> None:
        self._native = native
        self._name = name
        self._keeper = keeper

    def wait(self, timeout_ns: int | None = None) -> None:
        """Returns when the array holds the result. Raises what the operation failed with; `Timeout` when it is still
        running after `timeout_ns`: it goes on, and may be waited for again."""
        deadline_ns = None if timeout_ns is None else time.monotonic_ns() + timeout_ns
        while True:
            left_ns = _SIGNAL_CHECK_NS if deadline_ns is None else deadline_ns - time.monotonic_ns()
            if self._native.wait(max(0, min(left_ns, _SIGNAL_CHECK_NS))):
                break
            if left_ns <= 0:
                raise Timeout(f"{self._name} is not done after {format_duration(timeout_ns or 0)}; it goes on")
        error = self.error()
        if error is not None:
            raise error

    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return self._native.done()

    def error(self) -> FireflyerError | None:
        """What it failed with; None while it runs and after success."""
        kind, culprit, _, text = self._native.failure()
        message = f"{text}; this communicator cannot be used any more, create a new one"
        if kind == 0:
            return None
        if kind == 2:
            return UsageError(message)
        if kind == 3:
            return Aborted(message)
        if kind == 4:
            return DataCorruption(message)
        return PeerFailed(message, rank=culprit)


class Communicator:
    """Made by `create` or `from_environment`, by all ranks of the group at the same time."""

    def __init__(self, rank: int, equipment: Equipment, doors: Doors | None, timeout_ns: int) -> None:
        """Takes over the descriptors in `equipment`. Use `create` instead."""
        plan = equipment.plan
        self.rank = rank
        self.plan = plan
        self.world_size = plan.world_size
        self.node = plan.node_of_rank[rank]
        self.nodes = plan.nodes
        self.timeout_ns = timeout_ns
        self._native = Executor(
            rank=rank,
            node_of_rank=list(plan.node_of_rank),
            labels=list(equipment.labels),
            trees=[list(tree) for tree in plan.trees],
            timeout_ns=timeout_ns,
            window_fd=equipment.window_fd,
            doorbell_fd=equipment.doorbell_fd,
            leader_fd=equipment.leader_fd,
            local_fds=list(equipment.local_fds),
            connections=list(equipment.connections),
            routes=native_routes(plan),
            programs=native_programs(plan, self.node) if equipment.leader_fd < 0 else [],
        )
        self._exchange = RankExchange(rank, plan, self._native, doors, timeout_ns)
        self._lock = threading.Lock()
        self._pending: deque[Work] = deque()
        self._finalizer = weakref.finalize(self, _give_up, self._native, self._exchange, self._pending)
        _open.add(self)

    @classmethod
    def create(
        cls,
        *,
        rank: int,
        world_size: int,
        node: int,
        store: Store,
        secret: Secret,
        plan: Plan | None = None,
        name: str = "world",
        attempt: int = 0,
        host: str = "127.0.0.1",
        timeout_ns: int = DEFAULT_TIMEOUT_NS,
        join_timeout_ns: int = DEFAULT_JOIN_TIMEOUT_NS,
    ) -> Communicator:
        """Joins the group `name`; returns when this rank is connected.

        `node` is what the launcher says; ranks of different nodes talk over TCP only. `plan` fixes the order of sums
        (None: rank 0 makes one from the nodes). `host` is the address at which leaders of other nodes reach this
        process. `timeout_ns` bounds how long a rank may hold the others up, `join_timeout_ns` how long joining takes.
        Raises `UsageError`, `Timeout`, `Unreachable`, `PermissionDenied`.
        """
        if not 0 <= rank < world_size:
            raise UsageError(f"rank {rank} is not a rank of {world_size}; ranks count from 0")
        if timeout_ns < MS or join_timeout_ns < MS:
            raise UsageError("timeout_ns and join_timeout_ns are nanoseconds and at least 1_000_000")
        generation = store.add(f"attempt-{attempt}/collectives/{name}/joined/{rank}", 1)
        prefix = f"attempt-{attempt}/collectives/{name}/{generation}"
        with ExitStack() as stack, ExitStack() as undo:
            doors = None
            if world_size > 1:
                doors = Doors(rank=rank, world_size=world_size, host=host, secret=secret, prefix=prefix)
                undo.callback(doors.close)
                doors.publish(store)
            equipment = meet(
                store,
                prefix,
                rank=rank,
                world_size=world_size,
                node=node,
                plan=plan,
                secret=secret,
                host=host,
                join_timeout_ns=join_timeout_ns,
                timeout_ns=timeout_ns,
                stack=stack,
            )
            communicator = cls(rank, equipment.duplicate(), doors, timeout_ns)
            if doors is not None:
                undo.push(communicator.__exit__)
                doors.open(store, communicator._exchange.admit, join_timeout_ns)
            undo.pop_all()
            return communicator

    @classmethod
    def from_environment(
        cls,
        env: RankEnvironment,
        *,
        plan: Plan | None = None,
        name: str = "world",
        host: str | None = None,
        timeout_ns: int = DEFAULT_TIMEOUT_NS,
        join_timeout_ns: int = DEFAULT_JOIN_TIMEOUT_NS,
    ) -> Communicator:
        """The group of all ranks of a job started by `ff run`; of this process alone when started by hand.

        `host` defaults to the address from which this machine reaches the launcher. Raises as `create` does.
        """
        store = open_store(env)
        try:
            return cls.create(
                rank=env.rank,
                world_size=env.world_size,
                node=env.node,
                store=store,
                secret=new_secret() if env.secret_file is None else load_secret(env.secret_file),
                plan=plan,
                name=name,
                attempt=env.attempt,
                host=host or ("127.0.0.1" if env.control is None else _own_address(env.control)),
                timeout_ns=timeout_ns,
                join_timeout_ns=join_timeout_ns,
            )
        finally:
            store.close()

    @overload
    def allreduce(
        self, array: Any, *, op: str = ..., dtype: str | None = ..., async_op: Literal[False] = ...
    ) -> None: ...
    @overload
    def allreduce(self, array: Any, *, op: str = ..., dtype: str | None = ..., async_op: Literal[True]) -> Work: ...
    @overload
    def allreduce(self, array: Any, *, op: str = ..., dtype: str | None = ..., async_op: bool = ...) -> Work | None: ...
    def allreduce(
        self, array: Any, *, op: str = "sum", dtype: str | None = None, async_op: bool = False
    ) -> Work | None:
        """Replaces `array` by the element-wise sum over all ranks, the same bits on all of them.

        A NumPy array or CPU tensor of any shape, contiguous and writable, of float64, float32, float16, bfloat16,
        float8_e4m3fn, float8_e5m2, int32 or int64 (see `arrays` for the types that NumPy lacks). The small floats are
        summed in float32 and rounded once. Raises `UsageError`; then, here or from `Work.wait`, `PeerFailed`.
        """
        if op != "sum":
            raise UsageError(f"op {op!r} is not supported; allreduce computes 'sum'")
        return self._submit("allreduce", flatten(array, dtype, sums=True), -1, async_op)

    @overload
    def reduce(self, array: Any, *, root: int, dtype: str | None = ..., async_op: Literal[False] = ...) -> None: ...
    @overload
    def reduce(self, array: Any, *, root: int, dtype: str | None = ..., async_op: Literal[True]) -> Work: ...
    @overload
    def reduce(self, array: Any, *, root: int, dtype: str | None = ..., async_op: bool = ...) -> Work | None: ...
    def reduce(self, array: Any, *, root: int, dtype: str | None = None, async_op: bool = False) -> Work | None:
        """As `allreduce`, but only rank `root` receives the sum; the arrays of the others stay as they are."""
        flat = flatten(array, dtype, sums=True, writes=root == self.rank)
        return self._submit("reduce", flat, self._checked_root(root), async_op)

    @overload
    def broadcast(self, array: Any, *, root: int = ..., async_op: Literal[False] = ...) -> None: ...
    @overload
    def broadcast(self, array: Any, *, root: int = ..., async_op: Literal[True]) -> Work: ...
    @overload
    def broadcast(self, array: Any, *, root: int = ..., async_op: bool = ...) -> Work | None: ...
    def broadcast(self, array: Any, *, root: int = 0, async_op: bool = False) -> Work | None:
        """Replaces `array` by that of rank `root`. Any element type; size and type must be the same on all ranks."""
        flat = flatten(array, None, sums=False, writes=root != self.rank)
        return self._submit("broadcast", flat, self._checked_root(root), async_op)

    def all_to_all(
        self,
        out: Any,
        array: Any,
        *,
        out_splits: Sequence[int] | None = None,
        in_splits: Sequence[int] | None = None,
        async_op: bool = False,
    ) -> Work:
        """Hands the r-th part of `array` to rank r, and puts what rank r hands to this one into the r-th part of `out`.

        The parts lie one after the other, in the order of ranks: equal ones, or of as many elements (of the flattened
        array) as `in_splits` says for `array` and `out_splits` for `out`. Both arrays as for `broadcast`, of one type,
        without common memory.
        """
        return self._fly(self._exchange.all_to_all(out, array, out_splits, in_splits), async_op)

    def gather(self, array: Any, *, root: int, out: Any = None, async_op: bool = False) -> Work:
        """Puts the arrays of all ranks, equal in size and type, into `out` at rank `root`, in the order of ranks."""
        return self._fly(self._exchange.gather(array, root, out), async_op)

    def scatter(self, out: Any, *, root: int, array: Any = None, async_op: bool = False) -> Work:
        """Puts the r-th of the equal parts of `array` at rank `root` into `out` of rank r."""
        return self._fly(self._exchange.scatter(out, root, array), async_op)

    def send(self, array: Any, *, to: int, tag: int = 0, async_op: bool = False) -> Work:
        """Hands `array`, of any element type, to rank `to`, which must call `recv` with the same size, type and tag.

        Of each pair of ranks the first `send` meets the first `recv`, and so on; other operations do not count. Done
        when the array may be changed again: a short one at once, a long one when the other rank has called `recv`.
        """
        return self._fly(self._exchange.send(array, to, tag), async_op)

    def recv(self, array: Any, *, source: int, tag: int = 0, async_op: bool = False) -> Work:
        """Puts what rank `source` sends into `array`. See `send`."""
        return self._fly(self._exchange.receive(array, source, tag), async_op)

    def barrier(self) -> None:
        """Returns when every rank has entered."""
        self._submit("barrier", _EMPTY, -1, False)

    def stats(self) -> Stats:
        total, in_flight_ns, operations = self._native.stats()
        return Stats(total, in_flight_ns, *operations)

    def abort(self, reason: str) -> None:
        """Makes every pending and later operation fail with `Aborted` on every rank."""
        self._native.abort(reason)

    def close(self) -> None:
        """Finishes what is pending, takes leave of the others, ends the threads. May be called again."""
        self._native.close()
        self._exchange.close()
        self._finalizer.detach()
        _open.discard(self)
        self._pending.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if error is not None and self._busy():
            self.abort(f"{type(error).__name__} raised while operations were pending")
        self.close()

    def _busy(self) -> bool:
        with self._lock:
            return self._exchange.busy() or any(not work.done() for work in self._pending)

    def _fly(self, flight: Flight, async_op: bool) -> Work:
        work = Work(flight.native, flight.name, flight.keeper)
        if not async_op:
            work.wait()
        return work

    def _checked_root(self, root: int) -> int:
        if not 0 <= root < self.world_size:
            raise UsageError(f"root {root} is not a rank; the group has ranks 0 to {self.world_size - 1}")
        return root

    def _submit(self, kind: str, flat: FlatArray, root: int, async_op: bool) -> Work | None:
        with self._lock:
            self._forget_finished()
            try:
                native = self._native.submit(kind, flat.address, flat.elements, flat.dtype, root)
            except ValueError:
                raise Busy("4096 operations are pending; wait for some of them first") from None
            except RuntimeError:
                raise UsageError("the communicator is closed; create a new one") from None
            work = Work(native, kind, flat.keeper)
            self._pending.append(work)
        if async_op:
            return work
        try:
            work.wait()
        finally:
            with self._lock:
                self._forget_finished()
        return None

    def _forget_finished(self) -> None:
        while self._pending and self._pending[0].done():
            self._pending.popleft()

    def abandon_after_fork(self) -> None:
        """Called by itself in the child of a fork: gives up the child's copies of the parent's connections."""
        self._finalizer.detach()
        self._native.abandon()
        self._exchange.abandon()
        _abandoned.append(self._native)


_open: weakref.WeakSet[Communicator] = weakref.WeakSet()
_abandoned: list[Executor] = []  # their threads do not exist, so they must never be destroyed


def _after_fork_in_child() -> None:
    for communicator in list(_open):
        communicator.abandon_after_fork()
    _open.clear()


os.register_at_fork(after_in_child=_after_fork_in_child)


def _give_up(native: Executor, exchange: RankExchange, pending: deque[Work]) -> None:
    """The communicator was dropped, or the interpreter ends. `pending` keeps the arrays until no thread uses them."""
    if exchange.busy() or any(not work.done() for work in pending):
        native.abort("the process ends or has dropped its communicator with operations pending")
    native.close()
    exchange.close()
    pending.clear()


def _own_address(control: str) -> str:
    """The address of this machine from which packets to `host:port` leave. Sends nothing."""
    address = Address.parse(control)
    try:
        family, kind, _, _, target = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(target)
            return str(probe.getsockname()[0])
    except OSError as error:
        raise UsageError(f"cannot find the way to the launcher at {control}: {error}; pass host=") from error
