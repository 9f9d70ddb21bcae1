"""Time of one training step of a plan: its parts, the link or unit that limits it, and MFU.

A step is computation of the slowest rank, communication that nothing hides, the bubble of the pipeline, and the
optimizer. What is hidden: all-to-all under DualPipe; gradients behind the last backward (HFReduce uses no GPU cores,
Fire-Flyer paper, V-A) and the drain of the pipeline; ZeRO 2 and 3 behind computation. A step is never shorter than what
its busiest link needs.
"""

from __future__ import annotations

import msgspec

from fireflyer.codesign.decoding import compute_share
from fireflyer.codesign.model import ModelShape, model_flops_utilization, training_flops
from fireflyer.codesign.parallel.expert_replicas import ExpertLoads
from fireflyer.codesign.parallel.memory import RankMemory, held_parameters, peak_memory
from fireflyer.codesign.parallel.node import NodeModel
from fireflyer.codesign.parallel.pipeline import OVERLAPPING, StageTimes, pipeline_time
from fireflyer.codesign.parallel.plan import FORMAT_BYTES, ParallelPlan
from fireflyer.codesign.parallel.stages import Stage, again_flops, balance_model, first_equal_stages, layers_with
from fireflyer.codesign.parallel.traffic import LINKS, Link, Traffic, link_rate, stage_message_bytes, stage_traffic

__all__ = [
    "LinkUse",
    "MeasuredStep",
    "PassSeconds",
    "PlanFile",
    "StepEstimate",
    "StepParts",
    "estimate_step",
    "flops_rates",
    "optimizer_seconds",
    "pass_seconds",
    "stage_seconds",
]


