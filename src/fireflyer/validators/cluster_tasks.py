"""Validations as tasks of the platform: submitted for idle nodes, withdrawn where other tasks need these, and read."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Final, Generic, NamedTuple, TypeVar

from fireflyer.base.errors import FireflyerError, NotFound, TransientError
from fireflyer.base.units import SECOND
from fireflyer.cluster.client import Client
from fireflyer.cluster.core.platform.views import NodeView, TaskView
from fireflyer.cluster.schema.logs import LogText
from fireflyer.cluster.schema.tasks import FINISHED, Outcome, Program, TaskSpec, TaskState
from fireflyer.validators.core.validation.queue import ValidationQueue
from fireflyer.validators.core.validation.reports import MAX_REPORT_BYTES, LinkReport, NodeReport

__all__ = ["Ended", "Job", "run_jobs"]

LOOK_S: Final = 1.0
_PATIENCE_NS: Final = 120 * SECOND
"""Without an answer of a manager."""
_GRACE_NS: Final = 5 * SECOND
"""A validation has nothing to save."""
_MAX_LOG_BYTES: Final = 4 * MAX_REPORT_BYTES

_Report = TypeVar("_Report", NodeReport, LinkReport)


class Job(NamedTuple):
    """One validation, and how it is run."""

    nodes: tuple[str, ...]
    node_group: str
    args: tuple[str, ...]
    """Of `fireflyer.validators.task`."""
    directory: str
    limit_ns: int
    """Of the run: what goes on then hangs, and is ended by the platform."""

    def spec(self) -> TaskSpec:
        """Of the lowest priority, so that every other task may interrupt it; never begun again by the platform for a
        failure, which would be another validation than the one that was asked for."""
        program = Program(
            script="fireflyer.validators.task", kind="module", args=self.args, workdir=self.directory
        )  # fmt: skip
        return TaskSpec(
            name=f"validate-{'-'.join(self.nodes)}"[:80], program=program, least_nodes=len(self.nodes),
            most_nodes=len(self.nodes), node_group=self.node_group, only=self.nodes, priority=0, time_ns=self.limit_ns,
            max_restarts=0, max_requeues=0, grace_ns=_GRACE_NS,
        )  # fmt: skip


class Ended(NamedTuple, Generic[_Report]):
    job: Job
    report: _Report | None
    why_not: str
    """Where there is no report: why it could not be validated."""


def run_jobs(
    client: Client,
    jobs: Iterable[Job],
    read: Callable[[str], _Report | None],
    apart: Collection[frozenset[str]],
    *,
    most_nodes: int,
    limit_ns: int,
    say: Callable[[str], None],
) -> Iterator[Ended[_Report]]:
    """Each job once, as soon as its nodes are idle; what each of them ended with. `read`: the report in the log of a
    task. Jobs whose nodes were not idle within
    `limit_ns` end with that as the reason. Tasks that are still there are stopped when the iteration ends, however it
    does. A leader that fails is waited for; raises `FireflyerError` where none answers for two minutes."""
    running = _Running(client, read, {job.nodes: job for job in jobs}, apart, most_nodes, say)
    began_ns = heard_ns = time.monotonic_ns()
    try:
        while not running.queue.done:
            try:
                yield from running.look(late=time.monotonic_ns() - began_ns >= limit_ns)
                heard_ns = time.monotonic_ns()
            except TransientError:
                if time.monotonic_ns() - heard_ns > _PATIENCE_NS:
                    raise
            if not running.queue.done:
                time.sleep(LOOK_S)
    finally:
        running.stop()


class _Running(Generic[_Report]):
    """Which task is of which job."""

    def __init__(
        self,
        client: Client,
        read: Callable[[str], _Report | None],
        jobs: dict[tuple[str, ...], Job],
        apart: Collection[frozenset[str]],
        most_nodes: int,
        say: Callable[[str], None],
    ) -> None:
        self.queue = ValidationQueue(jobs, apart, most_nodes=most_nodes)
        self._client, self._jobs, self._say = client, jobs, say
        self._read: Callable[[str], _Report | None] = read
        self._tasks: dict[int, Job] = {}

    def look(self, *, late: bool) -> Iterator[Ended[_Report]]:
        """What has ended since; begins what can begin, or, where it is `late`, ends what has not begun."""
        nodes = {node.name: node for node in self._client.all_nodes()}
        for task, job in list(self._tasks.items()):
            view = self._client.task(task).task
            if view.state is FINISHED:
                ended = _ended(self._client, job, view, self._read)
                del self._tasks[task]
                self.queue.ended(job.nodes)
                yield ended
            elif _is_in_the_way(view, job, nodes) or (late and view.state is TaskState.QUEUED):
                del self._tasks[task]
                _stop(self._client, task, "its node is needed")
                if not self.queue.interrupted(job.nodes):
                    yield Ended(job, None, "other tasks have interrupted it again and again")
        if not late:
            for begun in self.queue.begin([name for name, node in nodes.items() if node.state == "idle"]):
                task = _submit(self._client, self._jobs[begun])
                self._tasks[task] = self._jobs[begun]
                self._say(f"task {task} validates {' and '.join(begun)}")
            return
        for waiting in self.queue.waiting:
            self.queue.ended(waiting)
            yield Ended(self._jobs[waiting], None, "its nodes were not idle in time; see --wait")

    def stop(self) -> None:
        for task in self._tasks:
            _stop(self._client, task, "the command that had submitted it has ended")


def _is_in_the_way(view: TaskView, job: Job, nodes: dict[str, NodeView]) -> bool:
    """It was interrupted, or another task was faster: to be begun again when its nodes are idle, as one that stays in
    the queue would begin beside validations that must be apart from it."""
    if view.state is TaskState.SUSPENDED:
        return True
    others = (nodes[name].task for name in job.nodes if name in nodes)
    return view.state is TaskState.QUEUED and (view.runs > 0 or any(task not in (None, view.id) for task in others))


def _submit(client: Client, job: Job) -> int:
    key = secrets.token_hex(16)
    began_ns = time.monotonic_ns()
    while True:
        try:
            return client.submit(job.spec(), key=key)[0]
        except TransientError:  # the same key makes no second task
            if time.monotonic_ns() - began_ns > _PATIENCE_NS:
                raise
            time.sleep(LOOK_S)


def _stop(client: Client, task: int, reason: str) -> None:
    """At the end of a command too, where a manager that does not answer is no reason to say more: the task has a time
    limit and the lowest priority."""
    try:
        client.stop(task, reason)
    except FireflyerError:
        return


def _ended(client: Client, job: Job, view: TaskView, read: Callable[[str], _Report | None]) -> Ended[_Report]:
    if view.outcome is not Outcome.SUCCEEDED:
        return Ended(job, None, f"task {view.id} {view.outcome.value if view.outcome else 'ended'}: {view.reason}")
    report = read(_log(client, view.id))
    return Ended(
        job, report, "" if report is not None else f"task {view.id} has written no report; see ff logs {view.id}"
    )


def _log(client: Client, task: int) -> str:
    """Of rank 0; the end of it, where it is long."""
    pieces: list[str] = []
    try:
        for event in client.logs(task, rank=0, follow=True):
            if isinstance(event, LogText):
                pieces.append(event.text)
                while sum(map(len, pieces)) > _MAX_LOG_BYTES:
                    pieces.pop(0)
    except NotFound:
        return ""
    return "".join(pieces)
