"""Slurm places: a task that may run becomes a job of Slurm, agents come up in it, and the task's run gets these nodes.

    task waits ──> row ASKED ──sbatch──> WAITING ──> RUNNING: agents join ──> the run begins on them
                      ^                                                        │
                      └── not found by its name, after a pause                 v
    row ENDED <── Slurm says that the job has ended <── agents go (`Orders.leave`) <── the run is over

A job serves one run. It is found by its name, made from durable numbers, so a manager that was killed between `sbatch`
and the row asks for no second one. Two jobs of a task would do no harm either: what runs is decided by rows of runs
(docs/design/0046), and Slurm does not let two jobs of one name run at a time.

When Slurm says that a job has ended, nothing of it lives on nodes that answer Slurm: their part of the run is over. On
the others it is over when the leases of 0046 have ended.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Final

import msgspec

from fireflyer.cluster.core.platform.heard import Heard
from fireflyer.cluster.core.platform.life.progress import Progress
from fireflyer.cluster.core.platform.life.tasks import KEPT_RUNS, Tasks
from fireflyer.cluster.core.platform.messages import Settings
from fireflyer.cluster.core.platform.slurm.job_endings import JobEndings, code_words
from fireflyer.cluster.core.platform.slurm.messages import (
    Cancel,
    JobNotSubmitted,
    JobSubmitted,
    SlurmEvent,
    SlurmSaid,
    SlurmSettings,
    SlurmSilent,
)
from fireflyer.cluster.core.platform.slurm.reasons import why_waits
from fireflyer.cluster.core.platform.slurm.reconcile import AskAgain, Found, Nothing, is_wanted, reconcile
from fireflyer.cluster.core.platform.store.ledger import Ledger
from fireflyer.cluster.core.platform.store.rows import JobRow, JobState, RunState, TaskRow, Wish
from fireflyer.cluster.core.scheduler.model import Decision, Wait
from fireflyer.cluster.core.slurm.output import Phase, SlurmJob, SlurmNode
from fireflyer.cluster.core.slurm.request import job_token_name, node_of, slot_name
from fireflyer.cluster.schema.tasks import FINISHED, Outcome, TaskSpec, TaskState

__all__ = ["SlurmEngine"]

_WAITS: Final = (TaskState.QUEUED, TaskState.SUSPENDED)
NEVER_SUBMITTED: Final = "NOT SUBMITTED"
"""The state of a job that Slurm was not asked for any more."""
JobKey = tuple[int, int]


class SlurmEngine:
    def __init__(
        self,
        ledger: Ledger,
        heard: Heard,
        tasks: Tasks,
        progress: Progress,
        settings: Settings,
        slurm: SlurmSettings,
    ) -> None:
        self._ledger, self._heard, self._tasks = ledger, heard, tasks
        self._slurm = slurm
        self._endings = JobEndings(ledger, tasks, progress, settings)
        self.nodes: dict[str, SlurmNode] = {}
        """As Slurm said last."""
        self.silent = "Slurm has not been asked yet"
        """Why it is not known what Slurm does; empty: it answers."""
        self._jobs: dict[str, list[SlurmJob]] = {}
        self._said = False
        """Jobs were asked for since this manager leads."""
        self.surplus: dict[int, str] = {}
        """Jobs that are to be cancelled, beside those of rows -> their names."""
        self._events: list[SlurmEvent] = []
        self._in_draft: list[SlurmEvent] = []
        self._open: dict[JobKey, None] = {}
        self._slots: dict[str, dict[str, None]] = {}
        """Job, as in names of nodes -> names of nodes that have joined."""
        self._candidates: dict[int, None] = {}
        self._due = True

    # --- what comes in ---

    def hear(self, event: SlurmEvent) -> None:
        self._events.append(event)
        self._due = True

    def rebuild(self, _time_ns: int, _now_ns: int) -> None:
        self._events = [*self._in_draft, *self._events]
        self._in_draft, self._due = [], True
        self._open = {key: None for key, row in self._ledger.jobs.committed.items() if row.state is not JobState.ENDED}
        self._candidates = dict.fromkeys(self._ledger.index.unfinished)
        self._slots = {}
        for name in self._ledger.nodes.committed:
            self._add_slot(name)

    def committed(self) -> tuple[SlurmEvent, ...]:
        """The draft is: what it was made of, which is used up."""
        followed, self._in_draft = tuple(self._in_draft), []
        return followed

    def settings_changed(self, _time_ns: int) -> None:
        self._due = True

    def _add_slot(self, name: str) -> None:
        _, job = node_of(name)
        self._slots.setdefault(job, {})[name] = None

    def node(self, name: str, _time_ns: int, _now_ns: int) -> None:
        self._due = True
        if self._ledger.nodes.get(name) is not None:
            self._add_slot(name)
            return
        _, job = node_of(name)
        self._slots.get(job, {}).pop(name, None)

    def told(self, _time_ns: int) -> None:
        for task in self._tasks.touched:
            row = self._ledger.tasks.get(task)
            if row is not None and row.state is not FINISHED:
                self._candidates[task] = None
            else:
                self._candidates.pop(task, None)
            self._due = True
        self._tasks.touched.clear()

    # --- deciding ---

    def is_due(self, _time_ns: int) -> bool:
        return self._due

    def follow(self, now_ns: int) -> None:
        """What Slurm said, into the draft; also while nothing may be started. `now_ns`: monotonic."""
        events, self._events = self._events, []
        self._in_draft += events
        for event in events:
            match event:
                case SlurmSaid(jobs, nodes):
                    self._take(jobs, nodes)
                    for key in list(self._open):
                        self._reconcile(self._ledger.jobs.known(key), now_ns)
                case SlurmSilent(reason):
                    self.silent = reason
                case JobSubmitted():
                    self._submitted(event)
                case JobNotSubmitted():
                    self._not_submitted(event)
        for key in list(self._open):
            self._advance(self._ledger.jobs.known(key))
        if events:
            self._remove_slots()

    def _take(self, jobs: tuple[SlurmJob, ...], nodes: tuple[SlurmNode, ...]) -> None:
        self.silent, self._said = "", True
        self.nodes = {node.name: node for node in nodes}
        self._jobs = {}
        for job in jobs:
            self._jobs.setdefault(job.name, []).append(job)
        self.surplus = {}

    def _change(self, key: JobKey, **fields: object) -> JobRow | None:
        row = self._ledger.jobs.get(key)
        if row is None or row.state is JobState.ENDED:
            return None
        new = msgspec.structs.replace(row, **fields)
        if new != row:
            self._ledger.jobs.put(key, new)
        return new

    def _submitted(self, event: JobSubmitted) -> None:
        """Nothing, where the job was found before that was told."""
        key = event.task, event.number
        row = self._ledger.jobs.get(key)
        if row is not None and not row.slurm_id:
            self._change(key, slurm_id=event.slurm_id, state=JobState.WAITING, refusal="", retry_ns=None)

    def _not_submitted(self, event: JobNotSubmitted) -> None:
        """Nothing, where it was asked for again since, or was found."""
        row = self._ledger.jobs.get((event.task, event.number))
        if row is None or row.slurm_id or row.asked_ns != event.attempt:
            return
        pause = self._slurm.refusal_pause_ns if event.certain else self._slurm.submit_slack_ns
        self._change((event.task, event.number), refusal=event.reason, retry_ns=self._tasks.now_ns + pause)
        self._tasks.notes.append(f"task {event.task}: sbatch did not succeed: {event.reason}")

    def _reconcile(self, row: JobRow, now_ns: int) -> None:
        key = row.task, row.number
        match reconcile(row, self._jobs.get(row.name, ()), self._tasks.now_ns):
            case Found(job, surplus):
                self.surplus.update(dict.fromkeys(surplus, row.name))
                if job.phase is Phase.ENDED:
                    self._ended(row, job, now_ns)
                else:
                    self._shown(row, job)
            case AskAgain() if row.leave is not None:
                self._ended(row, SlurmJob(id=0, name=row.name, uid=0, state=NEVER_SUBMITTED), now_ns)
            case AskAgain():
                self._change(key, asked_ns=self._tasks.now_ns, term=self._ledger.term, retry_ns=None)
            case Nothing():
                nobody_asks = row.term != self._ledger.term or row.leave is not None
                if row.state is JobState.ASKED and nobody_asks and row.retry_ns is None:
                    # Another manager was to ask, or this one for a task that needs it no more: it may be under way.
                    self._change(key, retry_ns=self._tasks.now_ns + self._slurm.submit_slack_ns)

    def _shown(self, row: JobRow, job: SlurmJob) -> None:
        runs = job.phase is Phase.RUNNING or row.state is JobState.RUNNING
        begins = runs and row.running_ns is None
        self._change(
            (row.task, row.number),
            slurm_id=job.id,
            state=JobState.RUNNING if runs else JobState.WAITING,
            retry_ns=None,
            refusal="",
            slurm_state=job.state,
            slurm_reason=job.reason,
            nodes=job.nodes if begins else row.nodes,
            running_ns=self._tasks.now_ns if begins else row.running_ns,
            start_s=job.start_s if runs else row.start_s,
            submit_s=row.submit_s or job.submit_s,
        )
        if job.preempt_s is not None and runs:
            self._preempted(self._ledger.jobs.known((row.task, row.number)), job.preempt_s)

    def _preempted(self, row: JobRow, preempt_s: int) -> None:
        """Slurm waits for the job to leave, for as long as its partition grants: the run saves what it has done."""
        if row.leave is not None:
            return
        run = self._ledger.runs.get((row.task, row.run)) if row.run is not None else None
        if run is not None:
            reason = f"Slurm preempts its job {row.slurm_id} (since {preempt_s}, by its clock)"
            self._tasks.leave(run, "suspend", Wish.INTERRUPT, reason)
        elif row.run is None:
            self._leave(row, 0)

    # --- the end of a job ---

    def _ended(self, row: JobRow, job: SlurmJob, now_ns: int) -> None:
        task = self._ledger.tasks.known(row.task)
        ended = self._change(
            (row.task, row.number),
            slurm_id=job.id,
            state=JobState.ENDED,
            slurm_state=job.state,
            slurm_reason=job.reason,
            nodes=job.nodes or row.nodes,
            ended_ns=self._tasks.now_ns,
            start_s=job.start_s or row.start_s,
            end_s=job.end_s,
            account=job.source if job.end_s is not None else "",
            exit_code=job.exit_code,
            signal=job.signal,
        )
        del self._open[row.task, row.number]
        self._tasks.notes.append(f"Slurm job {job.id} of task {row.task} has ended: {job.state}")
        self._candidates[row.task] = None
        if ended is None:
            return
        words = f"Slurm ended its job {job.id}: {job.state}{code_words(job)}"
        wanted = row.leave is not None
        if is_wanted(row, job) and task.state is not FINISHED and not task.stopping:
            task = msgspec.structs.replace(task, stopping=f"its Slurm job {job.id} was cancelled in Slurm")
            self._tasks.put(task)
        if row.run is not None:
            self._endings.run_ended(row, job, words, self.nodes, now_ns)
        elif not wanted and task.state is not FINISHED:
            self._endings.never_ran(task, job, words)

    def _remove_slots(self) -> None:
        """Nodes of jobs that have ended, as soon as no run has them."""
        living = {job_token_name(*key) for key in self._open}
        for job in [job for job in self._slots if job not in living]:
            for name in list(self._slots[job]):
                if self._ledger.places.get(name) is None:
                    self._ledger.nodes.put(name, None)
                    self._tasks.gone[name] = None
                    del self._slots[job][name]
            if not self._slots[job]:
                del self._slots[job]

    # --- what a job is for ---

    def _advance(self, row: JobRow) -> None:
        """Its agents are to go when the task has no more use for it."""
        if row.leave is not None:
            return
        task = self._ledger.tasks.get(row.task)
        code = None
        if task is None or task.state is FINISHED:
            code = self._exit_code(task)
        elif row.run is not None:
            code = 0 if self._ledger.index.open_run(task) is None else None
        elif task.held or task.state not in _WAITS or self._held(task):
            code = 0
        elif row.running_ns is not None and self._tasks.now_ns - row.running_ns >= self._slurm.agents_timeout_ns:
            code = 1
            self._endings.never_ran(
                task, SlurmJob(id=row.slurm_id, name=row.name, uid=0, state="FAILED"), "no agent came up"
            )
        if code is not None and (row.run is None or self._is_over(row)):
            self._leave(row, code)

    def _is_over(self, row: JobRow) -> bool:
        run = self._ledger.runs.get((row.task, row.run)) if row.run is not None else None
        return run is None or run.state is RunState.OVER

    def _exit_code(self, task: TaskRow | None) -> int:
        if task is None or task.outcome is Outcome.SUCCEEDED:
            return 0
        return task.exit_code or 1

    def _leave(self, row: JobRow, code: int) -> None:
        self._change((row.task, row.number), leave=code, leave_ns=self._tasks.now_ns)
        job = job_token_name(row.task, row.number)
        self._tasks.nodes.update(self._slots.get(job, {}))

    def leave_of(self, slot: str) -> int | None:
        """The exit code with which the agent of this node is to go; None: it is to stay."""
        _, job = node_of(slot)
        if not job or self._ledger.places.committed.get(slot) is not None:
            return None
        task, _, number = job.removeprefix("t").partition("-")
        row = self._ledger.jobs.committed.get((int(task), int(number)))
        return 1 if row is None or row.state is JobState.ENDED else row.leave

    # --- decisions ---

    def decide(self, time_ns: int) -> None:
        self._due = False
        for key in list(self._open):
            self._begin_run(self._ledger.jobs.known(key))
        for task in self._to_submit(time_ns):
            self._ask_for(task)

    def _begin_run(self, row: JobRow) -> None:
        if row.state is not JobState.RUNNING or row.run is not None or row.leave is not None:
            return
        task = self._ledger.tasks.get(row.task)
        slots = tuple(slot_name(node, job_token_name(row.task, row.number)) for node in row.nodes)
        ready = task is not None and task.state in _WAITS and self._ledger.index.open_run(task) is None
        if not ready or task is None or not slots or not all(self._is_up(name) for name in slots):
            return
        self._change((row.task, row.number), run=task.runs)
        self._tasks.begin(task.id, slots, f"Slurm placed it: job {row.slurm_id}", backfilled=False)

    def _is_up(self, name: str) -> bool:
        return self._ledger.nodes.get(name) is not None and self._heard.ever(name)

    def _to_submit(self, time_ns: int) -> Iterator[TaskRow]:
        room = self._slurm.most_jobs - len(self._open)
        if room <= 0 or not self._said:
            return
        wanted: list[TaskRow] = []
        for task in list(self._candidates):
            row = self._ledger.tasks.get(task)
            if row is None or row.state is FINISHED:
                del self._candidates[task]
            elif self._may_submit(row, time_ns):
                wanted.append(row)
        wanted.sort(key=lambda row: (-row.priority, row.submitted_ns, row.id))
        yield from wanted[:room]

    def _may_submit(self, row: TaskRow, time_ns: int) -> bool:
        waits = row.state in _WAITS and not row.held and row.not_before_ns <= time_ns
        if not waits or (row.id, row.jobs - 1) in self._open or self._ledger.index.open_run(row) is not None:
            return False
        return not self._held(row)

    def _held(self, row: TaskRow) -> str:
        return self._tasks.held_words(row, self._tasks.spec(row))

    def _ask_for(self, row: TaskRow) -> None:
        number = row.jobs
        words = f"{self._ledger.draft_state.cluster}/job/{row.id}/{number}"
        job = JobRow(
            task=row.id,
            number=number,
            name="ff-" + hashlib.blake2b(words.encode(), digest_size=12).hexdigest(),
            asked_ns=self._tasks.now_ns,
            term=self._ledger.term,
        )
        self._ledger.jobs.put((row.id, number), job)
        self._open[row.id, number] = None
        if self._ledger.jobs.get((row.id, number - KEPT_RUNS)) is not None:
            self._ledger.jobs.put((row.id, number - KEPT_RUNS), None)
        self._tasks.put(msgspec.structs.replace(row, jobs=number + 1))

    # --- reasons ---

    def job_of(self, task: TaskRow) -> JobRow | None:
        """The last one, of what is committed."""
        return self._ledger.jobs.committed.get((task.id, task.jobs - 1))

    def why(self, task: int, time_ns: int) -> Decision | None:
        row = self._ledger.tasks.committed.get(task)
        if row is None:
            return None
        job = self.job_of(row)
        mine = next((one for one in self._jobs.get(job.name, ()) if one.id == job.slurm_id), None) if job else None
        open_job = job if job is not None and job.state is not JobState.ENDED else None
        reason = why_waits(row, open_job, held=self._held(row), silent=self.silent, time_ns=time_ns)
        start_s = mine.start_s if mine is not None and mine.phase is Phase.WAITING else None
        return Wait(task=task, reason=reason, earliest_ns=start_s * 10**9 if start_s is not None else None)

    def before(self, _task: int, _time_ns: int) -> None:
        """Slurm's queue is its own."""

    def would_start(self, row: TaskRow, _spec: TaskSpec, _time_ns: int) -> Wait:
        if self.silent:
            return Wait(task=row.id, reason=f"Slurm decides when it starts, and {self.silent}")
        return Wait(
            task=row.id, reason="Slurm decides when it starts; `ff why` says what Slurm says once it is submitted"
        )

    def usage(self) -> dict[str, float]:
        return {}

    def sample_usage(self, _time_ns: int) -> None:
        """Slurm counts what users have used."""

    def count_nodes(self) -> tuple[int, int]:
        """How many there are, and how many of them Slurm has heard of and not given up."""
        return len(self.nodes), sum(1 for node in self.nodes.values() if node.is_certain)

    def cancelled(self) -> Iterator[Cancel]:
        for slurm_id, name in self.surplus.items():
            yield Cancel(slurm_id, name, "a second job of the same name")
