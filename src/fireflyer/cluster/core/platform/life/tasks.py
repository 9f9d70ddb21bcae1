"""What happens to tasks and their runs, as changes of rows. Each step keeps the account exact, records the change for
the history, and tells who watches.
"""

from __future__ import annotations

import hashlib
from typing import Literal

import msgspec

from fireflyer.base.errors import InvariantViolation
from fireflyer.cluster.core.platform.heard import Heard
from fireflyer.cluster.core.platform.life.accounts import counted, run_account, waiting_account
from fireflyer.cluster.core.platform.life.accused import accused_nodes
from fireflyer.cluster.core.platform.life.states import Step, Verdict, following, pause_ns, verdict
from fireflyer.cluster.core.platform.messages import Settings
from fireflyer.cluster.core.platform.store.history import RunChange, TaskChange
from fireflyer.cluster.core.platform.store.index import RunKey
from fireflyer.cluster.core.platform.store.ledger import Ledger
from fireflyer.cluster.core.platform.store.rows import PlaceRow, RunRow, RunState, TaskRow, Wish
from fireflyer.cluster.core.platform.webhooks import Webhooks
from fireflyer.cluster.core.scheduler.order import waits_since_ns
from fireflyer.cluster.schema.sync import EndedRun
from fireflyer.cluster.schema.tasks import FINISHED, Cause, Outcome, TaskSpec, TaskState

__all__ = ["Tasks"]

KEPT_RUNS = 16
"""Of an unfinished task; older ones are in the history alone."""
MAX_EXCLUDED = 32
_FAILURES = (Cause.PROGRAM, Cause.INFRASTRUCTURE, Cause.HUNG)
"""A fault of a node often looks like an error of the program."""
_WAITS = (TaskState.QUEUED, TaskState.SUSPENDED)


