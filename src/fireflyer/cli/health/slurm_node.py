"""Carries out what `cluster.core.slurm.drains` decides for this node: runs the checks, asks Slurm, tells it.

    full round ──> drain for what is certain ──> keep record, then counters ──> repetitions ──> drain for the rest

Counters say that what happened was told, so they are kept last: a round that is killed is found again by the next.
"""

from __future__ import annotations

import asyncio
import time
from typing import Final

import msgspec

from fireflyer.base.errors import FireflyerError, PermanentError, Timeout, UsageError
from fireflyer.base.health_event import HealthEvent
from fireflyer.base.units import SECOND
from fireflyer.cli.health.slurm_log import SlurmLog
from fireflyer.cli.health.slurm_memory import NodeMemory, person
from fireflyer.cluster.core.health.records import TAKES_TASKS
from fireflyer.cluster.core.slurm.drains import (
    Decision,
    DrainLimits,
    Step,
    counted_faults,
    decide,
    drained_since_s,
    is_own,
    jobs_to_requeue,
    missed_checks,
    reason_fault,
)
from fireflyer.cluster.core.slurm.findings import (
    Evidence,
    Findings,
    certain,
    checks_to_repeat,
    findings_in,
    still_failing,
)
from fireflyer.cluster.core.slurm.fleet import FleetNode
from fireflyer.cluster.core.slurm.node_record import DrainRecord
from fireflyer.cluster.core.slurm.repair import NodeRepair, RepairRecord
from fireflyer.cluster.manager.slurm.commands import SlurmCommands
from fireflyer.validators.checks.rounds import HealthRounds
from fireflyer.validators.core.checks.evidence import Evidence as CheckEvidence
from fireflyer.validators.core.checks.policy import HealthPolicy

__all__ = ["NodeOfSlurm"]

_SHARE_OF_LOCK: Final = 0.2
_SHARE_OF_TOOLS: Final = 0.7
"""Of the whole time, until when tools may run; the rest is for Slurm's answers."""
_SETTLE_S: Final = 2.0
"""Between a drain and the look whether too many nodes have drained themselves at the same time."""
_DRAINS: Final = 2
"""In one look: the first, and a new reason where a further fault was found meanwhile."""


