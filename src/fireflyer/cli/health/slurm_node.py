"""Carries out what `cluster.core.slurm.drains` decides for this node: runs the checks, asks Slurm, tells it."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import time
from collections.abc import Callable, Iterator
from typing import Final

from fireflyer.base.errors import PermanentError, UsageError
from fireflyer.base.health_event import HealthEvent
from fireflyer.base.os_errors import translate_os_error
from fireflyer.base.units import SECOND
from fireflyer.cluster.core.slurm.drains import (
    Decision,
    DrainLimits,
    DrainRecord,
    Evidence,
    Step,
    checks_to_repeat,
    decide,
    faults_in,
    is_own,
    jobs_to_requeue,
    still_failing,
)
from fireflyer.cluster.manager.slurm.commands import SlurmCommands
from fireflyer.validators.checks.rounds import HealthRounds
from fireflyer.validators.checks.state_file import KeptFile, StateFile
from fireflyer.validators.core.checks.policy import HealthPolicy

__all__ = ["NodeOfSlurm"]

_CONFIRM_S: Final = 40.0
"""Slurm kills its HealthCheckProgram after 60 s."""
_SETTLE_S: Final = 2.0
"""Between a drain and the look whether too many nodes have drained themselves at the same time."""
_DRAINS: Final = 2
"""In one look: the first, and a new reason where a further fault was found meanwhile."""


class NodeOfSlurm:
    def __init__(
        self, name: str, policy: HealthPolicy, state: str, commands: SlurmCommands, limits: DrainLimits, *, probes: int,
        spacing_s: float, say: Callable[[str], None], prolog_of: int = 0,
    ) -> None:  # fmt: skip
        """`prolog_of`: number of the job. Raises `FireflyerError`."""
        self._name = name
        self._policy = policy
        self._state = state
        self._counters = StateFile(state)
        self._kept = KeptFile(state, "slurm.json", DrainRecord)
        self._commands = commands
        self._limits = limits
        self._probes = probes
        self._spacing_s = spacing_s
        self._say = say
        self._prolog_of = prolog_of

    def look(self, step: Step) -> Decision:
        """The last decision, after it was carried out. A prolog or epilog without a fault asks Slurm nothing. Raises
        `FireflyerError`; what happened once and was not acted on then is kept for the next look."""
        with self._alone():
            rounds = HealthRounds(self._counters)
            events = rounds.run(self._policy)
            faults = self._confirmed(rounds, events)
            record = self._kept.load()[0] or DrainRecord()
            if step != "resume":
                faults += tuple(event for event in record.pending if event not in faults)
            if any(event.once for event in faults):
                self._kept.save(record := record.with_faults(faults))
            if not faults and step in ("prolog", "epilog"):
                return Decision()
            evidence = Evidence(faults, all(map(_is_well, events)), validated=step == "resume")
            return asyncio.run(self._settle(step, evidence, record))

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Prologs, epilogs and the program of this node, one after the other: they share what is kept."""
        path = os.path.join(self._state, "slurm.lock")
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise translate_os_error(error, f"open {path}") from error
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            yield
        finally:
            os.close(fd)

    def _confirmed(self, rounds: HealthRounds, events: list[HealthEvent]) -> tuple[HealthEvent, ...]:
        """Without what could not be repeated in time."""
        faults = faults_in(events)
        ends_s = time.monotonic() + _CONFIRM_S
        for _ in range(self._probes - 1):
            names = checks_to_repeat(faults)
            if not names:
                break
            if time.monotonic() + self._spacing_s > ends_s:
                return still_failing(faults, ())
            time.sleep(self._spacing_s)
            faults = still_failing(faults, rounds.run(self._policy, names))
        return faults

    async def _settle(self, step: Step, evidence: Evidence, record: DrainRecord) -> Decision:
        node = (await self._commands.fleet(self._name)).get(self._name)
        if node is not None and not evidence.faults and not is_own(node):
            if step == "resume":
                raise UsageError(f"node {self._name} is not drained by ff; `scontrol` resumes what others drained")
            return Decision()
        decision, drains = await self._decided(step, evidence, record)
        for _ in range(_DRAINS):
            if not decision.drain:
                break
            await self._commands.drain(self._name, decision.drain)
            self._kept.save(record := record.drained(time.time_ns() // SECOND))
            await asyncio.sleep(_SETTLE_S)
            decision, drains = await self._decided(step, evidence, record)
        if decision.undrain:
            await self._commands.undrain(self._name)
        elif drains and evidence.faults:
            self._kept.save(record.with_faults(()))
        if decision.requeue:
            await self._requeue()
        return decision

    async def _decided(self, step: Step, evidence: Evidence, record: DrainRecord) -> tuple[Decision, bool]:
        """And whether the node drains now, by whomever."""
        fleet = await self._commands.fleet()
        decision = decide(step, self._name, fleet, evidence, record, self._limits, time.time_ns() // SECOND)
        if decision.words:
            self._say(decision.words)
        return decision, self._name in fleet and fleet[self._name].drains

    async def _requeue(self) -> None:
        """All but the job whose prolog this is: its exit code does that."""
        running = [job for job in await self._commands.jobs_on(self._name) if job.id != self._prolog_of]
        jobs, left = jobs_to_requeue(running, self._limits)
        for words in left:
            self._say(words)
        for job in jobs:
            try:
                await self._commands.requeue(job.id)
            except PermanentError as error:
                self._say(f"job {job.id} stays: {error}")
            else:
                self._say(f"job {job.id} is requeued")


def _is_well(event: HealthEvent) -> bool:
    return event.severity in ("ok", "warn") and not (event.could_not_run and event.severity != "ok")
