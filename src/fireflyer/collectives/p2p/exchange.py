"""Messages from rank to rank: send, recv, all_to_all, gather, scatter. Native threads move the bytes.

A connection to another rank is made by whoever first has something to do with it, in the thread that calls, and serves
both directions. A `recv` meets the first message of its rank with its tag, or one of any rank, in the order of the
calls of each, beside the order of the other operations. `all_to_all`, `gather` and `scatter` have their place in that
order, as `allreduce` has.
"""

from __future__ import annotations

import errno
import threading
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from fireflyer.base.errors import Busy, FireflyerError, UsageError
from fireflyer.collectives.arrays import DTYPES, FlatArray, check_apart, check_rank, flatten, whole_number
from fireflyer.collectives.codes import DTYPE_CODES, KIND_CODES
from fireflyer.collectives.p2p.peer_listener import PeerListener
from fireflyer.collectives.planning.plan import Plan
from fireflyer.native import ANY_RANK, Executor, NativeWork, exchange_of, submit_parts

__all__ = ["MAX_TAG", "InFlightMessage", "Part", "RankExchange", "RowSum", "parts_of"]

MAX_TAG: Final = 2**31 - 1
_FEW: Final = 64
_OWN_FAULTS: Final = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS)

Part = tuple[int, int, int]
"""Rank, address, bytes."""
RowSum = tuple[int, int, int, list[int]]
"""What is added up when the parts have arrived: op number, address of the result, elements, addresses of all rows."""


class InFlightMessage(NamedTuple):
    """An operation under way, and what must stay alive until it is done."""

    native: NativeWork
    name: str
    owner: object


