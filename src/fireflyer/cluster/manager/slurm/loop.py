"""Asks Slurm again and again, tells the machine, and does what it wants done, while this manager leads.

    squeue, sinfo ──> SlurmSaid ──> machine ──> committed rows ──> work ──> sbatch, scancel ──> JobSubmitted

One step after the other, so what Slurm says is never older than what was told before. `sbatch` is started only while
this manager leads, and ends within its time limit: a successor waits for longer than that before it asks again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
import time
from collections.abc import Callable, Collection, Mapping
from typing import Final, Protocol

import msgspec

from fireflyer.base.errors import FireflyerError, PermanentError, PermissionDenied, TransientError
from fireflyer.base.units import MS, SECOND
from fireflyer.cluster.agent.accounts import Account, Accounts
from fireflyer.cluster.core.platform.slurm.messages import (
    Cancel,
    JobNotSubmitted,
    JobSubmitted,
    SlurmEvent,
    SlurmSaid,
    SlurmSilent,
    Submit,
    WatchedJob,
    Work,
)
from fireflyer.cluster.core.slurm.output import Phase, SlurmJob
from fireflyer.cluster.core.slurm.request import JobOrders, arguments, script
from fireflyer.cluster.manager.config import SlurmConfig
from fireflyer.cluster.manager.slurm.commands import SlurmCommands
from fireflyer.cluster.manager.slurm.records import SlurmRecords

__all__ = ["JobMachines", "Leader", "SlurmLoop"]

_log = logging.getLogger(__name__)
_TOKEN_LIFETIME_S: Final = 90 * 24 * 3600
_SUBMITTED_PER_ROUND: Final = 20
"""Then Slurm is asked again what became of them."""


class Leader(Protocol):
    """Of the platform, as this loop uses it. Methods raise `TransientError` where this manager does not lead."""

    def slurm_jobs(self) -> tuple[WatchedJob, ...]: ...

    def slurm_work(self) -> tuple[Work, ...]: ...

    async def tell_slurm(self, event: SlurmEvent) -> None:
        """Returns when what follows from it is committed."""
        ...

    def require_lead(self) -> int: ...


class JobMachines(Protocol):
    """Of `manager.machines`, as this loop uses it. Methods raise `FireflyerError`."""

    async def issue_for_job(self, job: str, nodes: int, lifetime_s: int) -> str: ...

    async def retire_jobs(self, living: Collection[str], now_s: int) -> None: ...


class SlurmLoop:
    def __init__(
        self,
        config: SlurmConfig,
        leader: Leader,
        machines: JobMachines,
        managers: Callable[[], tuple[str, ...]],
        accounts: Accounts,
        *,
        commands: SlurmCommands,
        records: SlurmRecords,
    ) -> None:
        self._config = config
        self._leader = leader
        self._machines = machines
        self._managers = managers
        self._accounts = accounts
        self.commands, self._records = commands, records
        self._untold: JobSubmitted | JobNotSubmitted | None = None
        """What became of the last `sbatch`, until that is committed: else it would be started again."""
        self._was_silent = ""

    async def run(self) -> None:
        """Until it is cancelled."""
        while True:
            try:
                await self.turn()
            except Exception:  # without this loop tasks would wait for ever, and nobody would know why
                _log.exception("the loop of Slurm goes on after an error")
            await asyncio.sleep(self._config.poll_ms * MS / SECOND)

    async def turn(self) -> None:
        """Asks once, and does what is to be done then; nothing, where another manager leads, or none."""
        with contextlib.suppress(TransientError):
            await self._round()

    async def _round(self) -> None:
        await self._tell_outcome()
        watched = self._leader.slurm_jobs()
        await self._leader.tell_slurm(await self._ask(watched))
        await self._retire(watched)
        submitted = 0
        for one in self._leader.slurm_work():
            match one:
                case Submit():
                    await self._submit(one)
                    submitted += 1
                    if submitted >= _SUBMITTED_PER_ROUND:
                        return
                case Cancel():
                    await self._cancel(one)

    async def _ask(self, watched: tuple[WatchedJob, ...]) -> SlurmSaid | SlurmSilent:
        try:
            jobs = await self.commands.jobs([job.name for job in watched])
            runs = [job.name for job in jobs if job.phase is Phase.RUNNING]
            preempted = await self.commands.preempted(runs)
            # After the jobs: one may end because a node is given up, and then that node must not count as heard.
            nodes = await self.commands.nodes()
        except FireflyerError as error:
            if str(error) != self._was_silent:
                self._was_silent = str(error)
                _log.warning("Slurm does not answer reason=%s", error)
            return SlurmSilent(f"Slurm does not answer: {error}")
        self._was_silent = ""
        uids = {job.name: self._uid(job.user) for job in watched}
        ours = [
            msgspec.structs.replace(job, preempt_s=preempted.get(job.id))
            for job in jobs
            if job.uid == uids[job.name]  # anyone may give a job this name
        ]
        lost = _not_shown(watched, ours, uids)
        return SlurmSaid(await self._records.completed(ours, lost), nodes)

    def _uid(self, user: str) -> int | None:
        try:
            account = self._account(user)
        except PermissionDenied:
            return None
        return self._accounts.uid if account is None else account.uid

    def _account(self, user: str) -> Account | None:
        """Raises `PermissionDenied`."""
        return self._accounts.of_user(user, "")

    async def _retire(self, watched: tuple[WatchedJob, ...]) -> None:
        self._leader.require_lead()
        try:
            await self._machines.retire_jobs([job.job for job in watched], int(time.time()))
        except FireflyerError as error:
            _log.warning("nodes of jobs that ended are not retired yet reason=%s", error)

    async def _submit(self, one: Submit) -> None:
        self._leader.require_lead()
        self._untold = _not_submitted(one, "the manager does not know whether Slurm has it", certain=False)
        try:
            account = self._account(one.user)
            token = await self._machines.issue_for_job(one.job, one.most_nodes, _TOKEN_LIFETIME_S)
            orders = JobOrders(token=token, managers=self._managers(), job=one.job)
            python = self._config.python or (sys.executable,)
            self._leader.require_lead()
            slurm_id = await self.commands.submit(arguments(one.request), script(python, orders), account)
        except (PermanentError, TransientError) as error:
            _log.warning("sbatch did not succeed task=%d reason=%s", one.task, error)
            self._untold = _not_submitted(one, str(error), certain=isinstance(error, PermanentError))
        else:
            _log.info("submitted to Slurm task=%d job=%d", one.task, slurm_id)
            self._untold = JobSubmitted(one.task, one.number, slurm_id)
        await self._tell_outcome()

    async def _tell_outcome(self) -> None:
        """Again, where this manager did not lead meanwhile: it may lead on in the same term."""
        if self._untold is not None:
            await self._leader.tell_slurm(self._untold)
            self._untold = None

    async def _cancel(self, one: Cancel) -> None:
        self._leader.require_lead()
        try:
            await self.commands.cancel(one.slurm_id, one.name)
        except FireflyerError as error:
            _log.warning("scancel did not succeed job=%d reason=%s", one.slurm_id, error)
        else:
            _log.info("cancelled in Slurm job=%d reason=%s", one.slurm_id, one.reason)


def _not_submitted(one: Submit, reason: str, *, certain: bool) -> JobNotSubmitted:
    return JobNotSubmitted(one.task, one.number, reason, certain, one.attempt)


def _not_shown(
    watched: tuple[WatchedJob, ...], shown: list[SlurmJob], uids: Mapping[str, int | None]
) -> list[SlurmJob]:
    """Jobs that Slurm had, as the manager knows them."""
    ids = {(job.name, job.id) for job in shown}
    return [
        SlurmJob(id=job.slurm_id, name=job.name, uid=uid, state="", submit_s=job.submit_s)
        for job in watched
        if (uid := uids[job.name]) is not None and job.slurm_id and (job.name, job.slurm_id) not in ids
    ]
