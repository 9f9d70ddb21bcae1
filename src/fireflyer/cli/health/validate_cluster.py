"""`ff validate nodes`, `ff validate links`: validations of idle nodes of the platform, as tasks that any other task
interrupts."""

from __future__ import annotations

import fcntl
import os
import signal
import time
from collections.abc import Callable, Sequence
from shlex import quote
from typing import IO, TYPE_CHECKING, Any, Final

import click
import msgspec

from fireflyer.base.errors import Busy, UsageError
from fireflyer.base.units import SECOND, format_bytes, format_duration
from fireflyer.cli.completion import complete_directory, complete_file
from fireflyer.cli.numbers import Duration
from fireflyer.cli.platform.connect import platform_option

if TYPE_CHECKING:
    from fireflyer.base.health_event import HealthEvent
    from fireflyer.cluster.client import Client
    from fireflyer.cluster.core.platform.views import NodeView
    from fireflyer.validators.cluster_tasks import Ended, Job
    from fireflyer.validators.core.validation.records import NodeRecord
    from fireflyer.validators.core.validation.reports import LinkReport, NodeReport

__all__ = ["MAX_LEAF", "links_command", "nodes_command", "pairs_below_leaves"]

MAX_REASON: Final = 300
MAX_LEAF: Final = 128
"""Nodes below a leaf switch; more have no leaf, and all their pairs would take days."""
_SLACK_NS: Final = 300 * SECOND
"""Of a task, for its start and for what takes longer than it was told."""
_DRAINED_SHARE: Final = 0.05
_FAULT, _WARNING, _NOT_RUN = 2, 1, 3


def _common(function: Callable[..., object]) -> Callable[..., object]:
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


@click.command("nodes", short_help="Validate idle nodes of the platform.", epilog="""\b
Examples:
  ff validate nodes                                  those not validated for a week, one after the other
  ff validate nodes --every 1d --at-once 8           daily, eight at a time
  ff validate nodes --node gpu-7 --time 5m           one node, longer
  ff validate nodes --fs ff://fs-1:7000 --drain      replicas of a chain apart; nodes at fault are drained
\b
Exit codes: 0 all are in order; 1 a warning; 2 a node is at fault; 3 some could not be validated.""")  # fmt: skip
@click.option("--every", type=Duration(), default="7d", show_default=True, help="Leave out what was validated since.")
@click.option("--only", metavar="NAME", multiple=True, help="Only this validator; may be repeated.")
@click.option("--time", "each", type=Duration(), default="1m", show_default=True, help="Of each validator.")
@click.option("--directory", metavar="DIR", default="/tmp", show_default=True, shell_complete=complete_directory,  # noqa: S108 - of the nodes
              help="On the storage that is tested, of each node; /tmp may be memory.")  # fmt: skip
@click.option("--records", metavar="FILE", default="validation.jsonl", show_default=True, shell_complete=complete_file,
              help="What was measured, and when; nodes are compared with it.")  # fmt: skip
@click.option("--fs", "target", metavar="ff://…", help="File system whose storage runs on these nodes: replicas of a "
              "chain are validated one after the other; `none`: there is none.  [default: as for `ff fs`]")  # fmt: skip
