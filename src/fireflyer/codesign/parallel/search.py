"""Search for the fastest plans of a model on so many nodes.

All combinations are enumerated; divisibility refuses most of them. Each of the rest has a lower bound, the computation
and bubble of its pipeline without any communication, which is cheap since it is the same for many plans. They are
looked at in the order of that bound: memory first, then the whole step. Once the bound is above the last of the plans
to be kept, no later one can be among them, so the ranking is that of a search which simulates everything.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from math import gcd

import msgspec

from fireflyer.base.errors import UsageError
from fireflyer.codesign.model import ModelShape
from fireflyer.codesign.parallel.memory import peak_memory
from fireflyer.codesign.parallel.node import NodeModel
from fireflyer.codesign.parallel.pipeline import OVERLAPPING, StageTimes, pipeline_time
from fireflyer.codesign.parallel.plan import (
    RECOMPUTE,
    SCHEDULES,
    ParallelPlan,
    Precision,
    Recompute,
    Schedule,
    refusals,
)
from fireflyer.codesign.parallel.stages import balance_model, first_equal_stages
from fireflyer.codesign.parallel.step import StepEstimate, estimate_step, stage_seconds

__all__ = ["RankedPlan", "SearchResult", "SearchSpace", "enumerate_plans", "order_key", "search_plans"]

MAX_GPUS = 1 << 17


class SearchSpace(msgspec.Struct, frozen=True, kw_only=True):
    """Plans that a search enumerates: all degrees for these values of the rest."""

    sequence_tokens: int
    batch_sequences: int
    precision: Precision = Precision()
    micro_batches: tuple[int, ...] = (1, 2, 4, 8)
    """Sequences of a micro-batch."""
    schedules: tuple[Schedule, ...] = SCHEDULES
    chunks: tuple[int, ...] = (2, 4)
    """Stages of a rank, for `interleaved`."""
    recompute: tuple[Recompute, ...] = RECOMPUTE


class RankedPlan(msgspec.Struct, frozen=True):
    """A plan with its prediction."""

    plan: ParallelPlan
    estimate: StepEstimate


class SearchResult(msgspec.Struct, frozen=True, kw_only=True):
    """Fastest plans that fit, and what became of the others."""

    ranked: tuple[RankedPlan, ...]
    """Plans that fit, the fastest first."""
    enumerated: int
    refused: int
    """Number of plans that `refusals` excludes, by divisibility or by needs of schedules."""
    out_of_memory: int
    """Number of plans, of those looked at, that do not fit into memory."""
    bounded: int
    """Number of plans not looked at: computation and bubble alone take longer than the whole step of the last kept
    plan."""
    simulated: int
    faster: int | None
    """Plans that are faster than the one to compare with, if there is one: all of them are among the simulated."""


def enumerate_plans(space: SearchSpace, shape: ModelShape, node: NodeModel, nodes: int) -> Iterator[ParallelPlan]:
    """All plans of the space for so many GPUs, refused ones among them. Shard groups are nothing, the ranks of a node,
    or all data-parallel ranks."""
    gpus = nodes * node.gpus
    for tensor in _divisors(node.nvlink_gpus):
        for pipeline in _divisors(gpus // tensor):
            if pipeline > shape.layers + 1:
                break
            data = gpus // tensor // pipeline
            shards = sorted({1, gcd(data, max(1, node.gpus // tensor)), data})
            for shard in shards:
                stages = (0,) if shard == 1 else (1,) if pipeline > 1 else (1, 2, 3)
                for zero in stages:
                    for expert in _expert_degrees(shape, data * tensor):
                        base = ParallelPlan(
                            sequence_tokens=space.sequence_tokens,
                            batch_sequences=space.batch_sequences,
                            precision=space.precision,
                            pipeline=pipeline,
                            replicate=data // shard,
                            shard=shard,
                            tensor=tensor,
                            expert=expert,
                            zero=zero,
                        )
                        yield from _variants(space, base)


def _variants(space: SearchSpace, base: ParallelPlan) -> Iterator[ParallelPlan]:
    schedules: tuple[Schedule, ...] = space.schedules if base.pipeline > 1 else ("1f1b",)
    for schedule in schedules:
        for chunks in space.chunks if schedule == "interleaved" else (1,):
            for micro_batch in space.micro_batches:
                for recompute in space.recompute:
                    yield msgspec.structs.replace(
                        base, schedule=schedule, chunks=chunks, micro_batch=micro_batch, recompute=recompute
                    )


@lru_cache(maxsize=256)
def _divisors(number: int) -> tuple[int, ...]:
    small = [one for one in range(1, int(number**0.5) + 1) if number % one == 0]
    return tuple(sorted({*small, *(number // one for one in small)}))


def _expert_degrees(shape: ModelShape, stage_ranks: int) -> tuple[int, ...]:
    return (1,) if shape.experts is None else _divisors(gcd(shape.experts.routed, stage_ranks))


def order_key(plan: ParallelPlan, estimate: StepEstimate) -> tuple[object, ...]:
    """Sort key of the ranking: time, then memory, then the degrees, so that the order is the same each time."""
    degrees = (plan.pipeline, plan.tensor, plan.expert, plan.shard, plan.zero, plan.micro_batch, plan.chunks)
    names = (SCHEDULES.index(plan.schedule), _recompute_order(plan))
    return (estimate.step_s, estimate.peak_memory.total, *degrees, *names)


def _recompute_order(plan: ParallelPlan) -> int:
    return next((at for at, mode in enumerate(RECOMPUTE) if mode == plan.recompute), len(RECOMPUTE))


def search_plans(
    space: SearchSpace,
    shape: ModelShape,
    node: NodeModel,
    nodes: int,
    *,
    keep: int = 10,
    compare: StepEstimate | None = None,
) -> SearchResult:
    """The `keep` fastest plans that fit into memory. With `compare` all plans that are faster than it are simulated and
    counted. Raises `UsageError` for more GPUs than a search can enumerate."""
    if not 1 <= nodes * node.gpus <= MAX_GPUS:
        raise UsageError(f"{nodes * node.gpus} GPUs are more than the {MAX_GPUS} of a search; use fewer nodes")
    plans: list[tuple[float, int, ParallelPlan]] = []
    enumerated = 0
    bounds: dict[tuple[object, ...], float] = {}
    for plan in enumerate_plans(space, shape, node, nodes):
        enumerated += 1
        if not refusals(plan, shape, node, nodes):
            plans.append((_lower_bound(plan, shape, node, bounds), len(plans), plan))
    plans.sort()
    kept: list[tuple[tuple[object, ...], RankedPlan]] = []
    out_of_memory = simulated = faster = 0
    for bound, _, plan in plans:
        last = kept[-1][1].estimate.step_s if len(kept) == keep else float("inf")
        if bound > last and (compare is None or bound > compare.step_s):
            break
        memory = peak_memory(plan, shape)
        if memory.total > node.usable_bytes:
            out_of_memory += 1
            continue
        estimate = estimate_step(plan, shape, node, memory)
        simulated += 1
        faster += compare is not None and estimate.step_s < compare.step_s
        if estimate.step_s <= last:
            kept.append((order_key(plan, estimate), RankedPlan(plan, estimate)))
            kept.sort(key=lambda one: one[0])
            del kept[keep:]
    return SearchResult(
        ranked=tuple(one for _, one in kept),
        enumerated=enumerated,
        refused=enumerated - len(plans),
        out_of_memory=out_of_memory,
        bounded=len(plans) - out_of_memory - simulated,
        simulated=simulated,
        faster=None if compare is None else faster,
    )


def _lower_bound(
    plan: ParallelPlan, shape: ModelShape, node: NodeModel, known: dict[tuple[object, ...], float]
) -> float:
    """Seconds of computation of the slowest rank and of a bubble without communication."""
    key = (plan.pipeline, plan.data, plan.tensor, plan.schedule, plan.chunks, plan.micro_batch, plan.recompute)
    if (found := known.get(key)) is not None:
        return found
    stages = balance_model(shape, plan.pieces, plan.sequence_tokens)
    share = 0.5 if plan.schedule == "dualpipe" and plan.pipeline > 1 else 1.0
    of_stage: dict[int, StageTimes] = {}
    first = first_equal_stages(shape, plan)
    for stage in set(first):
        held = [stage_seconds(plan, shape, node, stages[piece]) for piece in plan.pieces_of(stage)]
        forward, backward, weight = (share * sum(column) for column in zip(*held, strict=True))
        of_stage[stage] = StageTimes(forward, backward, weight, forward + backward)
    time = pipeline_time(plan.schedule, plan.micro_batches, plan.chunks, [of_stage[one] for one in first])
    # The bubble of an overlapping schedule may shrink with communication that the other parts contain.
    known[key] = bound = time.busy if plan.schedule in OVERLAPPING else time.busy + time.bubble
    return bound
