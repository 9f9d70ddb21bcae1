"""Hooks for FSDP2 (`fully_shard`), over whichever process group its mesh has.

>>> use_for_fsdp(model, communicator_of(mesh.get_group()))

FSDP2 asks the hooks for the memory of what it sends and receives, so gathered parameters and summed gradients lie where
the other ranks of the node can reach them, and nothing is copied on the way. It calls the hooks by keyword.

`all_reduce_hook` is for replicated shards (one more mean over the replicas) where the mesh has one axis only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from fireflyer.base.errors import UsageError
from fireflyer.collectives.communicator import Communicator
from fireflyer.collectives.torch.buffer_pool import BufferPool
from fireflyer.collectives.torch.calls import Calls
from fireflyer.collectives.torch.completer import Completer
from fireflyer.collectives.torch.tensors import moved, op_name, summed, tensor_in
from fireflyer.collectives.torch.work import GroupWork
from fireflyer.collectives.torch_devices import DeviceCommunicator

__all__ = ["HfreduceAllGather", "HfreduceReduceScatter", "all_reduce_hook", "use_for_fsdp"]


class _Hook:
    def __init__(self, communicator: Communicator, buffers: BufferPool | None = None) -> None:
        """`buffers`: memory on the CPU is taken from there, made of `communicator.empty`."""
        self.communicator = communicator
        self._buffers = buffers
        self._comm = DeviceCommunicator.of(communicator)
        self._completer = Completer(f"FSDP futures of rank {communicator.rank}")

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """On the CPU, memory that the ranks of the node share. It is used again when the tensor is gone."""
        if self._buffers is not None and torch.device(device).type == "cpu":
            return self._buffers.take(math.prod(size), dtype).view(*size)
        return tensor_in(self._comm, math.prod(size), dtype, torch.device(device)).view(*size)

    def _run(self, calls: Calls, group: dist.ProcessGroup, output: torch.Tensor, async_op: bool) -> GroupWork | None:
        if (group.rank(), group.size()) != (self._comm.rank, self._comm.world_size):
            raise UsageError(
                f"rank {group.rank()} of {group.size()} in the mesh is rank {self._comm.rank} of "
                f"{self._comm.world_size} in the communicator; make it with communicator_of(mesh.get_group())"
            )
        work = calls.start(self._completer, [output])
        if async_op:
            return work
        work.wait()
        return None


class HfreduceAllGather(_Hook):
    """Gathering of shards, for `FSDPModule.set_custom_all_gather`."""

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> GroupWork | None:
        calls = Calls()
        calls.add(self._comm.allgather, moved(calls.result([output_tensor])), moved(calls.argument([input_tensor])))
        return self._run(calls, group, output_tensor, async_op)


class HfreduceReduceScatter(_Hook):
    """Reduction of gradients to shards, for `FSDPModule.set_custom_reduce_scatter`."""

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> GroupWork | None:
        calls = Calls()
        out, array = calls.result([output_tensor]), calls.argument([input_tensor])
        name = op_name(op, output_tensor.dtype)
        calls.add(self._comm.reduce_scatter, summed(out, name), summed(array, name), op=name)
        return self._run(calls, group, output_tensor, async_op)


def all_reduce_hook(communicator: Communicator) -> Callable[[torch.Tensor], None]:
    """Make a hook for `FSDPModule.set_all_reduce_hook` that averages sharded gradients over the replicas in
    `communicator`."""
    comm = DeviceCommunicator.of(communicator)

    def average(reduce_output: torch.Tensor) -> None:
        comm.allreduce(reduce_output, op="mean")

    return average


def use_for_fsdp(model: FSDPModule, communicator: Communicator, *, buffers: BufferPool | None = None) -> None:
    """Sets both hooks on every FSDP module in `model`. The communicator has the ranks of the axis that shards.

    `buffers`: memory of what is sent and received that is used again and again, as
    `BufferPool(lambda size: communicator.empty(size, "u8"))`.
    """
    gather, scatter = HfreduceAllGather(communicator, buffers), HfreduceReduceScatter(communicator, buffers)
    for module in cast("torch.nn.Module", model).modules():
        if isinstance(module, FSDPModule):
            module.set_custom_all_gather(cast("Any", gather))
            module.set_custom_reduce_scatter(cast("Any", scatter))