class MeasuredStep(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Parts of a measured step in seconds, as table 4 of the DeepSeek-V3 paper has them."""

    forward_s: float
    bubble_s: float
    backward_s: float
    weight_s: float
    overlapped_s: float
    """Forward and backward that run together (1F1B)."""
    optimizer_s: float
    step_s: float
    """The whole step, as measured: the parts may lack some of it."""
    tokens_per_day: float
    gpus: int

    @property
    def parts_s(self) -> float:
        """Sum of the parts."""
        pipeline = self.forward_s + self.bubble_s + self.backward_s + self.weight_s + self.overlapped_s
        return pipeline + self.optimizer_s

    @property
    def step_tokens(self) -> float:
        """Tokens of a step, by the throughput of a day."""
        return self.tokens_per_day / 86_400 * self.step_s

    def utilization(self, flops_per_token: float, peak_flops: float) -> float:
        """MFU with so many FLOPs per token on GPUs of `peak_flops`."""
        return model_flops_utilization(flops_per_token, self.tokens_per_day / 86_400, self.gpus, peak_flops)


class PlanFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The TOML file of `ff train plan`: a plan, its model, and what was measured of it, if it was."""

    model: str
    """Path of the model's `config.json`, from the directory of this file."""
    plan: ParallelPlan
    measured: MeasuredStep | None = None
    experts: ExpertLoads | None = None


class StepParts(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of a step, which add up to it."""

    compute: float
    """Matrix products and attention of the slowest rank, recomputation included."""
    tensor: float
    experts: float
    """All-to-all that no computation hides."""
    bubble: float
    sends: float
    """Time of sends between stages, while the pipeline fills and drains."""
    gradients: float
    """Reduction and gathering of parameters that nothing hides."""
    optimizer: float
    waiting: float
    """Time for which the busiest link is used longer than all the above."""

    @property
    def total(self) -> float:
        """The step."""
        pipeline = self.compute + self.tensor + self.experts + self.bubble + self.sends
        return pipeline + self.gradients + self.optimizer + self.waiting


class LinkUse(msgspec.Struct, frozen=True, kw_only=True):
    """Use of one link in a step, at the stage that uses it most."""

    link: Link
    stage: int
    bytes: float
    seconds: float


class StepEstimate(msgspec.Struct, frozen=True, kw_only=True):
    """Prediction for a plan that `refusals` lets pass."""

    parts: StepParts
    links: tuple[LinkUse, ...]
    traffic: Traffic
    """Traffic of the stage that uses the busiest link most."""
    slowest_stage: int
    limit: str
    """Resource that limits the step: `compute`, or the name of a link."""
    tokens_per_s: float
    mfu: float
    mfu_non_causal: float
    peak_memory: RankMemory
    fits: bool
    """Memory of a GPU suffices."""
    computing_share: float = 1.0
    """Share of the SMs of a GPU that compute, 0 to 1; the others move tokens of experts."""

    @property
    def step_s(self) -> float:
        """Seconds of a step."""
        return self.parts.total


class _Rank(msgspec.Struct, frozen=True):
    """Seconds of one micro-batch on a rank."""

    forward: float
    backward: float
    weight: float
    tensor: float
    experts: float
    passes: float
    """Forward, backward, and as much of a forward one as is computed again."""


def computing_share(plan: ParallelPlan, node: NodeModel) -> float:
    """Of the SMs of a GPU, those that compute; all where no experts are on other GPUs, or SMs are not told."""
    return compute_share(node.sms, node.lent_sms) if node.sms and plan.expert > 1 else 1.0


def flops_rates(plan: ParallelPlan, node: NodeModel) -> tuple[float, float]:
    """FLOPs per second of one GPU in matrix products of layers, and in attention scores, which are BF16."""
    efficiency = node.layer_efficiency * computing_share(plan, node)
    return node.gemm_flops.of(plan.precision.compute) * efficiency, node.gemm_flops.bf16 * efficiency


def stage_seconds(plan: ParallelPlan, shape: ModelShape, node: NodeModel, stage: Stage) -> tuple[float, float, float]:
    """Seconds of computation of one micro-batch in a piece of the model: forward, backward with recomputation, and the
    part of backward for weights."""
    tokens = plan.micro_batch_tokens / plan.tensor
    matrix_rate, score_rate = flops_rates(plan, node)
    matrix, scores = stage.matrix_flops * tokens / matrix_rate, stage.score_flops * tokens / score_rate
    again_matrix, again_scores = again_flops(plan, shape, stage)
    again = again_matrix * tokens / matrix_rate + again_scores * tokens / score_rate
    return matrix + scores, 2 * (matrix + scores) + again, matrix


def _rank_seconds(plan: ParallelPlan, shape: ModelShape, node: NodeModel, traffic: Traffic) -> _Rank:
    stages = balance_model(shape, plan.pieces, plan.sequence_tokens)
    held = [stage_seconds(plan, shape, node, stages[piece]) for piece in plan.pieces_of(traffic.stage)]
    share = 0.5 if plan.schedule == "dualpipe" and plan.pipeline > 1 else 1.0
    forward, backward, weight = (share * sum(column) for column in zip(*held, strict=True))
    m = plan.micro_batches
    tensor = sum(_seconds(node, traffic.by_purpose["tensor"]).values()) / m
    experts = max(_seconds(node, traffic.by_purpose["experts"]).values(), default=0.0) / m
    return _Rank(forward, backward, weight, tensor, experts, _passes(plan, shape, traffic.stage))


def _passes(plan: ParallelPlan, shape: ModelShape, stage: int) -> float:
    """Mean over the layers of a stage."""
    if not isinstance(plan.recompute, tuple):
        return 3 if plan.recompute in ("blocks", "full") else 2
    stages = balance_model(shape, plan.pieces, plan.sequence_tokens)
    held = [stages[piece] for piece in plan.pieces_of(stage)]
    layers = sum(one.dense_layers + one.expert_layers for one in held)
    return 2 + sum(layers_with(plan.recompute, shape, one, "blocks") for one in held) / max(1, layers)


def _seconds(node: NodeModel, counts: dict[Link, float]) -> dict[Link, float]:
    return {link: count / link_rate(node, link) for link, count in counts.items() if count}


def estimate_step(
    plan: ParallelPlan, shape: ModelShape, node: NodeModel, memory: RankMemory | None = None
) -> StepEstimate:
    """Prediction of a step. The plan must pass `refusals`; one that needs too much memory is estimated all the same.
    `memory`: of `peak_memory`, if it is known."""
    first = first_equal_stages(shape, plan)
    distinct = sorted(set(first))  # of equal stages the first hides the least
    traffics = [stage_traffic(plan, shape, node, stage) for stage in distinct]
    of_stage = {one.stage: _rank_seconds(plan, shape, node, one) for one in traffics}
    ranks = [of_stage[stage] for stage in first]
    m = plan.micro_batches
    pipeline = pipeline_time(plan.schedule, m, plan.chunks, [_stage_times(plan, one) for one in ranks])
    slowest = ranks[pipeline.slowest]
    compute, tensor = m * (slowest.forward + slowest.backward), m * slowest.tensor
    parts = StepParts(
        compute=compute,
        tensor=tensor,
        experts=max(0.0, pipeline.busy - compute - tensor),
        bubble=pipeline.bubble,
        sends=_send_latency(plan, shape, node),
        gradients=max(_exposed_reduction(plan, node, ranks, traffic, compute / m) for traffic in traffics),
        optimizer=max(optimizer_seconds(plan, shape, node, stage) for stage in distinct),
        waiting=0.0,
    )
    links = _busiest(node, traffics)
    busiest = max(links, key=lambda one: one.seconds, default=None)
    total = parts.total
    if busiest is not None and busiest.seconds > total:
        parts = msgspec.structs.replace(parts, waiting=busiest.seconds - total)
    limit = busiest.link if busiest is not None and busiest.seconds > compute else "compute"
    tokens_per_s = plan.step_tokens / parts.total
    peak = memory if memory is not None else peak_memory(plan, shape)
    per_token = [training_flops(shape, plan.sequence_tokens, causal=causal) for causal in (True, False)]
    causal, whole = (
        model_flops_utilization(one, tokens_per_s, plan.world_size, node.peak_flops.bf16) for one in per_token
    )
    return StepEstimate(
        parts=parts,
        links=links,
        traffic=next(one for one in traffics if busiest is None or one.stage == busiest.stage),
        slowest_stage=pipeline.slowest,
        limit=limit,
        tokens_per_s=tokens_per_s,
        mfu=causal,
        mfu_non_causal=whole,
        peak_memory=peak,
        fits=peak.total <= node.usable_bytes,
        computing_share=computing_share(plan, node),
    )


class PassSeconds(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of the passes of a micro-batch by piece of the model, with communication inside a stage."""

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    """Of inputs and weights, with recomputation."""
    weight: tuple[float, ...]
    """The part for weights."""
    pair_ratio: float
    """Of an overlapped forward and backward, over the sum of both."""


def pass_seconds(plan: ParallelPlan, shape: ModelShape, node: NodeModel) -> PassSeconds:
    """Of the passes that `estimate_step` adds up, for a simulation of the schedule."""
    stages = balance_model(shape, plan.pieces, plan.sequence_tokens)
    sent = [stage_traffic(plan, shape, node, stage) for stage in range(plan.pipeline)]
    ranks = [_rank_seconds(plan, shape, node, one) for one in sent]
    times = [_stage_times(plan, one) for one in ranks]
    forward, backward, weight = [], [], []
    for piece, stage in enumerate(stages):
        rank = next(at for at in range(plan.pipeline) if piece in plan.pieces_of(at))
        seconds = stage_seconds(plan, shape, node, stage)
        forward.append(seconds[0] * times[rank].forward / ranks[rank].forward)
        backward.append(seconds[1] * times[rank].backward / ranks[rank].backward)
        weight.append(seconds[2])
    apart, together = sum(one.forward + one.backward for one in times), sum(one.overlapped for one in times)
    return PassSeconds(
        forward=tuple(forward), backward=tuple(backward), weight=tuple(weight), pair_ratio=min(1.0, together / apart)
    )


def _stage_times(plan: ParallelPlan, rank: _Rank) -> StageTimes:
    """Communication of a pass is a share of that of a micro-batch; recomputation repeats the forward one."""
    passes = rank.passes
    communication = rank.tensor + rank.experts
    forward = rank.forward + communication / passes
    backward = rank.backward + communication * (passes - 1) / passes
    together = forward + backward
    if plan.schedule in OVERLAPPING:
        together = max(rank.forward + rank.backward + rank.tensor, rank.experts)
    return StageTimes(forward, backward, rank.weight, together)


def _send_latency(plan: ParallelPlan, shape: ModelShape, node: NodeModel) -> float:
    """Seconds that sends add while the pipeline fills and drains. The data-parallel ranks of a node start one after the
    other, so that each has the NICs alone; the last one waits for all others once."""
    hops = plan.pieces - 1
    if plan.pipeline == 1:
        return 0.0
    one = stage_message_bytes(plan, shape) / min(node.nic_bytes_per_s, node.pcie_bytes_per_s)
    sharing = max(1, node.gpus // node.nics)
    return (2 * hops + sharing - 1) * one


def _exposed_reduction(
    plan: ParallelPlan, node: NodeModel, ranks: list[_Rank], traffic: Traffic, micro_batch_s: float
) -> float:
    """Seconds of gradients and parameters that no computation hides, at one stage."""
    efficiency = node.allreduce_efficiency
    gradients = max(_seconds(node, traffic.by_purpose["gradients"]).values(), default=0.0) / efficiency
    parameters = max(_seconds(node, traffic.by_purpose["parameters"]).values(), default=0.0) / efficiency
    copies = max(_seconds(node, traffic.by_purpose["copies"]).values(), default=0.0)
    if plan.zero >= 2:
        hidden = micro_batch_s * plan.micro_batches
        return max(0.0, gradients + parameters - hidden) + copies
    stage = traffic.stage
    drain = sum(one.backward for one in ranks[:stage])
    return max(0.0, gradients - ranks[stage].backward - drain) + parameters + copies


def optimizer_seconds(plan: ParallelPlan, shape: ModelShape, node: NodeModel, stage: int) -> float:
    """Reads and writes of states, reads of gradients and writes of parameters, of those that a rank of the stage steps,
    over the rate of GPU memory: with ZeRO a shard of what all ranks have, and of experts one of those that the ranks
    with the same ones have."""
    precision, degrees = plan.precision, (plan.shard, plan.expert_shard)
    counts = held_parameters(plan, shape, stage)
    stepped = sum(count / (shard if plan.zero else 1) for count, shard in zip(counts, degrees, strict=True))
    gradient = FORMAT_BYTES["fp32" if plan.reduces_shards else precision.gradients]
    # With ZeRO 3 BF16 parameters are made of the states when they are gathered.
    parameter = 0 if plan.zero == 3 and precision.parameters == "bf16" else FORMAT_BYTES[precision.parameters]
    return stepped * (2 * precision.state_bytes + gradient + parameter) / node.hbm_bytes_per_s


def _busiest(node: NodeModel, traffics: list[Traffic]) -> tuple[LinkUse, ...]:
    """Each link that is used, at the stage that uses it most."""
    found = []
    for link in LINKS:
        most = max(traffics, key=lambda one: one.bytes_of(link))
        count = most.bytes_of(link)
        if count:
            found.append(LinkUse(link=link, stage=most.stage, bytes=count, seconds=count / link_rate(node, link)))
    return tuple(found)
