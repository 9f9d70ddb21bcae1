"""Who takes part: our ranks, gloo, Open MPI, plain TCP programs. Each is a crew that takes turns with the others."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Final

from tests.support.network.namespaces import INTERFACE, Host, Network, enter_namespace

from bench.collectives.crew import Crew, CrewDied
from bench.natives import Missing, open_mpi_version, program
from fireflyer.collectives.planning.plan import TREE
from fireflyer.collectives.planning.routing import default_plan
from fireflyer.identity.secrets import new_secret, save_secret
from fireflyer.runtime.rpc import Accepts, RpcServer
from fireflyer.runtime.store import StoreService

__all__ = [
    "LAYOUTS",
    "OPEN_MPI",
    "node_list",
    "open_mpi",
    "our_native_ranks",
    "python_ranks",
    "tcp_ring",
    "vm_exchange",
]

LAYOUTS: Final = ("1x2", "1x4", "1x8", "2x1", "2x4", "4x1")
"""Nodes × ranks on each."""

OPEN_MPI: Final[dict[str, tuple[str, ...]]] = {
    "openmpi": (),
    "openmpi ring": ("--mca", "coll_tuned_use_dynamic_rules", "1", "--mca", "coll_tuned_allreduce_algorithm", "4"),
    "openmpi han": ("--mca", "coll_han_priority", "100"),
    "openmpi tcp": ("--mca", "btl", "self,tcp", "--mca", "btl_tcp_if_include", "lo"),
}
"""Options of mpirun; the first three share memory, the last is for layouts whose nodes must not."""

_LOOPBACK: Final = "127.0.0.1"
_ONE_THREAD: Final = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}


def node_list(layout: str) -> list[int]:
    """The node of each rank: "2x4" is [0, 0, 0, 0, 1, 1, 1, 1]."""
    nodes, ranks = map(int, layout.split("x"))
    return [node for node in range(nodes) for _ in range(ranks)]


@contextmanager
def python_ranks(
    layout: str,
    module: str = "bench.collectives.ranks.arrays",
    *,
    transport: str = "tcp",
    ucx_tls: str = "tcp",
    network: Network | None = None,
) -> Iterator[Crew]:
    """Ranks of ours and of gloo, which have joined neither yet. `ucx_tls` is what UCX uses where ours uses UCX. Each
    node is a host of `network`, if there is one."""
    nodes = node_list(layout)
    control = None if network is None else network.control
    interface = _ONE_THREAD if network is None else _ONE_THREAD | {"GLOO_SOCKET_IFNAME": INTERFACE}
    with tempfile.TemporaryDirectory() as directory, _store(directory, control) as (address, secret_file):
        commands = []
        for rank, node in enumerate(nodes):
            arguments = {
                "rank": rank,
                "world_size": len(nodes),
                "node": node,
                "store": address,
                "secret_file": secret_file,
                "rendezvous": os.path.join(directory, "gloo"),
                "transport": transport,
                "host": _LOOPBACK if network is None else network.hosts[node].address,
            }
            command = [sys.executable, "-m", module, "{socket}", json.dumps(arguments)]
            commands.append(command if network is None else network.hosts[node].command(command))
        with Crew(f"ours on {layout}", commands, len(nodes), interface | {"UCX_TLS": ucx_tls}) as crew:
            yield crew


def open_mpi(setting: str, ranks: int, stack: ExitStack) -> Crew | str:
    """A crew that ends with `stack`, or why there is none."""
    try:
        open_mpi_version()
        command = ["mpirun", "-np", str(ranks), "--oversubscribe", "--bind-to", "none"]
        if os.geteuid() == 0:
            command.append("--allow-run-as-root")
        command += [*OPEN_MPI[setting], program("collectives", "mpi_peer"), "{socket}"]
        return stack.enter_context(Crew(f"{setting}, {ranks} ranks", [command], ranks, {}))
    except (Missing, CrewDied) as error:
        return str(error)


def our_native_ranks(layout: str, stack: ExitStack) -> Crew | str:
    """Ours from C++, with the plan that a group gets that was given none."""
    nodes = node_list(layout)
    plan = default_plan(nodes)
    rows = [route for route in plan.all_routes() if route.kind == "allreduce" and route.algorithm == TREE]
    trees = "/".join(",".join(str(parent) for parent in tree) for tree in plan.trees)
    routes = "/".join(f"{route.up_to_bytes or 0}:{route.chunk_bytes}" for route in rows)
    try:
        command = [program("collectives", "ours_peer"), "{socket}", *layout.split("x"), str(plan.window), trees, routes]
        return stack.enter_context(Crew(f"ours from C++, {layout}", [command], len(nodes), {}))
    except (Missing, CrewDied) as error:
        return str(error)


def vm_exchange(ranks: int, stack: ExitStack) -> Crew | str:
    """Plain programs that read and write as much of each other's memory as an allreduce of private arrays does."""
    try:
        command = [program("collectives", "vm_exchange"), "{socket}", str(ranks)]
        return stack.enter_context(Crew("plain process_vm programs", [command], ranks, {}))
    except (Missing, CrewDied) as error:
        return str(error)


def tcp_ring(programs: int, stack: ExitStack, network: Network | None = None) -> Crew | str:
    """Plain programs on loopback TCP, or on the hosts of a network, each connected to the next."""
    addresses = [_LOOPBACK] * programs if network is None else [host.address for host in network.hosts]
    try:
        commands = [
            [program("collectives", "tcp_exchange"), "{socket}", str(rank), str(programs), addresses[rank]]
            for rank in range(programs)
        ]
        if network is not None:
            commands = [host.command(command) for host, command in zip(network.hosts, commands, strict=True)]
        crew = stack.enter_context(Crew("plain TCP programs", commands, programs, {}))
        doors = [(member.greeting["port"], addresses[member.rank]) for member in crew.members]
        crew.tell_each([("connect", *door) for door in [*doors[1:], doors[0]]])
        return crew
    except (Missing, CrewDied) as error:
        return str(error)


@contextmanager
def _store(directory: str, where: Host | None = None) -> Iterator[tuple[str, str]]:
    secret = new_secret()
    secret_file = os.path.join(directory, "secret")
    save_secret(secret, secret_file)
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    async def begin() -> tuple[RpcServer, str]:
        if where is not None:
            enter_namespace(where.namespace)
        server = RpcServer(Accepts(secret))
        StoreService(server)
        return server, str(await server.start(_LOOPBACK if where is None else where.address, 0))

    server, address = asyncio.run_coroutine_threadsafe(begin(), loop).result(30)
    try:
        yield address, secret_file
    finally:
        asyncio.run_coroutine_threadsafe(server.close(), loop).result(30)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
