"""Ends what runs on a local platform before its processes end: `ff down`.

    nodes close ──> each run is asked to save and to leave ──> nodes are free ──> manager and agents end
                                                           └─> the time is over: its guards end with their lease

The nodes close by a maintenance window of their own, so nothing is started on them meanwhile, and the tasks wait in the
queue. `ff up` removes the window when it has started all agents.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from typing import Final

from fireflyer.base.errors import Busy, NotFound, Timeout
from fireflyer.cluster.agent.records import AgentDirectory
from fireflyer.cluster.client import Client
from fireflyer.cluster.core.platform.views import NodeView
from fireflyer.cluster.core.scheduler.model import Reservation
from fireflyer.cluster.local.layout import LocalPlatform, PlatformLayout

__all__ = ["close_nodes", "end_runs", "open_nodes", "wait_until_free"]

CLOSED: Final = "ff-down"
"""Name of the maintenance window."""
LOOK_S: Final = 0.1
KILL_S: Final = 30.0
"""For guards whose lease has ended."""
_FOR_EVER_NS: Final = 1 << 62


def close_nodes(client: Client) -> list[NodeView]:
    """Asks all runs to leave; the nodes that have one. Raises `FireflyerError`."""
    nodes = list(client.all_nodes())
    client.add_reservation(
        Reservation(
            name=CLOSED, nodes=tuple(node.name for node in nodes), begin_ns=time.time_ns(), until_ns=_FOR_EVER_NS
        )
    )
    return _busy(nodes)


def open_nodes(client: Client) -> None:
    """Raises `FireflyerError`."""
    if any(one.name == CLOSED for one in client.reservations()):
        with contextlib.suppress(NotFound):
            client.remove_reservation(CLOSED)


def wait_until_free(client: Client, limit_s: float, on_change: Callable[[list[NodeView]], None]) -> list[NodeView]:
    """Those that still have a run after `limit_s`. `on_change` is told whenever fewer nodes have one."""
    until_s = time.monotonic() + limit_s
    before: list[NodeView] | None = None
    while True:
        busy = _busy(list(client.all_nodes()))
        if before is not None and len(busy) < len(before):
            on_change(busy)
        if not busy or time.monotonic() >= until_s:
            return busy
        before = busy
        time.sleep(LOOK_S)


def _busy(nodes: list[NodeView]) -> list[NodeView]:
    return [node for node in nodes if node.task is not None]


def end_runs(layout: PlatformLayout, platform: LocalPlatform) -> int:
    """Kills what agents that have ended left behind; how many guards lived. Raises `Timeout`, `FireflyerError`."""
    names = [f"agent-{number}" for number in range(1, platform.nodes + 1)]
    directories = [AgentDirectory(layout.agent_directory(name)) for name in names if layout.has_agent(name)]
    lived = sum(len(directory.living_guards()) for directory in directories)
    until_s = time.monotonic() + KILL_S
    for directory in directories:
        _await_end_of_agent(directory, until_s)
        directory.end_lease()
    while living := [token for directory in directories for token in directory.living_guards()]:
        if time.monotonic() >= until_s:
            raise Timeout(f"processes of {', '.join(living[:3])} live {KILL_S:.0f} s after their lease ended")
        time.sleep(LOOK_S)
    return lived


def _await_end_of_agent(directory: AgentDirectory, until_s: float) -> None:
    """One that lives would write the lease anew. Raises `Busy`."""
    while True:
        try:
            os.close(directory.take())
            return
        except Busy:
            if time.monotonic() >= until_s:
                raise
        time.sleep(LOOK_S)
