"""Kills what the demonstration is to lose: all processes of a storage node, or of a compute node, with SIGKILL.

Processes are found by what they were started with: the path of a node's own directory in their command line, or, of
what an agent's guards have started, the token of the guard in their environment.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable

from fireflyer.cluster.local.layout import PlatformLayout
from fireflyer.runtime.processes.guard import MARKER, processes

__all__ = ["kill_compute_node", "kill_storage_node"]


def kill_storage_node(layout: PlatformLayout, node: int) -> int:
    """How many processes were killed."""
    return _kill(_naming(os.path.join(layout.storage_directory, f"node-{node}", "storage.toml")))


def kill_compute_node(layout: PlatformLayout, name: str) -> int:
    """The agent, the guards that it has started, and all ranks below them: what a power cut ends. How many processes
    were killed."""
    directory = layout.agent_directory(name)
    runs = os.path.join(directory, "runs")
    # The launcher of a run is on the node that has its run directory; the others know the run, too.
    led = {f"{token}-launcher" for token in _names(runs) if os.path.isdir(os.path.join(runs, token, "job"))}
    return _kill([*_naming(directory), *_marked(led | set(_names(os.path.join(directory, "guards"))))])


def _kill(pids: Iterable[int]) -> int:
    killed = 0
    for pid in dict.fromkeys(pids):
        try:
            os.kill(pid, signal.SIGKILL)
            killed += 1
        except ProcessLookupError:
            pass  # it died with one before it
    return killed


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
