"""Ranks of a plan: coordinates, process groups and nodes.

The order is that of the Fire-Flyer paper (V-B2): the stage changes slowest, then the replica, the shard, the tensor
rank. So the GPUs of a node are different data-parallel ranks of one stage: they do not send to the next stage at the
same time, and HFReduce adds their gradients in host memory before the NIC. A bridged pair is a tensor group. Expert
groups are neighbouring ranks of a stage; those that have the same experts are at the same place of their groups.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, Literal

import msgspec

from fireflyer.codesign.parallel.plan import ParallelPlan

__all__ = [
    "AXES",
    "Axis",
    "Coordinates",
    "coordinates_of",
    "gradient_adds",
    "groups",
    "mesh_dims",
    "placement_refusals",
]

Axis = Literal["pipeline", "data", "replicate", "shard", "tensor", "expert", "expert_data"]
AXES: Final[tuple[Axis, ...]] = ("pipeline", "data", "replicate", "shard", "tensor", "expert", "expert_data")


class Coordinates(msgspec.Struct, frozen=True):
    """Place of one rank on each axis."""

    pipeline: int
    replicate: int
    shard: int
    tensor: int
    expert: int
    expert_data: int


def mesh_dims(plan: ParallelPlan) -> tuple[tuple[str, int], ...]:
    """Names and lengths of the axes of the device mesh, slowest first, as `torch.distributed.device_mesh` takes
    them."""
    return (
        ("pipeline", plan.pipeline),
        ("replicate", plan.replicate),
        ("shard", plan.shard),
        ("tensor", plan.tensor),
    )


def coordinates_of(plan: ParallelPlan, rank: int) -> Coordinates:
    """Place of `rank`, from 0 to `world_size` - 1."""
    stage, inside = divmod(rank, plan.stage_ranks)
    data, tensor = divmod(inside, plan.tensor)
    replicate, shard = divmod(data, plan.shard)
    expert_data, expert = divmod(inside, plan.expert)
    return Coordinates(stage, replicate, shard, tensor, expert, expert_data)


def groups(plan: ParallelPlan, axis: Axis) -> Iterator[tuple[int, ...]]:
    """Ranks of each process group of `axis`, ascending; every rank is in one."""
    per_stage = plan.stage_ranks
    if axis == "pipeline":
        yield from (tuple(range(first, plan.world_size, per_stage)) for first in range(per_stage))
        return
    stride, count = {
        "data": (plan.tensor, plan.data),
        "replicate": (plan.shard * plan.tensor, plan.replicate),
        "shard": (plan.tensor, plan.shard),
        "tensor": (1, plan.tensor),
        "expert": (1, plan.expert),
        "expert_data": (plan.expert, plan.expert_data),
    }[axis]
    for block in range(0, plan.world_size, stride * count):
        for first in range(block, block + stride):
            yield tuple(range(first, first + stride * count, stride))


def gradient_adds(plan: ParallelPlan, gpus: int) -> tuple[int, int]:
    """Gradients that a node of `gpus` GPUs adds before its NIC: of the parameters outside experts, and of experts.

    The first is 8 / tensor on a node of 8 GPUs; an expert's is the number of its copies on the node.
    """
    on_node = min(gpus, plan.stage_ranks)
    return max(1, on_node // plan.tensor), max(1, on_node // plan.expert)


def placement_refusals(plan: ParallelPlan, nodes: Sequence[int]) -> list[str]:
    """Why ranks on these nodes (the number of each rank's) cannot run `plan` as it is meant: a tensor group must be
    inside a node, and the ranks of a node in one stage, unless the node has whole stages."""
    found = []
    for ranks in groups(plan, "tensor"):
        places = sorted({nodes[rank] for rank in ranks})
        if len(places) > 1:
            found.append(f"tensor group {list(ranks)} is on nodes {places}; start all its ranks on one node")
    for node in sorted(set(nodes)):
        held = [coordinates_of(plan, rank).pipeline for rank in range(plan.world_size) if nodes[rank] == node]
        stages = sorted(set(held))
        if len(stages) > 1 and len(held) != len(stages) * plan.stage_ranks:
            found.append(
                f"node {node} has {len(held)} ranks of stages {stages}, which have {plan.stage_ranks} ranks each; a "
                "node has ranks of one stage, or whole stages"
            )
    return found
