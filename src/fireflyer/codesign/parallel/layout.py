"""How pipelines whose ranks share the NIC of a node are laid out so that they do not send together.

The schedule of a plan is simulated with its passes and messages for the layouts of `codesign.schedule.contention`, as
many pipelines to a NIC as the GPUs of a node for each of its NICs. The step that `estimate_step` states is that of
pipelines kept apart.
"""

from __future__ import annotations

from typing import Final

import msgspec

from fireflyer.codesign.model import ModelShape
from fireflyer.codesign.parallel.node import NodeModel
from fireflyer.codesign.parallel.plan import ParallelPlan
from fireflyer.codesign.parallel.step import pass_seconds
from fireflyer.codesign.parallel.traffic import stage_message_bytes
from fireflyer.codesign.schedule import Choice, Costs, build_schedule, choose_layout, compile_schedule

__all__ = ["PipelineLayout", "pass_costs", "pipeline_layout"]

MOST_PASSES: Final = 1 << 13
"""Of all pipelines of a NIC in one simulation: some tenths of a second of a processor for all layouts."""


class PipelineLayout(msgspec.Struct, frozen=True, kw_only=True):
    """The layout to use, and why."""

    layout: str
    reason: str
    sharing: int
    """Pipelines to a NIC."""
    micro_batches: int
    """Micro-batches that were simulated: those of the plan, or fewer where they are many."""
    slowdowns: dict[str, float]
    """Time of each layout over that of the schedule without messages."""


def pass_costs(plan: ParallelPlan, shape: ModelShape, node: NodeModel, *, send_s: float = 0.0) -> Costs:
    """Passes of a micro-batch by piece of the model, for a simulation; a message takes `send_s`."""
    passes = pass_seconds(plan, shape, node)
    return Costs(
        forward_s=passes.forward,
        backward_s=passes.backward,
        input_s=tuple(whole - part for whole, part in zip(passes.backward, passes.weight, strict=True)),
        weights_s=passes.weight,
        pair_ratio=passes.pair_ratio,
        send_s=(send_s,) * (len(passes.forward) - 1) if send_s else (),
    )


def pipeline_layout(plan: ParallelPlan, shape: ModelShape, node: NodeModel) -> PipelineLayout | None:
    """None where no two pipelines send to other nodes over one NIC: one stage, a NIC for each GPU, or nodes that hold
    several stages, of which most messages stay inside."""
    sharing = node.gpus // node.nics
    if plan.pipeline == 1 or sharing < 2 or plan.stage_ranks < node.gpus:
        return None
    count = _simulated(plan, sharing)
    program = compile_schedule(build_schedule(plan.schedule, plan.pipeline, count, plan.chunks))
    wire_s = stage_message_bytes(plan, shape) / node.nic_bytes_per_s
    found: Choice = choose_layout(program, pass_costs(plan, shape, node, send_s=wire_s), sharing)
    return PipelineLayout(
        layout=found.chosen.layout.value,
        reason=found.reason,
        sharing=sharing,
        micro_batches=count,
        slowdowns={one.layout.value: one.slowdown for one in found.all},
    )


def _simulated(plan: ParallelPlan, sharing: int) -> int:
    """Micro-batches of the simulation: a multiple of two for each rank, which every schedule takes, where those of the
    plan have too many passes."""
    most = MOST_PASSES // (3 * plan.pieces * sharing)
    if plan.micro_batches <= most:
        return plan.micro_batches
    each = 2 * plan.pipeline
    return min(plan.micro_batches, max(each, most // each * each))
