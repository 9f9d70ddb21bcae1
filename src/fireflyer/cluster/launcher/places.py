"""Where the nodes of a job run, and who starts their guards: this machine, others over ssh or by
their agents, or others that join."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import NamedTuple, Protocol

from msgspec import structs

from fireflyer.base.errors import FireflyerError
from fireflyer.base.launch import LOGS_NAME
from fireflyer.base.units import SECOND
from fireflyer.cluster.core.facts import Answer
from fireflyer.cluster.core.messages import Event
from fireflyer.cluster.launcher.agents import AgentNodes, Agents, AgentTarget, UserToken
from fireflyer.cluster.launcher.checks import check_host_ranks
from fireflyer.cluster.launcher.joined import JoinedHosts, JoinedNodes
from fireflyer.cluster.launcher.machines import HERE, Machine, Ssh, ThisMachine
from fireflyer.cluster.launcher.nodes import Nodes
from fireflyer.cluster.launcher.preflight import (
    admission,
    ask_by_ssh,
    check_hosts,
    check_joined,
    check_late,
    marked_directory,
    settings_for_hosts,
)
from fireflyer.cluster.schema.job import JobSpec, Rendezvous
from fireflyer.cluster.schema.wire import SupervisorConfig
from fireflyer.identity.machines import MachineStore
from fireflyer.identity.secrets import Secret
from fireflyer.runtime.rpc import RpcServer

__all__ = ["NodeControl", "Places", "find_places"]

Feed = Callable[[Event], None]
WasUp = Callable[[int, int], bool]


class NodeControl(Protocol):
    """What starts and kills the nodes of a job, and tells how they ended."""

    def start(self, machine: Machine, config: SupervisorConfig) -> None: ...

    def kill(self, node: int, incarnation: int) -> None: ...

    async def close(self) -> bool: ...


async def _nothing(_exit_code: int, _reason: str) -> None:
    pass


class Places(NamedTuple):
    job_token: str
    machines: Mapping[int, Machine]
    """By the number of the host. Those that have not joined yet are missing, and are there when they have."""
    make_nodes: Callable[[Feed, WasUp], NodeControl]
    end: Callable[[int, str], Awaitable[None]] = _nothing
    """Tells all machines how the job ended."""
    host_ranks: tuple[int, ...] = ()
    """As machines that have joined say; see `JobSpec`."""


async def find_places(
    spec: JobSpec,
    *,
    run_dir: str,
    job_token: str,
    secret: Secret,
    server: RpcServer,
    control_port: int,
    on_waiting: Callable[[list[int]], None],
    agents: Mapping[str, AgentTarget] | None = None,
    user_token: UserToken | None = None,
) -> Places:
    """Raises `HostsRefused` where a machine cannot run the job. `on_waiting`: machines that have not joined yet.
    `agents`: how those of the hosts are reached; None: by what their machines have left when they joined.
    `control_port`: at which the server listens."""
    logs_dir = os.path.join(run_dir, LOGS_NAME)
    if spec.rendezvous is not None:
        return await _joined_places(spec, spec.rendezvous, run_dir, job_token, server, on_waiting)
    if not spec.hosts:
        here = Machine(number=0, name="", address=HERE, launcher=HERE, directory=run_dir, shared=True)
        local = ThisMachine()
        return Places(
            job_token,
            dict.fromkeys(range(spec.nodes), here),
            lambda feed, was_up: Nodes(starter=local, job_token=job_token, logs_dir=logs_dir, feed=feed, was_up=was_up),
        )
    workdir = spec.remote.workdir or os.getcwd()
    if spec.remote.via == "agent":
        targets = await asyncio.to_thread(_joined_agents, spec) if agents is None else agents
        return await _places_of_agents(spec, targets, run_dir, workdir, control_port, job_token, secret, user_token)
    ssh = Ssh(
        spec.remote.shell,
        spec.remote.python,
        workdir=workdir,
        secret=secret,
        environment=settings_for_hosts(os.environ),
        first_lease_ns=spec.timeouts.supervisor_start_ns,
    )
    ask = partial(ask_by_ssh, spec.remote)
    machines = await check_hosts(spec, ask, run_dir=run_dir, workdir=workdir, control_port=control_port)
    return Places(
        job_token,
        dict(enumerate(machines)),
        lambda feed, was_up: Nodes(starter=ssh, job_token=job_token, logs_dir=logs_dir, feed=feed, was_up=was_up),
    )


def _joined_agents(spec: JobSpec) -> dict[str, AgentTarget]:
    machines = MachineStore(spec.remote.machines_dir).machines()
    return {name: AgentTarget.of_machine(machines[name]) for name in spec.hosts if name in machines}


async def _places_of_agents(
    spec: JobSpec,
    targets: Mapping[str, AgentTarget],
    run_dir: str,
    workdir: str,
    control_port: int,
    job_token: str,
    secret: Secret,
    user_token: UserToken | None,
) -> Places:
    agents = Agents(targets)
    try:
        machines = await check_hosts(spec, agents.ask, run_dir=run_dir, workdir=workdir, control_port=control_port)
    except FireflyerError:
        await agents.close()
        raise

    def make_nodes(feed: Feed, was_up: WasUp) -> NodeControl:
        return AgentNodes(
            agents,
            job=spec.name,
            job_token=job_token,
            secret=secret,
            workdir=workdir,
            environment=settings_for_hosts(os.environ),
            user_token=user_token,
            first_lease_ns=spec.timeouts.supervisor_start_ns,
            feed=feed,
            was_up=was_up,
        )

    return Places(job_token, dict(enumerate(machines)), make_nodes)


async def _joined_places(
    spec: JobSpec,
    rendezvous: Rendezvous,
    run_dir: str,
    job_token: str,
    server: RpcServer,
    on_waiting: Callable[[list[int]], None],
) -> Places:
    logs_dir = os.path.join(run_dir, LOGS_NAME)
    timeouts = spec.timeouts
    with marked_directory(spec, run_dir) as question:
        hosts = JoinedHosts(spec, question=question)
        hosts.serve(server)
        server.on_disconnect(hosts.disconnected)
        try:
            answers = await hosts.wait_for_all(on_waiting)
            spec = structs.replace(spec, host_ranks=hosts.settle())
            check_host_ranks(spec)
            addresses = {number: hosts.address(number) for number in answers}
            machines = check_joined(spec, answers, addresses, here=rendezvous.host, run_dir=run_dir)
        except FireflyerError as error:
            await hosts.end(2, str(error))
            raise
    admit_again = admission(spec, machines)

    def admit(number: int, answer: Answer, address: str) -> None:
        if number in machines:
            admit_again(number, answer, address)
        else:
            machines[number] = check_late(spec, number, answer, address, here=rendezvous.host, run_dir=run_dir)

    hosts.admit = admit
    here = ThisMachine(lease_s=timeouts.lease_ns / SECOND, first_lease_s=timeouts.supervisor_start_ns / SECOND)

    def make_nodes(feed: Feed, was_up: WasUp) -> NodeControl:
        local = Nodes(starter=here, job_token=job_token, logs_dir=logs_dir, feed=feed, was_up=was_up)
        return JoinedNodes(
            hosts, local, job_token=job_token, first_lease_ns=timeouts.supervisor_start_ns, feed=feed, was_up=was_up
        )

    return Places(job_token, machines, make_nodes, hosts.end, spec.host_ranks)
