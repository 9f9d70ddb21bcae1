"""Whatever a log holds, its account sums to the wall time; and of an honest log it is the truth."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import pairwise

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.jobs.job_logs import Break, JobScript, make_log

from fireflyer.analytics.accounting import JobAccount, account
from fireflyer.analytics.timeline import read_log
from fireflyer.base.events import (
    AttemptFailed,
    AttemptStarted,
    CheckpointReport,
    FaultInjected,
    JobFinished,
    JobStarted,
    Logged,
    NodeLost,
    RankExited,
    ResumeReport,
    StepReport,
)
from fireflyer.base.units import MS, SECOND

NS = st.integers(-SECOND, 100 * SECOND)
INSTANT = st.integers(0, 100 * SECOND)
RANK = st.integers(-1, 4)
ATTEMPT = st.integers(0, 3)
STEP = st.one_of(st.integers(-2, 12), st.sampled_from([10**12, -(10**12)]))

EVENTS = st.one_of(
    st.builds(
        StepReport,
        rank=RANK,
        attempt=ATTEMPT,
        step=STEP,
        samples=NS,
        tokens=NS,
        loss=st.one_of(st.none(), st.floats()),
        productive_ns=NS,
        checkpoint_ns=NS,
        allreduce_bytes=NS,
        allreduce_ns=NS,
    ),
    st.builds(ResumeReport, rank=RANK, attempt=ATTEMPT, step=STEP, checkpoint=st.none()),
    st.builds(
        CheckpointReport,
        rank=RANK,
        attempt=ATTEMPT,
        step=STEP,
        bytes=NS,
        stall_ns=NS,
        write_ns=NS,
        error=st.sampled_from([None, "disk full"]),
    ),
    st.builds(
        JobStarted,
        job=st.just("j"),
        command=st.just(()),
        nodes=st.just(2),
        ranks_per_node=st.just(2),
        max_restarts=st.just(3),
        wall_time_s=st.just(0.0),
    ),
    st.builds(AttemptStarted, attempt=ATTEMPT),
    st.builds(NodeLost, node=st.just(1), attempt=ATTEMPT, reason=st.just("gone")),
    st.builds(RankExited, rank=RANK, attempt=ATTEMPT, exit_code=st.sampled_from([0, 1, 137])),
    st.builds(AttemptFailed, attempt=ATTEMPT, reason=st.just("it broke"), restarting=st.booleans()),
    st.builds(FaultInjected, what=st.just("kill-node=1"), attempt=ATTEMPT, step=STEP),
    st.builds(JobFinished, exit_code=st.sampled_from([0, 1]), reason=st.just("over")),
)
LOGS = st.lists(st.builds(Logged, at_ns=INSTANT, event=EVENTS), max_size=60)


def check_invariants(result: JobAccount) -> None:
    parts = msgspec.structs.asdict(result.parts)
    assert all(spent_ns >= 0 for spent_ns in parts.values()), parts
    assert result.parts.total_ns == result.wall_ns
    blocks = result.blocks
    assert sum(block.end_ns - block.start_ns for block in blocks) == result.wall_ns
    assert all(earlier.end_ns == later.start_ns for earlier, later in pairwise(blocks))
    steps = [point.step for point in result.losses]
    assert steps == sorted(set(steps))


@given(LOGS)
@settings(max_examples=400)
def test_parts_of_any_log_sum_to_its_wall_time(log: Sequence[Logged]) -> None:
    check_invariants(account(log))


@given(LOGS)
@settings(max_examples=200)
def test_progress_of_any_attempt_rises(log: Sequence[Logged]) -> None:
    for attempt in read_log(log).attempts:
        steps = [step for step, _ in attempt.progress]
        instants = [at_ns for _, at_ns in attempt.progress]
        assert steps == sorted(set(steps))
        assert instants == sorted(instants)


@st.composite
def job_scripts(draw: st.DrawFn) -> JobScript:
    count = draw(st.integers(0, 4))
    breaks = tuple(
        Break(
            after_step=draw(st.integers(0, 40)),
            into_ns=draw(st.integers(0, 300 * MS)),
            detection_ns=draw(st.integers(0, 2 * SECOND)),
            before_ready=draw(st.booleans()),
            node=draw(st.sampled_from([0, 1, None])),
            injected=draw(st.booleans()),
        )
        for _ in range(count)
    )
    return JobScript(
        nodes=draw(st.integers(1, 3)),
        ranks_per_node=draw(st.integers(1, 3)),
        steps=draw(st.integers(1, 40)),
        checkpoint_every=draw(st.integers(1, 50)),
        step_ns=draw(st.integers(10_000, 500 * MS)),
        gap_ns=draw(st.integers(10_000, 20 * MS)),
        stall_ns=draw(st.integers(0, 50 * MS)),
        start_ns=draw(st.integers(0, 5 * SECOND)),
        tail_ns=draw(st.integers(0, SECOND)),
        breaks=breaks,
        finish=draw(st.booleans()),
    )


@given(job_scripts())
@settings(max_examples=200)
def test_account_of_an_honest_log_is_the_truth(script: JobScript) -> None:
    log, expected = make_log(script)
    result = account(log)
    check_invariants(result)
    parts = msgspec.structs.asdict(result.parts)
    assert parts.pop("unknown_ns") == 0
    assert parts == expected
    assert result.last_step == script.steps
    assert [point.step for point in result.losses] == list(range(1, script.steps + 1))
    assert len(result.failures) == len(script.breaks)


@given(job_scripts(), st.integers(0, 2**32))
@settings(max_examples=100)
def test_order_and_repetition_of_entries_do_not_matter(script: JobScript, seed: int) -> None:
    log, _ = make_log(script)
    rng = random.Random(seed)
    shuffled = log + rng.sample(log, k=len(log) // 3)
    rng.shuffle(shuffled)
    assert account(shuffled) == account(log)


@given(job_scripts(), st.data())
@settings(max_examples=100)
def test_a_log_that_a_kill_cut_short_still_sums_and_never_shrinks(script: JobScript, data: st.DataObject) -> None:
    log, _ = make_log(script)
    cut = data.draw(st.integers(0, len(log)))
    before, after = account(log[:cut]), account(log)
    check_invariants(before)
    assert before.wall_ns <= after.wall_ns
    assert before.attempts <= max(1, after.attempts)
    assert len(before.failures) <= len(after.failures)


@given(job_scripts(), st.integers(0, 2**32))
@settings(max_examples=100)
def test_lost_step_reports_never_hide_a_step_that_a_later_report_proves(script: JobScript, seed: int) -> None:
    rng = random.Random(seed)
    log, _ = make_log(script)
    kept = [
        entry
        for entry in log
        if not isinstance(entry.event, StepReport) or entry.event.step == script.steps or rng.random() < 0.8
    ]
    result = account(kept)
    check_invariants(result)
    assert result.last_step == script.steps
