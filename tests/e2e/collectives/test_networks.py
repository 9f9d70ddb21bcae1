"""Hosts in network namespaces: real links, slow ones, cut ones, and two zones with a thin link between them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.support.campaigns.shards import rotating
from tests.support.network import namespaces
from tests.support.network.namespaces import Network, delayed_network_of, network_of
from tests.support.patience import allowed_s
from tests.support.ranks.processes import ranks_running

from fireflyer.base.units import MIB, SECOND
from fireflyer.collectives import Plan, Route, make_plan
from fireflyer.collectives.planning.cost import Speeds
from fireflyer.collectives.planning.routing import plan_for

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(bool(namespaces.missing()), reason=namespaces.missing() or "-"),
]
SLOW = pytest.mark.slow
TIMEOUT_NS = 2 * SECOND
HANG_LIMIT_S = 1.125 * TIMEOUT_NS / SECOND + 0.3 + 0.7
FAST, TENTH = 1e9, 1e8
MOST_TIMEOUT_S = 20.0
"""With a slow link, whatever else runs: the sum takes five times as long."""
SLOW_COUNT_PER_S = 0.45 * TENTH / 10 / 8
"""Numbers of 4 bytes of which the slow link carries its share in more than two seconds."""


def digest_of(directory: Path, nodes: list[int], network: Network | None, scenario: str, **params: Any) -> str:
    with ranks_running(directory, nodes, scenario, network=network, **params) as ranks:
        digests = {event["digest"] for event in ranks.wait_for("result", limit_s=120).values()}
        assert ranks.exit_codes() == [0] * len(nodes)
    assert len(digests) == 1
    return str(digests.pop())


def test_sums_on_three_hosts_are_those_of_the_loopback_bit_for_bit(tmp_path: Path) -> None:
    work = {"dtypes": ["f32", "bf16", "i64"], "counts": [0, 1, 1003, 300_000]}
    plan = {"plan_nodes": [0, 1, 2], "chunk_bytes": 65536, "window": 4}
    with network_of(3, rate_bits_per_s=FAST) as network:
        there = digest_of(tmp_path / "hosts", [0, 1, 2], network, "correctness", **work, **plan)
    assert there == digest_of(tmp_path / "loopback", [0, 1, 2], None, "correctness", **work, **plan)


@SLOW
@pytest.mark.parametrize(("hosts", "victim"), [(3, 2), (5, 3), (8, 0)])
def test_a_host_whose_link_is_cut_is_named_by_all_others_in_time(hosts: int, victim: int, tmp_path: Path) -> None:
    nodes = list(range(hosts))
    others = [rank for rank in nodes if rank != victim]
    with (
        network_of(hosts, rate_bits_per_s=FAST) as network,
        ranks_running(tmp_path, nodes, "endless", network=network, timeout_ns=TIMEOUT_NS, count=300_000) as ranks,
    ):
        ranks.wait_for("step", nodes, count=2)
        cut_at = time.monotonic()
        network.cut(network.hosts[victim])
        failed = ranks.wait_for("failed", nodes, limit_s=30)
        for rank in others:
            event = failed[rank]
            assert (event["type"], event["culprit"]) == ("PeerFailed", victim), f"rank {rank}: {event}"
        for rank, event in failed.items():
            assert event["at"] - cut_at < allowed_s(HANG_LIMIT_S), (
                f"rank {rank} took {event['at'] - cut_at:.2f} s: {event}"
            )
        assert failed[victim]["type"] == "PeerFailed"  # it sees the others vanish


@pytest.mark.parametrize(
    "algorithm", [pytest.param("double_binary_tree", marks=SLOW), pytest.param("ring", marks=rotating(expected_s=12))]
)
def test_a_host_with_a_slow_link_is_not_blamed_as_long_as_it_moves(algorithm: str, tmp_path: Path) -> None:
    """The sum takes more than twice the timeout, for ten times less bandwidth at one host.

    Connections that share a full link are starved now and then until a packet is sent again, and that waits for
    processors as well. So the busier the machine, the longer the timeout, and the larger the sum with it.
    """
    nodes = [0, 1, 2, 3]
    timeout_s = min(allowed_s(2 * TIMEOUT_NS / SECOND), MOST_TIMEOUT_S)
    count = int(timeout_s * SLOW_COUNT_PER_S)
    plan: dict[str, Any] = {"plan_nodes": nodes, "chunk_bytes": 262144, "window": 4, "algorithm": algorithm}
    with network_of(4, rate_bits_per_s=TENTH) as network:
        network.slow_down(network.hosts[2], TENTH / 10)
        with ranks_running(
            tmp_path,
            nodes,
            "summing",
            network=network,
            timeout_ns=int(timeout_s * SECOND),
            count=count,
            times=1,
            **plan,
        ) as ranks:
            took = {event["seconds"] for event in ranks.wait_for("result", limit_s=15 * timeout_s).values()}
            assert ranks.exit_codes() == [0] * 4
    assert min(took) > 2 * timeout_s, "the link was not slow enough to show anything"


@SLOW
@pytest.mark.parametrize("zones", [(0, 0, 0, 1, 1, 1), (0, 1, 0, 1, 1, 0, 1, 0)], ids=["three and three", "mixed"])
def test_a_plan_for_two_zones_crosses_the_thin_link_once(zones: tuple[int, ...], tmp_path: Path) -> None:
    """By one pair of nodes: each direction carries the array once, as it must, with the plain trees several times."""
    nodes, size_bytes, slow = list(range(len(zones))), 2 * MIB, TENTH / 2
    speeds = Speeds(bytes_per_s=FAST / 8, cross_bytes_per_s=slow / 8)
    aware = plan_for(nodes, speeds, zones=zones)
    plain = make_plan(nodes, routes=[Route("allreduce", None, "double_binary_tree", 65536)])
    crossed: dict[str, int] = {}
    with network_of(len(zones), rate_bits_per_s=FAST, zones=zones, between_bits_per_s=slow) as network:
        for name, plan in (("aware", aware), ("plain", plain)):
            before = network.bytes_between_zones()
            text = msgspec.json.encode(plan).decode()
            digest_of(tmp_path / name, nodes, network, "summing", count=size_bytes // 4, times=1, plan=text)
            crossed[name] = max(b - a for a, b in zip(before, network.bytes_between_zones(), strict=True))
    expected = {"aware": size_bytes, "plain": size_bytes // 2 * _most_crossings(plain, zones)}
    for name, count in crossed.items():
        assert 1.0 <= count / expected[name] < 1.15, f"{name}: {count} bytes crossed, not {expected[name]}"
    assert expected["plain"] >= 1.5 * expected["aware"]


def _most_crossings(plan: Plan, zones: tuple[int, ...]) -> int:
    """Edges of both trees between zones: each carries half of the array in each direction."""
    return sum(parent >= 0 and zones[node] != zones[parent] for tree in plan.trees for node, parent in enumerate(tree))


KILLED = """
import subprocess, sys
from tests.support.network.namespaces import delayed_network_of, network_of
with network_of(2, rate_bits_per_s=1e9) as one, delayed_network_of(2, delay_us=10) as other:
    for network in (one, other):
        command = network.hosts[1].command(["sh", "-c", "echo up; exec sleep 600"])
        subprocess.Popen(command, stdout=subprocess.PIPE).stdout.readline()
    print(*(host.holder for network in (one, other) for host in (network.control, *network.hosts)), flush=True)
    sys.stdin.read()
"""


def test_nothing_of_a_network_survives_a_killed_test() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", KILLED], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        pids = [int(word) for word in process.stdout.readline().split()]
        inodes = {os.stat(f"/proc/{pid}/ns/net").st_ino for pid in pids}
        assert len(inodes) == 6
        assert len(_using(inodes)) >= 9  # holders, what runs there, and the switch
        process.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + 10
    while (left := _using(inodes)) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not left


def _using(namespaces_: set[int]) -> list[int]:
    """Processes in any of these namespaces."""
    found = []
    for pid in (int(name) for name in os.listdir("/proc") if name.isdigit()):
        try:
            if os.stat(f"/proc/{pid}/ns/net").st_ino in namespaces_:
                found.append(pid)
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
    return found


def test_frames_through_the_delaying_switch_come_late_and_whole(tmp_path: Path) -> None:
    delay_s = 0.004
    with (
        delayed_network_of(2, delay_us=delay_s * 1e6) as network,
        ranks_running(tmp_path, [0, 1], "summing", network=network, count=1000, times=1) as ranks,
    ):
        took = [event["seconds"] for event in ranks.wait_for("result", limit_s=30).values()]
    assert min(took) > delay_s
