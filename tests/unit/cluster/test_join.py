"""A machine that has joined a job: what it tells the launcher of the guards that it runs."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from tests.support.loops import on_loop

from fireflyer.cluster.schema.join import GuardEnded, StartGuard
from fireflyer.cluster.schema.wire import Done, SupervisorConfig
from fireflyer.cluster.supervisor.join import _JoinedHost

pytestmark = pytest.mark.processes


class Launcher:
    """Answers after another turn of the loop, as any that is at the other end of a network."""

    def __init__(self) -> None:
        self.told: list[GuardEnded] = []

    async def call(self, _method: Any, request: GuardEnded, _timeout_ns: int) -> Done:
        await asyncio.sleep(0.01)
        self.told.append(request)
        return Done()


@on_loop
async def test_a_machine_that_leaves_says_that_nothing_of_the_job_is_left_there(tmp_path: Path) -> None:
    """Else the launcher has no proof, and waits for the end of the lease."""
    launcher = Launcher()
    client: Any = launcher
    host = _JoinedHost(client, str(tmp_path), "127.0.0.1:1", str(tmp_path / "secret"))
    config = SupervisorConfig(
        launcher="", secret_file="", node=1, incarnation=3, heartbeat_ns=1, logs_dir="", lease_ns=10**10
    )  # fmt: skip
    host._start(StartGuard(config, "token", 10**10))
    await host.close()
    assert GuardEnded(1, 3, True, "the process that guards its ranks ended") in launcher.told
