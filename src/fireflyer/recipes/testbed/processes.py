"""Finds the processes of a cluster of `ff up` by what they were started with, and signals them.

A service is found by the path of its own directory or file in its command line; what an agent's guards have started, by
the token of the guard in its environment.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable

from fireflyer.cluster.local.layout import PlatformLayout
from fireflyer.runtime.processes.guard import MARKER, processes

__all__ = [
    "agent_processes",
    "compute_node_processes",
    "file_manager_processes",
    "guard_processes",
    "manager_processes",
    "rank_processes",
    "signal_all",
    "storage_processes",
]

_RANK = b"fireflyer.recipes.train_gpt"
_GUARD = b"guard.py"


def storage_processes(layout: PlatformLayout, node: int) -> list[int]:
    return _naming(os.path.join(layout.storage_directory, f"node-{node}", "storage.toml"))


def file_manager_processes(layout: PlatformLayout) -> list[int]:
    """The manager of the file system, with the meta service in it."""
    return _naming(os.path.join(layout.storage_directory, "manager-1", "manager.toml"))


def manager_processes(layout: PlatformLayout) -> list[int]:
    """Of the platform."""
    return _naming(os.path.join(layout.directory, "manager", "manager.toml"))


def agent_processes(layout: PlatformLayout, name: str) -> list[int]:
    """The agent alone: its guards, and what they have started, stay."""
    return _naming(layout.agent_directory(name))


def compute_node_processes(layout: PlatformLayout, name: str) -> list[int]:
    """The agent, the guards that it has started, and all ranks below them, in this order: what a power cut ends."""
    return [*agent_processes(layout, name), *_started_by_guards(layout, name)]


def guard_processes(layout: PlatformLayout, name: str) -> list[int]:
    """Guards of the runs on this compute node, the outermost first."""
    return [
        pid
        for pid in _started_by_guards(layout, name)
        if any(os.path.basename(one) == _GUARD for one in _read(pid, "cmdline").split(b"\0"))
    ]


def rank_processes(layout: PlatformLayout, name: str) -> list[int]:
    """Ranks on this compute node: the training programs alone, without what watches them."""
    found = [pid for pid in _started_by_guards(layout, name) if _RANK in _read(pid, "cmdline").split(b"\0")]
    parents = processes()
    above = {parents.get(pid) for pid in found}
    return [pid for pid in found if pid not in above]


def signal_all(pids: Iterable[int], number: signal.Signals) -> int:
    """How many processes got it."""
    reached = 0
    for pid in dict.fromkeys(pids):
        try:
            os.kill(pid, number)
            reached += 1
        except ProcessLookupError:
            pass  # it died with one before it
    return reached


def _started_by_guards(layout: PlatformLayout, name: str) -> list[int]:
    directory = layout.agent_directory(name)
    runs = os.path.join(directory, "runs")
    # The launcher of a run is on the node that has its run directory; the others know the run, too.
    led = {f"{token}-launcher" for token in _names(runs) if os.path.isdir(os.path.join(runs, token, "job"))}
    return _marked(led | set(_names(os.path.join(directory, "guards"))))


def _naming(path: str) -> list[int]:
    """Processes that have `path` as an argument, the oldest first: who was started by another one comes after it."""
    wanted = os.fsencode(path)
    return [pid for pid in sorted(processes()) if wanted in _read(pid, "cmdline").split(b"\0")]


def _marked(tokens: set[str]) -> list[int]:
    """`tokens`: in the environment of those that guards have started, and of the guards."""
    prefix = f"{MARKER}=".encode()
    found = []
    for pid in sorted(processes()):
        marks = [one[len(prefix) :].decode(errors="replace") for one in _read(pid, "environ").split(b"\0")
                 if one.startswith(prefix)]  # fmt: skip
        if tokens.intersection(marks):
            found.append(pid)
    return found


def _read(pid: int, name: str) -> bytes:
    try:
        with open(f"/proc/{pid}/{name}", "rb") as file:
            return file.read()
    except OSError:
        return b""


def _names(directory: str) -> list[str]:
    try:
        return os.listdir(directory)
    except FileNotFoundError:
        return []
