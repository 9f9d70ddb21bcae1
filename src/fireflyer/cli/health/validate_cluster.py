"""`ff validate nodes`, `ff validate links`: validations of idle nodes of the platform, as tasks that any other task
interrupts."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator, Sequence
from shlex import quote
from typing import TYPE_CHECKING, Any, Final

import click

from fireflyer.base.errors import UsageError
from fireflyer.base.units import SECOND, format_duration
from fireflyer.cli.completion import complete_file
from fireflyer.cli.health.validation import (
    MAX_REASON,
    SLACK_NS,
    at_fault,
    check_names,
    common,
    held,
    keep,
    measure,
    of_nodes,
    say,
    shown,
    told,
    worst_of,
)
from fireflyer.cli.numbers import Duration
from fireflyer.cli.platform.connect import platform_option

if TYPE_CHECKING:
    from fireflyer.base.health_event import HealthEvent
    from fireflyer.cluster.client import Client
    from fireflyer.cluster.core.platform.views import NodeView
    from fireflyer.validators.cluster_tasks import Ended, Job
    from fireflyer.validators.core.validation.reports import LinkReport, NodeReport

__all__ = ["MAX_LEAF", "check_is_of_links", "links_command", "nodes_command", "pairs_below_leaves"]

MAX_LEAF: Final = 128
"""Nodes below a leaf switch; more have no leaf, and all their pairs would take days."""
_DRAINED_SHARE: Final = 0.05


@click.command("nodes", short_help="Validate idle nodes of the platform.", epilog="""\b
Examples:
  ff validate nodes                              # those not validated for a week, one after the other
  ff validate nodes --every 1d --at-once 8       # daily, eight at a time
  ff validate nodes --node gpu-7 --time 5m       # one node, longer
  ff validate nodes --fs ff://fs-1:7000 --drain  # replicas of a chain apart; nodes at fault are drained
\b
Exit codes: 0 all are in order; 1 a warning; 2 a node is at fault; 3 some could not be validated.""")  # fmt: skip
@of_nodes
@click.option("--fs", "target", metavar="ff://…", help="File system whose storage runs on these nodes: replicas of a "
              "chain are validated one after the other; `none`: there is none.  [default: as for `ff fs`]")  # fmt: skip
@click.option("--drain", is_flag=True, help="Drain nodes at fault, up to a twentieth of all; else it is proposed.")
@common
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
    from fireflyer.validators.core.validation.node_measurements import NodeMeasurements
    from fireflyer.validators.core.validation.queue import due_nodes, exclusion_groups, host_groups
    from fireflyer.validators.core.validation.reports import parse_node_report
    from fireflyer.validators.stress import run
    from fireflyer.validators.stress.record_file import read_records

    check_names(only)
    if drain and not is_operator(client.whoami().roles):
        raise UsageError("--drain is for operators; leave it out, and the commands for them are printed")
    click.get_current_context().with_resource(held(records))
    known = read_records(records)
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
    shared = ["node", "--time", f"{max(1, each // SECOND)}s", "--directory", directory]
    words = [*shared, *(f"--only={name}" for name in only)]
    limit_ns = (len(only) or len(run.VALIDATORS)) * 2 * each + SLACK_NS
    jobs = [_job((name,), nodes, words, directory, limit_ns) for name in due]
    most = at_once or max(1, len(nodes) // 20)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # stops what was submitted, as Ctrl-C
    ended: list[Ended[NodeReport]] = []
    measured = NodeMeasurements(known, only)

    def validated(jobs: Sequence[Job]) -> Iterator[Ended[NodeReport]]:
        return run_jobs(client, jobs, parse_node_report, groups, most_nodes=most, limit_ns=limit, say=say)

    def again(name: str, low: list[str]) -> Job:
        return _job((name,), nodes, [*shared, *(f"--only={one}" for one in low)], directory, limit_ns)

    try:
        try:
            measure(validated, jobs, again, measured, ended)
        finally:  # what was measured before Ctrl-C, or before no manager answered, counts
            code, found = told(measured, ended, as_json=as_json)
        _propose(client, [node for node, events in found.items() if at_fault(events)], found, nodes, drain=drain)
    finally:
        keep(measured, records)
    return code


@click.command("links", short_help="Measure links between idle nodes of the platform.", epilog="""\b
Examples:
  ff validate links                    # all pairs of nodes of each leaf switch
  ff validate links --node a --node b  # this pair alone
