"""Facts of a soak that never ran, in which every check holds."""

from __future__ import annotations

from typing import Final

import msgspec
from tests.support.jobs.whole_facts import RunLog, loss_at, run_of

from fireflyer.base.events import AttemptFailed, JobFinished, RankExited
from fireflyer.base.units import MS, SECOND
from fireflyer.recipes.soak.facts import FaultFact, SoakFacts, WriterFacts
from fireflyer.recipes.soak.plan import SoakPlan
from fireflyer.recipes.testbed.facts import FileFact, Reference, StorageSample, TaskFacts

__all__ = ["SOAK", "good_soak"]

SOAK: Final = SoakPlan(seed=5, minutes=1, steps=60)
SHARDS: Final = {"shard-00000-of-00002.safetensors": "a" * 64, "shard-00001-of-00002.safetensors": "b" * 64}


def good_soak() -> SoakFacts:
    """The first task lost a node in step 36, with its launcher, and went on from step 30 in another run; the second
    was not disturbed."""
    plans = (SOAK.task(1), SOAK.task(2))
    log = RunLog(plans[0])
    log.attempt(0, 0, 35)
    killed_ns = 100 * MS + log.now_ns + 20 * MS
    before = run_of(0, ("agent-1", "agent-2"), 0, log, "infrastructure")
    log = RunLog(plans[0])
    log.attempt(0, 30, 60)
    log.log(JobFinished(0, "all ranks exited with 0"))
    after = run_of(1, ("agent-1", "agent-2"), before.over_ns + SECOND, log, "succeeded")
    log = RunLog(plans[1])
    log.attempt(0, 0, 20)
    log.log(RankExited(1, 0, 137, "killed"), AttemptFailed(0, "rank 1 was killed", True))
    log.attempt(1, 20, 60)
    log.log(JobFinished(0, "all ranks exited with 0"))
    other = run_of(0, ("agent-3", "agent-4"), 0, log, "succeeded")
    files = tuple(FileFact(path=f"/soak/append/{n}", bytes=10 + n, digest=f"{n:064d}") for n in range(3))
    end_ns = max(after.over_ns, other.over_ns) + SECOND
    return SoakFacts(
        seed=SOAK.seed,
        faults=tuple(
            msgspec.structs.replace(fault, allowed_ns=120 * SECOND)
            for fault in (
                FaultFact(number=1, kind="storage-kill", target="2", at_ns=SECOND, reached=1, released_ns=SECOND,
                          recovered_ns=3 * SECOND),
                FaultFact(number=2, kind="node-kill", target="agent-1", at_ns=killed_ns, reached=5,
                          released_ns=killed_ns, recovered_ns=killed_ns + 9 * SECOND, task="task-0001", step=35),
                FaultFact(number=3, kind="storage-kill", target="1", at_ns=5 * SECOND, reached=1,
                          released_ns=5 * SECOND, recovered_ns=6 * SECOND, failed=True),
            )
        ),
        left_out=(),
        plans=plans,
        tasks=tuple(
            TaskFacts(
                name=plan.name,
                user=plan.user,
                priority=plan.priority,
                task=number,
                submitted_ns=0,
                ended_ns=runs[-1].over_ns,
                state="finished",
                outcome="succeeded",
                reason="all ranks exited with code 0",
                account={"queue_ns": SECOND, "productive_ns": runs[-1].over_ns - SECOND},
                runs=runs,
            )
            for number, (plan, runs) in enumerate(zip(plans, ((before, after), (other,)), strict=True), 1)
        ),
        references={
            plan.name: Reference(
                losses={n: loss_at(plan, n) for n in range(1, plan.steps + 1)}, shards=SHARDS, cached=False
            )
            for plan in plans
        },
        shards={plan.name: SHARDS for plan in plans},
        writers=(
            WriterFacts(name="append", acknowledged=9, bytes=900, repeated=1, errors=("Timeout: no answer",),
                        longest_ns=2 * SECOND, reads=8, wrong_reads=()),
        ),
        stored=files,
        twins=files,
        storage=StorageSample(at_ns=end_ns, alive=(1, 2, 3), incarnations=(1, 2, 3), chains=3, whole=3, serving=3),
        fsck=("6 files in 3 directories, 8 chunks: 0 faults.",),
        fsck_code=0,
        begin_ns=SECOND // 2,
        end_ns=end_ns,
    )  # fmt: skip
