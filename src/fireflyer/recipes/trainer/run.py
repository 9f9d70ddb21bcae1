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
import time
from collections.abc import Iterator
from typing import Final

import torch
import torch.distributed as dist

from fireflyer.base.errors import FireflyerError, PeerFailed, PermanentError, UsageError
from fireflyer.checkpoint import TrainingLoop, stored_plans
from fireflyer.recipes.trainer.agreement import on_rank_0
from fireflyer.recipes.trainer.building import Run, build, join
from fireflyer.recipes.trainer.core.anomalies import Decision
from fireflyer.recipes.trainer.core.course import adamw_settings, evaluation_due, learning_rate
from fireflyer.recipes.trainer.core.figures import (
    AnomalyLine,
    EvaluationLine,
    ExpertsLine,
    StartLine,
    StepLine,
    mean_loss,
    rates,
)
from fireflyer.recipes.trainer.core.recipe import Recipe
from fireflyer.recipes.trainer.evaluation import evaluate, note_held_out
from fireflyer.recipes.trainer.expert_places import LOADS, loads_of, place_measured
from fireflyer.recipes.trainer.measurements import compare_pipeline, count_quantization, measure_exchanges
from fireflyer.recipes.trainer.metrics_file import MetricsFile
from fireflyer.recipes.trainer.pipelines import Pipelined
from fireflyer.recipes.trainer.preconditions import check_checkpoints, checked_shape, plan_of_checkpoints
from fireflyer.recipes.trainer.tracing import check_trace_file
from fireflyer.runtime import read_environment
from fireflyer.runtime.reporter import Reporter

__all__ = ["run_recipe"]

_log = logging.getLogger(__name__)
_PRINT_EVERY_STEPS: Final = 10


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
        device = join(env)
        cleanup.callback(dist.destroy_process_group)
        reporter = Reporter.from_environment(env)
        cleanup.callback(reporter.close)
        run = build(recipe, identity, shape, env, device, reporter)
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


def _train(run: Run, reporter: Reporter, identity: str, cleanup: contextlib.ExitStack) -> None:
    recipe, profile = run.recipe, run.recipe.metrics.profile
    on_rank_0(lambda: check_checkpoints(recipe))
    if profile is not None:
        on_rank_0(lambda: check_trace_file(profile.file))
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
        before_save=None if run.guard is None else run.guard.before_save,
        by_name=True,
        env=run.env,
    )
    with loop:
        last = recipe.optimizer.steps
        resumed = loop.restored is not None
        note_held_out(loop.values, run.held_out)
        run.metrics = on_rank_0(lambda: MetricsFile.open_for(recipe.metrics.file, resumed=resumed, identity=identity))
        if run.metrics is not None:
            cleanup.callback(run.metrics.close)
        _write_start(run, loop, identity)
        _say(run, f"going on after step {loop.step}" if resumed else f"starting, {last} steps")
        if resumed:
            _place_experts(run, loop)
        _open_data(run)
        with run.tracer:
            for step in loop.steps(last):
                run.tracer.before(step)
                _take_step(run, loop, step)
                run.tracer.after(step)


def _take_step(run: Run, loop: TrainingLoop, step: int) -> None:
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
    samples, tokens = inputs.shape if _counts_batch(run) else (0, 0)
    loop.record(loss=loss, samples=samples, tokens=samples * tokens)
    if run.held_out and evaluation_due(step, run.recipe.optimizer.steps, run.recipe.evaluation):
        _evaluate(run, step)


def _commit(run: Run, step: int, loss: float) -> tuple[float | None, Decision]:
    """The optimizer's step, unless the policy says otherwise: the norm where it was taken, and what to do."""
    decision = run.policy.before_commit(loss)
    if decision.action != "commit":
        run.arrangement.discard()
        return None, decision
    norm = run.arrangement.commit(lambda: _look(run, step))
    decision = run.policy.after_commit(loss, norm)
    if run.guard is not None:
        run.guard.after_commit(step)
    return norm if math.isfinite(norm) else None, decision


def _look(run: Run, step: int) -> None:
    if run.guard is not None:
        run.guard.before_commit(step)


def _counts_batch(run: Run) -> bool:
    """Whether this rank reports its part of the batch: other stages and tensor ranks have the same part."""
    place = run.mesh.coordinates
    return place.pipeline == 0 and place.tensor == 0


def _mean_over_ranks(run: Run, summed: float) -> float:
    """Mean loss over the tokens of the whole batch, added in the order of ranks: the same bits on all, and in every
    run."""
    group = run.mesh.group("data")
    mine = torch.tensor([summed], dtype=torch.float64)
    sums = [torch.empty_like(mine) for _ in range(group.size())]
    dist.all_gather(sums, mine, group=group)
    return sum(float(one) for one in sums) / run.recipe.plan.step_tokens


def _has_checkpoint(run: Run, loop: TrainingLoop) -> bool:
    """Whether the run has saved one, or goes on from one; the same on all ranks. Collective."""
    loop.manager.wait()
    found = on_rank_0(lambda: bool(stored_plans(run.recipe.checkpoint.directory)))
    return loop.manager.decide(b"yes" if found else b"no") == b"yes"


def _go_back(run: Run, loop: TrainingLoop) -> None:
    """To the newest checkpoint, and on from there with the batch after the bad one."""
    position, used = run.data.position, run.policy.state
    loop.rewind()
    run.tracer.forget()
    note_held_out(loop.values, run.held_out)
    run.policy.went_back(used)
    run.data.go_on_at(position)
    run.arrangement.balance.count_from(loads_of(loop.values, run.shape))
    if run.guard is not None:
        run.guard.start_anew()
    _open_data(run)


def _place_experts(run: Run, loop: TrainingLoop) -> None:
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


def _open_data(run: Run) -> None:
    group = run.mesh.group("data")
    run.data.open(group.rank(), group.size())


def _evaluate(run: Run, step: int) -> None:
    def loss_of(inputs: torch.Tensor, targets: torch.Tensor) -> float:
        return run.arrangement.evaluate(inputs.to(run.device), targets.to(run.device))

    sources = evaluate(run.held_out, loss_of, batch=run.recipe.evaluation.batch, group=run.mesh.group("data"))
    loss = mean_loss(sources)
    run.write(EvaluationLine(step=step, loss=loss, sources=sources))
    _say(run, f"step {step}: held-out loss {'not finite' if loss is None else f'{loss:.4f}'}")


def _write_start(run: Run, loop: TrainingLoop, identity: str) -> None:
    name = loop.restored.name if loop.restored is not None else None
    held_out = {one.name: one.identity for one in run.held_out}
    run.write(
        StartLine(step=loop.step, checkpoint=name, recipe=identity, world_size=run.env.world_size, held_out=held_out)
    )


def _write_step(run: Run, step: int, loss: float, norm: float | None, seconds: float) -> None:
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


def _is_told(run: Run, step: int) -> bool:
    return step % _PRINT_EVERY_STEPS == 0 or step == run.recipe.optimizer.steps


def _write_measurements(run: Run, step: int) -> None:
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


def _say(run: Run, line: str) -> None:
    """For people, where no launcher shows the progress."""
    if run.env.rank == 0 and run.env.control is None:
        print(line, flush=True)