class RankExchange:
    """Of one rank and one communicator. Thread-safe."""

    def __init__(
        self, rank: int, plan: Plan, native: Executor, peer_listener: PeerListener | None, timeout_ns: int
    ) -> None:
        """`peer_listener` None: this rank is alone."""
        self.rank = rank
        self.world_size = plan.world_size
        self._plan = plan
        self._executor = native
        self._native = exchange_of(native)
        self._peer_listener = peer_listener
        self._timeout_ns = timeout_ns
        self._lock = threading.Lock()
        self._dialling: dict[int, threading.Lock] = {}
        self._linked: set[int] = set()
        self._flights: list[InFlightMessage] = []
        self._sweep_at = _FEW

    # --- operations ---

    def send(self, array: Any, to: int, tag: int) -> InFlightMessage:
        flat = flatten(array, None, sums=False, writes=False)
        return self._message("send", flat, to, tag)

    def receive(self, array: Any, source: int | None, tag: int) -> InFlightMessage:
        """`source` None: from any rank."""
        flat = flatten(array, None, sums=False)
        return self._message("recv", flat, source, tag)

    def all_to_all(
        self, out: Any, array: Any, out_splits: Sequence[int] | None, in_splits: Sequence[int] | None
    ) -> InFlightMessage:
        source, target = flatten(array, None, sums=False, writes=False), flatten(out, None, sums=False)
        check_apart(source, target)
        outgoing = parts_of(array, source, self._split("array", array, in_splits, "in_splits"))
        incoming = parts_of(out, target, self._split("out", out, out_splits, "out_splits"))
        _check_types(source, target)
        if outgoing[self.rank][2] != incoming[self.rank][2]:
            raise UsageError(
                f"rank {self.rank} sends {outgoing[self.rank][2]} bytes to itself but expects "
                f"{incoming[self.rank][2]}; in_splits and out_splits must agree there"
            )
        return self.start("all_to_all", 0, source.dtype, -1, outgoing, incoming, (array, out))

    def gather(self, array: Any, root: int, out: Any) -> InFlightMessage:
        root = check_rank("root", root, self.world_size)
        source = flatten(array, None, sums=False, writes=False)
        mine = _part(root, source)
        if root != self.rank:
            return self.start("gather", source.elements, source.dtype, root, [mine], [], array)
        target = self._whole("out", out, source, writes=True)
        incoming = parts_of(out, target, [_size(out) // self.world_size] * self.world_size)
        return self.start("gather", source.elements, source.dtype, root, [mine], incoming, (array, out))

    def scatter(self, out: Any, root: int, array: Any) -> InFlightMessage:
        root = check_rank("root", root, self.world_size)
        target = flatten(out, None, sums=False)
        mine = _part(root, target)
        if root != self.rank:
            return self.start("scatter", target.elements, target.dtype, root, [], [mine], out)
        source = self._whole("array", array, target, writes=False)
        outgoing = parts_of(array, source, [_size(array) // self.world_size] * self.world_size)
        return self.start("scatter", target.elements, target.dtype, root, outgoing, [mine], (array, out))

    def start(
        self,
        kind: str,
        count: int,
        dtype: str,
        root: int,
        out: list[Part],
        in_: list[Part],
        owner: object,
        summed: RowSum | None = None,
    ) -> InFlightMessage:
        """The next operation of the group, in which this rank hands out `out` and receives `in_`, at most one part for
        each rank, which may be itself; and then adds up `summed`."""
        for rank in sorted({part[0] for part in (*out, *in_)}):
            self._connect(rank)
        try:
            native = submit_parts(self._executor, KIND_CODES[kind], count, DTYPE_CODES[dtype], root, out, in_, summed)
        except IndexError as error:
            raise Busy("4096 operations are pending; wait for some of them first") from error
        except ValueError as error:
            raise UsageError(f"{kind} of {count} {dtype}: {error}") from None
        except RuntimeError:
            raise UsageError("the communicator is closed; create a new one") from None
        return self._keep(InFlightMessage(native, kind, owner))

    # --- life ---

    def admit(self, rank: int, fd: int) -> None:
        """Takes over a connection that `rank` has made. Raises as the native `link` does."""
        self._native.link(rank, fd)

    def busy(self) -> bool:
        with self._lock:
            return any(not flight.native.done() for flight in self._flights)

    def shut(self) -> None:
        """Accepts no peer any more: who connects now finds no listener, rather than a connection that is closed at
        once. To be called before the executor is closed. Idempotent."""
        if self._peer_listener is not None:
            self._peer_listener.close()

    def close(self) -> None:
        """After the executor has been closed. Idempotent."""
        with self._lock:
            self._flights.clear()

    def abandon(self) -> None:
        """In the child of a fork: gives up the parent's listeners."""
        if self._peer_listener is not None:
            self._peer_listener.abandon()

    # --- what they are made of ---

    def _message(self, name: str, flat: FlatArray, peer: int | None, tag: int) -> InFlightMessage:
        tag = whole_number("tag", tag)
        if not 0 <= tag <= MAX_TAG:
            raise UsageError(f"tag {tag} is out of range; use 0 to {MAX_TAG}")
        if peer is None and name == "recv":
            if self.world_size == 1:
                raise UsageError("the group has no other rank to receive from")
            peer = ANY_RANK  # who sends makes the connection
        else:
            peer = check_rank("to" if name == "send" else "source", peer, self.world_size)
            if peer == self.rank:
                raise UsageError(f"rank {peer} cannot {name} to or from itself; copy the array")
            self._connect(peer)
        call = self._native.send if name == "send" else self._native.receive
        try:
            native = call(peer, flat.address, flat.elements * DTYPES[flat.dtype], DTYPE_CODES[flat.dtype], tag)
        except (IndexError, ValueError) as error:
            raise Busy("4096 messages are pending; wait for some of them first") from error
        except RuntimeError:
            raise UsageError("the communicator is closed; create a new one") from None
        return self._keep(InFlightMessage(native, name, flat.owner))

    def _keep(self, flight: InFlightMessage) -> InFlightMessage:
        with self._lock:
            if len(self._flights) >= self._sweep_at:
                self._flights = [kept for kept in self._flights if not kept.native.done()]
                self._sweep_at = max(_FEW, 2 * len(self._flights))
            self._flights.append(flight)
        return flight

    def _connect(self, rank: int) -> None:
        """Makes a connection where there is none. If it cannot be made, the group ends: the next operation says so."""
        if rank == self.rank or rank in self._linked or self._peer_listener is None:
            return
        with self._lock:
            turn = self._dialling.setdefault(rank, threading.Lock())
        with turn:
            if not self._native.linked(rank):
                self._dial(rank, self._peer_listener)
            self._linked.add(rank)

    def _dial(self, rank: int, peer_listener: PeerListener) -> None:
        local = self._plan.node_of_rank[rank] == self._plan.node_of_rank[self.rank]
        try:
            fd = peer_listener.dial(rank, local=local, timeout_ns=self._timeout_ns)
        except (FireflyerError, OSError) as error:
            peer_listener.settle()
            if not self._native.linked(rank):  # it may have been here, said all that it had to say, and closed
                self._lost(rank, error)
            return
        try:
            self._native.link(rank, fd)
        except RuntimeError:
            raise UsageError("the communicator is closed; create a new one") from None

    def _lost(self, rank: int, error: FireflyerError | OSError) -> None:
        culprit, reason = rank, str(error)
        if isinstance(error, FireflyerError):
            reason = error.message
        elif error.errno in _OWN_FAULTS:
            culprit, reason = self.rank, str(error.strerror)
        else:
            reason = f"{error.strerror or error}; has it ended?"
        self._native.fail(culprit, f"rank {rank} cannot be reached by rank {self.rank}: {reason}")

    def _split(self, name: str, array: Any, splits: Sequence[int] | None, argument: str) -> list[int]:
        world, size = self.world_size, _size(array)
        if splits is None:
            if size % world != 0:
                raise UsageError(f"{name} of {size} elements does not divide among {world} ranks; pass {argument}=")
            return [size // world] * world
        numbers = [whole_number(f"a number in {argument},", split) for split in splits]
        if len(numbers) != world or any(number < 0 for number in numbers) or sum(numbers) != size:
            raise UsageError(
                f"{argument} must be {world} numbers of elements, one for each rank, that add up to {size}, "
                f"the size of {name}"
            )
        return numbers

    def _whole(self, name: str, array: Any, part: FlatArray, *, writes: bool) -> FlatArray:
        """At the root: the array that holds a part for every rank."""
        if array is None:
            raise UsageError(f"the root must pass {name}=, of {self.world_size} parts")
        whole = flatten(array, None, sums=False, writes=writes)
        if whole.elements != part.elements * self.world_size or whole.dtype != part.dtype:
            raise UsageError(
                f"{name} has {whole.elements} {whole.dtype}, but {self.world_size} parts of {part.elements} "
                f"{part.dtype} are needed"
            )
        check_apart(whole, part)
        return whole


def parts_of(array: Any, flat: FlatArray, splits: list[int]) -> list[Part]:
    """Consecutive parts of `array`, which is `flat`, of so many of its elements for rank 0, 1, ..."""
    unit = flat.elements * DTYPES[flat.dtype] // max(1, _size(array))
    parts = []
    address = flat.address
    for rank, split in enumerate(splits):
        parts.append((rank, address, split * unit))
        address += split * unit
    return parts


def _size(array: Any) -> int:
    return int(array.numel() if hasattr(array, "numel") else array.size)


def _part(rank: int, flat: FlatArray) -> Part:
    return (rank, flat.address, flat.elements * DTYPES[flat.dtype])


def _check_types(source: FlatArray, target: FlatArray) -> None:
    if source.dtype != target.dtype:
        raise UsageError(f"out holds {target.dtype}, but the array {source.dtype}; both need the same type")
