"""Experts on ranks by the tokens that they got, when a run goes on.

The tokens of each expert are counted while a run trains, and are in its checkpoints. With `placement = "measured"` a
run that goes on renumbers the experts of each layer, so that its ranks have about equal loads
(`codesign.parallel.expert_placement`). The checkpoint after it has the experts in their new order, with gates in the
same one: it is one of an ordinary model, for any plan.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import torch
import torch.distributed as dist

from fireflyer.base.errors import DataCorruption
from fireflyer.codesign.model import ModelShape
from fireflyer.codesign.parallel.expert_placement import place_experts
from fireflyer.recipes.trainer.arrangements import Arrangement
from fireflyer.recipes.trainer.core.figures import LayerLoads
from fireflyer.training.experts.renumbering import renumber_experts
from fireflyer.training.mesh import PlanMesh
from fireflyer.training.process_groups import communicator_beside

__all__ = ["LOADS", "common_parts", "loads_of", "place_measured"]

LOADS: Final = "expert_loads"
"""Name among the values of a checkpoint."""
_MAX_TOKENS: Final = 1 << 62


def loads_of(values: Mapping[str, Any], shape: ModelShape) -> dict[str, list[int]]:
    """Tokens of each expert, by the name of the gate, among the `values` of a checkpoint; empty where it has none.
    Raises `DataCorruption` for what is no count of the experts of this model."""
    loads = values.get(LOADS, {})
    routed = 0 if shape.experts is None else shape.experts.routed
    if not isinstance(loads, dict):
        raise DataCorruption(f"{LOADS} of the checkpoint is no table of counts; go on from an older checkpoint")
    for name, counts in loads.items():
        good = isinstance(counts, list) and len(counts) == routed
        if not good or not all(type(one) is int and 0 <= one < _MAX_TOKENS for one in counts):
            raise DataCorruption(
                f"{LOADS} of the checkpoint has no counts of {routed} experts for {name!r}; go on from an older one"
            )
    return loads


def place_measured(
    arrangement: Arrangement, mesh: PlanMesh, shape: ModelShape, loads: Mapping[str, list[int]]
) -> tuple[LayerLoads, ...]:
    """Renumbers the experts of all layers by `loads`, the same on all ranks, and says what comes of it. All ranks get
    one order: gradients of a gate are averaged over all of them, and those of experts by number. Collective over all
    ranks."""
    group, experts = mesh.group("expert"), shape.experts
    nodes = common_parts(_told_by_all(communicator_beside(group).plan.node_of_rank))
    here = dict(arrangement.module.named_modules())
    layers = []
    for gate, counts in loads.items():
        if experts is None or not any(counts):
            continue
        found = place_experts([float(one) for one in counts], experts, group.size(), nodes)
        layer = here.get(gate.rpartition(".")[0])  # another stage of the pipeline may have it
        if layer is not None and found.order != tuple(range(len(counts))):
            renumber_experts(layer, found.order, arrangement.optimizer, group)
        layers.append(LayerLoads(gate=gate, tokens=tuple(counts), before=found.before, after=found.after))
    return tuple(layers)


def common_parts(groups: Iterable[Sequence[int]]) -> int:
    """Into how many parts of equal loads the ranks of each expert group are put, from the nodes of the ranks of all
    groups: the most nodes that have equally many consecutive ranks of a group. Parts of one node do no harm."""
    return max(map(_equal_parts, groups), default=1)


def _equal_parts(nodes: Sequence[int]) -> int:
    """Of one group; 1 where its nodes have different numbers of its ranks, or not consecutive ones."""
    count = len(set(nodes))
    each = len(nodes) // count
    even = all(node == nodes[rank - rank % each] for rank, node in enumerate(nodes))
    return count if even and each * count == len(nodes) else 1


def _told_by_all(nodes: Sequence[int]) -> list[list[int]]:
    """`nodes` of all ranks of the run. Collective."""
    mine = torch.tensor(nodes, dtype=torch.int64)
    rows = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, mine)
    return [row.tolist() for row in rows]
