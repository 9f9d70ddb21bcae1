"""Makes a new cluster of `ff up` one whose links can be cut and whose disks can be full.

`ff up` stands still meanwhile, so that it starts nothing again before everything is in place: the manager of the
platform names a relay to its agents, one storage node reaches its manager through another, and that node's directory
and that of one agent lie on small file systems. There are no tasks and no files yet.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

import msgspec

from fireflyer.base.errors import Timeout
from fireflyer.base.toml_text import to_toml
from fireflyer.base.units import GIB, MIB
from fireflyer.cluster.agent.records import AgentDirectory
from fireflyer.cluster.local.layout import PlatformLayout
from fireflyer.data.files import read_file
from fireflyer.identity.private_files import write_private_file
from fireflyer.recipes.soak.plan import SoakPlan
from fireflyer.recipes.soak.relay import Relay
from fireflyer.recipes.soak.small_disks import SmallDisk
from fireflyer.recipes.testbed.cluster import Cluster
from fireflyer.recipes.testbed.processes import agent_processes, manager_processes, signal_all, storage_processes

__all__ = ["Prepared", "prepare"]

STORAGE_BYTES: Final = 8 * GIB
AGENT_BYTES: Final = 128 * MIB
END_MS: Final = 30_000
_MAX_BYTES: Final = 1 << 20


@dataclass(slots=True)
class Prepared:
    storage_link: Relay
    manager_link: Relay
    storage_disk: SmallDisk | None = None
    agent_disk: SmallDisk | None = None


def prepare(cluster: Cluster, plan: SoakPlan, after: contextlib.ExitStack, *, mounts: bool) -> Prepared:
    """`after`: ends when all processes of the cluster have ended; relays and disks are closed then. `mounts`: small
    file systems can be mounted."""
    layout = cluster.layout
    names = [f"agent-{number}" for number in range(1, plan.nodes + 1)]
    storage_file = os.path.join(layout.storage_directory, f"node-{plan.storage_nodes}", "storage.toml")
    manager_file = os.path.join(layout.directory, "manager", "manager.toml")
    storage_link = Relay(_table(storage_file)["managers"][0])
    manager_link = Relay(layout.load().listen_agents)
    for link in (storage_link, manager_link):
        after.callback(link.close)
        link.start()
    prepared = Prepared(storage_link, manager_link)
    os.kill(cluster.up_pid, signal.SIGSTOP)
    try:
        pids = [*manager_processes(layout), *storage_processes(layout, plan.storage_nodes)]
        pids += [pid for name in names for pid in agent_processes(layout, name)]
        _end(pids)
        if mounts:
            prepared.storage_disk = SmallDisk(os.path.dirname(storage_file), STORAGE_BYTES)
            after.callback(prepared.storage_disk.close)
            prepared.agent_disk = SmallDisk(layout.agent_directory(names[-1]), AGENT_BYTES)
            after.callback(prepared.agent_disk.close)
        _change(storage_file, managers=[storage_link.address])
        _change(manager_file, managers=[manager_link.address])
        for name in names:
            _join_through(layout, name, manager_link.address)
    finally:
        os.kill(cluster.up_pid, signal.SIGCONT)
    return prepared


def _end(pids: Iterable[int]) -> None:
    """Kills them, and returns when they have ended. Raises `Timeout`."""
    with contextlib.ExitStack() as cleanup:
        ends = []
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                ends.append(os.pidfd_open(pid))
                cleanup.callback(os.close, ends[-1])
        signal_all(pids, signal.SIGKILL)
        for end in ends:
            poll = select.poll()
            poll.register(end, select.POLLIN)
            if not poll.poll(END_MS):
                raise Timeout(f"a process that was killed has not ended within {END_MS // 1000} s")


def _join_through(layout: PlatformLayout, name: str, address: str) -> None:
    """The agent finds its manager at `address`, and nowhere else."""
    directory = AgentDirectory(layout.agent_directory(name))
    membership = directory.membership()
    if membership is not None:
        directory.join(msgspec.structs.replace(membership, managers=(address,)))
    directory.write_leader(msgspec.structs.replace(directory.leader(), managers=(address,)))


def _table(path: str) -> dict[str, list[str]]:
    return tomllib.loads(read_file(path, max_bytes=_MAX_BYTES).decode())


def _change(path: str, **values: list[str]) -> None:
    write_private_file(path, to_toml({**_table(path), **values}).encode())
