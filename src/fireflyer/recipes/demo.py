"""The demonstration: train a GPT on real text, lose a node in mid-run, finish anyway, prove that nothing was lost.

Two jobs with the same seed run one after the other on two nodes of two ranks each. The first is left alone. In the
second the launcher kills node 1 (its supervisor and its ranks, with SIGKILL) when step `kill_step` is reported; the
gang is started again and resumes from its newest checkpoint. The demonstration succeeds only if both jobs finish, the
first in one attempt, all ranks of the second resumed from the newest checkpoint that was committed, and every loss that
any rank of either job reported, also of steps that were computed twice, is bitwise that of the first job's curve.
"""

from __future__ import annotations

import math
import os
import shutil
import struct
from collections.abc import Callable, Mapping, Sequence

import msgspec

from fireflyer.analytics import Failure, JobAccount, LossPoint, account
from fireflyer.base.errors import Exists, UsageError
from fireflyer.base.events import CheckpointReport, Logged, ResumeReport, StepReport, decode_log
from fireflyer.checkpoint.core.names import candidates
from fireflyer.cluster import Fault, JobResult, JobSpec, RankLine, run_job
from fireflyer.recipes.corpus import build_corpus

__all__ = ["CurveComparison", "DemoResult", "DemoSpec", "compare_curves", "judge", "run_demo"]


class DemoSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Demonstration: its steps, checkpoints, nodes, and the failure it plants."""

    directory: str
    """Everything is written beneath it; the runs of an earlier demonstration are replaced, its corpus is reused."""
    steps: int = 120
    kill_step: int = 70
    checkpoint_every: int = 20
    kill_node: int = 1
    nodes: int = 2
    ranks_per_node: int = 2
    seed: int = 0
    corpus_bytes: int = 10_000_000

    def __post_init__(self) -> None:
        if not 0 < self.checkpoint_every < self.kill_step < self.steps:
            raise UsageError(
                f"--checkpoint-every {self.checkpoint_every} --kill-step {self.kill_step} --steps {self.steps}: each "
                "must be less than the next, so that the node dies after a checkpoint and before the end"
            )
        if not 0 <= self.kill_node < self.nodes:
            raise UsageError(f"kill_node={self.kill_node} is out of range; nodes count from 0 to {self.nodes - 1}")


class CurveComparison(msgspec.Struct, frozen=True):
    """Two loss curves, step by step, as bits of their float64 values."""

    first_step: int
    last_step: int
    compared: int
    first_difference: int | None
    """The first step whose loss differs, is not finite, or is missing from one curve; None when all are equal."""

    @property
    def equal(self) -> bool:
        return self.compared > 0 and self.first_difference is None


class DemoResult(msgspec.Struct, frozen=True, kw_only=True):
    """Outcome of a demonstration, and what it has checked."""

    ok: bool
    facts: tuple[tuple[str, str], ...]
    """Facts that the report shows beside its own figures: (name, value), in order."""
    problems: tuple[str, ...]
    """Reasons why `ok` is false, one line each; empty: it is true."""
    undisturbed: JobResult
    disturbed: JobResult | None
    disturbed_log: tuple[Logged, ...] = ()
    undisturbed_log: tuple[Logged, ...] = ()


def _pack(loss: float) -> bytes:
    return struct.pack("<d", loss)


def _bits(losses: Sequence[LossPoint]) -> dict[int, bytes]:
    """Without steps that have a loss that is not finite, or two different ones."""
    found: dict[int, bytes] = {}
    unclear: set[int] = set()
    for point in losses:
        bits = _pack(point.loss)
        if not math.isfinite(point.loss) or found.setdefault(point.step, bits) != bits:
            unclear.add(point.step)
    return {step: bits for step, bits in found.items() if step not in unclear}


def compare_curves(
    ours: Sequence[LossPoint], reference: Sequence[LossPoint], *, first: int, last: int
) -> CurveComparison:
    """Compares steps `first` to `last`, both included. A step that either curve lacks, or for which it has several
    losses or one that is not finite, counts as a difference."""
    left, right = _bits(ours), _bits(reference)
    compared = 0
    for step in range(first, last + 1):
        if left.get(step) is None or left.get(step) != right.get(step):
            return CurveComparison(first, last, compared, step)
        compared += 1
    return CurveComparison(first, last, compared, None)


def _job(spec: DemoSpec, name: str, corpus: str, inject: tuple[Fault, ...]) -> JobSpec:
    run_dir = os.path.join(spec.directory, name)
    if os.path.isfile(os.path.join(run_dir, "events.jsonl")):
        shutil.rmtree(run_dir)
    elif os.path.lexists(run_dir):
        raise Exists(f"{run_dir} exists and is not a run of an earlier demonstration; give another --directory")
    options: Mapping[str, object] = {
        "--steps": spec.steps,
        "--seed": spec.seed,
        "--checkpoint-every": spec.checkpoint_every,
        "--checkpoint-dir": os.path.join(run_dir, "checkpoints"),
        "--corpus-dir": corpus,
    }
    return JobSpec(
        script="fireflyer.recipes.train_gpt",
        kind="module",
        args=tuple(str(part) for pair in options.items() for part in pair),
        run_dir=run_dir,
        nodes=spec.nodes,
        ranks_per_node=spec.ranks_per_node,
        max_restarts=1,
        name=name,
        devices="cpu",
        inject=inject,
    )


def _read_log(result: JobResult) -> list[Logged]:
    with open(result.events_path, "rb") as file:
        return decode_log(file, name=result.events_path)


def judge(
    spec: DemoSpec, undisturbed: Sequence[Logged], disturbed: Sequence[Logged]
) -> tuple[list[tuple[str, str]], list[str]]:
    """(facts, problems) of the logs of two finished jobs; the demonstration succeeded if there are no problems."""
    reference, ours = account(undisturbed), account(disturbed)
    facts: list[tuple[str, str]] = []
    injected = [failure for failure in ours.failures if failure.injected]
    if not injected or injected[0].resumed_step is None:
        return facts, ["the node was not killed, or the job did not resume from a checkpoint after it"]
    failure, resumed = injected[0], injected[0].resumed_step
    facts.append(("node killed", f"node {spec.kill_node} (its supervisor and its ranks) at step {failure.broken_step}"))
    facts.append(("resumed from", f"step {resumed} ({failure.resumed_checkpoint})"))
    problems = [f"the undisturbed run was restarted: {one.reason}" for one in reference.failures]
    problems += _judge_start(failure, disturbed)
    comparison = compare_curves(ours.losses, reference.losses, first=resumed + 1, last=spec.steps)
    if comparison.equal:
        steps = f"steps {resumed + 1} to {spec.steps}"
        facts.append(("loss curve", f"{steps} are bitwise those of the undisturbed run with the same seed"))
    else:
        problems.append(f"the loss curve differs from the undisturbed run, first at step {comparison.first_difference}")
    before = compare_curves(ours.losses, reference.losses, first=1, last=resumed) if resumed else None
    if before is not None and not before.equal:
        problems.append(f"the loss curve before the failure differs, first at step {before.first_difference}")
    for job, log in (("undisturbed", undisturbed), ("disturbed", disturbed)):
        problems += _judge_reports(job, log, reference) + _judge_ranks(spec, job, log)
    if ours.losses and ours.losses[-1].loss >= ours.losses[0].loss:
        problems.append("the loss did not fall")
    return facts, problems


def _judge_start(failure: Failure, disturbed: Sequence[Logged]) -> list[str]:
    """What is wrong with the checkpoint that the job resumed from after `failure`."""
    resumed, name = failure.resumed_step or 0, failure.resumed_checkpoint
    if resumed == 0:
        return ["the job restarted at step 0: there was no checkpoint to resume from"]
    events = [entry.event for entry in disturbed]
    problems: list[str] = []
    starts = {(event.attempt, event.step, event.checkpoint) for event in events if isinstance(event, ResumeReport)}
    if len(starts) > len({attempt for attempt, *_ in starts}):
        problems.append("ranks of one attempt resumed from different checkpoints")
    if [one.step for one in candidates([name or ""])] != [resumed]:
        problems.append(f"the job resumed at step {resumed} from {name}, which is not a checkpoint of that step")
    saves = [event for event in events if isinstance(event, CheckpointReport) and event.error is None]
    newest = max((event.step for event in saves if event.attempt <= failure.attempt), default=0)
    if resumed < newest:
        problems.append(f"the job resumed from step {resumed} although the checkpoint of step {newest} was committed")
    return problems


def _judge_reports(job: str, log: Sequence[Logged], reference: JobAccount) -> list[str]:
    """The first loss that a rank reported which is not that of the reference: an account keeps one for each step."""
    curve = _bits(reference.losses)
    for entry in log:
        event = entry.event
        if isinstance(event, StepReport) and event.loss is not None and curve.get(event.step) != _pack(event.loss):
            where = f"rank {event.rank} in attempt {event.attempt}"
            return [f"a loss of the {job} run is not that of the undisturbed curve: {where} at step {event.step}"]
    return []


def _judge_ranks(spec: DemoSpec, job: str, log: Sequence[Logged]) -> list[str]:
    """Ranks of which nobody knows what they computed: equal losses of the others would prove nothing about them."""
    events = [entry.event for entry in log]
    last = max((event.attempt for event in events if isinstance(event, ResumeReport)), default=0)
    started = {event.rank for event in events if isinstance(event, ResumeReport) and event.attempt == last}
    steps = [event for event in events if isinstance(event, StepReport) and event.loss is not None]
    ended = {event.rank for event in steps if event.attempt == last and event.step == spec.steps}
    silent = sorted(set(range(spec.nodes * spec.ranks_per_node)) - (started & ended))
    if not silent:
        return []
    return [f"rank {silent[0]} of the {job} run reported no start or no loss of step {spec.steps}"]


async def run_demo(
    spec: DemoSpec,
    *,
    on_phase: Callable[[str], None],
    on_entry: Callable[[Logged], None],
    on_line: Callable[[RankLine], None],
) -> DemoResult:
    """Runs the demonstration; `on_phase` gets a sentence before each part, the others are `run_job`'s callbacks.

    Raises `UsageError` and `Exists` for what cannot start. What happens to the jobs is in the result.
    """
    undisturbed_job = _job(spec, "undisturbed", os.path.join(spec.directory, "corpus"), ())
    disturbed_job = _job(
        spec,
        "disturbed",
        os.path.join(spec.directory, "corpus"),
        (Fault("kill-node", spec.kill_node, spec.kill_step),),
    )
    on_phase("preparing the corpus: the sources of the Python standard library")
    corpus = build_corpus(os.path.join(spec.directory, "corpus"), max_bytes=spec.corpus_bytes)
    on_phase(f"corpus: {corpus}")
    on_phase(f"run 1 of 2: undisturbed, {spec.nodes} nodes of {spec.ranks_per_node} ranks, {spec.steps} steps")
    undisturbed = await run_job(undisturbed_job, on_entry=on_entry, on_line=on_line)
    if undisturbed.exit_code != 0:
        problem = f"the undisturbed run failed: {undisturbed.reason}"
        return DemoResult(ok=False, facts=(), problems=(problem,), undisturbed=undisturbed, disturbed=None)
    on_phase(f"run 2 of 2: the same, and node {spec.kill_node} is killed at step {spec.kill_step}")
    disturbed = await run_job(disturbed_job, on_entry=on_entry, on_line=on_line)
    log, reference = _read_log(disturbed), _read_log(undisturbed)
    if disturbed.exit_code != 0:
        facts: list[tuple[str, str]] = []
        problems = [f"the disturbed run failed: {disturbed.reason}"]
    else:
        facts, problems = judge(spec, reference, log)
    return DemoResult(
        ok=not problems,
        facts=tuple(facts),
        problems=tuple(problems),
        undisturbed=undisturbed,
        disturbed=disturbed,
        disturbed_log=tuple(log),
        undisturbed_log=tuple(reference),
    )