class Tasks:
    """Steps of one draft, at cluster time `now_ns`. `touched`: tasks of which the scheduler must know more."""

    def __init__(self, ledger: Ledger, heard: Heard, settings: Settings) -> None:
        self._ledger, self._heard, self._settings = ledger, heard, settings
        self.webhooks = Webhooks(ledger)
        self.now_ns = 0
        self.touched: dict[int, None] = {}
        self.notes: list[str] = []
        self.nodes: dict[str, None] = {}
        """Whose orders may have changed."""
        self.failed: dict[RunKey, None] = {}
        """Runs that ended by a failure, which a fault of their nodes may have caused."""
        self.gone: dict[str, None] = {}
        """That this draft removes."""

    def spec(self, task: TaskRow) -> TaskSpec:
        return self._ledger.submissions.known(task.submission).spec

    # --- rows ---

    def put(self, row: TaskRow) -> None:
        self.touched[row.id] = None
        self._ledger.put_task(row)

    def _enter(self, row: TaskRow, step: Step) -> TaskRow:
        """In its next state; the caller has brought the account up to date if that is due."""
        row = msgspec.structs.replace(row, state=following(row.state, step), since_ns=self.now_ns)
        self.put(row)
        self.tell(row)
        self.webhooks.task(row, self.spec(row), self.now_ns)
        return row

    def put_claim(self, row: TaskRow, claim: tuple[str, ...]) -> None:
        """Nodes that are kept for it; no change that anybody watches."""
        self._ledger.put_task(msgspec.structs.replace(row, claim=claim))

    def tell(self, row: TaskRow) -> None:
        spec = self.spec(row)
        slim = msgspec.structs.replace(row, claim=())
        self._ledger.record(TaskChange(self.now_ns, slim, spec.node_group, spec.least_nodes))
        self._ledger.changed("task", str(row.id), row.state.value)

    def _put_run(self, row: RunRow) -> None:
        self._ledger.put_run(row)
        self.touched[row.task] = None
        self.nodes.update(self._ledger.index.places.get((row.task, row.number), {}))
        self._ledger.record(RunChange(self.now_ns, row))

    def _until_now(self, row: TaskRow) -> TaskRow:
        """With the account up to date, of one whose launcher does not live."""
        return msgspec.structs.replace(row, account=waiting_account(row, self.now_ns), counted_ns=self.now_ns)

    def hold(self, row: TaskRow) -> None:
        """Its user suspended it before it ran."""
        self._enter(self._until_now(row), Step.SUSPEND)

    def held_words(self, row: TaskRow, spec: TaskSpec) -> str:
        """Why it may not run, whatever is free; empty: it may."""
        if row.held:
            return "its user suspended it: resume it to let it run"
        for after in spec.after:
            other = self._ledger.tasks.get(after.task)
            if other is not None and other.state is not FINISHED:
                return f"it runs after task {after.task}, which has not finished"
            if other is not None and after.ok and other.outcome is not Outcome.SUCCEEDED:
                return f"it runs after the success of task {after.task}, which has not succeeded"
        return ""

    # --- a run's way ---

    def begin(self, task_id: int, nodes: tuple[str, ...], reason: str, *, backfilled: bool) -> None:
        row = self._ledger.tasks.known(task_id)
        if row.state not in _WAITS or self._ledger.index.open_run(row) is not None:
            raise InvariantViolation(f"task {task_id} is to start while it is {row.state.value}")
        number = row.runs
        for name in nodes:
            if self._ledger.places.get(name) is not None or self._ledger.nodes.get(name) is None:
                raise InvariantViolation(f"task {task_id} is to start on {name}, which is not free")
            self._ledger.put_place(name, PlaceRow(name=name, task=task_id, run=number))
        run = RunRow(
            task=task_id,
            number=number,
            token=self._token(task_id, number),
            nodes=nodes,
            reason=reason,
            backfilled=backfilled,
            queued_ns=row.queued_ns,
            scheduled_ns=self.now_ns,
        )
        self._put_run(run)
        self._ledger.drop_run((task_id, number - KEPT_RUNS))
        row = msgspec.structs.replace(self._until_now(row), runs=number + 1, claim=())
        self._enter(row, Step.SCHEDULE)
        self.notes.append(f"task {task_id} run {number} on {', '.join(nodes[:4])}: {reason}")

    def _token(self, task: int, run: int) -> str:
        """Never the same for two runs: numbers of tasks and runs are never given twice."""
        words = f"{self._ledger.draft_state.cluster}/{task}/{run}"
        return hashlib.blake2b(words.encode(), digest_size=16).hexdigest()

    def leave(self, run: RunRow, wanted: Literal["suspend", "stop"], wish: Wish, reason: str) -> RunRow:
        """Tells a run to go; one that was told to suspend may be told to stop, and not the other way."""
        if run.state in (RunState.ENDED, RunState.OVER) or run.wanted == "stop" or run.wanted == wanted:
            return run
        if run.prepared_ns is None:
            wanted = "stop"  # there is nothing to save
        row = self._ledger.tasks.known(run.task)
        run = msgspec.structs.replace(
            run,
            wanted=wanted,
            wish=wish,
            wish_reason=reason,
            wanted_ns=run.wanted_ns if run.wanted_ns is not None else self.now_ns,
        )
        self._put_run(run)
        if row.state in (TaskState.SCHEDULED, TaskState.RUNNING):
            self._enter(row, Step.LEAVE)
        self.notes.append(f"task {run.task} run {run.number} is to {wanted}: {reason}")
        return run

    def prepared(self, run: RunRow) -> None:
        if run.prepared_ns is None and run.state is RunState.SCHEDULED:
            self._put_run(msgspec.structs.replace(run, prepared_ns=self.now_ns))

    def started(self, run: RunRow) -> None:
        if run.state is not RunState.SCHEDULED:
            return
        prepared_ns = run.prepared_ns if run.prepared_ns is not None else self.now_ns
        run = msgspec.structs.replace(run, state=RunState.RUNNING, prepared_ns=prepared_ns, started_ns=self.now_ns)
        self._put_run(run)
        row = self._ledger.tasks.known(run.task)
        if row.state is TaskState.SCHEDULED:
            self._enter(row, Step.START)

    def ended(self, run: RunRow, ended: EndedRun | None, at_ns: int | None = None) -> RunRow:
        """Its launcher has ended, certainly. `at_ns`: when, where somebody has noted that; else now."""
        if run.state in (RunState.ENDED, RunState.OVER):
            return run
        begun_ns = run.started_ns if run.started_ns is not None else run.scheduled_ns
        run = msgspec.structs.replace(
            run,
            state=RunState.ENDED,
            wanted="stop",
            ended_ns=self._noted(at_ns, begun_ns),
            ended=ended,
            wanted_ns=run.wanted_ns if run.wanted_ns is not None else self.now_ns,
            wish=run.wish if run.wish is not Wish.NONE else Wish.ENDED,
            wish_reason=run.wish_reason or "its launcher has ended",
            saved_ns=self._heard.costs.saved_ns((run.task, run.number)),
        )
        self._put_run(run)
        row = self._ledger.tasks.known(run.task)
        if row.state is not FINISHED:
            self._run_ended(row, run)
        return run

    def _noted(self, at_ns: int | None, since_ns: int) -> int:
        """By another clock than the manager's, so kept between what the manager saw before and now."""
        return self.now_ns if at_ns is None else min(self.now_ns, max(at_ns, since_ns))

    def _run_ended(self, row: TaskRow, run: RunRow) -> None:
        account = run_account(row, run, self.now_ns)
        whole_life = run.ended.whole_life if run.ended is not None else None
        row = msgspec.structs.replace(
            row,
            account=account,
            counted_ns=self.now_ns,
            whole_life=row.whole_life if whole_life is None else whole_life,
        )
        if run.ended is not None:
            productive_ns = counted(run.ended.parts, self.now_ns - run.scheduled_ns)
            self._ledger.add_productive(productive_ns * len(run.nodes))
        judged = verdict(row, self.spec(row), run.wish, run.ended)
        differed = run.ended is not None and bool(run.ended.corrupt)
        if (judged.cause in _FAILURES or differed) and run.wish is not Wish.NODE_FAULT:
            self.failed[run.task, run.number] = None
        if judged.step is Step.FINISH and judged.outcome is not None:
            code = run.ended.exit_code if run.ended is not None else None
            self.finish(row, judged.outcome, judged.reason, cause=judged.cause, exit_code=code)
        elif row.state is not TaskState.SUSPENDING:
            self._enter(row, Step.LEAVE)
        else:
            self.put(row)

    def freed(self, run: RunRow, node: str) -> None:
        """No process of it is left there, and none will start."""
        place = self._ledger.places.get(node)
        if place is not None and (place.task, place.run) == (run.task, run.number):
            self._ledger.put_place(node, None)
            self.nodes[node] = None
            self.touched[run.task] = None

    def over(self, run: RunRow, at_ns: int | None = None) -> None:
        """Nothing of it is left anywhere: its task may run again. `at_ns`: since when, where somebody noted it."""
        ended_ns = run.ended_ns if run.ended_ns is not None else run.scheduled_ns
        run = msgspec.structs.replace(run, state=RunState.OVER, over_ns=self._noted(at_ns, ended_ns))
        self._put_run(run)
        self.nodes.update(dict.fromkeys(run.nodes))
        self._heard.run_over((run.task, run.number))
        row = self._ledger.tasks.known(run.task)
        if row.state is FINISHED:
            self._forget_old()
            return
        judged = verdict(row, self.spec(row), run.wish, run.ended)
        row = self._until_now(row)
        if judged.step is Step.FINISH and judged.outcome is not None:
            # What was asked meanwhile: to stop, or to give up.
            code = run.ended.exit_code if run.ended is not None else None
            self.finish(row, judged.outcome, judged.reason, cause=judged.cause, exit_code=code)
            return
        self._enter(self._again(row, run, judged), judged.step)

    def _again(self, row: TaskRow, run: RunRow, judged: Verdict) -> TaskRow:
        """It waits for another run."""
        since_ns = waits_since_ns(row.queued_ns, run.scheduled_ns, self.now_ns)
        row = msgspec.structs.replace(row, cause=judged.cause, queued_ns=since_ns)
        if not judged.counted:
            return row
        requeues, settings = row.requeues + 1, self._settings
        pause = pause_ns(requeues, settings.requeue_pause_ns, settings.requeue_pause_max_ns)
        return msgspec.structs.replace(
            row,
            requeues=requeues,
            not_before_ns=self.now_ns + pause,
            excluded=self._excluding(row, accused_nodes(run)),
        )

    def _excluding(self, row: TaskRow, bad: tuple[str, ...]) -> tuple[str, ...]:
        """Nodes on which it shall not run again, the newest ones; none where it could then run nowhere."""
        spec = self.spec(row)
        excluded = tuple(dict.fromkeys((*row.excluded, *bad)))[-MAX_EXCLUDED:]
        if self._settings.slurm is not None:
            return excluded  # Slurm has the nodes: the engine looks which of them it can do without
        left = sum(
            1
            for name, node in self._ledger.nodes.rows()
            if node.group == spec.node_group
            and name not in excluded
            and name not in spec.never
            and (not spec.only or name in spec.only)
            and all(label in node.labels for label in spec.labels)
        )
        return excluded if left >= spec.least_nodes else ()

    # --- the end ---

    def finish(
        self, row: TaskRow, outcome: Outcome, reason: str, *, cause: Cause | None = None, exit_code: int | None = None
    ) -> None:
        """For good. The account is up to date, or no run of it has a launcher."""
        if row.counted_ns != self.now_ns:
            row = self._until_now(row)
        row = msgspec.structs.replace(
            row,
            outcome=outcome,
            cause=cause if cause is not None else row.cause,
            exit_code=exit_code,
            reason=reason,
            ended_ns=self.now_ns,
            claim=(),
            held=False,
        )
        self._enter(row, Step.FINISH)
        self.notes.append(f"task {row.id} {outcome.value}: {reason or 'its program has ended'}")
        self._release_dependents(row)
        self._forget_old()

    def _release_dependents(self, first: TaskRow) -> None:
        """Those who waited for it: looked at again, or ended with it, and so on."""
        ended = [first]
        while ended:
            row = ended.pop()
            for waiting in list(self._ledger.index.dependents.get(row.id, {})):
                task = self._ledger.tasks.known(waiting)
                self.touched[waiting] = None
                wants_success = any(after.task == row.id and after.ok for after in self.spec(task).after)
                if row.outcome is Outcome.SUCCEEDED or not wants_success or task.runs:
                    continue
                task = msgspec.structs.replace(
                    self._until_now(task),
                    outcome=Outcome.FAILED,
                    reason=f"task {row.id}, after whose success it was to run, has not succeeded",
                    ended_ns=self.now_ns,
                )
                ended.append(self._enter(task, Step.FINISH))

    def _forget_old(self) -> None:
        """The oldest of those that have finished, where there are more than are remembered."""
        index = self._ledger.index
        surplus = len(index.finished) - self._settings.max_finished
        if surplus <= 0:
            return
        for old in list(index.finished)[:surplus]:
            row = self._ledger.tasks.known(old)
            if index.open_run(row) is None:
                self._ledger.drop_task(row)
