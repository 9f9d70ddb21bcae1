"""One rank of a training run, from its start to its end.

    meet the others -> compare recipes and data -> divide the model -> restore -> steps -> the last checkpoint

Started again after a failure it goes on from the newest valid checkpoint, and from there the losses are bitwise those
of a run that was never disturbed, as long as the plan is the same: batches follow from the position and the seed, the
learning rate from the step, and sums over ranks are formed in one order.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Final

import torch
import torch.distributed as dist

from fireflyer.base.errors import FireflyerError, PeerFailed, PermanentError, UsageError
from fireflyer.base.launch import RankEnvironment
from fireflyer.checkpoint import TrainingLoop, stored_plans
from fireflyer.codesign.model import ModelShape
from fireflyer.recipes.trainer.agreement import check_same, on_rank_0
from fireflyer.recipes.trainer.arrangements import Arrangement, Replicated, Sharded, TensorParallel
from fireflyer.recipes.trainer.core.anomalies import AnomalyPolicy, Decision
from fireflyer.recipes.trainer.core.course import adamw_settings, evaluation_due, learning_rate
from fireflyer.recipes.trainer.core.figures import (
    AnomalyLine,
    EvaluationLine,
    ExpertsLine,
    MetricsLine,
    StartLine,
    StepLine,
    mean_loss,
    rates,
)
from fireflyer.recipes.trainer.core.recipe import Recipe
from fireflyer.recipes.trainer.evaluation import evaluate
from fireflyer.recipes.trainer.expert_places import LOADS, loads_of, place_measured
from fireflyer.recipes.trainer.measurements import compare_pipeline, count_quantization, measure_exchanges
from fireflyer.recipes.trainer.metrics_file import MetricsFile
from fireflyer.recipes.trainer.models import BuiltModel, build_model
from fireflyer.recipes.trainer.pipelines import Pipelined
from fireflyer.recipes.trainer.preconditions import (
    check_checkpoints,
    checked_shape,
    identity_of_model,
    plan_of_checkpoints,
)
from fireflyer.recipes.trainer.sources import HeldOut, TrainingData, open_held_out, open_training_data
from fireflyer.recipes.trainer.split_experts import ExpertsDivided
from fireflyer.recipes.trainer.tracing import Tracer
from fireflyer.runtime import read_environment
from fireflyer.runtime.reporter import Reporter
from fireflyer.training.fp8 import convert
from fireflyer.training.guard import Guard
from fireflyer.training.mesh import PlanMesh
from fireflyer.training.recompute import recompute
from fireflyer.training.tensor import tensor_parallel

__all__ = ["run_recipe"]

_log = logging.getLogger(__name__)
TIMEOUT: Final = timedelta(minutes=5)
"""How long a rank waits for the others in one operation."""
_PRINT_EVERY_STEPS: Final = 10
_MAX_NAMED: Final = 8


@dataclass(slots=True)
class _Run:
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
    metrics: MetricsFile | None = None
    """On rank 0."""

    def write(self, line: MetricsLine) -> None:
        if self.metrics is not None:
            self.metrics.write(line)


def run_recipe(recipe: Recipe, identity: str) -> None:
    """Runs this rank to the last step of `recipe`, whose paths are absolute. `identity`: digest of the recipe as it was
    given, which must be that of the other ranks. Collective.

    Raises `UsageError` for a recipe that cannot be run, before anything is started, and for data, plans or recipes that
    differ between ranks; `PeerFailed`; `CorruptionFound` of the guard; `PermanentError` where the policy for bad steps
    stops the run.
    """
    shape = checked_shape(recipe)
    env = read_environment()
    if env.world_size != recipe.plan.world_size:
        raise UsageError(
            f"the plan has {recipe.plan.world_size} ranks, this job {env.world_size}; start it with `ff run "
            f"--ranks-per-node {recipe.plan.world_size} --no-python ff train run FILE`"
        )
    with contextlib.ExitStack() as cleanup:
        torch.set_num_threads(1)  # ranks share the machine, and the order of additions must not depend on threads
        torch.use_deterministic_algorithms(True)
        device = _join(env)
        cleanup.callback(dist.destroy_process_group)
        reporter = Reporter.from_environment(env)
        cleanup.callback(reporter.close)
        run = _build(recipe, identity, shape, env, device, reporter)
        cleanup.callback(run.data.close)
        with _peer_failures(), run.arrangement:
            _train(run, reporter, identity, cleanup)


@contextlib.contextmanager
def _peer_failures() -> Iterator[None]:
    """What torch's groups raise when another rank is gone becomes `PeerFailed`; gloo's errors have no class of their
    own."""
    try:
        yield
    except RuntimeError as error:
        text = str(error)
        if isinstance(error, FireflyerError) or not (isinstance(error, dist.DistError) or "gloo" in text):
            raise
        raise PeerFailed(f"another rank is gone, or did not answer in time: {text.splitlines()[0]}") from error


def _join(env: RankEnvironment) -> torch.device:
    """The process group, and the device of this rank: a GPU where there is one for each rank of the node."""
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


def _build(
    recipe: Recipe, identity: str, shape: ModelShape, env: RankEnvironment, device: torch.device, reporter: Reporter
) -> _Run:
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
    arrangement = _arrange(built, shape, mesh, recipe)
    column = mesh.group("data").rank() + plan.data * mesh.coordinates.pipeline
    torch.manual_seed(recipe.model.seed + column)  # of dropout, if the model has it
    guard = None
    if recipe.guard.period_steps:
        group = mesh.group("replicate")
        every = recipe.guard.period_steps
        guard = Guard(arrangement.module, arrangement.optimizer, every=every, group=group, reporter=reporter)
    return _Run(
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
    )


def _arrange(built: BuiltModel, shape: ModelShape, mesh: PlanMesh, recipe: Recipe) -> Arrangement:
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


def _train(run: _Run, reporter: Reporter, identity: str, cleanup: contextlib.ExitStack) -> None:
    recipe = run.recipe
    on_rank_0(lambda: check_checkpoints(recipe))
    loop = TrainingLoop(
        recipe.checkpoint.directory,
        run.arrangement.module,
        run.arrangement.optimizer,
        period_steps=recipe.checkpoint.period_steps,
        period=recipe.checkpoint.period,
        mttf=recipe.checkpoint.mttf,
        keep=recipe.checkpoint.keep,
        keep_every=recipe.checkpoint.keep_every,
        stateful={"data": run.data, "policy": run.policy},
        plan=plan_of_checkpoints(recipe),
        reporter=reporter,
        by_name=True,
        env=run.env,
    )
    with loop:
        last = recipe.optimizer.steps
        resumed = loop.restored is not None
        run.metrics = on_rank_0(lambda: MetricsFile.open_for(recipe.metrics.file, resumed=resumed, identity=identity))
        if run.metrics is not None:
            cleanup.callback(run.metrics.close)
        _write_start(run, loop, identity)
        _say(run, f"going on after step {loop.step}" if resumed else f"starting, {last} steps")
        if resumed:
            _place_experts(run, loop)
        _open_data(run)
        with Tracer(recipe.metrics.profile if run.env.rank == 0 else None, run.device.type) as tracer:
            for step in loop.steps(last):
                tracer.before(step)
                _take_step(run, loop, step)
                tracer.after(step)


def _take_step(run: _Run, loop: TrainingLoop, step: int) -> None:
    """One step, and the evaluation that is due after it; or back to a checkpoint."""
    began_ns = time.perf_counter_ns()
    inputs, targets = (tensor.to(run.device) for tensor in run.data.next_batch())
    for group in run.arrangement.optimizer.param_groups:
        group.update(adamw_settings(step, run.recipe.optimizer))
    loss = _mean_over_ranks(run, run.arrangement.backward(inputs, targets))
    norm, decision = _commit(run, step, loss)
    if run.shape.experts is not None:
        loop.values[LOADS] = run.arrangement.balance.loads
    if decision.action == "rewind" and not _has_checkpoint(run, loop):
        decision = run.policy.without_checkpoint(decision)
    seconds = (time.perf_counter_ns() - began_ns) / 1e9
    if decision.action != "commit":
        run.write(AnomalyLine(step=step, action=decision.action, reason=decision.reason))
        if run.env.rank == 0:
            _log.warning("step %d: %s; %s", step, decision.reason, decision.action)
    if decision.action == "stop":
        raise PermanentError(f"step {step}: {decision.reason}; the run stops as [policy] says")
    if decision.action == "rewind":
        _go_back(run, loop)
        return
    _write_step(run, step, loss, norm, seconds)
    if _is_told(run, step):
        _write_measurements(run, step)
    loop.record(loss=loss, samples=len(inputs), tokens=inputs.numel())
    if run.held_out and evaluation_due(step, run.recipe.optimizer.steps, run.recipe.evaluation):
        _evaluate(run, step)


def _commit(run: _Run, step: int, loss: float) -> tuple[float | None, Decision]:
    """The optimizer's step, unless the policy says otherwise: the norm where it was taken, and what to do."""
    decision = run.policy.before_commit(loss)
    if decision.action != "commit":
        run.arrangement.discard()
        return None, decision
    guard = run.guard
    norm = run.arrangement.commit(lambda: _look(guard, step))
    decision = run.policy.after_commit(loss, norm)
    if guard is not None:
        guard.after_commit(step)
    return norm if math.isfinite(norm) else None, decision


