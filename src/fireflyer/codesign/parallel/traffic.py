"""Bytes over each link in one step of a plan, and the seconds that the link needs for them.

Gradients by HFReduce (Fire-Flyer paper, IV): each GPU copies them to host memory and back over PCIe, the processor adds
those of the node, and the sums go up and down a double binary tree over the NIC. For 8 GPUs without NVLink that is 24
memory operations per byte, four passes over the shared host bridge and two over the NIC. By rings: the GPUs of a node
add over NVLink first, and each NIC carries its share.
"""

from __future__ import annotations

from typing import Final, Literal, get_args

import msgspec

from fireflyer.codesign.model import ModelShape, count_parameters
from fireflyer.codesign.parallel.experts import copies_per_token
from fireflyer.codesign.parallel.memory import held_parameters
from fireflyer.codesign.parallel.mesh import gradient_adds
from fireflyer.codesign.parallel.node import NodeModel
from fireflyer.codesign.parallel.plan import FORMAT_BYTES, ParallelPlan
from fireflyer.codesign.parallel.stages import balance_model, held_share, layer_groups
from fireflyer.codesign.parallel.tensor import tensor_collectives

__all__ = [
    "LINKS",
    "PURPOSES",
    "Link",
    "LinkBytes",
    "Purpose",
    "Traffic",
    "link_rate",
    "reduction",
    "stage_message_bytes",
    "stage_traffic",
]

Link = Literal["nvlink", "pcie", "host_bridge", "host_memory", "nic"]
Purpose = Literal["gradients", "parameters", "pipeline", "tensor", "experts", "copies"]
LINKS: Final[tuple[Link, ...]] = get_args(Link)
PURPOSES: Final[tuple[Purpose, ...]] = get_args(Purpose)

LinkBytes = dict[Link, float]


