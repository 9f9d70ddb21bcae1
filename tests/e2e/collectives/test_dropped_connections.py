"""Connections between nodes that are reset, closed, or deliver nothing any more, one way or both: every rank is told in
time between which two ends, though all processes live; and the dumps say which way bytes stopped, and why."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.support.campaigns.shards import rotating
from tests.support.network.tcp_proxy import Blow, End, Proxy
from tests.support.patience import allowed_s
from tests.support.ranks.processes import Event, Ranks, ranks_running

from fireflyer.base.units import MS, SECOND
from fireflyer.collectives.flight import Verdict, explain, find_dumps, read_dumps

pytestmark = pytest.mark.processes

TIMEOUT_NS = 1000 * MS
NOTICED_S = 1.0
# docs/design/0023-collective-failures.md: 1.125 timeout + 0.3 s; and the slack of a busy test machine
HANG_LIMIT_S = 1.125 * TIMEOUT_NS / SECOND + 0.3 + 0.7
NODES = [0, 0, 1]
ENDS = (0, 2)  # the leaders; rank 2 connects to rank 0
TURNS = rotating(expected_s=2)
CONTROL, DATA, ALL = range(1), range(1, 1 << 16), range(1 << 16)  # the control connection is made first


@contextmanager
def ranks_over(proxies: dict[int, Proxy], tmp_path: Path, kind: str = "allreduce") -> Iterator[Ranks]:
    """Ranks that call until they fail. One proxy, for node 0: every connection between the leaders goes through it.
    One for each rank: the connections between ranks, which either end may have made, go through those."""
    ports = {str(number): proxy.port for number, proxy in proxies.items()}
    of_ranks = len(proxies) > 1
    usual: dict[str, Any] = {
        "call": {"kind": kind, "count": 100_000 if of_ranks else 1_000_000},
        "listen_ports" if of_ranks else "proxies": ports,
    }
    try:
        with ranks_running(
            tmp_path / "job",
            NODES,
            "",
            timeout_ns=TIMEOUT_NS,
            module="tests.support.ranks.fault_ranks",
            dump_dir=str(tmp_path / "flight"),
            **usual,
        ) as ranks:
            for rank, proxy in proxies.items():
                proxy.begin(ranks.wait_for("rank listening" if of_ranks else "listening", [rank])[rank]["port"])
            ranks.wait_for("under way")
            yield ranks
    finally:
        for proxy in proxies.values():
            proxy.close()


def failures(ranks: Ranks, since: float, limit_s: float) -> dict[int, Event]:
    """Of all ranks: each names an end, and the other one."""
    failed = ranks.wait_for("failed", limit_s=limit_s + 20)
    for rank, event in failed.items():
        assert (event["type"], event["culprit"] in ENDS) == ("PeerFailed", True), f"rank {rank}: {event}"
        for end in ENDS:
            assert f"rank {end} (node {NODES[end]}, host " in event["message"], event
        assert event["at"] - since < allowed_s(limit_s), f"rank {rank} took {event['at'] - since:.2f} s: {event}"
    return failed


def verdict_of(tmp_path: Path) -> Verdict:
    return explain([dump for _, dump in read_dumps(find_dumps([str(tmp_path / "flight")]))])


@pytest.mark.parametrize(
    ("blow", "numbers"),
    [
        pytest.param("reset", CONTROL, id="reset control", marks=TURNS),
        pytest.param("reset", range(1, 2), id="reset data"),
        pytest.param("finish", CONTROL, id="finish control"),
        pytest.param("finish", range(1, 2), id="finish data", marks=TURNS),
        pytest.param("reset", ALL, id="reset all", marks=TURNS),
        pytest.param("finish", ALL, id="finish all", marks=TURNS),
    ],
)
def test_a_connection_that_is_reset_or_closed_is_named_by_all_ranks(blow: Blow, numbers: range, tmp_path: Path) -> None:
    proxy = Proxy()
    with ranks_over({0: proxy}, tmp_path) as ranks:
        at = time.monotonic()
        proxy.inject(blow, numbers)
        for event in failures(ranks, at, NOTICED_S).values():
            assert "connection" in event["message"]
            assert ("Connection reset by peer" if blow == "reset" else "closed by the other end") in event["message"]


@pytest.mark.parametrize(
    ("blow", "numbers", "towards"),
    [
        pytest.param("freeze", range(1, 2), "server", id="one data connection, to rank 0"),
        pytest.param("freeze", DATA, "client", id="data, to rank 2", marks=TURNS),
        pytest.param("freeze", DATA, None, id="data, both ways", marks=TURNS),
        pytest.param("swallow", DATA, "server", id="data swallowed, to rank 0", marks=TURNS),
        pytest.param("swallow", range(1, 2), "client", id="one data connection swallowed, to rank 2", marks=TURNS),
        pytest.param("swallow", ALL, "client", id="everything swallowed, to rank 2", marks=TURNS),
    ],
)
def test_a_connection_on_which_bytes_stop_is_named_by_all_ranks_and_by_the_dumps(
    blow: Blow, numbers: range, towards: End | None, tmp_path: Path
) -> None:
    proxy = Proxy()
    with ranks_over({0: proxy}, tmp_path) as ranks:
        at = time.monotonic()
        proxy.inject(blow, numbers, towards)
        failures(ranks, at, HANG_LIMIT_S)
        verdict = verdict_of(tmp_path)
    assert verdict.kind == "link", verdict
    assert {culprit.rank for culprit in verdict.culprits} == set(ENDS)
    assert not any(culprit.certain for culprit in verdict.culprits)
    lost = [link for link in verdict.links if link.side == "network"]
    assert lost, verdict
    ways = {"server": (2, 0), "client": (0, 2)}
    for link in lost:
        assert towards is None or (link.sender, link.receiver) == ways[towards], link
        assert link.connection.startswith("data connection" if 0 not in numbers else ""), link
        assert link.sent > link.received > 0, link
        assert f"{link.sent} bytes sent, {link.received} bytes received" in link.text, link


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["all_to_all", "send"])
@pytest.mark.parametrize("blow", ["reset", "finish", "freeze", "swallow"])
def test_a_dropped_connection_of_two_ranks_is_named_by_all(kind: str, blow: Blow, tmp_path: Path) -> None:
    """Between two nodes every pair of ranks has a connection of its own: here those of rank 2."""
    proxies = {rank: Proxy() for rank in range(len(NODES))}
    with ranks_over(proxies, tmp_path, kind) as ranks:
        at = time.monotonic()
        for proxy in proxies.values():
            proxy.inject(blow)
        ends = blow in ("reset", "finish")
        limit_s = NOTICED_S if ends else HANG_LIMIT_S + TIMEOUT_NS / SECOND
        for event in ranks.wait_for("failed", limit_s=limit_s + 20).values():
            assert event["type"] == "PeerFailed", event
            assert event["at"] - at < allowed_s(limit_s), event
            assert "rank 2" in event["message"], event
            assert any(f"rank {other}" in event["message"] for other in (0, 1)), event
            assert not ends or "connection" in event["message"], event
