"""One call that shards a model over ranks by FSDP2, as ZeRO 1, 2 or 3, with our collectives.

>>> sharded = shard(model, model.blocks, zero=3, param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
>>> optimizer = sharded.optimizer(torch.optim.AdamW(model.parameters(), lr=3e-4), max_norm=1.0)
>>> for inputs in sharded.micro_batches(batch.chunk(4)):
...     loss(model(inputs)).div(4).backward()
>>> optimizer.step(); optimizer.zero_grad()

| `zero` | parameters are whole | gradients are reduced | whole gradients at one time |
|---|---|---|---|
| 1 | from first use to the end of the step | after the last micro-batch | of all layers; of one without accumulation |
| 2 | from first use to the end of the step | after each micro-batch | of one layer |
| 3 | while their layer computes | after each micro-batch | of one layer |

The optimizer's state is sharded in each.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, Literal, TypeVar, cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from fireflyer.base.errors import UsageError
from fireflyer.collectives.torch.buffer_pool import BufferPool, PoolUse
from fireflyer.collectives.torch_fsdp import all_reduce_hook, use_for_fsdp
from fireflyer.training.fsdp.optimizer import StepInBackward
from fireflyer.training.process_groups import communicator_beside

__all__ = ["ReplicaMean", "ShardedModel", "shard"]

T = TypeVar("T")

REPLICAS: Final = "replicas"
SHARDS: Final = "shards"
_PLAN_AXES: Final = (("shard",), ("replicate", "shard"))
"""Of `PlanMesh.data`."""
_MAX_PREFETCH: Final = 64
"""Of layers ahead; each holds its whole parameters."""


class ShardedModel:
    """Result of `shard`: `model`, whose parameters are shards now, and how to train it."""

    def __init__(self, model: torch.nn.Module, mesh: DeviceMesh, zero: int, pool: BufferPool | None) -> None:
        self.model = model
        self.mesh = mesh
        """Replicas, if there are any, and shards."""
        self.zero = zero
        self.is_last = True
        """Whether the backward pass that runs, or comes next, is the last of its step."""
        self._pool = pool

    @contextmanager
    def micro_batch(self, *, last: bool) -> Iterator[None]:
        """Around forward and backward pass of one micro-batch. With `last` False more of the same step follow: then
        replicas are not averaged yet, and what `zero` says is kept. The same on all ranks."""
        self._set_last(last)
        try:
            yield
        finally:
            self._set_last(True)

    def micro_batches(self, inputs: Sequence[T]) -> Iterator[T]:
        """Yields each of `inputs` as the micro-batches of one step. Raises `UsageError` for none."""
        if not inputs:
            raise UsageError("a step has at least one micro-batch; inputs is empty")
        for number, each in enumerate(inputs):
            with self.micro_batch(last=number == len(inputs) - 1):
                yield each

    def optimizer(self, optimizer: torch.optim.Optimizer, *, max_norm: float = math.inf) -> StepInBackward:
        """One that steps in the backward pass of the last micro-batch, in place of `optimizer`, which was made of
        `model.parameters()` after sharding. Raises `UsageError`."""
        return StepInBackward(optimizer, max_norm=max_norm, is_last=lambda: self.is_last)

    def buffers(self) -> PoolUse:
        """Memory of this rank that collectives send from and receive in; zero with one shard and on a device, where
        torch's statistics count it."""
        return PoolUse(0, 0, 0, 0) if self._pool is None else self._pool.use()

    def _set_last(self, last: bool) -> None:
        self.is_last = last
        model = cast("FSDPModule", self.model)
        if self.zero == 1:
            model.set_requires_gradient_sync(last)
        if self.zero < 3:
            model.set_reshard_after_backward(last)


class ReplicaMean:
    """The all-reduce hook of one FSDP module: averages its sharded gradients over the replicas, once in a step.

    Until the last micro-batch the shards of gradients are added here, and FSDP is given zeros; so a step sends them to
    other replicas once, however many micro-batches it has. Costs one more shard of gradients where there are several.
    """

    def __init__(self, average: Callable[[torch.Tensor], None], is_last: Callable[[], bool]) -> None:
        """`average`: over the replicas, in place, as `fireflyer.collectives.torch_fsdp.all_reduce_hook` gives it."""
        self._average = average
        self._is_last = is_last
        self._sums: dict[int, torch.Tensor] = {}
        """By number of elements: FSDP reduces parameters without a gradient in a pass in no call, so it may vary."""

    def __call__(self, reduce_output: torch.Tensor) -> None:
        key = reduce_output.numel()
        before = self._sums.pop(key, None)
        if before is not None:
            reduce_output += before
        if self._is_last():
            self._average(reduce_output)
        else:
            self._sums[key] = reduce_output.clone() if before is None else before.copy_(reduce_output)
            reduce_output.zero_()


