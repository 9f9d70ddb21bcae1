"""A communicator that takes tensors wherever they are: in CPU memory as `Communicator` does, on devices through it.

>>> comm = DeviceCommunicator.of(communicator)
>>> comm.allreduce(torch.ones(1000, device="cuda"))

Reductions, broadcast and allgather of tensors on a device go piece by piece through pinned slots, so that copies run
beside sums (`devices.engine`). all_to_all, gather, scatter, send and recv are copied as a whole, before and after.

As with other collectives on CUDA, an operation starts after what the current stream was given before the call, and
`wait` makes the current stream wait; it blocks the host only until the last sum is done. All ranks must give a
communicator the same operations in the same order, whether their tensors are on a device or not.

`at_once` says that the caller waits as soon as the operation has started. Then, as without `async_op`, a short one goes
from the calling thread, which waits for the copy to the host: no other thread is to be woken.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import accumulate
from typing import Any, Final

import torch

from fireflyer.base.errors import FireflyerError, UsageError
from fireflyer.collectives.arrays import DTYPES, DTypeLike, check_rank, dtype_named, storage_dtype_of
from fireflyer.collectives.communicator import Communicator
from fireflyer.collectives.devices import pieces as device_pieces
from fireflyer.collectives.devices.copies import CopyEngine, CopyEvent
from fireflyer.collectives.devices.engine import SLOT_BYTES, SLOTS, DeviceEngine, InFlightOperation, Job
from fireflyer.collectives.devices.pieces import Move, Piece, cut, span_bytes
from fireflyer.collectives.kernels import BITWISE, INTEGERS, OPS
from fireflyer.collectives.torch.cuda import DEVICES, on_device
from fireflyer.collectives.torch.pairs import PairedSums
from fireflyer.collectives.torch.pinned_blocks import Block, Blocks, WholeWork, all_of, bytes_in, bytes_of, end_of
from fireflyer.collectives.torch.tensors import dtype_name
from fireflyer.collectives.work import when_there_is_room

__all__ = ["DeviceCommunicator", "reaching"]

_attaching: Final = threading.Lock()
_abandoned: Final[list[object]] = []
"""Of the parent of this process. Never destroyed: the device is the parent's, and so are the copies under way."""


