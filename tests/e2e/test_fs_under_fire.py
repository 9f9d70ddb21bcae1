"""A chunk store of real processes that are killed, while clients write and verify: nothing acknowledged is lost."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from tests.support.fs_load import FIRST_FILE, WRITERS, Load
from tests.support.fs_local import LocalCluster
from tests.support.postgres import PostgresServer

from fireflyer.fs.client import connect
from fireflyer.fs.core.capability import Rights
from fireflyer.identity import UserCredential

pytestmark = [pytest.mark.serial, pytest.mark.slow, pytest.mark.timeout(400)]
LONGEST_GAP_S = 20
"""Without an answer: T is 2 s, L half a second, and the machine is shared; what it is without load is measured."""


@pytest.fixture
def local(tmp_path: Path) -> Iterator[LocalCluster]:
    cluster = LocalCluster(tmp_path)
    yield cluster
    cluster.close()


async def under_fire(local: LocalCluster, *victims: str, rebalance: bool = False) -> Load:
    """Kills one process after the other, each when all chains are whole."""
    there = msgspec.json.decode((local.directory / "cluster.json").read_bytes())
    credential = UserCredential((local.directory / "admin-token").read_text().strip())
    async with await connect(there["managers"], credential, name="load") as chunks:
        await chunks.acquire(FIRST_FILE, FIRST_FILE + WRITERS - 1, Rights.READ | Rights.WRITE)
        load = Load(chunks, [chain[0] for chain in there["chains"]])
        for victim in victims:
            await load.progress(40, within_s=60)
            os.kill(await asyncio.to_thread(local.process, victim), signal.SIGKILL)
            await load.progress(40, within_s=60)
            await asyncio.to_thread(local.wait, local.whole)
        if rebalance:
            await asyncio.to_thread(local.ff, "admin", "add-node")
            await asyncio.to_thread(local.wait, local.whole)
            await asyncio.to_thread(local.ff, "admin", "rebalance")
            for victim in ("manager-1", "node-2"):
                os.kill(await asyncio.to_thread(local.process, victim), signal.SIGKILL)
                await load.progress(40, within_s=60)
            await asyncio.to_thread(local.wait, lambda status: not status["moves"] and local.whole(status))
        await load.stop()
        await asyncio.to_thread(local.wait, local.whole)
        await load.check_all()
    return load


def test_storage_processes_and_the_manager_are_killed_under_load(local: LocalCluster) -> None:
    local.ff("up", "--detach", "--failure-timeout", "2")
    load = asyncio.run(under_fire(local, "node-1", "node-3", "manager-1", "node-2"))
    assert load.longest_gap_s < LONGEST_GAP_S


def test_chains_move_to_a_new_node_under_load_while_others_are_killed(local: LocalCluster) -> None:
    local.ff("up", "--detach", "--failure-timeout", "2")
    load = asyncio.run(under_fire(local, rebalance=True))
    assert load.longest_gap_s < LONGEST_GAP_S


def test_of_several_managers_over_postgresql_any_may_be_killed_under_load(
    local: LocalCluster, postgres_server: PostgresServer
) -> None:
    local.ff("up", "--detach", "--failure-timeout", "2", "--managers", "2", "--store", postgres_server.url())
    load = asyncio.run(under_fire(local, "manager-1", "node-1", "manager-2"))
    assert load.longest_gap_s < LONGEST_GAP_S
