"""One round of the loop that asks Slurm: what is to be done is asked for when what Slurm said is committed, not sooner,
and nothing waits for time to pass."""

from __future__ import annotations

import asyncio
from typing import Any

from tests.support.loops import on_loop
from tests.support.platform.desk import Desk, spec

from fireflyer.base.errors import Unreachable
from fireflyer.cluster.agent.accounts import Accounts
from fireflyer.cluster.core.platform.messages import SlurmFollowed
from fireflyer.cluster.core.platform.slurm.messages import (
    Cancel,
    JobSubmitted,
    SlurmEvent,
    SlurmSaid,
    SlurmSettings,
    Submit,
    WatchedJob,
    Work,
)
from fireflyer.cluster.core.slurm.output import SlurmNode
from fireflyer.cluster.core.slurm.request import JobRequest
from fireflyer.cluster.manager.config import SlurmConfig
from fireflyer.cluster.manager.slurm.loop import SlurmLoop
from fireflyer.cluster.manager.slurm.records import SlurmRecords
from fireflyer.cluster.schema.tasks import Program, TaskSpec


class Commands:
    """Of a Slurm that has one node and no jobs."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.cancelled: list[int] = []
        self.submitted = 0
        self.has_cancelled = asyncio.Event()

    async def nodes(self) -> tuple[SlurmNode, ...]:
        self.asked.append("nodes")
        return (SlurmNode(name="n1", state="idle"),)

    async def jobs(self, _names: list[str]) -> tuple[()]:
        self.asked.append("jobs")
        return ()

    async def submit(self, *_arguments: object) -> int:
        self.submitted += 1
        return 7

    async def preempted(self, _names: list[str]) -> dict[int, int]:
        return {}

    async def cancel(self, slurm_id: int, _name: str) -> None:
        self.cancelled.append(slurm_id)
        self.has_cancelled.set()


SUBMIT = Submit(
    task=1, number=0, attempt=5, user="ann", job="t1-0", most_nodes=1,
    request=JobRequest(name="ff-1", task=1, spec=TaskSpec(name="t", program=Program(script="x.py"))),
)  # fmt: skip


class Leader:
    """It commits when the test lets it."""

    def __init__(self) -> None:
        self.told: list[SlurmEvent] = []
        self.is_told = asyncio.Event()
        self.committed = asyncio.Event()
        self.asked_for_work = 0
        self.leads = True
        self.work: tuple[Work, ...] = (Cancel(7, "ff-7", "its task needs it no more"),)

    def slurm_jobs(self) -> tuple[WatchedJob, ...]:
        return ()

    def slurm_work(self) -> tuple[Work, ...]:
        self.asked_for_work += 1
        return self.work

    async def tell_slurm(self, event: SlurmEvent) -> None:
        self.told.append(event)
        self.is_told.set()
        await self.committed.wait()
        if not self.leads:
            raise Unreachable("another manager leads")

    def require_lead(self) -> int:
        return 0


class NoMachines:
    async def retire_jobs(self, _jobs: list[str], _now_s: int) -> None:
        pass

    async def issue_for_job(self, _job: str, _nodes: int, _lifetime_s: int) -> str:
        return "token"


async def others_have_had_their_turns() -> None:
    for _ in range(100):
        await asyncio.sleep(0)


def loop_of(leader: Leader) -> tuple[SlurmLoop, Commands]:
    machines: Any = NoMachines()
    commands: Any = Commands()
    config, records = SlurmConfig(own_user=True), SlurmRecords(commands, "")
    loop = SlurmLoop(config, leader, machines, lambda: (), Accounts(1000), commands=commands, records=records)
    return loop, commands


@on_loop
async def test_what_is_to_be_done_is_asked_for_after_the_commit() -> None:
    leader = Leader()
    loop, commands = loop_of(leader)
    running = asyncio.ensure_future(loop.run())
    try:
        await leader.is_told.wait()
        await others_have_had_their_turns()
        assert not leader.asked_for_work
        leader.committed.set()
        await commands.has_cancelled.wait()
        assert commands.cancelled == [7]
    finally:
        running.cancel()
        await asyncio.wait([running])


@on_loop
async def test_a_manager_that_leads_no_more_does_nothing() -> None:
    leader = Leader()
    loop, commands = loop_of(leader)
    running = asyncio.ensure_future(loop.run())
    try:
        await leader.is_told.wait()
        leader.leads = False
        leader.committed.set()
        await others_have_had_their_turns()
        assert not leader.asked_for_work
        assert not commands.cancelled
    finally:
        running.cancel()
        await asyncio.wait([running])


@on_loop
async def test_nodes_are_asked_for_after_the_jobs_so_that_one_that_is_given_up_is_not_taken_for_heard() -> None:
    leader = Leader()
    leader.committed.set()
    loop, commands = loop_of(leader)
    await loop.turn()
    assert commands.asked == ["jobs", "nodes"]


@on_loop
async def test_what_became_of_a_submission_is_told_before_anything_is_submitted_again() -> None:
    """The manager did not lead for a moment, and leads on: what is committed still wants the job."""
    leader = Leader()
    leader.work = (SUBMIT,)
    loop, commands = loop_of(leader)
    told = leader.tell_slurm

    async def not_now(event: SlurmEvent) -> None:
        if isinstance(event, JobSubmitted):
            raise Unreachable("nobody leads")
        await told(event)

    leader.committed.set()
    leader.tell_slurm = not_now  # type: ignore[method-assign]
    await loop.turn()
    await loop.turn()
    assert commands.submitted == 1
    leader.tell_slurm = told  # type: ignore[method-assign]
    leader.work = ()
    await loop.turn()
    assert leader.told.count(JobSubmitted(1, 0, 7)) == 1


def test_the_machine_says_when_what_slurm_said_is_committed() -> None:
    desk = Desk(slurm=SlurmSettings())
    effects: list[Any] = []
    perform = desk._perform

    def perform_and_note(effect: Any) -> Any:
        effects.append(effect)
        return perform(effect)

    desk._perform = perform_and_note  # type: ignore[method-assign]
    task = desk.task(spec())
    said = SlurmSaid((), (SlurmNode(name="n1", state="idle"),))
    desk.handle(said)
    followed = [effect for effect in effects if isinstance(effect, SlurmFollowed)]
    assert [event for effect in followed for event in effect.events] == [said]
    (work,) = desk.machine.slurm_work(desk.now_ns)
    assert isinstance(work, Submit)
    assert work.task == task