def shard(
    model: torch.nn.Module,
    layers: Iterable[torch.nn.Module],
    *,
    zero: Literal[1, 2, 3] = 3,
    replicas: int = 1,
    mesh: DeviceMesh | None = None,
    param_dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = None,
    prefetch: int = 1,
) -> ShardedModel:
    """Shards `model` in place: each of `layers` by itself, in the order in which they run, and the rest as one unit.

    *Ranks.* All of `torch.distributed`, in `replicas` groups of adjacent ranks that each hold the whole model, or a
    `mesh` with the axes `replicas` and `shards`, of which the first may be missing, or `PlanMesh.data`, which has the
    axes of a plan: needed where parameters are divided by tensor parallelism already. Shards are gathered and gradients
    reduced inside of a group; between groups our allreduce averages them.

    *Precision.* Parameters are gathered and used in `param_dtype`, gradients reduced in `reduce_dtype`; None: as they
    are. Shards, and so the optimizer's master copy, keep the dtype that the model has.

    *Prefetch.* That many layers are gathered ahead while one computes, forward and backward; 0: none.

    Collective. Make the optimizer afterwards. Parameters are not copied from rank 0: start with the same seed.
    Raises `UsageError`.
    """
    units = _checked_layers(model, layers)
    if zero not in (1, 2, 3):
        raise UsageError(f"zero {zero!r} is not one of 1, 2, 3")
    if not 0 <= prefetch <= _MAX_PREFETCH:
        raise UsageError(f"prefetch {prefetch} is not between 0 and {_MAX_PREFETCH}")
    device = next(model.parameters()).device.type
    whole = _mesh_of(replicas, device) if mesh is None else _checked_mesh(mesh)
    names = whole.mesh_dim_names or ()
    own = whole[names[-1]]
    policy = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=reduce_dtype)
    for unit in units:
        fully_shard(unit, mesh=own, reshard_after_forward=zero == 3, mp_policy=policy)
    # torch keeps the parameters of the root until its backward pass, which comes first
    fully_shard(model, mesh=own, reshard_after_forward=False, mp_policy=policy)
    root = cast("FSDPModule", model)
    pool = None
    if own.size() > 1:
        within = communicator_beside(own.get_group())
        if device == "cpu":
            pool = BufferPool(lambda size_bytes: within.empty(size_bytes, "u8"))
        use_for_fsdp(root, within, buffers=pool)
    sharded = ShardedModel(model, whole, zero, pool)
    if len(names) > 1 and whole[names[0]].size() > 1:
        average = all_reduce_hook(communicator_beside(whole[names[0]].get_group()))
        for module in _fsdp_modules(model):
            module.set_all_reduce_hook(ReplicaMean(average, lambda: sharded.is_last))
    _set_prefetch(root, cast("list[FSDPModule]", units), prefetch)
    return sharded


def _checked_layers(model: torch.nn.Module, layers: Iterable[torch.nn.Module]) -> list[torch.nn.Module]:
    units = list(layers)
    if not units:
        raise UsageError("layers is empty; pass the blocks of the model, so that not all of it is gathered at once")
    inside = {id(module) for module in model.modules()} - {id(model)}
    for number, unit in enumerate(units):
        if id(unit) not in inside:
            raise UsageError(f"layers[{number}], a {type(unit).__name__}, is not a part of the model")
    if any(isinstance(module, FSDPModule) for module in model.modules()):
        raise UsageError("the model, or a part of it, is sharded already; shard it once")
    return units


def _mesh_of(replicas: int, device: str) -> DeviceMesh:
    if not dist.is_initialized():
        raise UsageError("there is no process group yet; call torch.distributed.init_process_group first")
    size = dist.get_world_size()
    if replicas < 1 or size % replicas:
        raise UsageError(f"replicas {replicas} does not divide {size} ranks")
    return init_device_mesh(device, (replicas, size // replicas), mesh_dim_names=(REPLICAS, SHARDS))


def _checked_mesh(mesh: DeviceMesh) -> DeviceMesh:
    if mesh.mesh_dim_names not in ((SHARDS,), (REPLICAS, SHARDS), *_PLAN_AXES):
        raise UsageError(f"mesh has the axes {mesh.mesh_dim_names}; they must be ('replicas', 'shards') or ('shards',)")
    return mesh


def _fsdp_modules(model: torch.nn.Module) -> list[FSDPModule]:
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def _set_prefetch(root: FSDPModule, units: list[FSDPModule], count: int) -> None:
    if count == 0:
        return
    for at, unit in enumerate(units):
        unit.set_modules_to_forward_prefetch(units[at + 1 : at + 1 + count])
        unit.set_modules_to_backward_prefetch(units[max(0, at - count) : at][::-1])
    root.set_modules_to_forward_prefetch(units[:count])
    root.set_modules_to_backward_prefetch(units[-count:][::-1])
    gather: Any = root
    # Without it, a gather on the CPU blocks; torch has no public way to this.
    gather._set_unshard_async_op(True)  # noqa: SLF001
