"""Takes submissions into the draft, within the limits of each user and of the cluster."""

from __future__ import annotations

import hashlib

import msgspec

from fireflyer.base.errors import Busy, Exists, NotFound, PermissionDenied, UsageError
from fireflyer.base.units import MIB
from fireflyer.cluster.core.platform.access import is_operator
from fireflyer.cluster.core.platform.life.tasks import Tasks
from fireflyer.cluster.core.platform.messages import Settings, Submission, Submitted
from fireflyer.cluster.core.platform.store.history import CommandDone
from fireflyer.cluster.core.platform.store.ledger import Ledger
from fireflyer.cluster.core.platform.store.rows import ConfigRow, SubmissionRow, TaskRow
from fireflyer.cluster.schema.tasks import FINISHED, MAX_ARRAY, Outcome, Program, TaskSpec, TaskState

__all__ = ["highest_priority", "submit"]

MAX_SPEC_BYTES = 256 * 1024
MAX_SPECS_BYTES = 4 * MIB


def highest_priority(config: ConfigRow, user: str) -> int:
    """That the user may ask for."""
    bounds = {bound.user: bound.priority for bound in config.bounds}
    return bounds.get(user, bounds.get("", 50))


def submit(ledger: Ledger, tasks: Tasks, settings: Settings, asked: Submitted) -> Submission:
    """All of it or nothing. Raises `UsageError`, `PermissionDenied`, `Exists`, `NotFound`, `Busy`."""
    encoded = [msgspec.msgpack.encode(spec) for spec in asked.specs]
    digest = hashlib.blake2b(msgspec.msgpack.encode(encoded), digest_size=16).hexdigest() if asked.key else ""
    repeated = _repeated(ledger, asked, digest)
    if repeated is not None:
        return repeated
    _check_sizes(encoded)
    wanted = sum(spec.array or 1 for spec in asked.specs)
    _check_room(ledger, settings, asked.user, wanted)
    names: dict[str, None] = {}
    for spec in asked.specs:
        _check_spec(ledger, asked, spec)
        for name in _names(spec):
            other = ledger.index.named.get((asked.user, name))
            if other is not None:
                raise Exists(f"task {other} of {asked.user} has the name {name} and has not finished; choose another")
            if name in names:
                raise UsageError(f"two tasks of the submission have the name {name}; give each its own")
            names[name] = None
    return _put(ledger, tasks, asked, digest, wanted)


def _names(spec: TaskSpec) -> list[str]:
    return [spec.name] if spec.array is None else [f"{spec.name}.{index}" for index in range(spec.array)]


def _repeated(ledger: Ledger, asked: Submitted, digest: str) -> Submission | None:
    known = ledger.index.keys.get((asked.user, asked.key)) if asked.key else None
    if not known:
        return None
    rows = sorted((ledger.submissions.known(row) for row in known), key=lambda row: row.id)
    if rows[0].digest != digest:
        raise UsageError(f"the idempotency key {asked.key} was used for another submission; choose another key")
    return Submission(tuple(row.first + place for row in rows[:1] for place in range(row.total)), repeated=True)


def _check_sizes(encoded: list[bytes]) -> None:
    largest = max(map(len, encoded))
    if largest > MAX_SPEC_BYTES:
        raise UsageError(f"a task is {largest} bytes; at most {MAX_SPEC_BYTES}: put data into files")
    if sum(map(len, encoded)) > MAX_SPECS_BYTES:
        raise UsageError(f"a submission has at most {MAX_SPECS_BYTES} bytes; submit fewer tasks at a time")


def _check_room(ledger: Ledger, settings: Settings, user: str, wanted: int) -> None:
    if wanted > MAX_ARRAY:
        raise UsageError(f"a submission has at most {MAX_ARRAY} tasks, not {wanted}; submit fewer at a time")
    if settings.history and ledger.outbox_rows() >= settings.max_outbox_rows:
        raise Busy("the history is away and its outbox is full; submit again when the database is back")
    mine = len(ledger.index.of_user.get(user, {}))
    if mine + wanted > settings.max_unfinished_per_user:
        raise Busy(
            f"{user} has {mine} unfinished tasks, and at most {settings.max_unfinished_per_user} are taken; "
            "wait until some have ended"
        )
    if len(ledger.index.unfinished) + wanted > settings.max_tasks:
        raise Busy(f"the cluster has {len(ledger.index.unfinished)} unfinished tasks, which is its limit; try later")


def _check_spec(ledger: Ledger, asked: Submitted, spec: TaskSpec) -> None:
    highest = highest_priority(ledger.settings, asked.user)
    if spec.priority > highest and not is_operator(asked.roles):
        raise PermissionDenied(f"{asked.user} may ask for priority {highest} at most, not {spec.priority}")
    if spec.kind == "interactive" and spec.time_ns is None:
        raise UsageError("an interactive task ends by its time: declare one with --time")
    _check_environment(spec.program)
    for after in spec.after:
        other = ledger.tasks.get(after.task)
        if other is None:
            raise NotFound(f"there is no task {after.task}, after which {spec.name} is to run")
        if after.ok and other.state is FINISHED and other.outcome is not Outcome.SUCCEEDED:
            raise UsageError(f"task {after.task}, after whose success {spec.name} is to run, has not succeeded")


def _check_environment(program: Program) -> None:
    if not program.environment:
        return
    if not program.snapshot:
        raise UsageError("the lock file of an environment travels with the task's directory; submit that, too")
    if program.python:
        raise UsageError("a task has a lock file or the path of a Python, not both; give one of them")


def _put(ledger: Ledger, tasks: Tasks, asked: Submitted, digest: str, wanted: int) -> Submission:
    now_ns = tasks.now_ns
    first = task = ledger.new_tasks(wanted)
    for spec in asked.specs:
        submission = SubmissionRow(
            id=task, spec=spec, count=spec.array or 1, key=asked.key, digest=digest, first=first, total=wanted
        )
        ledger.put_submission(submission, asked.user)
        for index, name in enumerate(_names(spec)):
            row = TaskRow(
                id=task,
                submission=submission.id,
                array_index=None if spec.array is None else index,
                name=name,
                user=asked.user,
                group=asked.group,
                state=TaskState.QUEUED,
                priority=spec.priority,
                submitted_ns=now_ns,
                queued_ns=now_ns,
                since_ns=now_ns,
                counted_ns=now_ns,
                whole_life=spec.whole_life,
            )
            tasks.put(row)
            tasks.tell(row)
            task += 1
    ledger.record(CommandDone(now_ns, asked.user, "submit", str(first), f"{wanted} tasks", asked.address))
    return Submission(tuple(range(first, first + wanted)))