class DeviceCommunicator:
    """Over a `Communicator`, with its operations, arguments and errors. One for each communicator: see `of`."""

    def __init__(self, communicator: Communicator, *, slot_bytes: int = SLOT_BYTES, slots: int = SLOTS) -> None:
        """`slots` of `slot_bytes` are pinned at the first operation on a device; the same on all ranks."""
        self.communicator = communicator
        self.rank = communicator.rank
        self.world_size = communicator.world_size
        self.watch: Callable[[str, int, int, int], None] | None = None
        """Set before the first operation on a device, it is told of every step of the pipeline (for benchmarks)."""
        self.pairs: PairedSums | None = None
        """Where GPUs are bridged in pairs (`torch_pair_join`); closed with this."""
        self._slot_bytes = slot_bytes
        self._slots = slots
        self._lock = threading.Lock()
        self._places: dict[torch.device, CopyEngine] = {}
        self._engine: DeviceEngine | None = None
        self._dropper: weakref.finalize[..., DeviceCommunicator] | None = None
        self._blocks = Blocks(communicator)
        self._closed = False

    @classmethod
    def of(cls, communicator: Communicator | DeviceCommunicator) -> DeviceCommunicator:
        """The one of this communicator, so that all who use it share its order."""
        if isinstance(communicator, DeviceCommunicator):
            return communicator
        with _attaching:
            if not isinstance(communicator.attached, DeviceCommunicator):
                communicator.attached = cls(communicator)
            return communicator.attached

    # --- operations ---

    def allreduce(
        self,
        array: Any,
        *,
        op: str = "sum",
        dtype: DTypeLike | None = None,
        out: Any = None,
        async_op: bool = False,
        at_once: bool = False,
    ) -> InFlightOperation:
        if not on_device(array):
            return self._host().allreduce(array, op=op, dtype=dtype, out=out, async_op=async_op)
        target = array if out is None else out
        _check_alike(array, target)
        name = _check_op(array, dtype, op)
        if self.pairs is not None and dtype is None and self.pairs.takes(array, op):
            bytes_of(target)  # raises if it has gaps
            if target is not array:
                target.copy_(array)
            return self.pairs.allreduce(target, op=op, async_op=async_op)

        def run(slot: Any, piece: Piece, async_op: bool = True) -> InFlightOperation:
            part = _part(slot, piece.source, name)
            return self.communicator.allreduce(part, op=op, dtype=name, async_op=async_op)

        return self._pieces("allreduce", array, target, array.numel(), run, async_op, at_once)

    def reduce(
        self,
        array: Any,
        *,
        root: int,
        op: str = "sum",
        dtype: DTypeLike | None = None,
        out: Any = None,
        async_op: bool = False,
        at_once: bool = False,
    ) -> InFlightOperation:
        if not on_device(array):
            return self._host().reduce(array, root=root, op=op, dtype=dtype, out=out, async_op=async_op)
        target = array if out is None else out
        _check_alike(array, target)
        name = _check_op(array, dtype, op)
        root = check_rank("root", root, self.world_size)

        def run(slot: Any, piece: Piece, async_op: bool = True) -> InFlightOperation:
            part = _part(slot, piece.source, name)
            return self.communicator.reduce(part, root=root, op=op, dtype=name, async_op=async_op)

        return self._pieces("reduce", array, target, array.numel(), run, async_op, at_once, writes=root == self.rank)

    def broadcast(
        self, array: Any, *, root: int = 0, async_op: bool = False, at_once: bool = False
    ) -> InFlightOperation:
        if not on_device(array):
            return self._host().broadcast(array, root=root, async_op=async_op)
        root = check_rank("root", root, self.world_size)

        def run(slot: Any, piece: Piece, async_op: bool = True) -> InFlightOperation:
            return self.communicator.broadcast(_part(slot, piece.source), root=root, async_op=async_op)

        own = root == self.rank
        return self._pieces("broadcast", array, array, array.numel(), run, async_op, at_once, reads=own, writes=not own)

    def reduce_scatter(
        self,
        out: Any,
        array: Any,
        *,
        op: str = "sum",
        dtype: DTypeLike | None = None,
        async_op: bool = False,
        at_once: bool = False,
    ) -> InFlightOperation:
        if not on_device(array):
            return self._host().reduce_scatter(out, array, op=op, dtype=dtype, async_op=async_op)
        self._check_parts("array", array, "out", out)
        name = _check_op(array, dtype, op)

        def run(slot: Any, piece: Piece, async_op: bool = True) -> InFlightOperation:
            source, target = _part(slot, piece.source, name), _part(slot, piece.target, name)
            return self.communicator.reduce_scatter(target, source, op=op, dtype=name, async_op=async_op)

        return self._pieces("reduce_scatter", array, out, out.numel(), run, async_op, at_once)

    def allgather(self, out: Any, array: Any, *, async_op: bool = False, at_once: bool = False) -> InFlightOperation:
        if not on_device(array):
            return self._host().allgather(out, array, async_op=async_op)
        self._check_parts("out", out, "array", array)

        def run(slot: Any, piece: Piece, async_op: bool = True) -> InFlightOperation:
            return self.communicator.allgather(_part(slot, piece.target), _part(slot, piece.source), async_op=async_op)

        return self._pieces("allgather", array, out, array.numel(), run, async_op, at_once)

    def all_to_all(
        self,
        out: Any,
        array: Any,
        *,
        out_splits: Sequence[int] | None = None,
        in_splits: Sequence[int] | None = None,
        async_op: bool = False,
    ) -> InFlightOperation:
        if not on_device(array):
            return self._host().all_to_all(out, array, out_splits=out_splits, in_splits=in_splits, async_op=async_op)
        splits = {
            name: None if counts is None else [count * array.element_size() for count in counts]
            for name, counts in (("out_splits", out_splits), ("in_splits", in_splits))
        }

        def run(source: Any, target: Any) -> InFlightOperation:
            return self._host().all_to_all(target, source, async_op=True, **splits)

        return self._whole(array, out, run, async_op)

    def gather(self, array: Any, *, root: int, out: Any = None, async_op: bool = False) -> InFlightOperation:
        if not on_device(array):
            return self._host().gather(array, root=root, out=out, async_op=async_op)

        def run(source: Any, target: Any) -> InFlightOperation:
            return self._host().gather(source, root=root, out=target, async_op=True)

        return self._whole(array, out if root == self.rank else None, run, async_op)

    def scatter(self, out: Any, *, root: int, array: Any = None, async_op: bool = False) -> InFlightOperation:
        if not on_device(out):
            return self._host().scatter(out, root=root, array=array, async_op=async_op)

        def run(source: Any, target: Any) -> InFlightOperation:
            return self._host().scatter(target, root=root, array=source, async_op=True)

        return self._whole(array if root == self.rank else None, out, run, async_op)

    def send(self, array: Any, *, to: int, tag: int = 0, async_op: bool = False) -> InFlightOperation:
        if not on_device(array):
            return self.communicator.send(array, to=to, tag=tag, async_op=async_op)

        def run(source: Any, _: Any) -> InFlightOperation:
            return self.communicator.send(source, to=to, tag=tag, async_op=True)

        return self._whole(array, None, run, async_op)

    def recv(self, array: Any, *, source: int | None, tag: int = 0, async_op: bool = False) -> InFlightOperation:
        if not on_device(array):
            return self.communicator.recv(array, source=source, tag=tag, async_op=async_op)

        def run(_: Any, target: Any) -> InFlightOperation:
            return self.communicator.recv(target, source=source, tag=tag, async_op=True)

        return self._whole(None, array, run, async_op)

    def barrier(self, *, async_op: bool = False) -> InFlightOperation:
        """Of the ranks' processes; what they gave to their devices may still be running."""
        return self._host().barrier(async_op=async_op)

    # --- memory and life ---

    def empty(self, shape: int | tuple[int, ...] | list[int], dtype: DTypeLike = "f32") -> Any:
        return self.communicator.empty(shape, dtype)

    def registered(self, array: Any) -> bool:
        return not on_device(array) and self.communicator.registered(array)

    def use(self, device: torch.device, copies: CopyEngine) -> None:
        """Copies from and to `device` are made by `copies`; before the first operation there."""
        with self._lock:
            self._places[device] = copies

    def place(self, device: torch.device) -> CopyEngine:
        """How this process copies from and to `device`."""
        with self._lock:
            if device not in self._places:
                self._places[device] = DEVICES[device.type](device)
            return self._places[device]

    def abort(self, reason: str) -> None:
        if self.pairs is not None:
            self.pairs.abort(reason)
        self.communicator.abort(reason)

    def close(self) -> None:
        """Finishes what is pending, unpins memory and closes the communicator. May be called again."""
        self._closed = True
        if self.pairs is not None:
            self.pairs.close()
        if self._engine is not None:
            self._engine.close()
        self.communicator.close()
        self._blocks.clear()

    def abandon_after_fork(self) -> None:
        """In the child of a fork, where no thread of it exists, and nobody gives back the locks that they held."""
        self._closed = True
        if self._dropper is not None:
            self._dropper.detach()
        if self.pairs is not None:
            self.pairs.abandon()
        _abandoned.append((self._engine, self.pairs, self._blocks))
        self._lock = threading.Lock()
        self._engine = self.pairs = None
        self._blocks = Blocks(self.communicator)

    # --- what they are made of ---

    def _host(self) -> Communicator:
        """The communicator, when all operations on devices that were called before were started on it."""
        if self._engine is not None:
            self._engine.drain()
        return self.communicator

    def _engine_on(self, place: CopyEngine) -> DeviceEngine:
        with self._lock:
            if self._closed:
                raise UsageError("the communicator is closed; create a new one")
            if self._engine is None:
                self._engine = DeviceEngine(
                    self.communicator, place, slot_bytes=self._slot_bytes, slots=self._slots, watch=self.watch
                )
                self._dropper = weakref.finalize(self, _drop, self._engine, weakref.ref(self.communicator))
            return self._engine

    def _pieces(
        self,
        kind: str,
        source: torch.Tensor,
        target: torch.Tensor,
        elements: int,
        run: Callable[..., InFlightOperation],
        async_op: bool,
        at_once: bool,
        *,
        reads: bool = True,
        writes: bool = True,
    ) -> InFlightOperation:
        if source.device != target.device:
            raise UsageError(
                f"{kind} reads from {source.device} and writes to {target.device}; pass tensors of one device"
            )
        pieces = cut(
            kind, elements, source.element_size(), self.world_size, self._slot_bytes, reads=reads, writes=writes
        )
        place = self.place(source.device)
        spans = [span_bytes(piece) for piece in pieces]
        if (at_once or not async_op) and sum(spans) <= device_pieces.AT_ONCE_BYTES:
            run = partial(run, async_op=async_op or len(pieces) > 1)
            short = self._at_once(place, pieces, spans, run, bytes_of(source), bytes_of(target))
            if not async_op:
                short.wait()
            return short
        place.guard([source, target])
        job = Job(kind, place, pieces, run, source=bytes_of(source), target=bytes_of(target))
        work = self._engine_on(place).start(job)
        if not async_op:
            work.wait()
        return work

    def _at_once(
        self,
        place: CopyEngine,
        pieces: Sequence[Piece],
        spans: Sequence[int],
        run: Callable[[Any, Piece], InFlightOperation],
        source: Any,
        target: Any,
    ) -> WholeWork:
        """In the calling thread, which waits for the copies to the host. The same operations as by the engine, since
        other ranks may not wait at once: all pieces side by side in one block."""
        begins = [0, *accumulate(spans)]
        block = self._blocks.take(begins[-1], place)
        parts = list(zip(pieces, begins, spans, strict=False))
        fetched = _moved_by((piece.device_to_host, begin) for piece, begin, _ in parts)
        called = self._fetch(place, source, block, fetched)
        running: list[InFlightOperation] = []
        self._host()
        try:
            for piece, begin, size in parts:
                start = partial(run, block.array[begin : begin + size], piece)
                # who has started one piece leaves none out, though there be no room
                running.append(when_there_is_room(start) if running else start())
        except FireflyerError:
            end_of(running)
            self._blocks.give(block, None)
            raise
        moves = _moved_by((piece.host_to_device, begin) for piece, begin, _ in parts)
        return WholeWork(running, place, self._blocks, None, block, target, moves, called)

    def _fetch(self, place: CopyEngine, source: Any, block: Block, moves: Sequence[Move]) -> CopyEvent:
        """Into `block`. A device that fails ends the communicator: without this rank the others cannot go on."""
        try:
            return place.fetch(source, block.tensor, moves) if moves else place.here()
        except Exception as error:
            self._blocks.give(block, None)
            self.communicator.abort(f"a copy failed on the device of rank {self.rank}: {error}")
            raise

    def _whole(
        self,
        source: torch.Tensor | None,
        target: torch.Tensor | None,
        run: Callable[[Any, Any], InFlightOperation],
        async_op: bool,
    ) -> WholeWork:
        """Copies `source` to the host, starts the operation, and copies to `target` when somebody waits."""
        given = [tensor for tensor in (source, target) if tensor is not None]
        if not given or any(not on_device(tensor) or tensor.device != given[0].device for tensor in given):
            raise UsageError("the tensors of an operation are on several devices; pass tensors of one")
        place = self.place(given[0].device)
        source_block = None if source is None else self._blocks.take(bytes_in(source), place)
        target_block = None if target is None else self._blocks.take(bytes_in(target), place)
        if source is not None and source_block is not None:
            called = self._fetch(place, bytes_of(source), source_block, all_of(source))
        else:
            called = place.here()
        try:
            running = run(
                None if source_block is None else source_block.array,
                None if target_block is None else target_block.array,
            )
        except FireflyerError:  # nothing was started
            for block in filter(None, (source_block, target_block)):
                self._blocks.give(block, None)
            raise
        moves = () if target is None else all_of(target)
        work = WholeWork([running], place, self._blocks, source_block, target_block, target, moves, called)
        if not async_op:
            work.wait()
        return work

    def _check_parts(self, whole_name: str, whole: Any, part_name: str, part: Any) -> None:
        if not on_device(whole) or not on_device(part):
            raise UsageError(f"{whole_name} and {part_name} are not on one device; pass tensors of one")
        if (whole.numel(), whole.dtype) != (part.numel() * self.world_size, part.dtype):
            raise UsageError(
                f"{whole_name} has {whole.numel()} elements of {whole.dtype}; it needs {self.world_size} (one for each "
                f"rank) times the {part.numel()} of {part.dtype} of {part_name}"
            )


