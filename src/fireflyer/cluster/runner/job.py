"""The job that a run of a task is. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from fireflyer.cluster.launcher import AgentTarget
from fireflyer.cluster.schema.job import JobSpec, Remote
from fireflyer.cluster.schema.runner import COPY_MARK, ENVIRONMENT_END, TOKEN_NAME, RunnerOrders
from fireflyer.cluster.schema.sync import RunNode
from fireflyer.identity.handshake import DerivedCredential
from fireflyer.runtime.address import Address

__all__ = ["agents_of", "job_of", "token_path"]


def job_of(orders: RunnerOrders, environ: Mapping[str, str]) -> JobSpec:
    """`environ`: of the launcher."""
    order = orders.order
    spec, program = order.spec, order.spec.program
    several = bool(orders.tickets)
    nodes = len(order.nodes)
    topology = _topology(order.nodes)
    return JobSpec(
        script=program.script,
        args=program.args,
        kind=program.kind,
        python=_python_of(orders),
        wrap=program.wrap,
        run_dir=orders.directory,
        nodes=nodes,
        min_nodes=spec.least_nodes if several and spec.least_nodes < nodes else 0,
        ranks_per_node=program.ranks_per_node,
        hosts=tuple(node.name for node in order.nodes) if several else (),
        remote=Remote(
            via="agent",
            name_hosts=bool(topology),
            workdir=COPY_MARK + program.snapshot if program.snapshot else workdir_of(orders, environ),
            share_machine=len({node.address for node in order.nodes}) < nodes,
        ),
        topology=topology,
        max_restarts=spec.max_restarts,
        name=spec.name,
        env={**program.env, **_environment(orders)},
        on_failure=order.node_check,
        on_failure_limit_ns=order.node_check_limit_ns,
        on_failure_accuses=True,
        listeners={node.name: str(Address(node.address, node.port)) for node in order.nodes},
        suspend_grace_ns=spec.grace_ns,
        watchdog_ns=spec.watchdog_ns,
        whole_life_state=order.whole_life,
        logs_bytes=orders.logs_bytes,
    )


def _python_of(orders: RunnerOrders) -> str:
    """From the working directory, which is the copy of the snapshot."""
    program = orders.order.spec.program
    if not program.environment:
        return program.python
    return f"../{orders.run_token}{ENVIRONMENT_END}/bin/python"


def _topology(nodes: Sequence[RunNode]) -> bytes:
    """What collectives are told of several zones, as `collectives.planning.declaration` reads it; empty where there is
    one zone. Trees then cross by one pair of nodes; halving would cross by many, so it is not chosen."""
    zones = {zone: number for number, zone in enumerate(dict.fromkeys(node.zone for node in nodes))}
    if len(zones) == 1:
        return b""
    zone_of_host = {node.name: zones[node.zone] for node in nodes}
    return msgspec.json.encode({"zone_of_host": zone_of_host, "algorithms": ["double_binary_tree"]})


def workdir_of(orders: RunnerOrders, environ: Mapping[str, str]) -> str:
    return orders.workdir or orders.order.spec.program.workdir or environ.get("HOME") or "/"


def agents_of(orders: RunnerOrders) -> dict[str, AgentTarget]:
    """How the agents of the run's nodes are reached, by name."""
    return {
        node.name: AgentTarget(
            node.address, node.port, DerivedCredential(ticket.identity, ticket.key), ticket.key, waits=True
        )
        for node, ticket in zip(orders.order.nodes, orders.tickets, strict=True)
    }


def _environment(orders: RunnerOrders) -> dict[str, str]:
    """What ranks are told of their task."""
    order = orders.order
    told = {"FF_TASK_ID": str(order.task), "FF_RUN_NUMBER": str(order.run)}
    if order.array_index is not None:
        told["FF_ARRAY_INDEX"] = str(order.array_index)
        told["FF_ARRAY_SIZE"] = str(order.spec.array or 1)
    if orders.token:
        told["FF_MANAGERS"] = ",".join(order.manager_urls)
        if not orders.tickets:  # else each node has a file of its own
            told["FF_TOKEN_FILE"] = token_path(orders)
    return told


def token_path(orders: RunnerOrders) -> str:
    """Of the file with the user's token, on the launcher's node."""
    return f"{orders.directory}/{TOKEN_NAME}"
