"""What must never be where Slurm places: beside what holds for every engine, jobs and their rows fit each other."""

from __future__ import annotations

import re

from tests.support.platform.hosts import RanksLike
from tests.support.platform.oracle import PlatformOracle
from tests.support.platform.slurm.controller import OURS, Controller
from tests.support.platform.slurm.steps import JobTokens

from fireflyer.cluster.core.platform.store.rows import JOBS, NODES, JobRow, JobState, RunRow, TaskRow
from fireflyer.cluster.core.slurm.request import job_token_name, node_of, slot_name
from fireflyer.cluster.schema.tasks import FINISHED
from fireflyer.kvstore.core.fenced import Transact
from fireflyer.sim import World

__all__ = ["SlurmOracle"]


class SlurmOracle(PlatformOracle):
    def __init__(self, world: World) -> None:
        super().__init__(world)
        self.controller: Controller | None = None
        self.tokens: JobTokens | None = None
        self.jobs: dict[tuple[int, int], JobRow] = {}
        self.names: dict[str, tuple[int, int]] = {}
        self.stopped_in_slurm = 0

    @property
    def slurm(self) -> Controller:
        assert self.controller is not None
        return self.controller

    # --- commits ---

    def committed(self, order: Transact) -> None:
        for key, value in order.write:
            if key.startswith(JOBS.prefix):
                if value is None:
                    place = key[len(JOBS.prefix) :]
                    row = self.jobs.pop((int.from_bytes(place[:8], "big"), int.from_bytes(place[8:], "big")))
                    assert row.state is JobState.ENDED, f"job {row.slurm_id} is forgotten before it has ended"
                else:
                    self._job(JOBS.decode(key, value))
        super().committed(order)

    def _job(self, row: JobRow) -> None:
        key = row.task, row.number
        old = self.jobs.get(key)
        assert self.names.setdefault(row.name, key) == key, f"{row.name} is the name of two jobs"
        if old is None:
            others = [job for job in self.jobs.values() if job.task == row.task]
            assert all(job.state is JobState.ENDED for job in others), f"task {row.task} has two jobs"
        else:
            assert old.state is not JobState.ENDED or row == old, f"job {row.name} lives again"
            same = old.slurm_id in (0, row.slurm_id)
            assert same, f"job {row.name} was {old.slurm_id}, and is {row.slurm_id}"
            assert old.run in (None, row.run), f"job {row.name} serves two runs"
            assert old.leave in (None, row.leave), f"agents of {row.name} are told two exit codes"
        self.jobs[key] = row

    def _check_start(self, run: RunRow, *, claimed: bool) -> None:
        (job,) = [job for job in self.jobs.values() if (job.task, job.run) == (run.task, run.number)]
        slots = tuple(slot_name(node, job_token_name(job.task, job.number)) for node in job.nodes)
        assert run.nodes == slots, f"run {run.number} of task {run.task} has other nodes than its job"
        assert self.specs[run.task].least_nodes <= len(slots) <= self.specs[run.task].most_nodes
        assert job.state is JobState.RUNNING

    def _check_guarantee(self, run: RunRow) -> None:
        job = next(job for job in self.jobs.values() if (job.task, job.run) == (run.task, run.number))
        assert job.slurm_id in self.slurm.preempted, f"task {run.task} is interrupted, and Slurm does not preempt it"

    def _look_at_policy(self, time_ns: int) -> None:
        """Order, limits and reservations are Slurm's."""

    def _task(self, key: bytes, value: bytes | None) -> None:
        super()._task(key, value)
        if value is not None:
            self._check_stopped(self.tasks[int.from_bytes(key[-8:], "big")])

    def _check_stopped(self, row: TaskRow) -> None:
        found = re.fullmatch(r"its Slurm job (\d+) was cancelled in Slurm", row.stopping)
        if found is not None:
            assert int(found[1]) in self.slurm.by_users, f"task {row.id} is stopped, and nobody cancelled its job"
            self.stopped_in_slurm += row.state is FINISHED

    # --- processes ---

    def started(self, ranks: RanksLike) -> None:
        super().started(ranks)
        assert self.grounds is not None
        here = node_of(ranks.host.name)[0]
        for other in self.grounds.living_ranks():
            same = other is ranks or node_of(other.host.name)[0] != here
            assert same, f"{here} runs two gangs"

    # --- the end ---

    def nothing_left(self) -> str:
        """Of jobs; empty: nothing."""
        assert self.store is not None
        assert self.tokens is not None
        rows = [row.name for row in self.jobs.values() if row.state is not JobState.ENDED]
        jobs = [job.id for job in self.slurm.jobs.values() if job.uid == OURS and (job.lives or job.parts)]
        steps = [name for name, machine in self.slurm.machines.items() if machine.steps]
        nodes = [key for key in self.store.rows if key.startswith(NODES.prefix)]
        left = {"rows": rows, "jobs": jobs, "steps": steps, "nodes": nodes, "joined": list(self.tokens.joined)}
        return str(left) if any(left.values()) else ""

    def check_end(self) -> None:
        super().check_end()
        assert not self.nothing_left(), self.nothing_left()
        twice = [job.name for job in self.slurm.jobs.values() if job.uid == OURS and job.lives]
        assert not twice, twice
