"""Activation recomputation: what forward does not keep is computed again in backward, by `torch.utils.checkpoint`.

    recompute(model, "blocks", blocks=model.blocks)           # or "none", "operators", "full"
    recompute_each(model.blocks, ("operators", "none", ...))
    choices = [measure_choices(block, inputs, rates=node_rates) for block in model.blocks]
    recompute_each(model.blocks, choose_recompute(choices, budget_bytes).names)

`operators` keeps the results of matrix products, of attention, and of sums over tensor ranks; norms, activation
functions and gathers of a sequence are computed again. With tensor parallelism all ranks of a tensor group must choose
the same, as what is computed again includes collectives; figures of `measure_choices` are counts and do so.

Apply it after `tensor_parallel` and before `fully_shard`. Names of parameters do not change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final, get_args

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import flop_registry

from fireflyer.base.errors import UsageError
from fireflyer.codesign.parallel.budget import RecomputeChoice
from fireflyer.codesign.parallel.plan import RECOMPUTE, LayerRecompute, PlanRecompute
from fireflyer.training.fp8.products import PRODUCT

__all__ = ["KEPT_OPERATORS", "measure_choices", "recompute", "recompute_each"]

KEPT_OPERATORS: Final = frozenset(
    {
        "aten::mm",
        "aten::addmm",
        "aten::bmm",
        "aten::_grouped_mm",
        "aten::_scaled_mm",
        PRODUCT,
        "aten::_scaled_dot_product_flash_attention",
        "aten::_scaled_dot_product_flash_attention_for_cpu",
        "aten::_scaled_dot_product_efficient_attention",
        "aten::_scaled_dot_product_cudnn_attention",
        "_c10d_functional::reduce_scatter_tensor",
        "_c10d_functional::all_reduce",
    }
)
"""Operators whose results `operators` keeps."""


def recompute(model: nn.Module, mode: PlanRecompute, *, blocks: Sequence[nn.Module]) -> None:
    """Makes `model` compute again in backward: nothing, norms and activation functions of each of `blocks`
    (`operators`), each of them from its input (`blocks`), or all of `model`, a pipeline stage, from its input (`full`);
    or what each of `blocks` has for itself, as `recompute_each`. Raises `UsageError` for another mode, and if it was
    applied before."""
    if mode == "full":
        _apply(model, "full")
    else:
        recompute_each(blocks, [mode] * len(blocks) if isinstance(mode, str) else mode)


def recompute_each(blocks: Sequence[nn.Module], modes: Sequence[str]) -> None:
    """A mode for each block: `none`, `operators` or `blocks`. Raises `UsageError`, and then changes nothing."""
    if len(modes) != len(blocks):
        raise UsageError(f"{len(modes)} modes for {len(blocks)} blocks; give one for each")
    allowed = get_args(LayerRecompute)
    for number, (block, mode) in enumerate(zip(blocks, modes, strict=True)):
        if mode not in allowed:
            raise UsageError(f"mode {mode!r} of block {number} is not one of {', '.join(allowed)}")
        _check_new(block)
    for block, mode in zip(blocks, modes, strict=True):
        if mode != "none":
            _apply(block, mode)


def _check_new(module: nn.Module) -> None:
    if isinstance(module.__dict__.get("forward"), partial):
        raise UsageError(f"recomputation of this {type(module).__name__} was set before; set it once")


def _apply(module: nn.Module, mode: str) -> None:
    if mode not in RECOMPUTE:
        raise UsageError(f"mode {mode!r} is not one of {', '.join(RECOMPUTE)}")
    _check_new(module)
    more: dict[str, Any] = {}
    if mode == "operators":
        more["context_fn"] = partial(create_selective_checkpoint_contexts, _policy)
    # On the instance: hooks of the module itself, and names of parameters, stay as they are.
    module.forward = partial(checkpoint, module.forward, use_reentrant=False, **more)


def _policy(_: Any, operator: Any, *__: Any, **___: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operator.name() in KEPT_OPERATORS else CheckpointPolicy.PREFER_RECOMPUTE


def measure_choices(
    block: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    *,
    flops_per_s: float,
    bytes_per_s: float,
    micro_batches: int = 1,
    in_flight: int = 1,
) -> tuple[RecomputeChoice, ...]:
    """What `none`, `operators` and `blocks` keep and cost for `block`, counted in one forward pass of it with `args`.

    Bytes are those of this rank. An operator takes the longer of FLOPs / `flops_per_s` and bytes of its arguments and
    results / `bytes_per_s`; a step has `micro_batches`, of which `in_flight` are kept at a time. Attention on the CPU
    counts no FLOPs. Collective with tensor parallelism.
    """
    given = _sizes([*args, *(kwargs or {}).values()])
    fixed = {_place(one) for one in (*block.parameters(), *block.buffers())}
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        local = _local(tensor)
        if _place(local) not in fixed:
            kept[_place(local)] = local.untyped_storage().nbytes()
        return tensor.detach()  # an operator's output leads to the node that keeps it: a cycle, and a leak

    counter = _Counter(flops_per_s, bytes_per_s)
    with torch.enable_grad(), saved_tensors_hooks(pack, _same), counter:
        block(*args, **kwargs or {})
    inputs = sum(given.values())
    everything = sum((given | kept).values())
    operators = min(everything, inputs + counter.kept_bytes)
    return (
        RecomputeChoice(name="none", kept_bytes=in_flight * everything),
        RecomputeChoice(
            name="operators",
            kept_bytes=in_flight * operators,
            working_bytes=everything - operators,
            seconds=micro_batches * counter.other_seconds,
        ),
        RecomputeChoice(
            name="blocks",
            kept_bytes=in_flight * inputs,
            working_bytes=everything,
            seconds=micro_batches * (counter.other_seconds + counter.kept_seconds),
        ),
    )


def _same(tensor: Tensor) -> Tensor:
    return tensor


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _place(tensor: Tensor) -> int:
    return _local(tensor).untyped_storage().data_ptr()


def _sizes(values: Any) -> dict[int, int]:
    """Bytes of the storages of what is differentiated among `values`, by their place."""
    found = [_local(one) for one in _tensors(values) if one.requires_grad]
    return {_place(one): one.untyped_storage().nbytes() for one in found}


class _Counter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Seconds of kept and of other operators, and bytes of what is kept."""

    def __init__(self, flops_per_s: float, bytes_per_s: float) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._flops_per_s, self._bytes_per_s = flops_per_s, bytes_per_s
        self.kept_bytes = 0
        self.kept_seconds = self.other_seconds = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Counts, and goes on; a DTensor's operation is seen as those on its local tensors."""
        if any(issubclass(one, DTensor) for one in types):
            return NotImplemented
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        formula: Callable[..., int] | None = flop_registry.get(func.overloadpacket)
        flops = 0 if formula is None else formula(*args, **kwargs, out_val=result)
        given, returned = _bytes((args, kwargs)), _bytes(result)
        moved = 0 if func.is_view else given + returned
        seconds = max(flops / self._flops_per_s, moved / self._bytes_per_s)
        if func.name() in KEPT_OPERATORS:
            self.kept_bytes += returned
            self.kept_seconds += seconds
        else:
            self.other_seconds += seconds
        return result


def _bytes(values: Any) -> int:
    return sum(one.numel() * one.element_size() for one in _tensors(values))


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        yield from _tensors([*value.values()])
    elif isinstance(value, (list, tuple)):
        for one in value:
            yield from _tensors(one)