def reaching(communicator: Any, devices: set[str]) -> Any:
    """`communicator`, made to take tensors of these types of devices. Raises `UsageError` where it cannot."""
    if devices <= {"cpu"}:
        return communicator
    unknown = sorted(devices - DEVICES.keys() - {"cpu"})
    if not isinstance(communicator, Communicator | DeviceCommunicator) or unknown:
        names = ", ".join(unknown or sorted(devices))
        raise UsageError(
            f"the communicator cannot take tensors on {names}; it takes those on cpu, {', '.join(DEVICES)}"
        )
    return DeviceCommunicator.of(communicator)


def _drop(engine: DeviceEngine, reference: weakref.ref[Communicator]) -> None:
    """Nobody uses it any more, or the interpreter ends."""
    communicator = reference()
    if communicator is not None and not engine.idle:
        communicator.abort("the process ends with operations on a device pending")
    engine.drop()


def _moved_by(parts: Iterable[tuple[Sequence[Move], int]]) -> list[Move]:
    """With what the slots begin at."""
    return [Move(move.device, begin + move.slot, move.size) for moves, begin in parts for move in moves]


def _part(slot: Any, span: tuple[int, int], dtype: str | None = None) -> Any:
    begin, size = span
    part = slot[begin : begin + size]
    return part if dtype is None else part.view(storage_dtype_of(dtype))


def _check_alike(array: torch.Tensor, out: Any) -> None:
    if not on_device(out) or (array.numel(), array.dtype) != (out.numel(), out.dtype):
        raise UsageError("out must be on the device of array and have its size and type")


def _check_op(tensor: torch.Tensor, dtype: DTypeLike | None, op: str) -> str:
    """The name of the type of its elements. Raises `UsageError` for what the communicator would refuse later."""
    name = dtype_name(tensor.dtype) if dtype is None else dtype_named(dtype)
    if DTYPES[name] != tensor.element_size():
        raise UsageError(f"dtype {name!r} does not fit to a tensor of {tensor.dtype}; use one of {', '.join(DTYPES)}")
    if op not in OPS:
        raise UsageError(f"op {op!r} is not known; use one of {', '.join(OPS)}")
    if op in BITWISE and name not in INTEGERS:
        raise UsageError(f"{op} combines the bits of integers, not of {name}")
    return name
