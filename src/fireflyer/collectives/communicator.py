"""The group of ranks that a program computes with. Native threads do the work; see cpp/include/fireflyer/collectives.

Operations of one communicator run one after the other in the order of the calls, which must be the same on all ranks.
A call with `async_op=True` returns at once with a `Work`; until it is done the array belongs to the communicator.

Failure: when a rank dies, hangs for longer than `timeout_ns` or calls something else than the others, every pending and
later operation raises the same error on every rank, naming the rank where there is one to blame (`PeerFailed.rank`).
The arrays of broken operations hold garbage, and the communicator is of no further use: `reform` it.
Bounds on how long that takes are in docs/design/0023-collective-failures.md.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from math import prod
from typing import Any, Final, NamedTuple, Protocol, Self

import msgspec
import numpy.typing as npt

from fireflyer.base.errors import Busy, FireflyerError, PeerFailed, UsageError
from fireflyer.base.launch import RankEnvironment
from fireflyer.base.units import MS
from fireflyer.collectives.arrays import (
    DTYPES,
    DTypeLike,
    FlatArray,
    check_apart,
    check_rank,
    dtype_named,
    flatten,
    storage_dtype_of,
    whole_number,
)
from fireflyer.collectives.bootstrap.arena import OwnMemory
from fireflyer.collectives.bootstrap.cpu_binding import CpuBinding
from fireflyer.collectives.bootstrap.group_setup import (
    DEFAULT_JOIN_TIMEOUT_NS,
    DEFAULT_TIMEOUT_NS,
    GroupConfig,
    GroupMember,
)
from fireflyer.collectives.bootstrap.job import JobPlans, tell_launcher, tell_launcher_of_saturation, tuned
from fireflyer.collectives.bootstrap.reconfiguration import Lineage
from fireflyer.collectives.bootstrap.rendezvous import GroupResources
from fireflyer.collectives.codes import DTYPE_CODES, KIND_CODES, OP_CODES, FailureKind
from fireflyer.collectives.flight import FlightRecorder, Snapshot
from fireflyer.collectives.p2p.canonical import CanonicalSums
from fireflyer.collectives.p2p.exchange import InFlightMessage, RankExchange
from fireflyer.collectives.p2p.peer_listener import PeerListener
from fireflyer.collectives.planning.plan import CANONICAL, CANONICAL_KINDS, Plan
from fireflyer.collectives.planning.programs import native_programs, native_routes
from fireflyer.collectives.saturation import SATURATING, SaturationWatch
from fireflyer.collectives.work import Work
from fireflyer.identity.secrets import load_secret, new_secret
from fireflyer.native import OP_KINDS, Executor
from fireflyer.runtime.address import Address, own_address_towards
from fireflyer.runtime.store import open_store

__all__ = ["Communicator", "Stats", "Work"]

_PATIENCE_NS: Final = 100 * MS
"""How long a caller works itself on an operation that it waits for: it cannot be interrupted meanwhile."""
_ANYWHERE: Final = CpuBinding()
_EMPTY: Final = FlatArray(0, 0, "f8e4m3", None)


class Stats(NamedTuple):
    """Counts of what this rank has finished so far."""

    bytes: int
    """Bytes of the arrays of finished operations."""
    in_flight_ns: int
    """Time in which at least one operation was pending."""
    saturated: int
    """Elements of fp8 results that this rank has rounded, or its node's network for it, and that did not fit: `f8e4m3`
    clipped to the largest number, finite ones of `f8e5m2` that became infinite. Over all ranks each element of a result
    is counted once, though every rank has it."""
    operations: dict[str, int]
    """Finished ones, by kind."""


class Attached(Protocol):
    """What lives as long as a communicator, and works with it: `torch_devices.DeviceCommunicator`."""

    def abandon_after_fork(self) -> None: ...


class Communicator(GroupMember):
    """Made by `create` or `from_environment`, by all ranks of the group at the same time. When ranks are lost, or
    others want to come in, `reform` makes the next one of it."""

    def __init__(
        self,
        rank: int,
        resources: GroupResources,
        peer_listener: PeerListener | None,
        memory: OwnMemory,
        config: GroupConfig,
        lineage: Lineage,
        cpu_binding: CpuBinding = _ANYWHERE,
    ) -> None:
        """Takes over the descriptors in `resources`. Use `create` instead."""
        plan = resources.plan
        self.rank = rank
        self.plan = plan
        self.world_size = plan.world_size
        self.node = plan.node_of_rank[rank]
        self.nodes = plan.nodes
        self.hosts = resources.hosts
        self.transport = resources.choice.transport
        self.timeout_ns = timeout_ns = config.timeout_ns
        self._memory = memory
        self._config = config
        self._lineage = lineage
        self._suspects: set[int] = set()
        self._given_up = False
        self._native = Executor(
            rank=rank,
            node_of_rank=list(plan.node_of_rank),
            labels=list(resources.labels),
            trees=[list(tree) for tree in plan.trees],
            timeout_ns=timeout_ns,
            window_fd=resources.window_fd,
            doorbell_fd=resources.doorbell_fd,
            leader_fd=resources.leader_fd,
            local_fds=list(resources.local_fds),
            connections=list(resources.connections),
            routes=native_routes(plan),
            programs=native_programs(plan, self.node) if resources.leader_fd < 0 else [],
            arena=memory.arena,
            local_peers=[one.native for one in resources.local_peers],
            cpus=list(cpu_binding.cpus),
            network_cpus=list(cpu_binding.network_cpus),
            fabric=resources.fabric,
        )
        self.cpu_binding = cpu_binding
        self._box = FlightRecorder(
            self._native.flight,
            group=lineage.here,
            plan=plan,
            rank=rank,
            labels=resources.labels,
            timeout_ns=timeout_ns,
            transport=self.transport,
            directory=config.dump_dir,
        )
        self._saturation = SaturationWatch(rank, lambda: self.stats().saturated)
        self._exchange = RankExchange(rank, plan, self._native, peer_listener, timeout_ns)
        # The ranks of one node are added in this order anyway.
        self._canonical = CanonicalSums(self._exchange) if plan.sums == CANONICAL and plan.nodes > 1 else None
        self._canonical_turn = threading.Lock()
        self._lock = threading.Lock()
        self._pending: deque[Work] = deque()
        self._held: dict[
            int, object
        ] = {}  # arrays of operations that are being begun, or whose callers were interrupted
        self.attached: Attached | None = None
        self._finalizer = weakref.finalize(self, _give_up, self._native, self._exchange, self._pending, self._held)
        _open.add(self)

    @classmethod
    def from_environment(
        cls,
        env: RankEnvironment,
        *,
        plan: Plan | None = None,
        sums: str | None = None,
        name: str = "world",
        host: str | None = None,
        timeout_ns: int = DEFAULT_TIMEOUT_NS,
        join_timeout_ns: int = DEFAULT_JOIN_TIMEOUT_NS,
        peer_memory: bool | None = None,
        transport: str | None = None,
        dump_dir: str | None = None,
    ) -> Communicator:
        """The group of all ranks of a job started by `ff run`; of this process alone when started by hand.

        `plan` None: that of an earlier attempt of the run, or a new one, for the network that `ff run --topology` has
        declared or `ff run --tune` lets the ranks measure (see `job`). `host` defaults to what `ff run --interface` or
        FF_ADDRESS says, else to the address from which this machine reaches the launcher, `transport` to what `ff run
        --transport` or FF_TRANSPORT says, "tcp" where nothing does, `dump_dir` to FF_DUMP_DIR, else `flight` in the
        directory of the run. Ports are those of `ff run --port-range` or FF_PORT_RANGE. Raises as `create` does.
        """
        plans = JobPlans.of_job(env, name)
        store = open_store(env)

        def join(measured: Plan | None) -> Communicator:
            if measured is not None and sums is not None:
                measured = msgspec.structs.replace(measured, sums=sums)
            return cls.create(
                rank=env.rank,
                world_size=env.world_size,
                node=env.node,
                store=store,
                secret=new_secret() if env.secret_file is None else load_secret(env.secret_file),
                plan=measured if plan is None else plan,
                sums=sums,
                name=name,
                attempt=env.attempt,
                host=host or env.address or ("127.0.0.1" if env.control is None else _own_address(env.control)),
                ports=env.ports,
                timeout_ns=timeout_ns,
                join_timeout_ns=join_timeout_ns,
                peer_memory=env.peer_memory if peer_memory is None else peer_memory,
                transport=(env.transport or "tcp") if transport is None else transport,
                dump_dir=env.dump_dir if dump_dir is None else dump_dir,
                pin=env.pin,
                planner=plans.plan,
            )

        try:
            made = tuned(join, plans) if env.tune and plan is None else join(None)
            made.tell_of_failure(lambda error: tell_launcher(env, error))
            made.tell_of_saturation(partial(tell_launcher_of_saturation, env, name))
            return made
        finally:
            store.close()

    def allreduce(
        self, array: Any, *, op: str = "sum", dtype: DTypeLike | None = None, out: Any = None, async_op: bool = False
    ) -> Work:
        """Puts the element-wise `op` ("sum", "mean", "min", "max", "product"; "band", "bor" and "bxor" of integers)
        over all ranks into `out`, the same bits on all of them; None: into `array` itself.

        NumPy arrays or CPU tensors of any shape, contiguous, of float64, float32, float16, bfloat16, float8_e4m3fn,
        float8_e5m2, int8, int32, int64 or uint8 (see `arrays` for the types that NumPy lacks). The small floats are
        added in float32 and rounded once; float8 sums that do not fit are clipped, and counted in `stats`. Integers
        wrap; their mean is the wrapped sum divided towards zero. A minimum or maximum with a NaN is NaN. Raises
        `UsageError`; then, here or from `Work.wait`, `PeerFailed`.
        """
        source, target = self._pair(array, out, dtype, sums=True)
        return self._submit("allreduce", source, target, source.elements, op=op, async_op=async_op)

    def reduce(
        self,
        array: Any,
        *,
        root: int,
        op: str = "sum",
        dtype: DTypeLike | None = None,
        out: Any = None,
        async_op: bool = False,
    ) -> Work:
        """Sum as `allreduce` does, but only rank `root` receives the result; the arrays of the others stay as they
        are."""
        root = check_rank("root", root, self.world_size)
        if root == self.rank:
            source, target = self._pair(array, out, dtype, sums=True)
        else:
            source, target = flatten(array, dtype, sums=True, writes=False), _EMPTY
        return self._submit("reduce", source, target, source.elements, root=root, op=op, async_op=async_op)

    def broadcast(self, array: Any, *, root: int = 0, async_op: bool = False) -> Work:
        """Replaces `array` by that of rank `root`. Any element type; size and type must be the same on all ranks."""
        root = check_rank("root", root, self.world_size)
        flat = flatten(array, None, sums=False, writes=root != self.rank)
        return self._submit("broadcast", flat, flat, flat.elements, root=root, async_op=async_op)

    def reduce_scatter(
        self, out: Any, array: Any, *, op: str = "sum", dtype: DTypeLike | None = None, async_op: bool = False
    ) -> Work:
        """`array` holds a part of `out`'s size for each rank, in the order of ranks: rank r receives the `op` of all
        ranks' r-th parts in `out`. Types and bits as for `allreduce`."""
        source = flatten(array, dtype, sums=True, writes=False)
        target = flatten(out, dtype, sums=True)
        self._check_parts("array", source, "out", target)
        return self._submit("reduce_scatter", source, target, target.elements, op=op, async_op=async_op)

    def allgather(self, out: Any, array: Any, *, async_op: bool = False) -> Work:
        """Puts the arrays of all ranks into `out`, in the order of ranks. Any element type."""
        source = flatten(array, None, sums=False, writes=False)
        target = flatten(out, None, sums=False)
        self._check_parts("out", target, "array", source)
        return self._submit("allgather", source, target, source.elements, async_op=async_op)

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

        Of each pair of ranks the first `send` with a tag meets the first `recv` with that tag, and so on; other tags
        and other operations do not count. Done when the array may be changed again: a short one at once, a long one
        when the other rank has called `recv`. Where size or type differ both calls raise `UsageError` (a short message
        was sent already, and is lost), and the communicator goes on.
        """
        return self._fly(self._exchange.send(array, to, tag), async_op)

    def recv(self, array: Any, *, source: int | None, tag: int = 0, async_op: bool = False) -> Work:
        """Puts what rank `source` sends with that tag into `array`. See `send`.

        `source` None: what any rank sends with that tag; those whose messages wait take turns. `Work.source` says whose
        it is.
        """
        return self._fly(self._exchange.receive(array, source, tag), async_op)

    def barrier(self, *, async_op: bool = False) -> Work:
        """Done when every rank has entered."""
        return self._submit("barrier", _EMPTY, _EMPTY, 0, async_op=async_op)

    def empty(self, shape: int | tuple[int, ...] | list[int], dtype: DTypeLike = "f32") -> npt.NDArray[Any]:
        """An array of zeros in this rank's arena, where the other ranks of its node reduce it without any copy. Its
        memory goes back when the array and all its views are gone.

        `dtype` is one of `arrays.DTYPES`, or a type of NumPy or torch; bf16 and the float8 types come as uint16 and
        uint8. Raises `UsageError` where the arena is full, or was made with `arena_bytes=0`.
        """
        own = dtype_named(dtype)
        sizes = [whole_number("size", size) for size in (shape if isinstance(shape, tuple | list) else (shape,))]
        if any(size < 0 for size in sizes):
            raise UsageError(f"cannot allocate an array of shape {shape}; sizes are not negative")
        size_bytes = prod(sizes) * DTYPES[own]
        arena = self._memory.arena
        try:
            if size_bytes > arena.bytes:  # it may be more than native code can count
                raise MemoryError
            return arena.allocate(size_bytes).view(storage_dtype_of(own)).reshape(sizes)
        except MemoryError:
            raise UsageError(
                f"the arena has no {size_bytes} bytes left ({arena.used} of {arena.bytes} are used); drop arrays, or "
                "pass a larger arena_bytes"
            ) from None

    def registered(self, array: Any) -> bool:
        """Whether `array` lies in this rank's arena."""
        flat = flatten(array, None, sums=False, writes=False)
        return self._memory.arena.holds(flat.address, flat.elements * DTYPES[flat.dtype])

    def stats(self) -> Stats:
        total, in_flight_ns, saturated, counts = self._native.stats()
        return Stats(total, in_flight_ns, saturated, dict(zip(OP_KINDS, counts, strict=True)))

    def records(self) -> Snapshot:
        """The last operations of this rank, with what it sees of the other ranks of its node."""
        return self._box.snapshot()

    def dump(self, directory: str | None = None, reason: str = "asked for") -> str | None:
        """Writes the records into `directory`, by default the `dump_dir` of this communicator, for `ff collectives
        explain`. Returns the path; None where there is no directory. Raises `FireflyerError`."""
        return self._box.write(directory, reason)

    def tell_of_failure(self, tell: Callable[[PeerFailed], None]) -> None:
        """Has `tell` called when this group first fails because of a peer, before that is raised here. It must neither
        block nor raise. Groups that follow from this one do not inherit it: their ranks have other numbers."""
        self._box.tell_of_failure(tell)

    def tell_of_saturation(self, tell: Callable[[int, int], None]) -> None:
        """Has `tell` called with how many values of how many in fp8 sums did not fit: when that is noticed first, and
        with the last counts when the communicator is closed. It must neither block nor raise."""
        self._saturation.tell(tell)

    def abort(self, reason: str) -> None:
        """Makes every pending and later operation fail with `Aborted` on every rank."""
        self._native.abort(reason)

    def close(self) -> None:
        """Finishes what is pending, takes leave of the others, ends the threads. May be called again."""
        self.retire()
        if not self._handed_over:
            self._memory.release()

    def retire(self) -> None:
        if self._given_up:  # nothing of it is here any more, but locks that nobody will give back
            return
        self._exchange.shut()
        self._native.close()
        self._saturation.end()
        self._exchange.close()
        self._finalizer.detach()
        _open.discard(self)
        self._pending.clear()
        self._held.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if error is not None and self._busy():
            self.abort(f"{type(error).__name__} raised while operations were pending")
        self.close()

    def _busy(self) -> bool:
        if self._given_up:
            return False
        with self._lock:
            return bool(self._held) or self._exchange.busy() or any(not work.done() for work in self._pending)

    def _fly(self, flight: InFlightMessage, async_op: bool) -> Work:
        work = Work(flight.native, flight.name, flight.owner, self._failed)
        if not async_op:
            work.wait()
        return work

    def _pair(self, array: Any, out: Any, dtype: DTypeLike | None, *, sums: bool) -> tuple[FlatArray, FlatArray]:
        """Where to read and where to write."""
        if out is None:
            flat = flatten(array, dtype, sums=sums)
            return flat, flat
        source = flatten(array, dtype, sums=sums, writes=False)
        target = flatten(out, dtype, sums=sums)
        if (source.elements, source.dtype) != (target.elements, target.dtype):
            raise UsageError(
                f"out has {target.elements} elements of {target.dtype}, array has {source.elements} of {source.dtype}; "
                "they must be alike"
            )
        if source.address != target.address:
            check_apart(source, target)
        return source, target

    def _check_parts(self, whole_name: str, whole: FlatArray, part_name: str, part: FlatArray) -> None:
        if (whole.elements, whole.dtype) != (part.elements * self.world_size, part.dtype):
            raise UsageError(
                f"{whole_name} has {whole.elements} elements of {whole.dtype}; it needs {self.world_size} (one for "
                f"each rank) times the {part.elements} of {part.dtype} of {part_name}"
            )
        if part.address != whole.address + self.rank * part.elements * DTYPES[part.dtype]:
            check_apart(whole, part)

    def _submit(
        self,
        kind: str,
        source: FlatArray,
        target: FlatArray,
        count: int,
        *,
        root: int = -1,
        op: str = "sum",
        async_op: bool = False,
    ) -> Work:
        op_code = OP_CODES.get(op)
        if op_code is None:
            raise UsageError(f"op {op!r} is not known; use one of {', '.join(OP_CODES)}")
        if source.dtype in SATURATING and kind in CANONICAL_KINDS:
            self._saturation.called(source.elements)
        if self._canonical is not None and kind in CANONICAL_KINDS:
            with self._canonical_turn:
                flight = self._canonical.start(kind, source, target, root, op)
            return self._fly(flight._replace(name=kind), async_op)
        dtype_code = DTYPE_CODES[source.dtype]
        what = (KIND_CODES[kind], source.address, target.address, count, dtype_code, root, op_code)
        owner = (source.owner, target.owner)
        # Ctrl-C may end this thread's part anywhere; native threads go on with the arrays.
        self._held[id(owner)] = owner
        try:
            work = self._start(kind, source.dtype, what, owner, async_op)
        except FireflyerError:
            del self._held[id(owner)]
            raise
        del self._held[id(owner)]
        if not async_op:
            work.wait()
        return work

    def _start(
        self, kind: str, dtype: str, what: tuple[int, int, int, int, int, int, int], owner: object, async_op: bool
    ) -> Work:
        try:
            if async_op:
                with self._lock:
                    self._forget_finished()
                    work = Work(self._native.submit(*what), kind, owner, self._failed)
                    self._pending.append(work)
                return work
            native = self._native.call(*what, _PATIENCE_NS)
        except IndexError:
            raise Busy("4096 operations are pending; wait for some of them first") from None
        except RuntimeError:
            raise UsageError("the communicator is closed; create a new one") from None
        except ValueError as error:
            raise UsageError(f"{kind} of {what[3]} {dtype}: {error}") from None
        if native is None:
            return _DONE
        work = Work(native, kind, owner, self._failed)
        with self._lock:
            self._forget_finished()
            self._pending.append(work)
        return work

    def _failed(self, failure: tuple[int, int, int, str]) -> str:
        kind, culprit, _, _ = failure
        if kind == FailureKind.PEER_FAILED and 0 <= culprit < self.world_size:
            self._suspects.add(culprit)
        return self._box.failed(failure)

    def _forget_finished(self) -> None:
        while self._pending and self._pending[0].done():
            self._pending.popleft()

    def abandon_after_fork(self) -> None:
        """Called by itself in the child of a fork: gives up the child's copies of the parent's connections. Another
        thread of the parent may have been closing this."""
        _abandoned.append(self._native)  # first: whatever fails below, it is not destroyed
        self._finalizer.detach()
        self._given_up = True
        if self.attached is not None:
            self.attached.abandon_after_fork()
        self._native.abandon()
        self._exchange.abandon()
        self._memory.release()


_DONE: Final = Work(None, "operation", None)
_open: weakref.WeakSet[Communicator] = weakref.WeakSet()
_abandoned: list[Executor] = []  # their threads do not exist, so they must never be destroyed


def _after_fork_in_child() -> None:
    found = list(_open)
    _open.clear()
    for communicator in found:
        communicator.abandon_after_fork()


os.register_at_fork(after_in_child=_after_fork_in_child)


def _give_up(native: Executor, exchange: RankExchange, pending: deque[Work], held: dict[int, object]) -> None:
    """The communicator was dropped, or the interpreter ends. `pending` and `held` keep the arrays until no thread uses
    them."""
    if held or exchange.busy() or any(not work.done() for work in pending):
        native.abort("the process ended or dropped its communicator with operations pending")
    exchange.shut()
    native.close()
    exchange.close()
    pending.clear()
    held.clear()


def _own_address(control: str) -> str:
    address = Address.parse(control)
    try:
        return own_address_towards(address.host, address.port)
    except OSError as error:
        raise UsageError(f"no local address reaches the launcher at {control}: {error}; pass host=") from error
