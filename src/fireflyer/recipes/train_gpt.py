"""Train a small GPT on the sources of the Python standard library: the script that `ff demo` runs on every rank.

    python -m fireflyer.recipes.train_gpt --steps 20                       # one process
    ff run --nodes 2 --ranks-per-node 2 --module fireflyer.recipes.train_gpt -- --steps 150

It is meant to be copied. `main` is the whole course of a rank: meet the others, build, restore, train, save. Started
again after a failure, it goes on from the newest valid checkpoint, and from there the losses are bitwise those of a run
that was never disturbed: all that a step depends on is either computed from its number and the seed (samples, learning
rate), or kept in the checkpoint (weights, moments, random generators, the plan that fixes the order of additions).
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import logging
import math
import os
import random
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
import numpy as np
import torch

from fireflyer.base.decoding import convert
from fireflyer.base.errors import FireflyerError, NotFound, PermanentError, UsageError
from fireflyer.base.events import ResumeReport, StepReport
from fireflyer.base.launch import RankEnvironment
from fireflyer.base.ports import Clock
from fireflyer.base.units import SECOND, format_duration, parse_duration
from fireflyer.checkpoint import CheckpointManager, capture, load_into, load_rng, stored_job_plan, stored_plans
from fireflyer.checkpoint.storage import is_remote
from fireflyer.cluster import Reporter
from fireflyer.cluster.sdk import go_suspend, should_suspend
from fireflyer.collectives import Communicator, Plan
from fireflyer.data import Batch, PrefetchLoader, ResumableSampler, SamplerState, TokenWindows
from fireflyer.recipes.corpus import Corpus, build_corpus, open_corpus
from fireflyer.recipes.gpt import PRESETS, GPTModel
from fireflyer.runtime import MonotonicClock, Store, open_store, read_environment
from fireflyer.training import DistributedDataParallel

__all__ = ["Options", "main", "parse_options"]

T = TypeVar("T")

_WARM_UP_STEPS = 20
_MAX_GRADIENT_NORM = 1.0
_BUCKET_BYTES = 1 << 20
_PRINT_EVERY_STEPS = 10


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """What a run is, the same on every rank."""

    steps: int = 150
    seed: int = 0
    global_batch: int = 16
    sequence_length: int = 128
    learning_rate: float = 3e-3
    preset: str = "small"
    corpus_dir: str
    checkpoint_dir: str
    checkpoint_every: int = 20
    keep: int = 2
    timeout_ns: int = 30 * SECOND
    least_step_ns: int = 0


class Progress(msgspec.Struct, frozen=True):
    """What a checkpoint keeps beside tensors."""

    corpus: str
    """The fingerprint."""
    sampler: SamplerState


@dataclass(slots=True)
class Job:
    """Everything that a step touches."""

    options: Options
    env: RankEnvironment
    clock: Clock
    comm: Communicator
    model: DistributedDataParallel
    optimizer: torch.optim.Optimizer
    corpus: Corpus
    windows: TokenWindows
    sampler: ResumableSampler
    checkpoints: CheckpointManager
    reporter: Reporter


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one rank to its end and returns the exit code; an error is one line on stderr."""
    logging.basicConfig(level=logging.WARNING, format="%(name)s: %(message)s")
    try:
        env = read_environment()
        options = parse_options(arguments, env)
        with contextlib.ExitStack() as cleanup:
            with what_stays():
                job = build(options, env, cleanup)
                steps_done, position = restore(job)
            train(job, steps_done, position)
            job.checkpoints.close()  # not in the cleanup: after a failure nobody waits for a save that needs the dead
    except FireflyerError as error:
        print(f"train_gpt: {error}", file=sys.stderr, flush=True)
        return 2 if isinstance(error, UsageError) else 1
    return 0