def _look(guard: Guard | None, step: int) -> None:
    if guard is not None:
        guard.before_commit(step)


def _mean_over_ranks(run: _Run, summed: float) -> float:
    """Mean loss over the tokens of the whole batch, added in the order of ranks: the same bits on all, and in every
    run."""
    group = run.mesh.group("data")
    mine = torch.tensor([summed], dtype=torch.float64)
    sums = [torch.empty_like(mine) for _ in range(group.size())]
    dist.all_gather(sums, mine, group=group)
    return sum(float(one) for one in sums) / run.recipe.plan.step_tokens


def _has_checkpoint(run: _Run, loop: TrainingLoop) -> bool:
    """Whether the run has saved one, or goes on from one; the same on all ranks. Collective."""
    loop.manager.wait()
    found = on_rank_0(lambda: bool(stored_plans(run.recipe.checkpoint.directory)))
    return loop.manager.decide(b"yes" if found else b"no") == b"yes"


def _go_back(run: _Run, loop: TrainingLoop) -> None:
    """To the newest checkpoint, and on from there with the batch after the bad one."""
    position, used = run.data.position, run.policy.state
    loop.rewind()
    run.policy.went_back(used)
    run.data.go_on_at(position)
    run.arrangement.balance.count_from(loads_of(loop.values, run.shape))
    if run.guard is not None:
        run.guard.start_anew()
    _open_data(run)


