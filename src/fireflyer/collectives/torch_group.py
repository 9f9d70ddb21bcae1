"""The `torch.distributed` backend "hfreduce".

>>> dist.init_process_group("hfreduce")

torch learns of it as it is imported (`fireflyer.torch_backend`), or when this module is.

A group is one `Communicator`, for tensors on the CPU and on CUDA devices, and a `Completer` of futures. Which
operations it has and what an error looks like is in docs/how-to/pytorch.md; why the classes are built as they are, in
docs/design/0008-torch.md.

The names of the methods, and which of them take lists, are those that torch calls: C++ reaches only what
`PyProcessGroup.hpp` lists, the rest is called by the functions of `torch.distributed`.
"""

# mypy: disable-error-code="override,assignment"
# The stub of ProcessGroup overloads its methods as the binding for callers does; what C++ and torch.distributed call is
# one form of each.

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed as dist

from fireflyer.base.errors import UsageError
from fireflyer.collectives.torch.calls import Calls
from fireflyer.collectives.torch.completer import Completer
from fireflyer.collectives.torch.cuda import DEVICES
from fireflyer.collectives.torch.functions import barrier_failure, missing_from_barrier, serve
from fireflyer.collectives.torch.methods import not_traced, shown_by_profiler
from fireflyer.collectives.torch.tensors import checked, moved, op_name, summed, tensor_in
from fireflyer.collectives.torch.work import GroupWork, HfreduceError
from fireflyer.collectives.torch_devices import DeviceCommunicator
from fireflyer.collectives.torch_join import HfreduceOptions, Joined, join

__all__ = ["BACKEND", "HfreduceGroup", "HfreduceOptions", "create", "register"]

BACKEND: Final = "hfreduce"
KEPT_WORKS: Final = 1024
"""The newest sums of one number, which the group keeps alive. DDP's `join` gives the work of such a sum to the C++
reducer and drops it; C++ then waits for an object whose Python methods are gone, for ever. Nobody tells when C++ has
finished with it."""
Tensors = list[torch.Tensor]


_TITLES: Final = {
    "allreduce": "all_reduce",
    "reduce": "reduce",
    "reduce_scatter": "reduce_scatter",
    "reduce_scatter_single": "reduce_scatter",
    "reduce_scatter_single_coalesced": "reduce_scatter",
    "broadcast": "broadcast",
    "allgather": "all_gather",
    "allgather_coalesced": "all_gather",
    "all_gather_single": "all_gather",
    "all_gather_single_coalesced": "all_gather",
    "gather": "gather",
    "scatter": "scatter",
    "all_to_all_single": "all_to_all",
    "alltoall": "all_to_all",
    "send": "send",
    "recv": "recv",
    "barrier": "barrier",
}
"""Of its methods, as the profiler shows them; those of gloo."""