@contextlib.contextmanager
def what_stays() -> Iterator[None]:
    """Set-up (torch's own lazy imports above all) makes 300,000 objects that live to the end. Keeping the garbage
    collector from walking them now, later and at the exit saves every start of a rank more than a second."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def build(options: Options, env: RankEnvironment, cleanup: contextlib.ExitStack) -> Job:
    """All parts of the job; what must be closed is given to `cleanup`. Collective."""
    torch.set_num_threads(1)  # ranks share the machine, and the order of additions must not depend on threads
    torch.use_deterministic_algorithms(True)
    for seed in (random.seed, np.random.seed, torch.manual_seed):  # checkpoints hold the state of all three
        seed(options.seed + env.rank)
    corpus = find_corpus(options.corpus_dir)
    windows = TokenWindows(corpus.records(), options.sequence_length, vocab_size=corpus.vocab_size)
    reporter = Reporter.from_environment(env)
    cleanup.callback(reporter.close)
    store = open_store(env)
    cleanup.callback(store.close)
    comm, checkpoints = join_group(options, env, store, reporter)
    cleanup.callback(comm.close)
    config = msgspec.structs.replace(
        PRESETS[options.preset], vocab_size=corpus.vocab_size, context=options.sequence_length, seed=options.seed
    )
    model = DistributedDataParallel(GPTModel(config), comm, bucket_bytes=_BUCKET_BYTES, broadcast_buffers=False)
    return Job(
        options=options,
        env=env,
        clock=MonotonicClock(),
        comm=comm,
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=options.learning_rate, betas=(0.9, 0.95), fused=True),
        corpus=corpus,
        windows=windows,
        sampler=ResumableSampler(len(windows), global_batch=options.global_batch, seed=options.seed),
        checkpoints=checkpoints,
        reporter=reporter,
    )


def find_corpus(directory: str) -> Corpus:
    """The one that this job began with; the first rank that finds none builds it while the others wait. In 3FS it must
    be there."""
    try:
        return open_corpus(directory)
    except NotFound:
        if is_remote(directory):
            raise
        return build_corpus(directory)


def join_group(
    options: Options, env: RankEnvironment, store: Store, reporter: Reporter
) -> tuple[Communicator, CheckpointManager]:
    """Meets the other ranks. The plan with which the job had as many ranks is used again, so that sums are formed in
    its order; only another number of ranks or nodes needs another plan, and its losses agree but for rounding."""
    first = stored_job_plan(options.checkpoint_dir)  # of a release that kept the job's first plan there
    plan = stored_plan_for(options, env, first)
    comm = Communicator.from_environment(env, plan=plan, timeout_ns=options.timeout_ns)
    checkpoints = CheckpointManager(
        options.checkpoint_dir,
        rank=env.rank,
        world_size=env.world_size,
        store=store,
        keep=options.keep,
        period_steps=options.checkpoint_every,
        job_plan=first,
        plan={"collectives": msgspec.to_builtins(comm.plan)},
        attempt=env.attempt,
        launch=env.launch,
        on_event=reporter.checkpoint,
    )
    return comm, checkpoints


def stored_plan_for(options: Options, env: RankEnvironment, first: dict[str, Any] | None) -> Plan | None:
    """The last plan of the job with as many ranks and nodes as it has now."""
    kept = [record.plan for record in stored_plans(options.checkpoint_dir) if "collectives" in record.plan]
    plans = [stored_as(Plan, one.get("collectives"), options) for one in ([] if first is None else [first]) + kept]
    fitting = [plan for plan in plans if (plan.world_size, plan.nodes) == (env.world_size, env.nodes)]
    return fitting[-1] if fitting else None


def restore(job: Job) -> tuple[int, int]:
    """Puts the newest valid checkpoint in place. Returns the steps that are done and the position in the sample
    stream, zeros for a fresh start. Collective."""
    started_ns = job.clock.now_ns()
    restored = job.checkpoints.restore()
    steps_done = position = 0
    if restored is not None:
        values = load_into(restored.shared, restored.values, job.model.module, job.optimizer)
        progress = stored_as(Progress, values, job.options)
        if progress.corpus != job.corpus.fingerprint:
            raise UsageError(
                f"{job.options.checkpoint_dir} was trained on another corpus than the one in {job.options.corpus_dir}; "
                "give the --corpus-dir that it began with, or a fresh --checkpoint-dir"
            )
        steps_done, position = restored.step, job.sampler.resume(progress.sampler)
        if restored.own is not None:  # None: this rank is one more than the saving job had
            load_rng(restored.own)
    job.reporter.resume(
        ResumeReport(
            rank=job.env.rank,
            attempt=job.env.attempt,
            step=steps_done,
            checkpoint=restored.name if restored else None,
            passed_over=restored.passed_over if restored else (),
            load_ns=job.clock.now_ns() - started_ns,
        )
    )
    say(job, f"resumed from {restored.name}" if restored else f"{job.corpus}; starting afresh")
    return steps_done, position


def stored_as(kind: type[T], value: object, options: Options) -> T:
    try:
        return convert(value, kind)
    except msgspec.ValidationError as error:
        raise UsageError(
            f"{options.checkpoint_dir} was not written by this script ({error}); give a fresh --checkpoint-dir"
        ) from error


def train(job: Job, steps_done: int, position: int) -> None:
    """Steps `steps_done + 1` to the last, a checkpoint whenever one is due, and one at the end or before a
    suspension."""
    options, env = job.options, job.env
    with PrefetchLoader(
        job.windows, job.sampler, rank=env.rank, world_size=env.world_size, position=position
    ) as loader:
        for step in range(steps_done + 1, options.steps + 1):
            started_ns = job.clock.now_ns()
            before = job.model.stats()
            batch = next(loader)
            loss = train_step(job, step, batch)
            trained_ns = job.clock.now_ns()
            after = job.model.stats()
            last = step == options.steps
            leaves = not last and should_suspend(step)
            job.reporter.step(
                StepReport(
                    rank=env.rank,
                    attempt=env.attempt,
                    step=step,
                    samples=batch.samples,
                    tokens=batch.samples * options.sequence_length,
                    loss=loss,
                    productive_ns=trained_ns - started_ns,
                    checkpoint_ns=save_if_due(job, step, loader, wait=last or leaves),
                    allreduce_bytes=after.reduced_bytes - before.reduced_bytes,
                    allreduce_ns=after.in_flight_ns - before.in_flight_ns,
                )
            )
            if step % _PRINT_EVERY_STEPS == 0 or step in (1, options.steps):
                say(job, f"step {step} of {options.steps}, loss {loss:.4f}, {format_duration(trained_ns - started_ns)}")
            if leaves:
                job.checkpoints.close()
                go_suspend()
            time.sleep(max(0, options.least_step_ns - (job.clock.now_ns() - started_ns)) / SECOND)


def train_step(job: Job, step: int, batch: Batch) -> float:
    """One optimizer step. Returns the mean loss over the tokens of the whole batch, the same bits on every rank."""
    inputs, targets = batch.tensors
    tokens = job.options.global_batch * job.options.sequence_length
    summed = job.model(inputs, targets)
    # Gradients are averaged over ranks: this factor makes them those of the mean over all tokens, also where the
    # batch does not divide evenly among the ranks.
    (summed * (job.env.world_size / tokens)).backward()
    norm = float(torch.nn.utils.clip_grad_norm_(job.model.parameters(), _MAX_GRADIENT_NORM))
    if not math.isfinite(norm):  # every rank sees the same: before the weights take it and push out good checkpoints
        job.checkpoints.wait()  # all ranks live, and the one in flight is good: somebody goes on from it
        raise PermanentError(f"the gradients of step {step} have norm {norm}: the run diverged; try a lower --lr")
    for group in job.optimizer.param_groups:
        group["lr"] = learning_rate(step, job.options.learning_rate)
    job.optimizer.step()
    job.optimizer.zero_grad()
    total = np.array([summed.item()], dtype=np.float64)
    job.comm.allreduce(total)
    return float(total[0]) / tokens


def save_if_due(job: Job, step: int, loader: PrefetchLoader, *, wait: bool) -> int:
    """Begins a checkpoint when it is time; `wait`: in any case, and waits for it. Returns how long that held training
    up, ns."""
    started_ns = job.clock.now_ns()
    if not wait and not job.checkpoints.due(step, started_ns):
        return 0
    progress = Progress(job.corpus.fingerprint, loader.state())
    state = capture(job.model.module, job.optimizer, values=msgspec.to_builtins(progress))
    handle = job.checkpoints.save(step, state, blocking=wait)
    if wait:
        handle.result()  # one that fails in mid-run is made up for by the next; nothing makes up for this one
    return job.clock.now_ns() - started_ns


def learning_rate(step: int, peak: float) -> float:
    """Linear warm-up, then constant: it does not depend on where the run is to end, so a run can be prolonged."""
    return peak * min(1.0, step / _WARM_UP_STEPS)


def say(job: Job, line: str) -> None:
    """For people, where no launcher shows the progress."""
    if job.env.rank == 0 and job.env.control is None:
        print(line, flush=True)


def parse_options(arguments: Sequence[str] | None, env: RankEnvironment) -> Options:
    """Options of the command line; directories default to ones below the run's. Raises `UsageError`."""
    base = env.run_dir or os.path.abspath("gpt-run")
    parser = argparse.ArgumentParser(prog="train_gpt", description="Train a small GPT on the Python standard library.")
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--global-batch", type=int, default=16, help="samples per step, all ranks together")
    parser.add_argument("--sequence-length", type=int, default=128, help="tokens per sample")
    parser.add_argument("--lr", type=float, default=3e-3, help="learning rate after warm-up")
    parser.add_argument("--preset", choices=sorted(PRESETS), default="small", help="size of the model")
    place = "a directory, or ff://… of 3FS"
    parser.add_argument("--corpus-dir", default=os.path.join(base, "corpus"), help=place)
    parser.add_argument("--checkpoint-dir", default=os.path.join(base, "checkpoints"), help=place)
    parser.add_argument("--checkpoint-every", type=int, default=20, help="steps")
    parser.add_argument("--keep", type=int, default=2, help="checkpoints")
    parser.add_argument("--timeout", default="30s", help="how long a collective may wait for another rank")
    parser.add_argument("--least-step", default="0s", help="wait after a step that took less, to be watched")
    given = parser.parse_args(arguments)
    for name in ("steps", "global_batch", "sequence_length", "checkpoint_every", "keep"):
        if getattr(given, name) < 1:
            raise UsageError(f"--{name.replace('_', '-')} {getattr(given, name)} must be at least 1")
    if not 0 < given.lr < 1:
        raise UsageError(f"--lr {given.lr} must be above 0 and below 1")
    if given.global_batch < env.world_size:
        raise UsageError(
            f"--global-batch {given.global_batch} is less than the world size, {env.world_size}: "
            "every rank needs at least one sample"
        )
    return Options(
        steps=given.steps,
        seed=given.seed,
        global_batch=given.global_batch,
        sequence_length=given.sequence_length,
        learning_rate=given.lr,
        preset=given.preset,
        corpus_dir=place_of(given.corpus_dir),
        checkpoint_dir=place_of(given.checkpoint_dir),
        checkpoint_every=given.checkpoint_every,
        keep=given.keep,
        timeout_ns=parse_duration(given.timeout),
        least_step_ns=parse_duration(given.least_step),
    )


def place_of(path: str) -> str:
    return path if is_remote(path) else os.path.abspath(path)


if __name__ == "__main__":
    sys.exit(main())
