"""A chunk store on one machine: one command starts it, finds its data again, and leaves nothing behind."""

from __future__ import annotations

import os
import shutil
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.support.fs.clusters.local_cluster import LocalCluster, wait_gone
from tests.support.jobs.launching import wait_until
from tests.support.patience import allowed_s

from fireflyer.fs.core.rows import CHAINS
from fireflyer.fs.service.meta.offline_store import FORMAT
from fireflyer.kvstore.dump import read_dump

pytestmark = [pytest.mark.processes, pytest.mark.slow, pytest.mark.timeout(300)]
QUICK = ("--failure-timeout", "2")


@pytest.fixture
def local(tmp_path: Path) -> Iterator[LocalCluster]:
    cluster = LocalCluster(tmp_path)
    yield cluster
    cluster.close()


def incarnations(status: dict[str, Any]) -> list[int]:
    return [node["incarnation"] for node in status["status"]["nodes"]]


def test_one_command_starts_it_and_the_same_command_finds_it_again(local: LocalCluster) -> None:
    text = local.ff("up", "--detach", "--nodes", "3", "--replicas", "2", *QUICK)
    assert "3 of 3 nodes, 6 chains of 2 replicas" in text
    assert "ff fs status --dir" in text
    assert "ff fs down --dir" in text
    first = local.status()
    assert local.whole(first)
    printed = msgspec.json.decode(local.ff("status", "--json"))
    assert printed.keys() == first.keys()
    assert printed["status"]["chains"] == first["status"]["chains"]
    for name in ("node-secret", "admin-token"):
        assert stat.S_IMODE((local.directory / name).stat().st_mode) == 0o600
    assert "the cluster is running already (process" in local.ff("up", "--detach", code=1)
    processes = local.processes()
    assert len(processes) == 5
    local.ff("down")
    wait_gone(processes)
    assert "is not running" in local.ff("down", code=1)
    local.ff("up", "--detach")
    again = local.wait(local.whole)
    assert again["status"]["cluster"] == first["status"]["cluster"]
    members = [
        [sorted(one[0] for one in chain["members"]) for chain in each["status"]["chains"]] for each in (first, again)
    ]
    assert members[0] == members[1]
    assert incarnations(again) == [2, 2, 2]


def states_in_the_store(local: LocalCluster, dump: Path) -> list[list[str]]:
    """Of the targets of each chain, as the managers left them."""
    local.ff("admin", "dump", str(dump))
    with open(dump, "rb") as file:
        chains = [CHAINS.decode(*row)[1] for row in read_dump(file, FORMAT) if row[0].startswith(CHAINS.prefix)]
    return [[str(member.state) for member in chain.members] for chain in chains]


def test_after_an_orderly_end_every_replica_can_bring_its_chain_back(local: LocalCluster, tmp_path: Path) -> None:
    """Also one whose node was the first to leave; the disks of the others may be gone by then."""
    local.ff("up", "--detach", "--nodes", "3", "--replicas", "3", "--relaxed", *QUICK)
    (tmp_path / "file").write_bytes(b"kept" * 1000)
    local.ff("put", str(tmp_path / "file"), "/file")
    for round_ in range(2):
        local.wait(local.whole)
        local.ff("down")
        states = states_in_the_store(local, tmp_path / f"{round_}.ffdump")
        assert len(states) > 1
        assert all(chain == ["lastsrv"] * 3 for chain in states), (states, local.logs())
        local.ff("up", "--detach", "--relaxed")
    local.wait(local.whole)
    assert local.ff("cat", "/file") == "kept" * 1000


def test_a_process_that_is_killed_is_started_again_and_all_chains_become_whole(local: LocalCluster) -> None:
    local.ff("up", "--detach", *QUICK)
    os.kill(local.process("node-2"), signal.SIGKILL)
    local.wait(lambda status: incarnations(status) == [1, 2, 1] and local.whole(status))
    os.kill(local.process("manager-1"), signal.SIGKILL)
    status = local.wait(lambda status: status["status"]["term"] > 1)
    assert incarnations(status) == [1, 2, 1]
    assert local.whole(local.wait(local.whole))


def test_nothing_is_left_when_its_owner_is_killed_and_it_starts_again(local: LocalCluster) -> None:
    local.ff("up", "--detach", *QUICK)
    processes = local.processes()
    os.kill(local.pid, signal.SIGKILL)
    wait_gone(processes)
    local.ff("up", "--detach")
    local.wait(local.whole)


