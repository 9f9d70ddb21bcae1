"""What `ff validate nodes`, `links` and `slurm` share: their options, the lock of the records, what they print."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Callable, Iterator, Sequence
from typing import IO, TYPE_CHECKING, Any, Final

import click
import msgspec

from fireflyer.base.errors import Busy, FireflyerError, UsageError
from fireflyer.base.units import SECOND
from fireflyer.cli.completion import complete_directory, complete_file
from fireflyer.cli.numbers import Duration

if TYPE_CHECKING:
    from fireflyer.base.health_event import HealthEvent
    from fireflyer.validators.cluster_tasks import Ended, Job
    from fireflyer.validators.core.validation.node_measurements import NodeMeasurements
    from fireflyer.validators.core.validation.reports import NodeReport

__all__ = [
    "MAX_REASON", "SLACK_NS", "at_fault", "check_names", "common", "held", "keep", "measure", "of_nodes", "say",
    "shown", "told", "worst_of",
]  # fmt: skip

MAX_REASON: Final = 300
SLACK_NS: Final = 300 * SECOND
"""Of a task, for its start and for what takes longer than it was told."""
_FAULT, _WARNING, _NOT_RUN = 2, 1, 3


def of_nodes(function: Callable[..., object]) -> Callable[..., object]:
    """Options of commands that validate nodes: which, by what, and where what was measured is kept."""
    for option in (
        click.option("--apart", metavar="NODES", multiple=True,
                     help="Nodes (a,b,c) of which one is validated at a time."),
        click.option("--records", metavar="FILE", default="validation.jsonl", show_default=True,
                     shell_complete=complete_file, help="What was measured, and when; nodes are compared with it."),
        click.option("--directory", metavar="DIR", default="/tmp", show_default=True,  # noqa: S108 - of the nodes
                     shell_complete=complete_directory,
                     help="On the storage that is tested, of each node; /tmp may be memory."),
        click.option("--time", "each", type=Duration(), default="1m", show_default=True, help="Of each validator."),
        click.option("--only", metavar="NAME", multiple=True, help="Only this validator; may be repeated."),
        click.option("--every", type=Duration(), default="7d", show_default=True,
                     help="Leave out what was validated since."),
    ):  # fmt: skip
        function = option(function)
    return function


def common(function: Callable[..., object]) -> Callable[..., object]:
    for option in (
        click.option("--json", "as_json", is_flag=True, help="One JSON object for each event."),
        click.option("--wait", "limit", type=Duration(), default="1h", show_default=True,
                     help="How long a node that is busy is waited for."),
        click.option("--at-once", type=click.IntRange(1), default=None, metavar="N",
                     help="Nodes under validation at a time.  [default: a twentieth of them, at least one]"),
        click.option("--node", "names", metavar="NAME", multiple=True, help="Only this node; may be repeated."),
    ):  # fmt: skip
        function = option(function)
    return function


def check_names(only: Sequence[str]) -> None:
    """Raises `UsageError`."""
    from fireflyer.validators.stress import run

    for name in only:
        if name not in ("links", *run.VALIDATORS):
            raise UsageError(f"no validator {name!r}; validators are links, {', '.join(run.VALIDATORS)}")


def held(records: str) -> IO[bytes]:
    """The lock of a command of the file of records, which can be written to: no other such command uses the file, as
    what must be apart is known within one alone. The lock is beside the file, which is replaced when it is compacted;
    who may write to the file may lock it. Raises `FireflyerError`."""
    from fireflyer.base.os_errors import translate_os_error

    try:
        with open(records, "ab") as there:
            like = os.fstat(there.fileno())
        file = open(f"{records}.lock", "ab")  # noqa: SIM115 - the caller closes it
        with contextlib.suppress(OSError):  # of another user, who has done it
            os.fchown(file.fileno(), -1, like.st_gid)
            os.fchmod(file.fileno(), like.st_mode & 0o666)
    except OSError as error:
        raise translate_os_error(error, f"open {records}") from error
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise Busy(f"another `ff validate` uses {records}; wait for its end, or give another --records") from None
    return file


def say(text: str) -> None:
    click.echo(text, err=True)


def measure(
    run: Callable[[Sequence[Job]], Iterator[Ended[NodeReport]]], jobs: Sequence[Job],
    again: Callable[[str, list[str]], Job], measured: NodeMeasurements, ended: list[Ended[NodeReport]],
) -> None:  # fmt: skip
    """All jobs, then those that measure low figures of their nodes once or twice more. `again`: the job of a node that
    runs validators of these names. `measured` and `ended` have what there is, also where this is interrupted."""
    from fireflyer.validators.core.validation.repetition import MEASUREMENTS

    for one in run(jobs):
        ended.append(one)
        measured.first(one.job.nodes[0], one.report, time.time_ns())
    for _ in range(MEASUREMENTS - 1):
        for one in run([again(node, names) for node, names in measured.to_repeat().items()]):
            measured.again(one.job.nodes[0], one.report)


def told(
    measured: NodeMeasurements, ended: Sequence[Ended[NodeReport]], *, as_json: bool
) -> tuple[int, dict[str, list[HealthEvent]]]:
    """The exit code, and the events of each node."""
    found = measured.events()
    return shown(found, ended, as_json=as_json), found


def keep(measured: NodeMeasurements, records: str) -> None:
    """Appends the records of nodes that are in order; after the nodes at fault are dealt with, as a disk may be full.
    Raises `FireflyerError`, when all were tried."""
    from fireflyer.validators.stress.record_file import append_record

    found, failed = measured.events(), None
    for record in measured.records():
        if at_fault(found[record.node]):
            continue
        try:
            append_record(records, record)
        except Busy:  # a minute each
            raise
        except FireflyerError as error:
            failed = failed or error
    if failed is not None:
        raise failed


def at_fault(events: Sequence[HealthEvent]) -> bool:
    return any(event.severity in ("low", "high") and not event.could_not_run for event in events)


def shown(found: dict[str, list[HealthEvent]], ended: Sequence[Ended[Any]], *, as_json: bool) -> int:
    """The exit code."""
    missing = [one for one in ended if one.report is None]
    for name, events in sorted(found.items()):
        telling = [event for event in events if event.severity != "ok"]
        if as_json:
            for event in events:
                click.echo(msgspec.json.encode({"nodes": name.split(), **msgspec.to_builtins(event)}))
        elif not telling:
            alone = events[0].words if len(events) == 1 else f"{len(events)} validations"
            click.echo(f"{name}: in order, {alone}")
        for event in () if as_json else telling:
            click.echo(f"{name}: {event.severity}: {event.check}: {event.words}")
    for one in missing:
        click.echo(f"{' '.join(one.job.nodes)}: not validated: {one.why_not}", err=True)
    if any(at_fault(events) for events in found.values()):
        return _FAULT
    if missing:
        return _NOT_RUN
    return _WARNING if any(event.severity == "warn" for events in found.values() for event in events) else 0


def worst_of(events: Sequence[HealthEvent]) -> HealthEvent:
    return max(events, key=lambda event: ("ok", "warn", "low", "high").index(event.severity))