@not_traced
@shown_by_profiler(BACKEND, _TITLES)
class HfreduceGroup(dist.ProcessGroup):
    """Made by torch, not by users. `communicator` is what it runs on."""

    def __init__(self, joined: Joined) -> None:
        communicator = joined.communicator
        super().__init__(communicator.rank, communicator.world_size)  # type: ignore[call-arg]  # the stub lacks it
        self.communicator = communicator
        self.joined = joined
        self._comm = DeviceCommunicator.of(communicator)
        self._completer = Completer(f"{BACKEND} futures of rank {communicator.rank}", inline=joined.inline_callbacks)
        self._kept: deque[GroupWork] = deque(maxlen=KEPT_WORKS)
        self._name = ""
        self._description = ""

    # --- what torch wants to know ---

    def getBackendName(self) -> str:  # noqa: N802 - as C++ calls it
        return BACKEND

    def getGroupName(self) -> str:  # noqa: N802 - as C++ calls it
        return self._name

    def setGroupName(self, name: str) -> None:  # noqa: N802 - as C++ calls it
        self._name = name

    def getGroupDesc(self) -> str:  # noqa: N802 - as C++ calls it
        return self._description

    def setGroupDesc(self, description: str) -> None:  # noqa: N802 - as C++ calls it
        self._description = description

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu"), *(torch.device(name) for name in DEVICES if name != "cpu" and _is_there(name))]

    def _get_backend(self, _device: torch.device) -> HfreduceGroup:
        """FSDP2 asks the backend of a device for memory (`set_allocate_memory_from_process_group_for_comm`)."""
        return self

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        return torch.device(device).type == "cpu"

    def allocate_tensor(self, size: int, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        if not self.supports_tensor_alloc(device):
            raise UsageError(
                f"the hfreduce group has no memory on {device}, only in CPU memory; let torch allocate there"
            )
        return tensor_in(self._comm, size, dtype)

    # --- the end ---

    def shutdown(self) -> None:
        """Called by `destroy_process_group`: finishes what is pending, takes leave of the others."""
        self._comm.close()
        self._completer.stop(complete=True)
        self._kept.clear()

    def abort(self) -> None:
        """Fails every pending and later operation on every rank."""
        self._comm.abort("its process group was aborted")

    # --- reductions ---

    def allreduce(self, tensors: Tensors, opts: Any = None) -> GroupWork:
        opts = opts or dist.AllreduceOptions()
        calls = Calls(opts)
        for tensor in tensors:
            array, op = calls.both([tensor]), op_name(opts.reduceOp, tensor.dtype)
            calls.add(self._comm.allreduce, summed(array, op), op=op, at_once=calls.waits)
        work = calls.start(self._completer, tensors)
        if len(tensors) == 1 and tensors[0].numel() == 1:
            self._kept.append(work)
        return work

    def allreduce_coalesced(self, tensors: Tensors, opts: Any = None) -> GroupWork:
        return self.allreduce(tensors, opts)

    def reduce(self, tensors: Tensors, opts: Any) -> GroupWork:
        calls = Calls(opts)
        for tensor in tensors:
            array, op = calls.both([tensor]), op_name(opts.reduceOp, tensor.dtype)
            calls.add(self._comm.reduce, summed(array, op), root=opts.rootRank, op=op, at_once=calls.waits)
        return calls.start(self._completer, tensors)

    def reduce_scatter(self, outputs: Tensors, inputs: list[Tensors], opts: Any = None) -> GroupWork:
        for output, parts in zip(outputs, inputs, strict=True):
            _check_alike(parts, self.size(), output.numel(), "reduce_scatter")
        return self._reduce_scatter(outputs, inputs, opts)

    def reduce_scatter_single(self, output: torch.Tensor, array: torch.Tensor, opts: Any = None) -> GroupWork:
        return self._reduce_scatter([output], [[array]], opts)

    def reduce_scatter_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> GroupWork:
        return self._reduce_scatter(outputs, [[array] for array in inputs], opts)

    def _reduce_scatter(self, outputs: Tensors, inputs: Sequence[Tensors], opts: Any) -> GroupWork:
        opts = opts or dist.ReduceScatterOptions()
        calls = Calls(opts)
        for output, parts in zip(outputs, inputs, strict=True):
            out, array, op = calls.result([output]), calls.argument(parts), op_name(opts.reduceOp, output.dtype)
            calls.add(self._comm.reduce_scatter, summed(out, op), summed(array, op), op=op, at_once=calls.waits)
        return calls.start(self._completer, outputs)

    # --- copies ---

    def broadcast(self, tensors: Tensors, opts: Any = None) -> GroupWork:
        opts = opts or dist.BroadcastOptions()
        calls = Calls(opts)
        for tensor in tensors:
            calls.add(self._comm.broadcast, moved(calls.both([tensor])), root=opts.rootRank, at_once=calls.waits)
        return calls.start(self._completer, tensors)

    def allgather(self, outputs: list[Tensors], inputs: Tensors, opts: Any = None) -> GroupWork:
        for parts, array in zip(outputs, inputs, strict=True):
            _check_alike(parts, self.size(), array.numel(), "all_gather")
        return self._allgather(outputs, inputs, opts, outputs)

    def allgather_coalesced(self, outputs: list[Tensors], inputs: Tensors, opts: Any = None) -> GroupWork:
        # torch passes one list for each rank here, not one for each tensor
        by_tensor = [list(parts) for parts in zip(*outputs, strict=True)]
        return self._allgather(by_tensor, inputs, opts, outputs)

    def all_gather_single(self, output: torch.Tensor, array: torch.Tensor, opts: Any = None) -> GroupWork:
        return self._allgather([[output]], [array], opts, [output])

    def all_gather_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> GroupWork:
        return self._allgather([[output] for output in outputs], inputs, opts, outputs)

    def _allgather(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any, value: Any) -> GroupWork:
        calls = Calls(opts)
        for parts, array in zip(outputs, inputs, strict=True):
            out, own = moved(calls.result(parts)), moved(calls.argument([array]))
            calls.add(self._comm.allgather, out, own, at_once=calls.waits)
        return calls.start(self._completer, value)

    def gather(self, outputs: list[Tensors], inputs: Tensors, opts: Any) -> GroupWork:
        calls = Calls(opts)
        (array,) = inputs
        out = None
        if self.rank() == opts.rootRank:
            _check_alike(outputs[0], self.size(), array.numel(), "gather")
            out = moved(calls.result(outputs[0]))
        calls.add(self._comm.gather, moved(calls.argument([array])), root=opts.rootRank, out=out)
        return calls.start(self._completer, outputs)

    def scatter(self, outputs: Tensors, inputs: list[Tensors], opts: Any) -> GroupWork:
        calls = Calls(opts)
        (output,) = outputs
        array = None
        if self.rank() == opts.rootRank:
            _check_alike(inputs[0], self.size(), output.numel(), "scatter")
            array = moved(calls.argument(inputs[0]))
        calls.add(self._comm.scatter, moved(calls.result([output])), root=opts.rootRank, array=array)
        return calls.start(self._completer, outputs)

    # --- exchange ---

    def all_to_all_single(
        self,
        output: torch.Tensor,
        array: torch.Tensor,
        output_splits: Sequence[int],
        input_splits: Sequence[int],
        opts: Any = None,
    ) -> GroupWork:
        """Splits count slices of the first dimension; none means even."""
        calls = Calls(opts)
        out, flat = moved(calls.result([output])), moved(calls.argument([array]))
        calls.add(
            self._comm.all_to_all,
            out,
            flat,
            out_splits=_elements(output_splits, output, out.numel(), "output_split_sizes"),
            in_splits=_elements(input_splits, array, flat.numel(), "input_split_sizes"),
        )
        return calls.start(self._completer, [output])

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> GroupWork:
        for tensors, name in ((outputs, "output"), (inputs, "input")):
            if len(tensors) != self.size():
                raise UsageError(
                    f"all_to_all got {len(tensors)} {name} tensors; pass one for each of {self.size()} ranks"
                )
        calls = Calls(opts)
        out, flat = calls.result(outputs), calls.argument(inputs)
        scale = moved(out).numel() // max(1, out.numel())
        calls.add(
            self._comm.all_to_all,
            moved(out),
            moved(flat),
            out_splits=[tensor.numel() * scale for tensor in outputs],
            in_splits=[tensor.numel() * scale for tensor in inputs],
        )
        return calls.start(self._completer, outputs)

    def send(self, tensors: Tensors, destination: int, tag: int = 0) -> GroupWork:
        calls = Calls()
        (tensor,) = tensors
        calls.add(self._comm.send, moved(calls.argument([tensor])), to=destination, tag=tag)
        return calls.start(self._completer, tensors, ordered=False)

    def recv(self, tensors: Tensors, source: int, tag: int = 0) -> GroupWork:
        calls = Calls()
        (tensor,) = tensors
        calls.add(self._comm.recv, moved(calls.result([tensor])), source=source, tag=tag)
        return calls.start(self._completer, tensors, ordered=False, source=source)

    def recv_anysource(self, tensors: Tensors, tag: int = 0) -> GroupWork:
        calls = Calls()
        (tensor,) = tensors
        calls.add(self._comm.recv, moved(calls.result([tensor])), source=None, tag=tag)
        return calls.start(self._completer, tensors, ordered=False)

    # --- barriers ---

    def barrier(self, opts: Any = None) -> GroupWork:
        calls = Calls(opts)
        calls.add(self._comm.barrier)
        return calls.start(self._completer, [])

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """A barrier whose error, after `timeout`, names the ranks that have not come, as far as this rank sees them:
        those of its node, and what the leaders of neighbouring nodes have said of theirs. It begins with the words of
        torch's barrier, which programs look for: with the first of these ranks, or all of them if `wait_all_ranks`."""
        if timeout is not None and timeout <= timedelta(0):
            waited = f"{timeout / timedelta(milliseconds=1):.0f} ms"
            raise HfreduceError(
                f"Rank {self.rank()} timed out in monitoredBarrier after {waited}; pass a longer timeout"
            )
        opts = dist.BarrierOptions()
        opts.asyncOp = False
        if timeout is not None:
            opts.timeout = timeout
        work = self.barrier(opts)
        try:
            work.wait()
        except HfreduceError as error:
            missing = [] if work.finished() else missing_from_barrier(self.communicator.records())
            failure = HfreduceError(barrier_failure(missing, error.rank, str(error), name_all=wait_all_ranks))
            failure.rank = missing[0] if missing else error.rank
            raise failure from None

    # names that older callers use
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single


def _check_alike(tensors: Sequence[torch.Tensor], count: int, elements: int, operation: str) -> None:
    if len(tensors) != count:
        raise UsageError(f"{operation} got a list of {len(tensors)} tensors; pass one for each of {count} ranks")
    for rank, tensor in enumerate(tensors):
        if checked(tensor).numel() != elements:
            raise UsageError(
                f"{operation} got a tensor of {tensor.numel()} elements for rank {rank} beside one of {elements}; all "
                "must have the same number, use all_to_all for others"
            )


def _elements(splits: Sequence[int], tensor: torch.Tensor, units: int, name: str) -> list[int] | None:
    """Splits of the first dimension as splits of the `units` in which the tensor travels."""
    if not splits:
        return None
    rows = tensor.size(0) if tensor.dim() > 0 else 1
    if sum(splits) != rows:
        raise UsageError(f"{name} {list(splits)} add up to {sum(splits)}, but the tensor has {rows} rows")
    each = units // max(1, rows)
    return [split * each for split in splits]


def _is_there(device_type: str) -> bool:
    return device_type != "cuda" or torch.cuda.is_available()


def create(backend: Any, options: Any) -> HfreduceGroup:
    """What torch calls with its `_DistributedBackendOptions` and the user's `pg_options`."""
    if options is not None and not isinstance(options, HfreduceOptions):
        raise UsageError(f"pg_options is a {type(options).__name__}; the hfreduce backend takes HfreduceOptions")
    world = dist.group.WORLD
    ranks = list(backend.global_ranks_in_group)
    whole = world.joined if isinstance(world, HfreduceGroup) and ranks else None
    joined = join(
        backend.store,
        rank=backend.group_rank,
        world_size=backend.group_size,
        name=f"torch-{backend.group_id}",
        timeout=backend.timeout,
        options=options or HfreduceOptions(),
        places=None if whole is None else whole.places.part(ranks),
        transport=None if whole is None else whole.transport,
    )
    return HfreduceGroup(joined)


def register() -> None:
    """Makes "hfreduce" known to `torch.distributed`. May be called again."""
    if not hasattr(dist.Backend, BACKEND.upper()):
        dist.Backend.register_backend(BACKEND, create, extended_api=True, devices=["cpu", "cuda"])


register()
serve(HfreduceGroup, BACKEND)  # once, also where the name was registered before this module was imported
