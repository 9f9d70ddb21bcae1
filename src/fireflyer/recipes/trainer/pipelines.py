"""A step over the stages of a pipeline, with replicas of it, and with experts on several ranks of a stage."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fireflyer.codesign.model import ModelShape
from fireflyer.codesign.parallel.pipeline import OVERLAPPING
from fireflyer.codesign.schedule import Action, Kind, Placement, Schedule, build_schedule
from fireflyer.recipes.trainer.arrangements import ArrangementBase, adamw
from fireflyer.recipes.trainer.core.recipe import OptimizerSettings
from fireflyer.recipes.trainer.models import BuiltModel
from fireflyer.recipes.trainer.phased import PhasedStage
from fireflyer.recipes.trainer.stages import CutModel, Stage, cut
from fireflyer.recipes.trainer.stored import StoredModel
from fireflyer.training.experts import SplitExperts, shard_experts
from fireflyer.training.gradient_norm import clip_over_ranks, counted_here
from fireflyer.training.mesh import PlanMesh
from fireflyer.training.pipeline import Pipeline, StepRecord, split_batch
from fireflyer.training.process_groups import communicator_beside
from fireflyer.training.recompute import recompute

__all__ = ["Pipelined", "one_forward"]


class Pipelined(ArrangementBase):
    """Layers divided over the stages of a pipeline, which runs the plan's schedule; with ZeRO 1 the states of a stage's
    optimizer divided over its shard group.

    All ranks of a pipeline read the same part of the batch: the first stage needs the inputs, the last one the targets.
    """

    def __init__(
        self, built: BuiltModel, shape: ModelShape, mesh: PlanMesh, settings: OptimizerSettings, dispatched_tokens: int
    ) -> None:
        """`dispatched_tokens`: the most tokens of one forward pass."""
        super().__init__(built, mesh)
        plan, rank, device = mesh.plan, mesh.coordinates.pipeline, next(built.module.parameters()).device
        schedule = build_schedule(plan.schedule, plan.pipeline, plan.micro_batches, plan.chunks)
        phased = plan.expert > 1 and plan.schedule in OVERLAPPING
        kind = PhasedStage if phased else Stage
        part = cut(built.module, shape, plan, schedule.placement, rank, self._products, kind)
        self.layers = nn.ModuleList(part.stages.values())
        self.balance.keep(self.layers.modules())
        self._split: SplitExperts | None = None
        if plan.expert > 1:
            split = shard_experts(self.layers, mesh, max_tokens=dispatched_tokens)
            self._split = self._resources.enter_context(split)
        experts = [] if self._split is None else [one for _, one in self._split.expert_parameters()]
        if plan.recompute == "full":
            for stage in part.stages.values():
                recompute(stage, "full", blocks=())
        on = None if device.type == "cpu" else device
        average = None if self._split is None else partial(self._split.add_gradients, average=True)
        self._pipeline, self._evaluation = _pipelines(part, schedule, mesh, on, average, record_phases=phased)
        parts = (stage.named_parts for stage in part.stages.values())
        self.module = self._stored = StoredModel(parts, experts, mesh, sharded=plan.zero == 1)
        self.optimizer = adamw(self._stored, settings)
        self._max_norm = settings.max_norm
        self._counted = counted_here(part.counted, experts, mesh)

    def backward(self, inputs: Tensor, targets: Tensor) -> float:
        self._stored.gather()
        count = self._plan.micro_batches
        losses = self._pipeline.step(
            split_batch(inputs, count), split_batch(targets, count), shares=[self._factor] * count
        )
        return self._sum_of_stages(losses)

    @property
    def schedule(self) -> Schedule:
        """What the pipeline runs in a step."""
        return self._pipeline.schedule

    @property
    def record(self) -> StepRecord | None:
        """Times of the passes of this rank in the last step."""
        return self._pipeline.record

    def discard(self) -> None:
        self._stored.drop_gradients()
        super().discard()

    def evaluate(self, inputs: Tensor, targets: Tensor) -> float:
        self._stored.gather_for_evaluation()
        self.layers.eval()  # gates count the tokens of training only
        try:
            return self._sum_of_stages(self._evaluation.evaluate([inputs], [targets]))
        finally:
            self.layers.train()

    def _step(self, before: Callable[[], None]) -> float:
        self._stored.take_gradients()
        before()
        norm = clip_over_ranks(self.layers.parameters(), self._counted, self._max_norm)
        if math.isfinite(norm):
            self.optimizer.step()
        self._stored.drop_gradients()
        return norm

    def _sum_of_stages(self, losses: Tensor | None) -> float:
        """Of the losses that the ranks of this pipeline have; the same bits on all of them."""
        mine = torch.zeros(1, dtype=torch.float64)
        if losses is not None:
            mine += losses.double().cpu().sum()
        group = self._mesh.group("pipeline")
        sums = [torch.empty_like(mine) for _ in range(group.size())]
        dist.all_gather(sums, mine, group=group)
        return sum(float(one) for one in sums)


def _pipelines(
    part: CutModel,
    schedule: Schedule,
    mesh: PlanMesh,
    device: torch.device | None,
    average: Callable[[], None] | None,
    *,
    record_phases: bool,
) -> tuple[Pipeline, Pipeline]:
    """That of training, and that of evaluation, on one communicator: the two never run at the same time."""
    comm, data = communicator_beside(mesh.group("pipeline")), mesh.group("data")
    # Gradients of experts are not averaged over all data-parallel ranks: then all wait for `average`.
    replicas = communicator_beside(data) if data.size() > 1 and average is None else None
    training = Pipeline(
        schedule,
        part.stages,
        comm,
        loss=part.loss,
        shared=part.shared,
        replicas=replicas,
        average=average,
        device=device,
        record_phases=record_phases,
    )
    forward = one_forward(schedule.placement)
    stages = {key: part.stages[key] for key in forward.placement.stages_of(comm.rank)}
    return training, Pipeline(forward, stages, comm, loss=part.evaluated, device=device)


def one_forward(placement: Placement) -> Schedule:
    """A schedule of one micro-batch, for evaluation: a batch of it is not cut, so that its loss is the same in any
    plan."""
    one_way = Placement(placement.rank_of[:1])
    rows = []
    for rank in range(one_way.ranks):
        held = [stage for _, stage in one_way.stages_of(rank)]
        forwards = [Action(Kind.FORWARD, stage, 0) for stage in held]
        rows.append((*forwards, *(Action(Kind.BACKWARD, stage, 0) for stage in reversed(held))))
    return Schedule("evaluation", one_way, 1, tuple(rows))
