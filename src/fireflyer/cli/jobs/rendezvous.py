"""The options of `ff run` with which the same command is started on each machine, as with torchrun."""

from __future__ import annotations

import os
import socket
from typing import NamedTuple

import click

from fireflyer.base.errors import UsageError
from fireflyer.base.units import SECOND
from fireflyer.cli.jobs.network import refuse_link_local
from fireflyer.cli.jobs.torchrun import NodeCount, is_here
from fireflyer.cluster.schema.addresses import AddressChoice
from fireflyer.cluster.schema.job import Rendezvous
from fireflyer.runtime.address import Address

__all__ = ["Meeting", "join", "rendezvous_of", "say_waiting"]

_ANY = -1
_TIMEOUT_NS = 600 * SECOND


class Meeting(NamedTuple):
    rendezvous: Rendezvous
    node_rank: int
    """-1: any number that is free."""


def rendezvous_of(
    endpoint: str | None, *, node_rank: int | None, nodes: NodeCount, secret_file: str | None, hosts: str | None
) -> Meeting | None:
    """None: machines do not join; torchrun's `--rdzv-endpoint localhost:0` for one machine means that as well. Raises
    `UsageError`."""
    if (
        endpoint is not None
        and nodes.most == 1
        and is_here(endpoint.rpartition(":")[0] if ":" in endpoint else endpoint)
    ):
        return None
    if endpoint is None:
        if node_rank is not None and (node_rank or nodes.most > 1):
            raise UsageError("--node-rank needs --rdzv-endpoint HOST:PORT, the address of machine 0")
        return None
    if hosts is not None:
        raise UsageError("--rdzv-endpoint and --hosts exclude each other: give --hosts on one machine only")
    if secret_file is None:
        raise UsageError(
            "--rdzv-endpoint needs --secret-file (or FF_SECRET_FILE): make one, (umask 077; head -c 32 /dev/urandom "
            "> secret), and copy it to each machine"
        )
    address = Address.parse(endpoint)
    refuse_link_local("--rdzv-endpoint", address.host)
    rank = node_rank if node_rank is not None else (0 if _is_here(address.host) else _ANY)
    return Meeting(Rendezvous(host=address.host, port=address.port, secret_file=os.path.abspath(secret_file)), rank)


def _is_here(host: str) -> bool:
    """Whether this machine has the address: a socket can be bound to it. Raises `UsageError`."""
    try:
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_DGRAM)
    except OSError as error:
        raise UsageError(f"--rdzv-endpoint: host {host!r} is not known here ({error}); give its address") from None
    for family, kind, protocol, _, target in found:
        try:
            with socket.socket(family, kind, protocol) as probe:
                probe.bind(target)
                return True
        except OSError:
            continue
    return False


def say_waiting(missing: list[int]) -> None:
    numbers = ", ".join(str(number) for number in missing[:20]) + (", ..." if len(missing) > 20 else "")
    click.echo(f"ff     | waiting for machine {numbers} to start the same command (--node-rank {missing[0]})")


def join(meeting: Meeting, *, nodes: NodeCount, ranks_per_node: int, addresses: AddressChoice) -> int:
    """On a machine that is not the first: takes part until the job has ended. Returns the exit code of the job."""
    from fireflyer.cluster import JoinSpec, join_job
    from fireflyer.runtime import run

    rendezvous = meeting.rendezvous
    spec = JoinSpec(
        endpoint=str(Address(rendezvous.host, rendezvous.port)),
        secret_file=rendezvous.secret_file,
        node_rank=meeting.node_rank,
        nodes=nodes.most,
        min_nodes=nodes.least,
        ranks_per_node=ranks_per_node,
        workdir=os.getcwd(),
        addresses=addresses,
        timeout_ns=_TIMEOUT_NS,
    )
    ended = run(join_job(spec, on_status=lambda text: click.echo(f"ff     | {text}")))
    reason = " ".join(ended.reason.split())
    click.echo(f"error: {reason}" if ended.exit_code else f"ff     | job ended: {reason}", err=bool(ended.exit_code))
    return ended.exit_code
