"""The options of `ff run` about other machines."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

from fireflyer.base.errors import UsageError
from fireflyer.cli.jobs.slurm import HOSTS_FROM_SLURM, allocation_of
from fireflyer.cli.jobs.torchrun import ONE_NODE, NodeCount
from fireflyer.cluster.schema.hosts import Host, parse_hosts
from fireflyer.cluster.schema.job import Remote

__all__ = ["JobHosts", "columns", "host_table", "hosts_of", "remote_of"]


class JobHosts(NamedTuple):
    """`names` empty: all nodes are on this machine."""

    names: tuple[str, ...]
    nodes: NodeCount
    ranks_per_node: int
    """The most that one has."""
    host_ranks: tuple[int, ...] = ()
    """How many each has. Empty: all have as many."""


def hosts_of(
    text: str | None,
    *,
    spares: int,
    nodes: NodeCount | None,
    ranks_per_node: int | None,
    joining: bool,
    environ: Mapping[str, str] = os.environ,
) -> JobHosts:
    """What `--hosts` and the options beside it mean together. `nodes`, `ranks_per_node`: None where not given.
    `joining`: the other machines join. Raises `UsageError`."""
    hosts: tuple[Host, ...] = ()
    if text == HOSTS_FROM_SLURM:
        allocation = allocation_of(environ, ranks_wanted=ranks_per_node is None)
        hosts = tuple(map(Host, allocation.hosts, allocation.ranks or (None,) * len(allocation.hosts)))
    elif text is not None:
        hosts = parse_hosts(text)
    if text is None:
        count = nodes or ONE_NODE
        if spares and not joining:
            raise UsageError("--spares needs --hosts or --rdzv-endpoint: spares are other machines")
        joined = range(count.most + spares if joining else 0)
        return JobHosts(tuple(f"machine {number}" for number in joined), count, ranks_per_node or 1)
    if spares >= len(hosts):
        raise UsageError(f"--spares {spares} of {len(hosts)} hosts leave none for the job; give more --hosts")
    there = len(hosts) - spares
    count = nodes or NodeCount(there, 0)
    if count.least > there or (not count.least and count.most != there):
        what = "give more hosts, or a smaller range" if count.least else "leave --nodes out"
        raise UsageError(f"--nodes {nodes} and {len(hosts)} --hosts with {spares} --spares do not fit together; {what}")
    ranks = _ranks_of(hosts, ranks_per_node)
    names = tuple(host.name for host in hosts)
    most = min(count.most, there) if count.least else there
    least = count.least if count.least < most else 0
    return JobHosts(names, NodeCount(most, least), max(ranks), ranks if len(set(ranks)) > 1 else ())


def _ranks_of(hosts: Sequence[Host], ranks_per_node: int | None) -> tuple[int, ...]:
    """How many ranks each host has: its own number, else that of --ranks-per-node, else that of the others. Raises
    `UsageError`."""
    slots = {host.slots for host in hosts if host.slots is not None}
    without = next((host.name for host in hosts if host.slots is None), None)
    if without is None:
        if ranks_per_node not in (None, *slots):
            raise UsageError(
                f"--ranks-per-node {ranks_per_node} contradicts --hosts, which gives each host its number; leave one "
                "of them out"
            )
    elif ranks_per_node is None and len(slots) > 1:
        raise UsageError(
            f"--hosts gives {without} no number of ranks, and the others have different ones; give --ranks-per-node N, "
            "for hosts without a number"
        )
    others = ranks_per_node or (slots.pop() if slots else 1)
    return tuple(host.slots or others for host in hosts)


def remote_of(
    ssh: str | None,
    *,
    via: Literal["ssh", "agent"] = "ssh",
    hosts: str | None = None,
    python: str | None,
    workdir: str | None,
    port: int,
    address: str | None,
) -> Remote:
    """Raises `UsageError`."""
    default = Remote()
    if via == "agent":
        if hosts is None:
            raise UsageError("--via agent needs --hosts: names of machines that have joined (`ff agent machines`)")
        for option, value in (("--ssh", ssh), ("--remote-python", python)):
            if value is not None:
                raise UsageError(f"{option} is for --via ssh; an agent runs ranks with its own Python")
    try:
        shell = tuple(shlex.split(ssh)) if ssh is not None else default.shell
    except ValueError as error:
        raise UsageError(f"--ssh {ssh!r} is not understood: {error}") from None
    if not shell:
        raise UsageError("--ssh is empty; give a command such as: ssh -p 2222")
    for option, path in (("--workdir", workdir), ("--remote-python", python)):
        if path is not None and not os.path.isabs(path):
            raise UsageError(f"{option} {path!r} is not an absolute path; hosts have no other")
    from fireflyer.cluster.agent.records import state_directory

    return Remote(
        via=via,
        machines_dir=state_directory("machines") if via == "agent" else "",
        shell=shell,
        python=python or default.python,
        workdir=workdir or "",
        port=port,
        address=address or "",
    )


def host_table(rows: list[tuple[str, str]]) -> str:
    """
    >>> print(host_table([("a", "cannot be reached"), ("node-7", "has no directory /work")]))
    HOST    FAULT
    a       cannot be reached
    node-7  has no directory /work
    """
    return columns([("HOST", "FAULT"), *rows])


def columns(rows: Sequence[Sequence[str]]) -> str:
    """Rows of one length, the first with the names of the columns."""
    widths = [max(len(row[number]) for row in rows) for number in range(len(rows[0]) - 1)]
    return "\n".join("  ".join([*map(str.ljust, row[:-1], widths), row[-1]]) for row in rows)
