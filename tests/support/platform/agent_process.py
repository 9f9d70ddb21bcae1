"""An agent of its own process that has joined a manager."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from tests.support.network.free_ports import free_port
from tests.support.patience import allowed_s
from tests.support.platform.manager import ManagerProcess

from fireflyer.base.errors import TransientError
from fireflyer.cluster.agent.join import join
from fireflyer.cluster.agent.records import AgentDirectory
from fireflyer.cluster.client import Client
from fireflyer.runtime import run

__all__ = ["agent_process", "nodes_heard"]

HERE: Final = "127.0.0.1"


@contextlib.contextmanager
def agent_process(manager: ManagerProcess, directory: Path, **environment: str) -> Iterator[None]:
    """Of a node with the name of the directory."""
    place = AgentDirectory(str(directory))
    with manager.client("admin") as client:
        token = client.join_token(directory.name)
    run(join(place, token, issuer=manager.agents, port=free_port(HERE), address=HERE))
    command = [sys.executable, "-P", "-m", "fireflyer", "agent", "run", "--dir", place.path, "--own-user"]
    with open(directory / "log", "wb") as log:
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=log, env={**os.environ, **environment})
    try:
        yield
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(allowed_s(30))
        finally:
            process.kill()
            process.wait()


def nodes_heard(client: Client) -> int:
    try:
        return sum(node.silent_ns is not None for node in client.nodes())
    except TransientError:  # no manager leads yet
        return 0
