"""What a training run is made of: the process group, data, and the model divided as the plan says."""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta
from typing import Final

import torch
import torch.distributed as dist

from fireflyer.base.errors import UsageError
from fireflyer.base.launch import RankEnvironment
from fireflyer.codesign.model import ModelShape
from fireflyer.recipes.trainer.agreement import check_same
from fireflyer.recipes.trainer.arrangements import Arrangement, Replicated, Sharded, TensorParallel
from fireflyer.recipes.trainer.core.anomalies import AnomalyPolicy
from fireflyer.recipes.trainer.core.figures import MetricsLine
from fireflyer.recipes.trainer.core.recipe import Recipe
from fireflyer.recipes.trainer.metrics_file import MetricsFile
from fireflyer.recipes.trainer.models import BuiltModel, build_model
from fireflyer.recipes.trainer.pipelines import Pipelined
from fireflyer.recipes.trainer.preconditions import identity_of_model
from fireflyer.recipes.trainer.sources import HeldOut, TrainingData, open_held_out, open_training_data
from fireflyer.recipes.trainer.split_experts import ExpertsDivided
from fireflyer.recipes.trainer.tracing import Tracer
from fireflyer.runtime.reporter import Reporter
from fireflyer.training.fp8 import convert
from fireflyer.training.guard import Guard
from fireflyer.training.mesh import PlanMesh
from fireflyer.training.recompute import recompute
from fireflyer.training.tensor import tensor_parallel

__all__ = ["Run", "arrange", "build", "join"]

TIMEOUT: Final = timedelta(minutes=5)
"""How long a rank waits for the others in one operation."""
_MAX_NAMED: Final = 8


@dataclass(slots=True)
class Run:
    """Everything that a step touches."""

    recipe: Recipe
    shape: ModelShape
    env: RankEnvironment
    mesh: PlanMesh
    arrangement: Arrangement
    data: TrainingData
    held_out: list[HeldOut]
    policy: AnomalyPolicy
    guard: Guard | None
    device: torch.device
    tracer: Tracer
    metrics: MetricsFile | None = None
    """On rank 0."""

    def write(self, line: MetricsLine) -> None:
        if self.metrics is not None:
            self.metrics.write(line)


def join(env: RankEnvironment) -> torch.device:
    """Joins the process group; returns the device of this rank: a GPU where there is one for each rank of the node."""
    use_gpu = torch.cuda.is_available() and torch.cuda.device_count() >= env.local_world_size
    device = torch.device("cuda", env.local_rank) if use_gpu else torch.device("cpu")
    if use_gpu:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # without it cuBLAS is not deterministic
        torch.cuda.set_device(device)
    backend = "cpu:gloo,cuda:nccl" if use_gpu else "gloo"
    if env.world_size == 1:
        store = dist.HashStore()  # type: ignore[attr-defined]  # torch's stubs lack it
        dist.init_process_group(backend, store=store, rank=0, world_size=1, timeout=TIMEOUT)
    else:
        dist.init_process_group(backend, timeout=TIMEOUT)
    return device


def build(
    recipe: Recipe, identity: str, shape: ModelShape, env: RankEnvironment, device: torch.device, reporter: Reporter
) -> Run:
    """The run of this rank. `identity`: digest of the recipe. Collective; raises `UsageError` where recipes, configs or
    data differ between ranks."""
    plan = recipe.plan
    vocabulary = shape.vocabulary
    data = open_training_data(
        recipe.data,
        sequence_tokens=plan.sequence_tokens,
        batch_sequences=plan.batch_sequences,
        vocabulary=vocabulary,
    )
    held_out = open_held_out(
        recipe.data, recipe.evaluation, sequence_tokens=plan.sequence_tokens, vocabulary=vocabulary
    )
    check_same({"the recipe": identity}, "give all ranks the same file")
    check_same({"the config of the model": identity_of_model(recipe.model)}, "give all ranks the same config.json")
    identities = {f"the data of source {name!r}": digest for name, digest in data.identities.items()}
    identities |= {f"the held-out data of {one.name!r}": one.identity for one in held_out}
    check_same(identities, "give all ranks the same shards")
    mesh = PlanMesh(plan, device_type=device.type, node=env.node)
    torch.manual_seed(recipe.model.seed)
    built = build_model(recipe.model, context=plan.sequence_tokens, device=device)
    arrangement = arrange(built, shape, mesh, recipe)
    column = mesh.group("data").rank() + plan.data * mesh.coordinates.pipeline
    torch.manual_seed(recipe.model.seed + column)  # of dropout, if the model has it
    guard = None
    if recipe.guard.period_steps:
        group = mesh.group("replicate")
        every = recipe.guard.period_steps
        guard = Guard(arrangement.module, arrangement.optimizer, every=every, group=group, reporter=reporter)
    return Run(
        recipe=recipe,
        shape=shape,
        env=env,
        mesh=mesh,
        arrangement=arrangement,
        data=data,
        held_out=held_out,
        policy=AnomalyPolicy(recipe.policy),
        guard=guard,
        device=device,
        tracer=Tracer(recipe.metrics.profile if env.rank == 0 else None, device.type),
    )


def arrange(built: BuiltModel, shape: ModelShape, mesh: PlanMesh, recipe: Recipe) -> Arrangement:
    """Divides `built` as the plan of `mesh`, which is that of `recipe`, says. Collective."""
    plan, settings = mesh.plan, recipe.optimizer
    if plan.precision.compute == "fp8":
        _convert(built)
    if plan.tensor > 1:
        tensor_parallel(built.module, mesh.tensor)
    if plan.recompute != "full" or plan.pipeline == 1:
        recompute(built.module, plan.recompute, blocks=built.blocks)
    dispatched_tokens = max(plan.micro_batch, recipe.evaluation.batch) * plan.sequence_tokens
    if plan.pipeline > 1:
        return Pipelined(built, shape, mesh, settings, dispatched_tokens)
    if plan.expert > 1:
        return ExpertsDivided(built, mesh, settings, dispatched_tokens)
    if plan.zero:
        return Sharded(built, mesh, settings)
    if plan.tensor > 1:
        return TensorParallel(built, mesh, settings)
    return Replicated(built, mesh, settings)


def _convert(built: BuiltModel) -> None:
    """Raises `UsageError` where products of matrices would stay in FP32 that the plan counts as FP8."""
    others = convert(built.module).other
    if others:
        more = f" and {len(others) - _MAX_NAMED} more" if len(others) > _MAX_NAMED else ""
        raise UsageError(
            f"precision.compute = 'fp8': {', '.join(others[:_MAX_NAMED])}{more} are of layers that FP8 does not know, "
            "and would stay in FP32; use compute = 'bf16'"
        )
