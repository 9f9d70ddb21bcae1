"""`PlanMesh`: device mesh and process groups of a parallel plan.

Which ranks are together is `fireflyer.codesign.parallel.mesh`, computed without torch; here the groups are made of
them, in one order on all ranks. The device mesh has the axes pipeline, replicate, shard and tensor; experts, which are
taken from data and tensor ranks, have a second one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Final, cast

import msgspec
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fireflyer.base.errors import UsageError
from fireflyer.codesign.parallel import ParallelPlan, coordinates_of, groups, mesh_dims
from fireflyer.codesign.parallel.mesh import AXES, Axis, Coordinates, placement_refusals

__all__ = ["PlanMesh"]

_WORDS: Final = 64
"""64-bit words that a rank tells the others about its plan; more than a plan has fields, so that ranks with different
versions of it can compare, too."""
_MAX_NAMED: Final = 8


class PlanMesh:
    """Mesh and groups of `plan` over all ranks of `torch.distributed`, which is initialised before.

    Collective. `node`: number of this rank's machine, as GROUP_RANK of torchrun and `ff run`; where given, tensor
    groups must be inside nodes and the ranks of a node in one stage, unless it has whole stages. Raises `UsageError`
    on every rank, with the same reason, if plans or node numbers do not agree, do not fit the world size or the nodes.
    """

    def __init__(self, plan: ParallelPlan, *, device_type: str = "cpu", node: int | None = None) -> None:
        if not dist.is_initialized():
            raise UsageError("there is no process group yet; call torch.distributed.init_process_group first")
        nodes = _agree(plan, node, device_type)
        if dist.get_world_size() != plan.world_size:
            raise UsageError(
                f"pipeline {plan.pipeline} x replicate {plan.replicate} x shard {plan.shard} x tensor {plan.tensor} = "
                f"{plan.world_size} ranks, but the job has {dist.get_world_size()}"
            )
        if plan.stage_ranks % plan.expert:
            raise UsageError(f"expert = {plan.expert} does not divide the {plan.stage_ranks} ranks of a stage")
        found = placement_refusals(plan, nodes) if nodes else []
        if found:
            raise UsageError("; ".join(found[:_MAX_NAMED]))
        self.plan = plan
        self.coordinates: Coordinates = coordinates_of(plan, dist.get_rank())
        names, sizes = zip(*mesh_dims(plan), strict=True)
        self.device_mesh = init_device_mesh(device_type, sizes, mesh_dim_names=names)
        self._groups: dict[Axis, dist.ProcessGroup] = {}
        for axis in ("pipeline", "replicate", "shard", "tensor"):
            self._groups[axis] = self.device_mesh.get_group(axis)
        self.expert_mesh = self._expert_mesh(device_type)
        self._groups["data"] = self._data_group()

    @property
    def tensor(self) -> DeviceMesh:
        """One-dimensional: for `tensor_parallel`."""
        return self.device_mesh["tensor"]

    @property
    def data(self) -> DeviceMesh:
        """Mesh for `fully_shard`: the shard axis, and before it the replicas if there are several (HSDP)."""
        return self.device_mesh["replicate", "shard"] if self.plan.replicate > 1 else self.device_mesh["shard"]

    def group(self, axis: Axis) -> dist.ProcessGroup:
        """Return the process group of `axis` that has this rank. Raises `UsageError` for an axis that is none."""
        found = self._groups.get(axis)
        if found is None:
            raise UsageError(f"axis {axis!r} is not one of {', '.join(AXES)}")
        return found

    def ranks(self, axis: Axis) -> tuple[int, ...]:
        """Ranks of that group, ascending."""
        return tuple(dist.get_process_group_ranks(self.group(axis)))

    def _expert_mesh(self, device_type: str) -> DeviceMesh | None:
        """Axes pipeline, expert_data, expert; None without expert parallelism."""
        plan = self.plan
        if plan.expert == 1:
            for axis in ("expert", "expert_data"):
                self._groups[axis] = _made(plan, axis)
            return None
        ranks = torch.arange(plan.world_size).view(plan.pipeline, plan.expert_data, plan.expert)
        mesh = DeviceMesh(device_type, ranks, mesh_dim_names=("pipeline", "expert_data", "expert"))
        self._groups["expert"], self._groups["expert_data"] = mesh.get_group("expert"), mesh.get_group("expert_data")
        return mesh

    def _data_group(self) -> dist.ProcessGroup:
        if self.plan.replicate == 1:
            return self._groups["shard"]
        return self._groups["replicate"] if self.plan.shard == 1 else _made(self.plan, "data")


def _made(plan: ParallelPlan, axis: Axis) -> dist.ProcessGroup:
    """All groups of `axis`, made in the order of `groups` on every rank; that of this rank."""
    of_ranks = [list(ranks) for ranks in groups(plan, axis)]
    mine, _ = dist.new_subgroups_by_enumeration(of_ranks)  # type: ignore[no-untyped-call]
    return cast("dist.ProcessGroup", mine)


def _agree(plan: ParallelPlan, node: int | None, device_type: str) -> list[int]:
    """Node of each rank, or nothing if no rank gave one. Raises `UsageError` on all ranks if plans differ."""
    fields = plan.__struct_fields__
    words = [len(fields), -1 if node is None else node, *(_word(getattr(plan, name)) for name in fields)]
    device = torch.device(device_type, torch.cuda.current_device()) if device_type == "cuda" else device_type
    mine = torch.tensor(words + [0] * (_WORDS - len(words)), dtype=torch.int64, device=device)
    gathered = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, mine)
    rows: list[list[int]] = [one.tolist() for one in gathered]
    different = [rank for rank, row in enumerate(rows) if (row[0], row[2:]) != (rows[0][0], rows[0][2:])]
    if different:
        names = [name for number, name in enumerate(fields, 2) if any(row[number] != rows[0][number] for row in rows)]
        raise UsageError(
            f"the parallel plans of {_ranks(different)} differ from rank 0's in "
            f"{', '.join(names) or 'their fields: use one version'}; give all ranks one plan"
        )
    nodes = [row[1] for row in rows]
    silent = [rank for rank, number in enumerate(nodes) if number < 0]
    if silent and len(silent) < len(nodes):
        raise UsageError(f"{_ranks(silent)} did not say on which node they are; pass node= on all ranks or on none")
    return [] if silent else nodes


def _word(value: object) -> int:
    digest = hashlib.sha256(msgspec.json.encode(value)).digest()
    return int.from_bytes(digest[:8], "little", signed=True)


def _ranks(ranks: Sequence[int]) -> str:
    more = f" and {len(ranks) - _MAX_NAMED} more" if len(ranks) > _MAX_NAMED else ""
    return f"ranks {', '.join(map(str, ranks[:_MAX_NAMED]))}{more}"