class Traffic(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes of one step at a node that has ranks of `stage`. `nvlink` and `pcie` are those of one GPU in its busier
    direction, `host_bridge` those of the most loaded bridge in both directions, `host_memory` reads and writes of the
    node, `nic` what the node sends."""

    stage: int
    by_purpose: dict[Purpose, LinkBytes]

    def bytes_of(self, link: Link) -> float:
        """Bytes over `link` for all purposes."""
        return sum(one.get(link, 0.0) for one in self.by_purpose.values())


def link_rate(node: NodeModel, link: Link) -> float:
    """Bytes per second of `link` in the sense of `Traffic`: of all NICs of the node together."""
    return {
        "nvlink": node.nvlink_bytes_per_s,
        "pcie": node.pcie_bytes_per_s,
        "host_bridge": node.bridge_bytes_per_s,
        "host_memory": node.host_memory_bytes_per_s,
        "nic": node.nics * node.nic_bytes_per_s,
    }[link]


def reduction(node: NodeModel, *, slices: int, adds: int, nodes: int, up: float, down: float) -> LinkBytes:
    """Bytes per link at a node whose GPUs give `up` bytes each to be added and get `down` bytes each back.

    `slices`: different arrays on the node, each on `adds` of its GPUs; `nodes`: over which each is added. Equal `up`
    and `down` are an allreduce; a reduce-scatter has no `down`, an allgather no `up`.
    """
    copies = slices * adds
    crossing = slices * (nodes - 1) / nodes * (up + down)
    if node.allreduce == "ring":
        return {
            "nvlink": (adds - 1) / adds * (up + down),
            "nic": crossing,
            "pcie": crossing / node.gpus,
        }
    # A bridged pair with the same array adds it first, and each GPU moves half of it.
    share = 1 / node.nvlink_gpus if node.nvlink_gpus > 1 and adds > 1 and slices == 1 else 1.0
    memory = copies * share * 2 * up + slices * (up + min(2, adds) * down)
    if nodes > 1:
        memory += slices * (3 * up + 2 * down)
    found: LinkBytes = {
        "pcie": share * max(up, down),
        "host_bridge": node.bridge_gpus * share * (up + down),
        "host_memory": memory,
        "nic": crossing,
    }
    if share < 1:
        found["nvlink"] = (1 - share) * (up + down)
    return found


def stage_traffic(plan: ParallelPlan, shape: ModelShape, node: NodeModel, stage: int) -> Traffic:
    """Traffic of one step at a node that has ranks of `stage`."""
    by_purpose: dict[Purpose, LinkBytes] = {
        "gradients": {},
        "parameters": {},
        "pipeline": _pipeline(plan, shape, node, stage),
        "tensor": {"nvlink": tensor_collectives(plan, shape, stage).sent_bytes} if plan.tensor > 1 else {},
        "experts": _experts(plan, shape, node, stage),
        "copies": _copies(plan, shape, node, stage),
    }
    for routed, count in enumerate(held_parameters(plan, shape, stage)):
        kept = 0.0 if routed else kept_gathered(plan, shape)
        up, down = _data(plan, node, count, kept, routed=bool(routed))
        _add(by_purpose["gradients"], up)
        _add(by_purpose["parameters"], down)
    return Traffic(stage=stage, by_purpose=by_purpose)


def _add(total: LinkBytes, more: LinkBytes) -> None:
    for link, count in more.items():
        total[link] = total.get(link, 0.0) + count


def _data(
    plan: ParallelPlan, node: NodeModel, count: float, kept: float, *, routed: bool
) -> tuple[LinkBytes, LinkBytes]:
    """Gradients of `count` parameters of each rank, and parameters that ZeRO gathers.

    Of each gradient there is a reduce-scatter in the shard group, in each micro-batch with ZeRO 2 and 3, and one
    allreduce in a step of its part between replicas (hybrid sharding). A pipeline averages whole gradients under its
    drain, so that with ZeRO 1 of its stages there is one allreduce over all ranks. ZeRO 3 gathers in each micro-batch:
    a layer forward and backward, those `kept` of the parameters once.
    """
    ranks = plan.expert_data if routed else plan.data
    # DualPipe has each stage twice, and adds the gradients of both.
    mirrors = 2 if plan.schedule == "dualpipe" and plan.pipeline > 1 else 1
    if ranks * mirrors == 1 or not count:
        return {}, {}
    on_node = min(node.gpus, plan.stage_ranks)
    adds = gradient_adds(plan, node.gpus)[routed]
    stages_here = node.gpus // on_node
    shard = plan.expert_shard if routed else plan.shard
    # Ranks of a shard group are neighbours: so many of one are on a node, and so many replicas of what each has.
    neighbours = min(shard, adds)
    whole = shard == 1 or plan.rows_of_whole
    scattered = 1 if whole else shard
    replicas = adds if whole else max(1, adds // neighbours)
    gradient = count * FORMAT_BYTES[plan.precision.gradients]
    up: LinkBytes = {}
    down: LinkBytes = {}
    across = -(-shard // neighbours)
    if not whole:
        alone = ranks == shard  # then both copies of DualPipe's stages are in one reduce-scatter
        repeats = plan.micro_batches if plan.zero >= 2 else 1
        up = reduction(
            node,
            slices=on_node // neighbours,
            adds=neighbours,
            nodes=across * (mirrors if alone else 1),
            up=gradient * repeats,
            down=0.0,
        )
    if shard > 1:
        gathered = (2 * count - kept) * plan.micro_batches if plan.zero == 3 else count
        parameters = gathered * FORMAT_BYTES[plan.precision.parameters]
        down = reduction(node, slices=on_node // neighbours, adds=neighbours, nodes=across, up=0.0, down=parameters)
    if whole or ranks > shard:
        part = gradient / scattered
        nodes = max(1, ranks // scattered // replicas) * mirrors
        _add(up, reduction(node, slices=on_node // replicas, adds=replicas, nodes=nodes, up=part, down=part))
    for found in (up, down):
        if "host_memory" in found:
            found["host_memory"] *= stages_here
    return up, down


def kept_gathered(plan: ParallelPlan, shape: ModelShape) -> float:
    """Parameters on a rank outside of layers, where one stage has all of the model: embedding, last norm and head.
    FSDP keeps them from forward to backward."""
    if plan.pipeline > 1:
        return 0.0
    count = count_parameters(shape)
    matrix = count.embedding + count.head + shape.learned_positions * shape.hidden
    return matrix / plan.tensor + shape.hidden * (2 if shape.layer_norm else 1)


def _layer_passes(plan: ParallelPlan, shape: ModelShape, stage: int) -> float:
    """Forward and backward communication of the layers with experts on a rank of `stage`, in passes of one layer:
    recomputing a block repeats the forward one."""
    stages = balance_model(shape, plan.pieces, plan.sequence_tokens)
    groups = [one for piece in plan.pieces_of(stage) for one in layer_groups(plan.recompute, shape, stages[piece])]
    passes = sum(one.layers * (3 if one.recompute in ("blocks", "full") else 2) for one in groups if one.has_experts)
    return held_share(plan) * passes


def _experts(plan: ParallelPlan, shape: ModelShape, node: NodeModel, stage: int) -> LinkBytes:
    if plan.expert == 1 or shape.experts is None:
        return {}
    copies = copies_per_token(plan, shape.experts, node.gpus)
    there, back = plan.precision.dispatch_bytes(shape.hidden), plan.precision.combine_bytes(shape.hidden)
    tokens = plan.micro_batch_tokens / plan.tensor * plan.micro_batches * _layer_passes(plan, shape, stage)
    remote = tokens * copies.remote * (there + back)
    inside = tokens * (copies.inside * there + copies.outputs * back)
    found: LinkBytes = {"nic": node.gpus * remote, "pcie": remote}
    if node.nvlink_gpus >= min(node.gpus, plan.expert):
        found["nvlink"] = inside
    else:
        found["pcie"] += inside
        found["host_bridge"] = node.bridge_gpus * 2 * (remote + inside)
    return found


def _sends(plan: ParallelPlan, stage: int) -> float:
    """Times that a micro-batch leaves a rank of `stage` for another one, forward and backward."""
    if plan.pipeline == 1:
        return 0.0
    last = plan.pieces - 1
    turn = plan.pipeline - 1 if plan.schedule in ("zbv", "dualpipev") else -1
    held = plan.pieces_of(stage)
    forward = sum(piece not in (last, turn) for piece in held)
    backward = sum(piece not in (0, turn + 1 if turn >= 0 else 0) for piece in held)
    return (forward + backward) * (0.5 if plan.schedule == "dualpipe" else 1.0)


def _crossing_share(plan: ParallelPlan, node: NodeModel) -> float:
    """Share of the sends to the next stage that leave the node: all, unless several stages are on one."""
    return min(1.0, plan.stage_ranks / node.gpus)


def stage_message_bytes(plan: ParallelPlan, shape: ModelShape) -> float:
    """Bytes of what a stage passes on of one micro-batch: the residual stream, or its gradient."""
    return plan.micro_batch_tokens / plan.tensor * shape.hidden * plan.precision.stream_bytes


def _pipeline(plan: ParallelPlan, shape: ModelShape, node: NodeModel, stage: int) -> LinkBytes:
    sent = _sends(plan, stage) * plan.micro_batches * stage_message_bytes(plan, shape)
    if not sent:
        return {}
    found: LinkBytes = {"nic": node.gpus * _crossing_share(plan, node) * sent, "pcie": sent}
    if node.allreduce == "hfreduce":
        found["host_bridge"] = node.bridge_gpus * 2 * sent
    return found


def _copies(plan: ParallelPlan, shape: ModelShape, node: NodeModel, stage: int) -> LinkBytes:
    """Gradients of a parameter that first and last stage share are added over both."""
    stages = balance_model(shape, plan.pieces, plan.sequence_tokens)
    shared = stages[-1].copies
    held = plan.pieces_of(stage)
    if not shared or plan.pipeline == 1 or not {0, plan.pieces - 1} & set(held) or {0, plan.pieces - 1} <= set(held):
        return {}
    sent = shared / plan.tensor * FORMAT_BYTES[plan.precision.gradients]
    return {"nic": node.gpus * _crossing_share(plan, node) * sent, "pcie": sent}