def _place_experts(run: _Run, loop: TrainingLoop) -> None:
    """As `[experts]` says, by the tokens counted before the checkpoint; else these go on to be counted."""
    loads = loads_of(loop.values, run.shape)
    if run.recipe.experts.placement == "fixed" or not loads:
        run.arrangement.balance.count_from(loads)
        return
    layers = place_measured(run.arrangement, run.mesh, run.shape, loads)
    loop.values[LOADS] = run.arrangement.balance.loads  # from here on, of the new numbers
    run.write(ExpertsLine(step=loop.step, layers=layers))
    if layers:
        worst = max(layers, key=lambda one: one.before)
        _say(
            run,
            f"experts put on ranks by their tokens: in {worst.gate} the fullest had {worst.before:.2f} of the mean, "
            f"now {worst.after:.2f}",
        )


def _open_data(run: _Run) -> None:
    group = run.mesh.group("data")
    run.data.open(group.rank(), group.size())


def _evaluate(run: _Run, step: int) -> None:
    def loss_of(inputs: torch.Tensor, targets: torch.Tensor) -> float:
        return run.arrangement.evaluate(inputs.to(run.device), targets.to(run.device))

    sources = evaluate(run.held_out, loss_of, batch=run.recipe.evaluation.batch, group=run.mesh.group("data"))
    loss = mean_loss(sources)
    run.write(EvaluationLine(step=step, loss=loss, sources=sources))
    _say(run, f"step {step}: held-out loss {'not finite' if loss is None else f'{loss:.4f}'}")


def _write_start(run: _Run, loop: TrainingLoop, identity: str) -> None:
    name = loop.restored.name if loop.restored is not None else None
    run.write(StartLine(step=loop.step, checkpoint=name, recipe=identity, world_size=run.env.world_size))


def _write_step(run: _Run, step: int, loss: float, norm: float | None, seconds: float) -> None:
    plan, metrics = run.recipe.plan, run.recipe.metrics
    speed = rates(run.shape, plan.sequence_tokens, plan.step_tokens, seconds, plan.world_size, metrics.peak_flops)
    rate = learning_rate(step, run.recipe.optimizer)
    run.write(
        StepLine(
            step=step,
            position=run.data.position,
            loss=loss if math.isfinite(loss) else None,
            norm=norm,
            learning_rate=rate,
            seconds=seconds,
            rates=speed,
        )
    )
    if step == 1 or _is_told(run, step):
        _say(run, f"step {step} of {run.recipe.optimizer.steps}, loss {loss:.4f}, {speed.tokens_per_s:.0f} tokens/s")


def _is_told(run: _Run, step: int) -> bool:
    return step % _PRINT_EVERY_STEPS == 0 or step == run.recipe.optimizer.steps


def _write_measurements(run: _Run, step: int) -> None:
    """Collective."""
    if run.recipe.plan.precision.compute == "fp8":
        run.write(count_quantization(run.arrangement.layers, step))
    arrangement = run.arrangement
    if not isinstance(arrangement, Pipelined) or arrangement.record is None:
        return
    if arrangement.record.phases:
        exchanges = measure_exchanges(arrangement.record, step)
        if exchanges is not None:
            run.write(exchanges)
    if run.env.local_world_size == run.env.world_size:  # clocks of several machines are not compared
        run.write(compare_pipeline(arrangement.schedule, arrangement.record, run.mesh.group("pipeline"), step))


def _say(run: _Run, line: str) -> None:
    """For people, where no launcher shows the progress."""
    if run.env.rank == 0 and run.env.control is None:
        print(line, flush=True)