class NodeOfSlurm:
    def __init__(
        self, name: str, policy: HealthPolicy, memory: NodeMemory, commands: SlurmCommands, limits: DrainLimits, *,
        probes: int, spacing_s: float, began_s: float, limit_s: float, log: SlurmLog, job: int = 0,
        idle: bool = False,
    ) -> None:  # fmt: skip
        """`limit_s`: for all, from `began_s` of the monotonic clock. `job`: number of the one whose prolog or epilog
        this is; 0: none. `idle`: no job runs here."""
        self._idle = idle
        self.name = name
        """In Slurm."""
        self._policy = policy
        self._memory = memory
        self._commands = commands
        self._limits = limits
        self._probes = probes
        self._spacing_s = spacing_s
        self._began_s = began_s
        self._limit_s = limit_s
        self._log = log
        self._job = job
        self._record = DrainRecord()
        self._repair = NodeRepair(name, RepairRecord())
        self._boot = ""
        self.events: tuple[HealthEvent, ...] = ()
        self.evidence: CheckEvidence | None = None
        """Of the full round."""
        self.state = ""
        """One of `SLURM_STATES` as the look has left the node; empty: Slurm was not asked."""
        self.drained_for: HealthEvent | None = None
        """The fault that our reason says, where no further one was found."""

    def look(self, step: Step, beside: tuple[HealthEvent, ...] = (), *, since_ns: int = 0) -> Decision:
        """The last decision, after it was carried out. A prolog or epilog without a fault asks Slurm nothing. `beside`:
        what others than the checks have found. `since_ns`: where it was validated, when that began: a fault that a
        round has found meanwhile asks for another validation. Raises `FireflyerError`, a `Timeout` where the time was
        over; what happened once and was not acted on then is kept for the next look."""
        with self._memory.alone(self._limit_s * _SHARE_OF_LOCK):
            rounds = self._memory.rounds()
            round_of_checks = rounds.run(self._policy, save=False, ends_s=self._tools_end_s, idle=self._idle)
            self.events = (*round_of_checks, *beside)
            self.evidence = rounds.evidence
            found = findings_in(self.events)
            self._boot = rounds.evidence.boot if rounds.evidence is not None else ""
            sure = self._sure(step, found)
            if step == "validated" and self._repair.last_fault_ns >= since_ns:
                self._log.say("a fault was found while it was validated")
                step = "validate"
            done = None
            if sure:
                done = self._act(step, sure, found, rounds)
            else:
                self._save(rounds)
            faults = self._confirmed(rounds, found.faults)
            more = [event for event in faults if event not in sure]
            if more or (done is None and step in ("check", "validate", "validated", "resume")):
                self._record = self._record.with_events(more, self._boot, _now_s())
                done = self._act(step, (*sure, *more), found, rounds)
            return done or Decision()

    @property
    def _tools_end_s(self) -> float:
        return self._began_s + self._limit_s * _SHARE_OF_TOOLS

    def _save(self, rounds: HealthRounds) -> None:
        self._record = msgspec.structs.replace(self._record, repair=self._repair.record)
        self._memory.save(self._record, rounds)

    def _sure(self, step: Step, found: Findings) -> tuple[HealthEvent, ...]:
        """What needs no repetition: of this round, and what happened before and was not acted on. Who resumes a node
        has judged that."""
        now_s = _now_s()
        record, forgotten = self._memory.record().current(now_s)
        for event in forgotten:
            self._log.say(f"{event.check} {event.part}: {event.words}: not acted on for a day, and forgotten")
        self._record = record.with_suspects(found.faults, now_s).with_events(found.faults, self._boot, now_s)
        self._repair = NodeRepair(self.name, record.repair)
        if step == "resume":
            return certain(found.faults)
        states = (event for event in certain(found.faults) if not event.once)
        return (*states, *(one.told(self._boot, now_s) for one in self._record.pending))

    def _confirmed(self, rounds: HealthRounds, faults: tuple[HealthEvent, ...]) -> tuple[HealthEvent, ...]:
        """Without what could not be repeated in time."""
        known = self._record.coming_and_going(self._probes)
        for _ in range(self._probes - 1):
            names = checks_to_repeat(faults, known)
            if not names:
                break
            if time.monotonic() + self._spacing_s > self._tools_end_s:
                self._log.fail(f"no time to repeat {', '.join(names)}: what they found counts in a later round")
                return still_failing(faults, (), known)
            time.sleep(self._spacing_s)
            again = rounds.run(self._policy, names, save=False, ends_s=self._tools_end_s, idle=self._idle)
            faults = still_failing(faults, again, known)
        return faults

    def _act(self, step: Step, faults: tuple[HealthEvent, ...], found: Findings, rounds: HealthRounds) -> Decision:
        """Whatever becomes of it: what is not done is remembered, and only then counted as told."""
        evidence = Evidence(faults, found.passed, validated=step == "resume", not_run=found.not_run)
        self.state = "unknown"
        try:
            return asyncio.run(self._in_time(step, evidence))
        finally:
            self._save(rounds)

    async def _in_time(self, step: Step, evidence: Evidence) -> Decision:
        try:
            async with asyncio.timeout(self._began_s + self._limit_s - time.monotonic()):
                if evidence.faults:
                    return await self._with_fault(step, evidence)
                return await self._without_fault(step, evidence)
        except TimeoutError as error:
            if isinstance(error, FireflyerError):
                raise
            words = f"gave up after {self._limit_s:g} s, before Slurm ends it; the next round does what is left"
            raise Timeout(words) from None

    async def _without_fault(self, step: Step, evidence: Evidence) -> Decision:
        drains = await self._commands.drains(self.name)
        self.state = "drained" if drains else "serves"
        if drains:
            fleet = await self._commands.fleet(self.name)
            node = fleet.get(self.name)
            if node is not None and is_own(node):
                if step not in ("validate", "validated") and self._memory.is_under_validation():
                    self._log.say("drained by ff; validators load it now: it stays")
                    return Decision()
                self.drained_for = reason_fault(node, _now_s())
                evidence = evidence._replace(repair=self._repair_of(node, evidence), remedy=self._repair.remedy_due)
                decision = self._decided(step, fleet, evidence)
                if decision.drain:
                    await self._commands.drain(self.name, decision.drain)
                if not decision.undrain:
                    return decision
                self._record = self._record.acted().serving()
                done = await self._serve_again(node, decision)
                if done.undrain:
                    self._repair.returned(time.time_ns(), by=person() if step in ("validated", "resume") else "")
                return done
        else:
            self._record = self._record.serving()
            self._repair.serving(time.time_ns())
        if step in ("validated", "resume"):
            raise UsageError(f"node {self.name} is not drained by ff; `scontrol` resumes what others drained")
        return Decision()

    def _repair_of(self, node: FleetNode, evidence: Evidence) -> str:
        """What has to be done before the node, which is drained by us, serves again."""
        now_ns = time.time_ns()
        if self._repair.health.state in TAKES_TASKS:
            self._repair.drained(
                reason_fault(node, _now_s()), self._boot, now_ns
            )  # a round was cut off, or its disk was new
        if not node.busy and node.state == "drained":
            passes = evidence.passed and not missed_checks(node, evidence, self._record)
            self._repair.idle(self._boot, now_ns, passes=passes)
        return self._repair.waits_for()

    async def _with_fault(self, step: Step, evidence: Evidence) -> Decision:
        fleet = await self._fleet()
        before = fleet.get(self.name)
        fresh = before is not None and before.drains and before.reason == self._record.unsettled
        if before is not None and is_own(before):
            evidence = evidence._replace(remedy=self._repair.remedy_due)
        decision = self._decided(step, fleet, evidence, fresh=fresh)
        for _ in range(_DRAINS):
            if not decision.drain:
                break
            drains = fleet[self.name].drains
            fresh = fresh or not drains
            self._record = self._record.settling(decision.drain if fresh else "")
            await self._commands.drain(self.name, decision.drain)
            if not drains:
                self._record = self._record.drained(_now_s())
            await asyncio.sleep(_SETTLE_S)
            fleet = await self._fleet()
            decision = self._decided(step, fleet, evidence, fresh=fresh)
        self._record = self._record.settling("")
        node = fleet.get(self.name)
        self.state = "drained" if node is not None and node.drains else "held" if decision.held else "serves"
        if node is not None and decision.undrain:
            self._record = self._record.taken_back(drained_since_s(node))
            return await self._serve_again(node, decision)
        if node is not None and node.drains:
            self._record = self._record.acted().with_failed(evidence.faults)
            self._note_fault(node, evidence)
        if decision.requeue:
            await self._requeue()
        return decision

    def _note_fault(self, node: FleetNode, evidence: Evidence) -> None:
        """What a person has drained is theirs to repair."""
        faults = counted_faults(evidence.faults, busy=node.busy)
        if not faults or not is_own(node):
            return
        now_ns = time.time_ns()
        self._repair.drained(faults[0], self._boot, now_ns, faults[1:])
        if not node.busy and node.state == "drained":
            self._repair.idle(self._boot, now_ns, passes=False)
        if words := self._repair.waits_for():
            self._log.say(words)

    async def _fleet(self) -> dict[str, FleetNode]:
        """All nodes. The job whose prolog or epilog this is does not make its node busy: none of its processes runs."""
        fleet = await self._commands.fleet()
        node = fleet.get(self.name)
        if node is not None and node.busy and self._job:
            others = [job for job in await self._commands.jobs_on(self.name, running=False) if job.id != self._job]
            fleet[self.name] = msgspec.structs.replace(node, busy=bool(others))
        return fleet

    def _decided(self, step: Step, fleet: dict[str, FleetNode], evidence: Evidence, *, fresh: bool = False) -> Decision:
        decision = decide(step, self.name, fleet, evidence, self._record, self._limits, _now_s(), fresh=fresh)
        if decision.words:
            self._log.say(decision.words)
        return decision

    async def _serve_again(self, node: FleetNode, decision: Decision) -> Decision:
        """Slurm cannot be asked to take back one drain and no other: so it is looked at as late as can be."""
        now = (await self._commands.fleet(self.name)).get(self.name)
        if now is None or (now.drains, now.reason, now.since_s) != (node.drains, node.reason, node.since_s):
            words = "its drain was changed meanwhile: it is left as it is"
            self._log.say(words)
            return Decision(words)
        await self._commands.undrain(self.name)
        self.state = "held" if decision.held else "serves"
        return decision

    async def _requeue(self) -> None:
        """All but the job whose prolog this is: its exit code does that."""
        running = [job for job in await self._commands.jobs_on(self.name) if job.id != self._job]
        jobs, left = jobs_to_requeue(running, self._limits)
        for words in left:
            self._log.say(words)
        for job in jobs:
            try:
                await self._commands.requeue(job.id)
            except PermanentError as error:
                self._log.say(f"job {job.id} stays: {error}")
            else:
                self._log.say(f"job {job.id} is requeued")


def _now_s() -> int:
    return time.time_ns() // SECOND
