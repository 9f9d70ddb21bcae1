"""Performs the soak: starts everything, does what the director says, and writes down what it sees."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Final

import msgspec

from fireflyer.base.errors import FireflyerError, TransientError
from fireflyer.cluster.client import Client
from fireflyer.data.files import replace_file
from fireflyer.recipes.corpus import Corpus, build_corpus
from fireflyer.recipes.soak.director import Action, Director, GiveUp, Inject, Phase, Recovered, Release, Submit
from fireflyer.recipes.soak.facts import SoakFacts
from fireflyer.recipes.soak.faults import kind_named
from fireflyer.recipes.soak.injector import Injector
from fireflyer.recipes.soak.plan import SoakPlan
from fireflyer.recipes.soak.preparing import prepare
from fireflyer.recipes.soak.seen import Seen
from fireflyer.recipes.soak.small_disks import own_mounts
from fireflyer.recipes.soak.watching import PlatformWatch
from fireflyer.recipes.soak.writers import Writer, running_writers
from fireflyer.recipes.testbed.cluster import Cluster, running_cluster
from fireflyer.recipes.testbed.collecting import shards_of, stored_files, task_facts, twins_of
from fireflyer.recipes.testbed.facts import FileFact, Reference
from fireflyer.recipes.testbed.plan import TaskPlan
from fireflyer.recipes.testbed.reference import undisturbed_runs
from fireflyer.recipes.testbed.storage_watch import StorageWatch
from fireflyer.recipes.testbed.storing import store_corpus
from fireflyer.recipes.testbed.tasks import CHECKPOINTS, CORPUS, task_spec
from fireflyer.runtime.processes.guarded import child_environment
from fireflyer.runtime.processes.run_lock import RunLock

if TYPE_CHECKING:
    from fireflyer.fs.client.files.file_system import FileSystem

__all__ = ["run_soak"]

LOOK_S: Final = 0.2
SAY_S: Final = 5.0
"""Between two lines that say how far everything is."""
FSCK_S: Final = 300.0
PAGE: Final = 100
_CANNOT: Final = "its task cannot be suspended any more"


def run_soak(plan: SoakPlan, directory: str, say: Callable[[str], None]) -> SoakFacts:
    """Everything is written beneath `directory`; the corpus and the undisturbed losses of an earlier soak are used
    again. `say` gets a line of progress, from several threads. Raises `FireflyerError` for what cannot start."""
    os.makedirs(directory, exist_ok=True)
    lock = RunLock(os.path.join(directory, "soak.lock"), "ff soak")
    try:
        no_mounts = own_mounts(directory)
        if no_mounts:
            plan = msgspec.structs.replace(plan, kinds=tuple(kind for kind in plan.kinds if not kind.mounts))
            say(f"without full disks: {no_mounts}")
        corpus = build_corpus(os.path.join(directory, "corpus"), max_bytes=plan.corpus_bytes)
        references = undisturbed_runs(plan, plan.undisturbed, directory, corpus, say)
        place = os.path.join(directory, "platform")
        with contextlib.ExitStack() as after, running_cluster(plan, place, say) as cluster:
            facts = _Stage(plan, directory, cluster, references, say).perform(corpus, after, no_mounts)
        replace_file(os.path.join(directory, "facts.json"), msgspec.json.encode(facts))
        return facts
    finally:
        lock.release()


class _Stage:
    """The part with the cluster."""

    def __init__(
        self,
        plan: SoakPlan,
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
        self._numbers: dict[str, int] = {}
        self._trouble: list[str] = []
        self._waiting: list[Action] = []
        """What the platform could not be asked yet."""
        self._said_s = 0.0
        self._zero_ns = time.monotonic_ns()
        self._unix_zero_ns = time.time_ns()

    def perform(self, corpus: Corpus, after: contextlib.ExitStack, no_mounts: str) -> SoakFacts:
        import fireflyer.fs
        from fireflyer.fs.client.local import access_of

        with contextlib.ExitStack() as cleanup:
            self._admin = cleanup.enter_context(self._cluster.client())
            self._clients = {user: cleanup.enter_context(self._new_user(user)) for user in self._users()}
            self._cluster_zero_ns = self._admin.cluster().time_ns - self._now_ns()
            prepared = prepare(self._cluster, self._plan, after, mounts=not no_mounts)
            self._injector = Injector(self._cluster, prepared, suspend=self._suspend, resume=self._resume)
            cleanup.callback(self._injector.release_everything)
            managers, credential = access_of(self._cluster.layout.storage_directory)
            files = cleanup.enter_context(fireflyer.fs.connect(f"ff://{self._cluster.layout.storage_directory}"))
            twins = twins_of(CORPUS, store_corpus(files, CORPUS, corpus))
            files.makedirs(CHECKPOINTS, exist_ok=True)
            files.chmod(CHECKPOINTS, 0o1777)  # each task is its user there, who makes a directory of their own
            self._storage = StorageWatch(managers, credential, self._now_ns)
            self._platform = PlatformWatch(
                cleanup.enter_context(self._cluster.client()), self._cluster.layout, self._now_ns
            )
            self._say(self._cluster.watch_line)
            with (
                _running(self._storage),
                _running(self._platform),
                running_writers(files, self._plan.seed, self._directory, self._now_ns) as writers,
            ):
                self._direct(writers)
            return self._facts(files, writers, twins, no_mounts)

    def _users(self) -> list[str]:
        return sorted({self._plan.task(number + 1).user for number in range(self._plan.shapes)})

    def _new_user(self, user: str) -> Client:
        self._admin.create_user(user)
        return self._cluster.client(self._admin.issue_token(user).token)

    def _now_ns(self) -> int:
        return time.monotonic_ns() - self._zero_ns

    # --- what is seen, and what is done ---

    def _direct(self, writers: list[Writer]) -> None:
        while self._director.phase is not Phase.DONE:
            seen = self._look(writers)
            self._waiting += self._director.handle(self._now_ns(), seen)
            stuck = [f"writer {writer.name}: {writer.stuck}" for writer in writers if writer.stuck]
            self._waiting += [GiveUp(reason) for reason in stuck]
            self._do_what_waits()
            if stuck:
                return
            self._say_how_far(seen)
            time.sleep(LOOK_S)

    def _look(self, writers: list[Writer]) -> Seen:
        return Seen(
            storage=self._storage.samples[-1] if self._storage.samples else None,
            platform=self._platform.newest,
            acknowledged_ns={writer.name: writer.acknowledged_ns for writer in writers},
            busy=max(1.0, os.getloadavg()[0] / len(os.sched_getaffinity(0))),
        )

    def _do_what_waits(self) -> None:
        """What fails because a manager does not answer is done with the next look."""
        waiting, self._waiting = self._waiting, []
        for action in waiting:
            try:
                self._do(action)
            except TransientError:
                self._waiting.append(action)

    def _do(self, action: Action) -> None:
        match action:
            case Submit(task=task):
                self._submit(task)
            case Inject(fault=fault, choice=choice):
                reached = self._injector.inject(fault, choice)
                if not fault.reached:
                    where = f", {fault.target}" if fault.target else ""
                    missed = "" if reached else ": nothing was there"
                    self._say(f"FAULT {fault.number}: {kind_named(fault.kind).text}{where}{missed}")
                self._director.injected(fault.number, reached, self._now_ns())
            case Release(fault=fault):
                self._injector.release(fault)
                self._director.released(fault.number, self._now_ns())
            case Recovered(fault=fault):
                took_s = ((fault.recovered_ns or 0) - (fault.released_ns or 0)) / 1e9
                self._say(f"fault {fault.number} ({fault.kind}) is over: recovered {took_s:.1f} s after it was")
            case GiveUp(reason=reason):
                self._trouble.append(reason)
                self._say(f"gives up: {reason}")

    def _submit(self, task: TaskPlan) -> None:
        spec = task_spec(
            self._plan,
            task,
            workdir=self._directory,
            max_restarts=self._plan.max_restarts,
            max_requeues=self._plan.max_requeues,
        )
        (self._numbers[task.name],) = self._clients[task.user].submit(spec, key=task.name)
        self._platform.follow(task.name, self._numbers[task.name])

    def _suspend(self, name: str) -> int:
        try:
            self._admin.suspend(self._numbers[name])
        except TransientError:
            raise
        except FireflyerError as error:
            self._say(f"task {name}: {_CANNOT}: {error}")
            return 0
        return 1

    def _resume(self, name: str) -> None:
        try:
            self._admin.resume(self._numbers[name])
        except TransientError:
            raise
        except FireflyerError as error:
            self._say(f"task {name} is not resumed: {error}")  # it has finished meanwhile, or the director will see

    def _say_how_far(self, seen: Seen) -> None:
        if time.monotonic() - self._said_s < SAY_S:
            return
        self._said_s = time.monotonic()
        parts = [f"{len(self._director.faults)} faults"]
        if seen.platform is not None:
            unfinished = {name: task for name, task in seen.platform.tasks.items() if task.state != "finished"}
            parts.append(f"{len(seen.platform.tasks) - len(unfinished)} tasks finished")
            parts += [f"{name} {task.state} {task.step}/{self._plan.steps}" for name, task in unfinished.items()]
        if seen.storage is not None:
            one = seen.storage
            parts.append(f"storage {len(one.alive)}/{self._plan.storage_nodes}, {one.whole}/{one.chains} whole")
        self._say(" · ".join(parts))

    # --- facts ---

    def _facts(self, files: FileSystem, writers: list[Writer], twins: list[FileFact], no_mounts: str) -> SoakFacts:
        end_ns = self._now_ns()
        self._say("reading every file back")
        stored = stored_files(files)
        self._say("checking names, inodes and chunks: ff fs fsck")
        code, printed = self._fsck()
        tasks = task_facts(
            self._admin,
            self._cluster.layout,
            {str(number): number for number in self._all_tasks()},
            cluster_zero_ns=self._cluster_zero_ns,
            unix_zero_ns=self._unix_zero_ns,
        )
        plans = tuple(self._director.plans)
        return SoakFacts(
            seed=self._plan.seed,
            faults=tuple(self._director.faults.values()),
            left_out=(f"full disks: {no_mounts}",) if no_mounts else (),
            plans=plans,
            tasks=tasks,
            references={task.name: self._references[self._plan.shape_of(task)] for task in plans},
            shards={task.name: shards_of(stored, f"{CHECKPOINTS}/{task.name}") for task in plans},
            writers=tuple(writer.facts() for writer in writers),
            stored=tuple(one for one in stored if not one.path.startswith(f"{CHECKPOINTS}/")),
            twins=tuple(sorted([*twins, *(twin for one in writers for twin in one.twins())], key=lambda one: one.path)),
            storage=self._storage.samples[-1] if self._storage.samples else None,
            fsck=printed,
            fsck_code=code,
            begin_ns=self._director.begin_ns,
            end_ns=end_ns,
            trouble=tuple(self._trouble),
        )

    def _all_tasks(self) -> list[int]:
        """Numbers of all tasks of the platform, also of one that was made twice."""
        found: list[int] = []
        before: int | None = None
        while True:
            page = self._admin.tasks(before=before, limit=PAGE)
            found += [task.id for task in page.tasks]
            before = page.next
            if before is None:
                return sorted(found)

    def _fsck(self) -> tuple[int | None, tuple[str, ...]]:
        command = [sys.executable, "-P", "-m", "fireflyer", "fs", "fsck", "--dir",
                   self._cluster.layout.storage_directory]  # fmt: skip
        try:
            done = subprocess.run(
                command, env=child_environment({}), capture_output=True, text=True, timeout=FSCK_S, check=False
            )
        except subprocess.TimeoutExpired:
            return None, ()
        return done.returncode, tuple(line for line in (done.stdout + done.stderr).splitlines() if line.strip())


@contextlib.contextmanager
def _running(one: StorageWatch | PlatformWatch) -> Iterator[None]:
    one.start()
    try:
        yield
    finally:
        one.stop()
