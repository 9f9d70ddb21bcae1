"""Performs the demonstration: starts everything, does what the director says, and writes down what it sees."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Final

import msgspec

from fireflyer.cluster.client import Client
from fireflyer.data.files import replace_file
from fireflyer.recipes.corpus import Corpus, build_corpus
from fireflyer.recipes.testbed.cluster import Cluster, running_cluster
from fireflyer.recipes.testbed.collecting import shards_of, stored_files, task_facts, twins_of
from fireflyer.recipes.testbed.facts import FileFact, Reference
from fireflyer.recipes.testbed.plan import TaskPlan
from fireflyer.recipes.testbed.processes import compute_node_processes, signal_all, storage_processes
from fireflyer.recipes.testbed.reference import undisturbed_runs
from fireflyer.recipes.testbed.storage_watch import StorageWatch
from fireflyer.recipes.testbed.storing import store_corpus
from fireflyer.recipes.testbed.tasks import CHECKPOINTS, CORPUS, task_spec
from fireflyer.recipes.whole.director import (
    Action,
    Director,
    GiveUp,
    KillNode,
    KillStorage,
    Phase,
    Seen,
    Submit,
    how_far,
)
from fireflyer.recipes.whole.facts import Facts, Fault
from fireflyer.recipes.whole.plan import WholePlan
from fireflyer.recipes.whole.traffic import Traffic
from fireflyer.recipes.whole.watching import NodeHistory, recovery_of, seen_of
from fireflyer.runtime.processes.run_lock import RunLock

if TYPE_CHECKING:
    from fireflyer.fs.client.files.file_system import FileSystem

__all__ = ["run_whole"]

LOOK_S: Final = 0.25
SAY_S: Final = 4.0
"""Between two lines that say how far everything is."""


def run_whole(plan: WholePlan, directory: str, say: Callable[[str], None]) -> Facts:
    """Everything is written beneath `directory`; the corpus and the undisturbed losses of an earlier demonstration are
    used again. `say` gets a line of progress, from several threads. Raises `FireflyerError` for what cannot start."""
    os.makedirs(directory, exist_ok=True)
    lock = RunLock(os.path.join(directory, "demo.lock"), "ff demo --whole")
    try:
        corpus = build_corpus(os.path.join(directory, "corpus"), max_bytes=plan.corpus_bytes)
        say(f"corpus: {corpus}")
        references = undisturbed_runs(plan, plan.all_tasks, directory, corpus, say)
        with running_cluster(plan, os.path.join(directory, "platform"), say) as cluster:
            facts = _Stage(plan, directory, cluster, references, say).perform(corpus)
        replace_file(os.path.join(directory, "facts.json"), msgspec.json.encode(facts))
        return facts
    finally:
        lock.release()


class _Stage:
    """The part with the platform."""

    def __init__(
        self,
        plan: WholePlan,
        directory: str,
        cluster: Cluster,
        references: dict[str, Reference],
        say: Callable[[str], None],
    ) -> None:
        self._plan = plan
        self._directory = directory
        self._cluster = cluster
        self._references = references
        self._say = say
        self._director = Director(plan)
        self._history = NodeHistory()
        self._tasks: dict[str, int] = {}
        self._faults: dict[str, Fault] = {}
        self._incarnation = 0
        """Of the storage node before it was killed."""
        self._trouble: list[str] = []
        self._said_s = 0.0

    def perform(self, corpus: Corpus) -> Facts:
        import fireflyer.fs
        from fireflyer.fs.client.local import access_of

        managers, credential = access_of(self._cluster.layout.storage_directory)
        target = f"ff://{self._cluster.layout.storage_directory}"
        with contextlib.ExitStack() as cleanup:
            files = cleanup.enter_context(fireflyer.fs.connect(target))
            twins = twins_of(CORPUS, store_corpus(files, CORPUS, corpus))
            files.makedirs(CHECKPOINTS, exist_ok=True)
            files.chmod(CHECKPOINTS, 0o1777)  # each task is its user there, who makes a directory of their own
            self._say(f"the corpus is in the file system: ff://{CORPUS}, {sum(one.bytes for one in twins):,} bytes")
            self._admin = cleanup.enter_context(self._cluster.client())
            self._clients = {user: cleanup.enter_context(self._new_user(user)) for user in self._users()}
            self._begin()
            self._storage = StorageWatch(managers, credential, self._now_ns)
            traffic = Traffic(files, self._now_ns)
            with _running(self._storage), _running(traffic):
                self._direct()
            return self._facts(files, traffic, twins)

    def _users(self) -> list[str]:
        return sorted({task.user for task in self._plan.all_tasks})

    def _new_user(self, user: str) -> Client:
        self._admin.create_user(user)
        return self._cluster.client(self._admin.issue_token(user).token)

    def _begin(self) -> None:
        self._zero_ns = time.monotonic_ns()
        self._unix_zero_ns = time.time_ns()
        self._cluster_zero_ns = self._admin.cluster().time_ns
        self._say(self._cluster.watch_line)

    def _now_ns(self) -> int:
        return time.monotonic_ns() - self._zero_ns

    # --- what is seen, and what is done ---

    def _direct(self) -> None:
        while self._director.phase is not Phase.DONE:
            seen = self._look()
            for action in self._director.handle(self._now_ns(), seen):
                self._do(action)
            self._say_how_far(seen)
            time.sleep(LOOK_S)
        for fault in self._faults.values():
            self._settle(fault)

    def _look(self) -> Seen:
        answers = {name: self._admin.task(number) for name, number in self._tasks.items()}
        names = {number: name for name, number in self._tasks.items()}
        self._history.look(self._now_ns(), self._admin.nodes(), names)
        for fault in self._faults.values():
            self._settle(fault)
        newest = self._storage.samples[-1] if self._storage.samples else None
        storage = self._faults.get("storage")
        return Seen(
            tasks={name: seen_of(answer) for name, answer in answers.items()},
            storage_whole=newest is not None
            and len(newest.alive) == self._plan.storage_nodes
            and newest.whole == newest.chains,
            storage_failed=storage is not None and storage.failed_ns is not None,
            storage_back=storage is not None and storage.over_ns is not None,
        )

    def _settle(self, fault: Fault) -> None:
        """Notes when something was back."""
        if fault.kind == "node" and fault.over_ns is None and not self._history.is_down(fault.what):
            self._faults["node"] = msgspec.structs.replace(fault, over_ns=self._now_ns())
            self._say(f"{fault.what} is back")
        if fault.kind == "storage" and fault.whole_ns is None:
            found = recovery_of(self._storage.samples, fault, self._incarnation)
            news = {
                "failed_ns": f"storage node {fault.what} counts as failed; its chains go on without it",
                "over_ns": f"storage node {fault.what} is back; what it missed is copied",
                "whole_ns": f"every chunk has {self._plan.replicas} replicas again",
            }
            for name, line in news.items():
                if getattr(fault, name) is None and getattr(found, name) is not None:
                    self._say(line)
            self._faults["storage"] = found

    def _do(self, action: Action) -> None:
        now_ns, layout = self._now_ns(), self._cluster.layout
        match action:
            case Submit(tasks=names):
                for name in names:
                    self._submit(next(task for task in self._plan.all_tasks if task.name == name))
            case KillStorage(node=node):
                killed = signal_all(storage_processes(layout, node), signal.SIGKILL)
                before = self._faults.get("storage")
                if before is None:
                    self._say(f"FAULT 1: storage node {node} gets SIGKILL, until it counts as failed")
                    self._incarnation = self._storage.samples[-1].incarnations[node - 1]
                    before = Fault(kind="storage", at_ns=now_ns, what=str(node))
                self._faults["storage"] = msgspec.structs.replace(before, killed=before.killed + killed)
            case KillNode(node=node, task=task):
                killed = signal_all(compute_node_processes(layout, node), signal.SIGKILL)
                self._history.killed(node, self._now_ns())
                self._say(f"FAULT 3: {node} gets SIGKILL: its agent and its part of task {task}, {killed} processes")
                step = seen_of(self._admin.task(self._tasks[task])).step
                self._faults["node"] = Fault(kind="node", at_ns=now_ns, what=node, killed=killed, task=task, step=step)
            case GiveUp(reason=reason):
                self._trouble.append(reason)
                self._say(f"gives up: {reason}")

    def _submit(self, task: TaskPlan) -> None:
        spec = task_spec(self._plan, task, workdir=self._directory)
        (number,) = self._clients[task.user].submit(spec, key=task.name)
        self._tasks[task.name] = number
        urgent = task is self._plan.urgent
        if urgent:
            self._faults["urgent"] = Fault(kind="urgent", at_ns=self._now_ns(), what=task.name)
        self._say(
            f"{'FAULT 2: ' if urgent else ''}{task.user} submits task {number}, {task.name}: {task.nodes} nodes, "
            f"{task.steps} steps, priority {task.priority}"
        )

    def _say_how_far(self, seen: Seen) -> None:
        if time.monotonic() - self._said_s < SAY_S or not seen.tasks:
            return
        self._said_s = time.monotonic()
        newest = self._storage.samples[-1] if self._storage.samples else None
        self._say(how_far(self._plan, seen, newest))

    # --- facts ---

    def _facts(self, files: FileSystem, traffic: Traffic, twins: list[FileFact]) -> Facts:
        end_ns = self._now_ns()
        tasks = task_facts(
            self._admin,
            self._cluster.layout,
            self._tasks,
            cluster_zero_ns=self._cluster_zero_ns,
            unix_zero_ns=self._unix_zero_ns,
        )
        self._say("reading every file back")
        stored = stored_files(files)
        return Facts(
            faults=tuple(sorted(self._faults.values(), key=lambda fault: fault.at_ns)),
            tasks=tasks,
            references=self._references,
            nodes=self._history.end(end_ns),
            storage=tuple(self._storage.samples),
            operations=tuple(traffic.operations),
            stored=tuple(one for one in stored if not one.path.startswith(f"{CHECKPOINTS}/")),
            twins=tuple(sorted([*twins, *traffic.twins()], key=lambda one: one.path)),
            shards={task.name: shards_of(stored, f"{CHECKPOINTS}/{task.name}") for task in self._plan.all_tasks},
            end_ns=end_ns,
            trouble=tuple(self._trouble),
        )


@contextlib.contextmanager
def _running(one: StorageWatch | Traffic) -> Iterator[None]:
    one.start()
    try:
        yield
    finally:
        one.stop()
