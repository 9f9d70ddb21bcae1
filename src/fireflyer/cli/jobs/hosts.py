"""The options of `ff run` about other machines."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from typing import Literal, NamedTuple

from fireflyer.base.errors import UsageError
from fireflyer.cli.jobs.torchrun import NodeCount
from fireflyer.cluster.schema.hosts import Host, expand_nodelist, parse_hosts
from fireflyer.cluster.schema.job import Remote

__all__ = ["JobHosts", "columns", "host_table", "hosts_of", "remote_of"]

_FROM_SLURM = "slurm"
_NODELIST = "SLURM_JOB_NODELIST"


class JobHosts(NamedTuple):
    """`names` empty: all nodes are on this machine."""

    names: tuple[str, ...]
    nodes: NodeCount
    ranks_per_node: int


def hosts_of(text: str | None, *, spares: int, nodes: NodeCount, ranks_per_node: int, joining: bool) -> JobHosts:
    """What `--hosts` and the options beside it mean together. `joining`: the other machines join. Raises
    `UsageError`."""
    if text is None and joining:
        return JobHosts(tuple(f"machine {number}" for number in range(nodes.most + spares)), nodes, ranks_per_node)
    if text is None:
        if spares:
            raise UsageError("--spares needs --hosts or --rdzv-endpoint: spares are other machines")
        return JobHosts((), nodes, ranks_per_node)
    hosts = _allocated() if text == _FROM_SLURM else parse_hosts(text)
    if spares >= len(hosts):
        raise UsageError(f"--spares {spares} of {len(hosts)} hosts leave none for the job; give more --hosts")
    there = len(hosts) - spares
    if nodes.least > there or (not nodes.least and nodes.most not in (1, there)):
        what = "give more hosts, or a smaller range" if nodes.least else "leave --nodes out"
        raise UsageError(f"--nodes {nodes} and {len(hosts)} --hosts with {spares} --spares do not fit together; {what}")
    slots = {host.slots for host in hosts if host.slots is not None}
    if len(slots) > 1 or (slots and any(host.slots is None for host in hosts)):
        raise UsageError(
            "--hosts gives hosts different numbers of ranks, and every node of a job has the same; leave the numbers "
            f"out and give --ranks-per-node {min(slots)}"
        )
    if slots and ranks_per_node not in (1, *slots):
        raise UsageError(
            f"--ranks-per-node {ranks_per_node} contradicts the {slots.pop()} ranks of --hosts; leave one of them out"
        )
    names = tuple(host.name for host in hosts)
    most = min(nodes.most, there) if nodes.least else there
    return JobHosts(
        names, NodeCount(most, nodes.least if nodes.least < most else 0), slots.pop() if slots else ranks_per_node
    )


def _allocated() -> tuple[Host, ...]:
    text = os.environ.get(_NODELIST)
    if not text:
        raise UsageError(
            f"--hosts slurm: {_NODELIST} is not set; start ff run inside of an allocation (salloc, sbatch), "
            "or name the hosts"
        )
    return tuple(Host(name) for name in expand_nodelist(text))


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