@click.option("--apart", metavar="NODES", multiple=True, help="Nodes (a,b,c) of which one is validated at a time.")
@click.option("--drain", is_flag=True, help="Drain nodes at fault, up to a twentieth of all; else it is proposed.")
@_common
@platform_option
def nodes_command(
    *, client: Client, every: int, only: tuple[str, ...], each: int, directory: str, records: str, target: str | None,
    apart: tuple[str, ...], drain: bool, names: tuple[str, ...], at_once: int | None, limit: int, as_json: bool,
) -> int:  # fmt: skip
    """Validate nodes of the platform that have no task, those first that were validated longest ago.

    Each validation is a task of the lowest priority on its node: any other task interrupts it, and it begins again when
    the node is idle. Nodes are compared with those of their model, also those of earlier days. For operators; run it
    from a timer."""
    from fireflyer.cluster.core.platform.access import is_operator
    from fireflyer.validators.cluster_tasks import run_jobs
    from fireflyer.validators.core.validation.queue import due_nodes, exclusion_groups, host_groups
    from fireflyer.validators.core.validation.reports import parse_node_report
    from fireflyer.validators.stress import run

    for name in only:
        if name not in ("links", *run.VALIDATORS):
            raise UsageError(f"no validator {name!r}; validators are links, {', '.join(run.VALIDATORS)}")
    if drain and not is_operator(client.whoami().roles):
        raise UsageError("--drain is for operators; leave it out, and the commands for them are printed")
    click.get_current_context().with_resource(_held(records))
    known = run.read_records(records)
    nodes = {node.name: node for node in client.all_nodes()}
    chosen = _chosen(nodes, names)
    hosts = _hosts(nodes)
    groups = [*host_groups(hosts), *(_group(one, nodes) for one in apart)]
    if (routing := _routing(target)) is not None:
        groups += exclusion_groups(routing, hosts)
    due = chosen if names else due_nodes(chosen, known, time.time_ns(), every)
    if not due:
        click.echo(f"all {len(chosen)} nodes were validated within {format_duration(every)}", err=True)
        return 0
    words = ["node", "--time", f"{max(1, each // SECOND)}s", "--directory", directory]
    words += [word for name in only for word in ("--only", name)]
    limit_ns = (len(only) or len(run.VALIDATORS)) * 2 * each + _SLACK_NS
    jobs = [_job((name,), nodes, words, directory, limit_ns) for name in due]
    most = at_once or max(1, len(nodes) // 20)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # stops what was submitted, as Ctrl-C
    ended: list[Ended[NodeReport]] = []
    try:
        ended.extend(run_jobs(client, jobs, parse_node_report, groups, most_nodes=most, limit_ns=limit, say=_say))
    finally:  # what was measured before Ctrl-C, or before no manager answered, counts
        found = _judged(ended, known)
        code = _shown(found, ended, as_json=as_json)
        for one in ended:
            if one.report is not None and not _at_fault(found[one.job.nodes[0]]):
                run.append_record(records, _own(one.job.nodes[0], one.report))
    _propose(client, [node for node, events in found.items() if _at_fault(events)], found, nodes, drain=drain)
    return code


@click.command("links", short_help="Measure links between idle nodes of the platform.", epilog="""\b
Examples:
  ff validate links                       all pairs of nodes of each leaf switch
  ff validate links --node a --node b     this pair alone
\b
Exit codes: 0 all are in order; 2 a link is slow or changes data; 3 some could not be measured.""")  # fmt: skip
@click.option("--time", "each", type=Duration(), default="5s", show_default=True, help="Of each pair.")
@_common
@platform_option
def links_command(
    *, client: Client, each: int, names: tuple[str, ...], at_once: int | None, limit: int, as_json: bool
) -> int:
    """Measure the links between nodes of a leaf switch, in pairs: each pair once, no node in two pairs at a time.

    Both nodes send to each other, and compare what comes. A node most of whose links are slower than usual below its
    leaf is at fault, or a link that alone is. Four links or more say what is usual."""
    from fireflyer.validators.cluster_tasks import run_jobs
    from fireflyer.validators.core.validation.queue import host_groups
    from fireflyer.validators.core.validation.reports import parse_link_report

    nodes = {node.name: node for node in client.all_nodes()}
    pairs = pairs_below_leaves([nodes[name] for name in _chosen(nodes, names)])
    if not pairs:
        raise UsageError("no leaf switch has two of these nodes; nothing to measure")
    words = ["link", "--time", f"{max(1, each // SECOND)}s"]
    jobs = [_job(pair, nodes, words, "/", 2 * each + _SLACK_NS) for pair in pairs]
    groups = host_groups(_hosts(nodes))
    most = at_once or len(nodes)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # stops what was submitted, as Ctrl-C
    ended: list[Ended[LinkReport]] = []
    try:
        ended.extend(run_jobs(client, jobs, parse_link_report, groups, most_nodes=most, limit_ns=limit, say=_say))
    finally:
        code = _shown(_links_judged(ended, nodes), ended, as_json=as_json)
    return code


# --- what is validated ---


def _held(records: str) -> IO[bytes]:
    """The file of records, which can be written to, and which no other such command uses: what must be apart is known
    within one alone. Raises `FireflyerError`."""
    from fireflyer.base.os_errors import translate_os_error

    try:
        file = open(records, "ab")  # noqa: SIM115 - the caller closes it
    except OSError as error:
        raise translate_os_error(error, f"open {records}") from error
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise Busy(f"another `ff validate nodes` uses {records}; wait for its end, or give another --records") from None
    return file


def _say(text: str) -> None:
    click.echo(text, err=True)


def _chosen(nodes: dict[str, NodeView], names: Sequence[str]) -> list[str]:
    """Nodes that a task could get, or those that were named."""
    for name in names:
        if name not in nodes:
            raise UsageError(f"there is no node {name}; `ff nodes` lists them")
    return list(names) or [name for name, node in nodes.items() if node.state in ("idle", "busy", "leaving")]


def _group(text: str, nodes: dict[str, NodeView]) -> frozenset[str]:
    return frozenset(_chosen(nodes, text.split(",")))


def _hosts(nodes: dict[str, NodeView]) -> dict[str, str]:
    return {name: node.inventory.address for name, node in nodes.items() if node.inventory is not None}


def _routing(target: str | None) -> Any:
    """Of the file system that is named, or that `ff fs` finds; None where there is none."""
    from fireflyer.cli.fs.connect import ask_one, named, routing
    from fireflyer.fs.schema.manager import GetRouting
    from fireflyer.fs.tools.default_cluster import TARGET_VARIABLE, default_target

    if target == "none" or not (where := target or os.environ.get(TARGET_VARIABLE) or default_target()):
        return None
    return routing(ask_one(named(where, None, None), GetRouting()))


def _job(members: tuple[str, ...], nodes: dict[str, NodeView], words: list[str], directory: str, limit_ns: int) -> Job:
    from fireflyer.validators.cluster_tasks import Job

    return Job(members, nodes[members[0]].group, tuple(words), directory, limit_ns)


def pairs_below_leaves(nodes: Sequence[NodeView]) -> list[tuple[str, str]]:
    """Pairs of each leaf and group of nodes, round after round. Raises `UsageError` for more than `MAX_LEAF` nodes."""
    from fireflyer.validators.core.validation.pairs import rounds_of_pairs

    below: dict[tuple[str, str], list[str]] = {}
    for node in nodes:
        below.setdefault((node.leaf, node.group), []).append(node.name)
    for (leaf, group), names in below.items():
        if len(names) > MAX_LEAF:
            place = f"leaf {leaf}" if leaf else f"group {group} without a leaf"
            pairs = len(names) * (len(names) - 1) // 2
            raise UsageError(
                f"{len(names)} nodes of {place} are {pairs} pairs; say in the configuration which nodes are below "
                f"which leaf, or name at most {MAX_LEAF} of them with --node"
            )
    rounds = [(names, pairs) for names in below.values() for pairs in rounds_of_pairs(len(names))]
    return [(names[a], names[b]) for names, pairs in rounds for a, b in pairs]


# --- what was found ---


def _own(node: str, report: NodeReport) -> NodeRecord:
    """With the platform's name of the node, and the time of this machine: clocks of nodes may be what is at fault."""
    return msgspec.structs.replace(report.record, node=node, seen_ns=time.time_ns())


def _judged(ended: Sequence[Ended[NodeReport]], known: Sequence[NodeRecord]) -> dict[str, list[HealthEvent]]:
    from fireflyer.validators.core.checks.health_round import as_event
    from fireflyer.validators.core.checks.settings import CheckSettings
    from fireflyer.validators.core.validation.records import compare_digests, compare_figures, peers_of

    new = {one.job.nodes[0]: _own(one.job.nodes[0], one.report) for one in ended if one.report is not None}
    found = {}
    for one in ended:
        if one.report is None:
            continue
        record = new[one.job.nodes[0]]
        peers = peers_of(record, [*known, *new.values()])
        beside = [*compare_figures(record, peers), *compare_digests(record, peers)]
        events = [as_event("validation", finding, CheckSettings(), record.seen_ns) for finding in beside]
        found[record.node] = [*one.report.events, *events]
    return found


def _links_judged(ended: Sequence[Ended[LinkReport]], nodes: dict[str, NodeView]) -> dict[str, list[HealthEvent]]:
    from fireflyer.base.health_event import HealthEvent
    from fireflyer.validators.core.validation.link_speeds import slow_links

    now_ns = time.time_ns()
    found: dict[str, list[HealthEvent]] = {}
    below: dict[str, dict[tuple[str, str], float]] = {}
    for one in ended:
        if one.report is None:
            continue
        first, second = one.job.nodes
        below.setdefault(nodes[first].leaf, {})[first, second] = one.report.bytes_per_s
        wrong = one.report.wrong_blocks
        words = f"{wrong} blocks are not what was sent" if wrong else f"{format_bytes(int(one.report.bytes_per_s))}/s"
        found[f"{first} {second}"] = [
            HealthEvent(check="link", severity="high" if wrong else "ok", words=words, seen_ns=now_ns)
        ]
    for speeds in below.values():
        for slow in slow_links(speeds):
            which = f"{slow.slow} of {slow.measured} links" if len(slow.nodes) == 1 else "the link"
            words = (
                f"{which}: {format_bytes(int(slow.bytes_per_s))}/s, "
                f"{1 - slow.bytes_per_s / slow.usual_bytes_per_s:.0%} below the usual of its leaf"
            )
            event = HealthEvent(check="link", severity="low", cause="slow_link", words=words, seen_ns=now_ns)
            found.setdefault(" ".join(slow.nodes), []).append(event)
    return found


def _at_fault(events: Sequence[HealthEvent]) -> bool:
    return any(event.severity in ("low", "high") and not event.could_not_run for event in events)


def _shown(found: dict[str, list[HealthEvent]], ended: Sequence[Ended[Any]], *, as_json: bool) -> int:
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
    if any(_at_fault(events) for events in found.values()):
        return _FAULT
    if missing:
        return _NOT_RUN
    return _WARNING if any(event.severity == "warn" for events in found.values() for event in events) else 0


def _propose(
    client: Client, at_fault: list[str], found: dict[str, list[HealthEvent]], nodes: dict[str, NodeView], *, drain: bool
) -> None:
    """Drains as many as leaves a twentieth of the nodes drained, or one; says the command for the others."""
    room = max(1, int(len(nodes) * _DRAINED_SHARE)) - sum(
        node.state in ("drained", "draining") for node in nodes.values()
    )
    for name in at_fault:
        worst = max(found[name], key=lambda event: ("ok", "warn", "low", "high").index(event.severity))
        if drain and room > 0:
            room -= 1
            click.echo(client.report_fault(name, worst), err=True)
        else:
            reason = f"validation: {worst.words}"[:MAX_REASON]
            why = "; a twentieth of the nodes is drained" if drain else ""
            click.echo(f"proposed{why}: ff node drain {name} {quote(reason)}", err=True)
