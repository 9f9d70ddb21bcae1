"""`StoredModel`: the part of a model that one rank has, by the names of the whole model, as checkpoints store it.

Stages of a pipeline hold some layers, ranks of expert parallelism some experts of a layer. Here each parameter has its
name of the whole model, and the stacked tensors of divided experts are DTensors that say which part of the whole this
rank has. They share the memory of the parameters that the model computes with; the optimizer is made of them, so that
its state is divided alike, and a checkpoint of one plan is restored by another.

ZeRO 1 of a stage is the same: the rows of a parameter are divided over the shard group, each rank steps its own, in the
memory of the whole parameter, and `gather` brings the rows of the others before the model computes. Of experts the rows
of each matrix are divided over the ranks that have the same ones.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from fireflyer.codesign.parallel.mesh import Axis
from fireflyer.training.mesh import PlanMesh

__all__ = ["StoredModel"]

_PLACEMENTS = (Replicate(), Shard(0))
_ROWS_OF_EXPERTS = (Shard(1), Shard(0))


class StoredModel(nn.Module):
    """Parameters and persistent buffers of `parts`. Has no forward pass."""

    def __init__(
        self,
        parts: Iterable[Mapping[str, nn.Module]],
        experts: Collection[nn.Parameter],
        mesh: PlanMesh,
        *,
        sharded: bool = False,
    ) -> None:
        """`parts`: modules by their names in the whole model; `experts`: parameters of which this rank has a part;
        `sharded`: the others are divided by rows over the shard group, and those of experts over the ranks that have
        the same ones where a shard group has several of them. Of no further use once a parameter is replaced by
        another."""
        super().__init__()
        divided = {id(one) for one in experts}
        device = next((one.device.type for one in experts), "cpu")
        # Of the device of the parameters: DTensors would copy them to that of another mesh.
        self._mesh = _stage_mesh(mesh, ("expert_data", "expert"), device) if divided else None
        self._divides_experts = sharded and mesh.plan.expert_shard > 1
        self._shards = _stage_mesh(mesh, ("replicate", "shard"), mesh.device_mesh.device_type) if sharded else None
        self._gathered = False
        """Since the last step that was begun."""
        self._pairs: list[tuple[nn.Parameter, nn.Parameter]] = []
        """DTensors of experts with the parameters of the model."""
        self._rows: list[tuple[nn.Parameter, nn.Parameter]] = []
        """DTensors of rows with the whole parameters."""
        for named in parts:
            for prefix, part in named.items():
                for name, value in part.state_dict(keep_vars=True).items():
                    self._hold(f"{prefix}.{name}" if prefix else name, value, divided=id(value) in divided)

    def take_gradients(self) -> None:
        """Shows the gradients of the model to the optimizer, and to who looks at them."""
        self._gathered = False
        for stored, parameter in self._pairs:
            gradient = parameter.grad
            stored.grad = None if gradient is None else self._of_all(gradient)
        for stored, parameter in self._rows:
            stored.grad = None if parameter.grad is None else self._own_rows(parameter.grad)

    @torch.no_grad()
    def gather(self) -> None:
        """Completes the parameters of the model by the rows of the other ranks: after a step, and after a checkpoint
        was read. Collective over the ranks of the stage; nothing to do where parameters are not sharded."""
        for stored, parameter in self._rows:
            parameter.copy_(stored.full_tensor())  # type: ignore[attr-defined]  # a parameter of a DTensor is one
        for stored, parameter in self._pairs if self._divides_experts else ():
            parameter.copy_(stored.redistribute(placements=_PLACEMENTS).to_local())  # type: ignore[attr-defined]
        self._gathered = True

    def gather_for_evaluation(self) -> None:
        """As `gather`; nothing to do for further batches, as parameters change between evaluations alone."""
        if not self._gathered:
            self.gather()

    def drop_gradients(self) -> None:
        """Of the model and here."""
        for one in (*self.parameters(), *(parameter for _, parameter in (*self._pairs, *self._rows))):
            one.grad = None

    def _hold(self, name: str, value: Tensor, *, divided: bool) -> None:
        *path, own = name.split(".")
        holder: nn.Module = self
        for step in path:
            children = dict(holder.named_children())
            if step not in children:
                children[step] = nn.Module()
                holder.add_module(step, children[step])
            holder = children[step]
        if not isinstance(value, nn.Parameter):
            holder.register_buffer(own, value)
        elif own not in dict(holder.named_parameters(recurse=False)):  # a stage may have it twice: embedding and head
            stored = value
            if divided:
                stored = nn.Parameter(self._of_all(value.detach()), requires_grad=value.requires_grad)
                self._pairs.append((stored, value))
            elif self._shards is not None:
                stored = nn.Parameter(self._own_rows(value.detach()), requires_grad=value.requires_grad)
                self._rows.append((stored, value))
            holder.register_parameter(own, stored)

    def _of_all(self, own: Tensor) -> DTensor:
        """A view: of stacked matrices of the experts of this rank its rows of each matrix."""
        assert self._mesh is not None  # noqa: S101 - there are divided experts
        placements = _ROWS_OF_EXPERTS if self._divides_experts else _PLACEMENTS
        shape = torch.Size((len(own) * self._mesh.size(1), *own.shape[1:]))
        (_, count, *_), (_, first, *_) = compute_local_shape_and_global_offset(shape, self._mesh, placements)
        return DTensor.from_local(
            own[:, first : first + count],
            self._mesh,
            placements,
            run_check=False,
            shape=shape,
            stride=own.stride(),
        )

    def _own_rows(self, whole: Tensor) -> DTensor:
        """A view."""
        assert self._shards is not None  # noqa: S101 - parameters are sharded
        (count, *_), (first, *_) = compute_local_shape_and_global_offset(whole.shape, self._shards, _PLACEMENTS)
        return DTensor.from_local(
            whole[first : first + count],
            self._shards,
            _PLACEMENTS,
            run_check=False,
            shape=whole.shape,
            stride=whole.stride(),
        )


def _stage_mesh(mesh: PlanMesh, axes: tuple[Axis, Axis], device_type: str) -> DeviceMesh:
    """Two axes of the stage of this rank alone: of a part of a larger mesh, checkpoints would take the ranks along its
    other axes, other stages, for ranks that have the same."""
    plan, groups = mesh.plan, [mesh.group(axis) for axis in axes]
    first = mesh.coordinates.pipeline * plan.stage_ranks
    ranks = torch.arange(first, first + plan.stage_ranks).view(*(group.size() for group in groups))
    return DeviceMesh.from_group(groups, device_type, mesh=ranks, mesh_dim_names=axes)
