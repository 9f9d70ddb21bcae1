"""Makes facts of what lies there when a run of a recipe is over: tasks with the event logs of their runs, and files."""

from __future__ import annotations

import hashlib
import posixpath
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Final

import msgspec

from fireflyer.base.events import JobStarted
from fireflyer.base.units import MIB, SECOND
from fireflyer.checkpoint.core.names import MANIFEST_FILE, candidates
from fireflyer.cluster.client import Client
from fireflyer.cluster.core.platform.views import RunView, TaskAnswer
from fireflyer.cluster.local.layout import PlatformLayout
from fireflyer.recipes.testbed.cluster import log_of
from fireflyer.recipes.testbed.facts import FileFact, RunFacts, TaskFacts

if TYPE_CHECKING:
    from fireflyer.fs.client.files.file_system import FileSystem

__all__ = ["shards_of", "stored_files", "task_facts", "twins_of"]

_PIECE_BYTES: Final = 4 * MIB


def task_facts(
    client: Client, layout: PlatformLayout, tasks: Mapping[str, int], *, cluster_zero_ns: int, unix_zero_ns: int
) -> tuple[TaskFacts, ...]:
    """`cluster_zero_ns`, `unix_zero_ns`: what the clocks of the platform and of this machine said at 0 of the
    recipe's clock."""
    return tuple(_task(client.task(number), layout, cluster_zero_ns, unix_zero_ns) for number in sorted(tasks.values()))


def _task(answer: TaskAnswer, layout: PlatformLayout, cluster_zero_ns: int, unix_zero_ns: int) -> TaskFacts:
    task = answer.task
    ended_ns = None if task.ended_ns is None else task.ended_ns - cluster_zero_ns
    return TaskFacts(
        name=task.name,
        user=task.user,
        priority=task.priority,
        task=task.id,
        submitted_ns=task.submitted_ns - cluster_zero_ns,
        ended_ns=ended_ns,
        state=task.state.value,
        outcome="" if task.outcome is None else task.outcome.value,
        reason=task.reason,
        account=msgspec.structs.asdict(task.account),
        runs=tuple(_run(run, layout, cluster_zero_ns, unix_zero_ns, ended_ns) for run in answer.runs),
    )


def _run(
    run: RunView, layout: PlatformLayout, cluster_zero_ns: int, unix_zero_ns: int, ended_ns: int | None
) -> RunFacts:
    log = log_of(layout, run)
    begun = next((entry for entry in log if isinstance(entry.event, JobStarted)), None)
    began_ns = None
    if begun is not None and isinstance(begun.event, JobStarted):
        began_ns = round(begun.event.wall_time_s * SECOND) - unix_zero_ns - begun.at_ns
    over_ns = run.over_ns if run.over_ns is not None else run.ended_ns
    return RunFacts(
        number=run.number,
        nodes=run.nodes,
        scheduled_ns=run.scheduled_ns - cluster_zero_ns,
        log_begins_ns=began_ns,
        over_ns=(ended_ns or 0) if over_ns is None else over_ns - cluster_zero_ns,
        cause="" if run.cause is None else run.cause.value,
        end_reason=run.end_reason,
        leave_reason=run.leave_reason,
        log=tuple(log),
    )


def stored_files(files: FileSystem) -> tuple[FileFact, ...]:
    """Everything below the root, read from the file system. Raises `OSError`."""
    found = []
    for _, _, entries in files.walk("/"):
        for entry in entries:
            digest, size, buffer = hashlib.sha256(), 0, memoryview(bytearray(_PIECE_BYTES))
            with files.open_file(entry.path) as file:
                while count := file.pread_into(buffer, size):
                    digest.update(buffer[:count])
                    size += count
            found.append(FileFact(path=entry.path, bytes=size, digest=digest.hexdigest()))
    return tuple(sorted(found, key=lambda one: one.path))


def shards_of(stored: Iterable[FileFact], directory: str) -> dict[str, str]:
    """Digests of the files of the last checkpoint in `directory`, by name, but its manifest, which names the save.
    Pure."""
    found: dict[str, dict[str, str]] = {}
    for one in stored:
        parent, name = posixpath.split(one.path)
        if posixpath.dirname(parent) == directory:
            found.setdefault(posixpath.basename(parent), {})[name] = one.digest
    newest = candidates(list(found))[:1]
    return {name: digest for last in newest for name, digest in found[last.name].items() if name != MANIFEST_FILE}


def twins_of(directory: str, content: Mapping[str, bytes]) -> list[FileFact]:
    return [
        FileFact(path=f"{directory}/{name}", bytes=len(data), digest=hashlib.sha256(data).hexdigest())
        for name, data in content.items()
    ]
