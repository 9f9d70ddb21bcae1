"""Divides a model over a tensor group.

The residual stream is a DTensor: each rank has all tokens (`sequence=False`), or a contiguous part of each sequence
(sequence parallelism), on which it also computes norms. It is gathered before attention and feed-forward, and their
results are added behind them: an allgather and a reduce-scatter with sequence parallelism, else an allreduce, which is
as many bytes. Attention and activation functions run on plain tensors of the rank's heads and inner values, so the
model's code needs no change as long as it takes the number of heads from what it computes.
"""

from __future__ import annotations

from typing import Any, cast

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import RowwiseParallel, parallelize_module

from fireflyer.base.errors import UsageError
from fireflyer.training.tensor.layouts import TensorLayout, blocks_of, layout_of, refusals
from fireflyer.training.tensor.projections import StackedProjection, VocabularyEmbedding

__all__ = ["tensor_parallel"]

_SEQUENCE_DIM = 1


def tensor_parallel(
    model: nn.Module,
    mesh: DeviceMesh,
    *,
    sequence: bool = True,
    loss: bool = False,
    layout: TensorLayout | None = None,
) -> nn.Module:
    """Divides `model` in place over the ranks of the one-dimensional `mesh`, and returns it.

    Collective; rank 0 of the mesh gives the values. The input is whole on each rank: tokens `[B, T]`, the same on all.
    Logits are whole, a plain tensor; with `loss` they stay divided by vocabulary, a DTensor, for
    `torch.distributed.tensor.parallel.loss_parallel`, in which forward with the loss, and backward, must then run.
    Apply it before `fully_shard`, recomputation and the optimizer.

    Raises `UsageError` with every reason if the model does not divide, was divided before, or is not known and
    `layout` is not given.
    """
    if mesh.ndim != 1:
        raise UsageError(f"the mesh has {mesh.ndim} dimensions; pass that of the tensor axis alone: PlanMesh.tensor")
    layout = layout_of(model) if layout is None else layout
    divided = next((name for name, one in model.named_parameters() if isinstance(one, DTensor)), None)
    if divided is not None:
        raise UsageError(
            f"parameter {divided!r} is a DTensor already; apply tensor_parallel once, and before fully_shard"
        )
    found = refusals(model, layout, mesh.size())
    if found:
        raise UsageError("; ".join(found))
    stream: Placement = Shard(_SEQUENCE_DIM) if sequence else Replicate()
    for block in blocks_of(model, layout):
        _divide_block(block, mesh, layout, stream)
    _divide_ends(model, mesh, layout, stream, loss=loss)
    _check_inputs(model, mesh, layout, sequence=sequence, loss=loss)
    return model


def _divide_block(block: nn.Module, mesh: DeviceMesh, layout: TensorLayout, stream: Placement) -> None:
    columns = list(layout.columns)
    for name, parts in layout.fused:
        linear = cast("nn.Linear", block.get_submodule(name))
        block.set_submodule(name, StackedProjection(linear, parts))
        columns += [f"{name}.parts.{part}" for part in range(parts)]
    for name in columns:
        # torch's ColwiseParallel would add the gradients of an input of several matrices once for each of them.
        column = block.get_submodule(name)
        distribute_module(column, mesh, _divide_outputs)
        column.register_forward_hook(_local_output)
    styles: dict[str, Any] = {
        name: RowwiseParallel(output_layouts=stream, use_local_output=False) for name in layout.rows
    }
    parallelize_module(block, mesh, styles)
    for name in layout.norms:
        distribute_module(block.get_submodule(name), mesh)
    for name in (*layout.inputs, *(name for name, _ in layout.fused)):
        block.get_submodule(name).register_forward_pre_hook(_gather_input, with_kwargs=True)


def _divide_ends(model: nn.Module, mesh: DeviceMesh, layout: TensorLayout, stream: Placement, *, loss: bool) -> None:
    embedding = cast("nn.Embedding", model.get_submodule(layout.embedding))
    norm = model.get_submodule(layout.final_norm)
    divided = VocabularyEmbedding(embedding, mesh, stream)
    model.set_submodule(layout.embedding, divided)
    distribute_module(norm, mesh)
    norm.register_forward_hook(_gather_output)
    if layout.head is None:
        return
    head = model.get_submodule(layout.head)
    tied = head.weight is embedding.weight
    distribute_module(head, mesh, _divide_outputs)
    if tied:
        head.weight = divided.weight
    if not loss:
        head.register_forward_hook(_whole_output)


def _divide_outputs(_: str, linear: nn.Module, mesh: DeviceMesh) -> None:
    for name, parameter in list(linear.named_parameters(recurse=False)):
        divided = distribute_tensor(parameter.detach(), mesh, [Shard(0)])
        linear.register_parameter(name, nn.Parameter(divided, requires_grad=parameter.requires_grad))


def _check_inputs(model: nn.Module, mesh: DeviceMesh, layout: TensorLayout, *, sequence: bool, loss: bool) -> None:
    """Refuses sequences that do not divide; a loss inside gets targets as DTensors, and the result is plain."""

    def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        tokens = args[0] if args else kwargs.get("input_ids", kwargs.get("tokens"))
        if sequence and isinstance(tokens, Tensor) and tokens.shape[_SEQUENCE_DIM] % mesh.size():
            raise UsageError(
                f"sequences of {tokens.shape[_SEQUENCE_DIM]} tokens do not divide into tensor = {mesh.size()} parts; "
                "pad them, or pass sequence=False to tensor_parallel"
            )
        if layout.targets is not None:
            args = (*args[:1], *(_whole(one, mesh) for one in args[1:]))
            kwargs = {name: _whole(one, mesh) if name == layout.targets else one for name, one in kwargs.items()}
        return args, kwargs

    def behind(module: nn.Module, given: Any, result: DTensor) -> Tensor:
        return result if loss and result.dim() > 0 else _whole_output(module, given, result)

    model.register_forward_pre_hook(before, with_kwargs=True)
    if layout.head is None:
        model.register_forward_hook(behind)


def _whole(value: Any, mesh: DeviceMesh) -> Any:
    if not isinstance(value, Tensor) or isinstance(value, DTensor):
        return value
    return DTensor.from_local(value, mesh, [Replicate()], run_check=False)


def _gather_input(
    _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if args:
        return (_gathered(args[0]), *args[1:]), kwargs
    return args, kwargs | {"hidden_states": _gathered(kwargs["hidden_states"])}


def _gather_output(_: nn.Module, __: Any, result: DTensor) -> DTensor:
    return _gathered(result)


def _local_output(_: nn.Module, __: Any, result: DTensor) -> Tensor:
    return result.to_local()


def _whole_output(_: nn.Module, __: Any, result: DTensor) -> Tensor:
    return _gathered(result).to_local()


def _gathered(hidden: DTensor) -> DTensor:
    return hidden.redistribute(placements=[Replicate()])