\b
Exit codes: 0 all are in order; 2 a link is slow or changes data; 3 some could not be measured.""")  # fmt: skip
@click.option("--time", "each", type=Duration(), default="5s", show_default=True, help="Of each pair.")
@click.option(
    "--records", metavar="FILE", shell_complete=complete_file, help="Append what was measured: a file of links alone."
)
@common
@platform_option
def links_command(
    *, client: Client, each: int, records: str | None, names: tuple[str, ...], at_once: int | None, limit: int,
    as_json: bool,
) -> int:  # fmt: skip
    """Measure the links between nodes of a leaf switch, in pairs: each pair once, no node in two pairs at a time.

    Both nodes send to each other, and compare what comes. A node most of whose links are slower than usual below its
    leaf is at fault, or a link that alone is. Four links or more say what is usual."""
    from fireflyer.validators.cluster_tasks import run_jobs
    from fireflyer.validators.core.validation.link_measurements import LinkMeasurements
    from fireflyer.validators.core.validation.queue import host_groups
    from fireflyer.validators.core.validation.repetition import MEASUREMENTS
    from fireflyer.validators.core.validation.reports import parse_link_report
    from fireflyer.validators.stress.record_file import append_record

    if records is not None:
        check_is_of_links(records)
    nodes = {node.name: node for node in client.all_nodes()}
    pairs = pairs_below_leaves([nodes[name] for name in _chosen(nodes, names)])
    if not pairs:
        raise UsageError("no leaf switch has two of these nodes; nothing to measure")
    words = ["link", "--time", f"{max(1, each // SECOND)}s"]
    jobs = [_job(pair, nodes, words, "/", 2 * each + SLACK_NS) for pair in pairs]
    groups = host_groups(_hosts(nodes))
    most = at_once or len(nodes)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # stops what was submitted, as Ctrl-C
    ended: list[Ended[LinkReport]] = []
    measured = LinkMeasurements()

    def exchanged(jobs: Sequence[Job]) -> Iterator[Ended[LinkReport]]:
        return run_jobs(client, jobs, parse_link_report, groups, most_nodes=most, limit_ns=limit, say=say)

    try:
        for one in exchanged(jobs):
            ended.append(one)
            first, second = one.job.nodes
            measured.first((first, second), nodes[first].leaf, one.report)
        for _ in range(MEASUREMENTS - 1):
            slow = set(measured.to_repeat())
            for one in exchanged([job for job in jobs if job.nodes in slow]):
                first, second = one.job.nodes
                measured.again((first, second), one.report)
    finally:
        code = shown(measured.events(time.time_ns()), ended, as_json=as_json)
        if records is not None:
            for record in measured.records(time.time_ns()):
                append_record(records, record)
    return code


def check_is_of_links(records: str) -> None:
    """Raises `UsageError` for a file of records of nodes: of these the records of links would leave no room."""
    from fireflyer.validators.core.validation.link_measurements import LINK_MODEL
    from fireflyer.validators.stress.record_file import first_record

    first = first_record(records)
    if first is not None and first.model != LINK_MODEL:
        raise UsageError(f"{records} has records of nodes, which those of links would push out; give another file")


# --- what is validated ---


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


def _propose(
    client: Client, faulty: list[str], found: dict[str, list[HealthEvent]], nodes: dict[str, NodeView], *, drain: bool
) -> None:
    """Drains as many as leaves a twentieth of the nodes drained, or one; says the command for the others."""
    room = max(1, int(len(nodes) * _DRAINED_SHARE)) - sum(
        node.state in ("drained", "draining") for node in nodes.values()
    )
    for name in faulty:
        worst = worst_of(found[name])
        if drain and room > 0:
            room -= 1
            click.echo(client.report_fault(name, worst), err=True)
        else:
            reason = f"validation: {worst.words}"[:MAX_REASON]
            why = "; a twentieth of the nodes is drained" if drain else ""
            click.echo(f"proposed{why}: ff node drain {name} {quote(reason)}", err=True)