def test_a_new_node_gets_its_share_and_a_drained_one_gives_all_away(local: LocalCluster) -> None:
    local.ff("up", "--detach", *QUICK)
    assert "Node 4 with 4 targets is added" in local.ff("admin", "add-node")
    local.wait(local.whole)
    plan = local.ff("admin", "rebalance", "--plan")
    assert plan.startswith("3 targets to move in 3 rounds (no plan moves fewer than 3)")
    assert "All moves are done." in local.ff("admin", "rebalance", "--wait", "90")
    assert nodes_of_chains(local.wait(local.whole)) == {1: 3, 2: 3, 3: 3, 4: 3}
    assert "No moves are needed" in local.ff("admin", "rebalance")
    assert "they serve until then" in local.ff("admin", "drain", "--node", "1")
    assert nodes_of_chains(local.wait(local.whole)) == {1: 3, 2: 3, 3: 3, 4: 3}
    local.ff("admin", "rebalance")
    while (status := local.status())["moves"]:
        serving = [sum(one[2] == "serving" for one in chain["members"]) for chain in status["status"]["chains"]]
        assert min(serving) >= 2, "no chain has a replica less while its node is emptied"
    assert nodes_of_chains(local.wait(local.whole)) == {2: 4, 3: 4, 4: 4}
    assert "node 1 retired." in local.ff("admin", "retire-node", "1")
    local.wait(lambda status: len(local.processes()) == 5 and local.whole(status))
    local.ff("down")
    local.ff("up", "--detach")
    assert len(local.wait(local.whole)["status"]["nodes"]) == 3


def nodes_of_chains(status: dict[str, Any]) -> dict[int, int]:
    found: dict[int, int] = {}
    for chain in status["status"]["chains"]:
        for _, node, state in chain["members"]:
            assert state == "serving"
            found[node] = found.get(node, 0) + 1
    return dict(sorted(found.items()))


def test_in_the_foreground_an_interrupt_ends_it_in_order(local: LocalCluster) -> None:
    command = [sys.executable, "-P", "-m", "fireflyer", "fs", "up", "--dir", str(local.directory), *QUICK]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    lock = local.directory / "up.lock"
    wait_until(lambda: lock.exists() and lock.read_bytes(), allowed_s(60), "it does not start")
    local.process("manager-1")
    process.send_signal(signal.SIGHUP)  # as who adds a node when the manager answers, though not all is up
    while not process.stdout.readline().startswith("Ctrl-C stops it"):
        assert process.poll() is None
    processes = local.processes()
    process.send_signal(signal.SIGINT)
    assert process.wait(allowed_s(60)) == 0
    process.stdout.close()
    wait_gone(processes)


@pytest.mark.parametrize("detached", [True, False])
def test_all_processes_end_when_the_directory_is_removed(local: LocalCluster, detached: bool) -> None:
    command = [sys.executable, "-P", "-m", "fireflyer", "fs", "up", "--dir", str(local.directory), *QUICK]
    if detached:
        local.ff("up", "--detach", *QUICK)
        processes = local.processes()
        local.directory.rename(local.directory.with_name("moved"))
        wait_gone(processes)
        return
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        while not process.stdout.readline().startswith("Ctrl-C stops it"):
            assert process.poll() is None
        processes = local.processes()
        while local.directory.exists():  # who is not gone yet makes files while others are removed
            shutil.rmtree(local.directory, ignore_errors=True)
        assert process.wait(allowed_s(60)) == 1
        assert (
            f"error: {local.directory} was removed, so the processes of its cluster were stopped"
            in process.stderr.read()
        )
    wait_gone(processes)
    assert not local.directory.exists()


def test_processes_that_die_at_once_again_and_again_end_it_with_the_reason(local: LocalCluster) -> None:
    local.ff("up", "--detach", "--nodes", "2", *QUICK)
    owner = local.pid
    nodes = [local.process(f"node-{number}") for number in (1, 2)]
    (local.directory / "node-secret").write_text("no secret")
    for pid in nodes:
        os.kill(pid, signal.SIGKILL)
    wait_gone([owner], 200)  # five starts of both, and the pauses between
    text = (local.directory / "up.log").read_text()
    assert "error: crash looping: node-1: " in text
    assert "node-secret" in text.splitlines()[-1]
    assert "node-secret" in local.ff("up", "--detach", code=1), "and it says so at once when it is started again"


def test_what_was_lost_while_it_did_not_run_is_made_anew_and_said(local: LocalCluster) -> None:
    local.ff("up", "--detach", *QUICK)
    # So that the other target of its chain has everything, whoever ends last.
    local.ff("admin", "drain", "--now", "--target", "1001")
    local.wait(lambda status: state_of(status, 1001) == "offline")
    local.ff("down")
    shutil.rmtree(local.directory / "node-1" / "target-1001")
    local.ff("up", "--detach", "--relaxed")
    local.ff("admin", "undrain", "--target", "1001")
    local.wait(local.whole)
    said = (local.directory / "up.log").read_text()
    assert said.count("target-1001 was missing: a new, empty target is made there and synced from other replicas") == 1
    assert "durable = false" in (local.directory / "node-1" / "storage.toml").read_text()
    local.ff("down")
    assert "before they are on disk" in local.ff("up", "--detach")
    local.ff("down")
    assert "before they are on disk" not in local.ff("up", "--detach", "--durable")


def state_of(status: dict[str, Any], target: int) -> str:
    members = [member for chain in status["status"]["chains"] for member in chain["members"]]
    return next(str(state) for number, _, state in members if number == target)


def test_a_cluster_that_cannot_be_made_says_why_in_one_line(local: LocalCluster) -> None:
    text = local.ff("up", "--detach", "--nodes", "2", "--replicas", "3", code=2)
    assert text == (
        "error: 3 replicas need 3 nodes with room for targets, and there are 2; add nodes, or give fewer replicas\n"
    )
