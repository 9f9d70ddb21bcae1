"""Every operation, every fault, real processes: all others name the rank that failed, or both calls, in time."""

from __future__ import annotations

import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from tests.support.campaigns.shards import rotating
from tests.support.network.tcp_proxy import Proxy
from tests.support.patience import allowed_s
from tests.support.ranks.processes import ranks_running

from fireflyer.base.units import MS, SECOND
from fireflyer.collectives.flight import explain, find_dumps, read_dumps

pytestmark = pytest.mark.processes

MODULE = "tests.support.ranks.fault_ranks"
TIMEOUT_NS = 1000 * MS
DEATH_LIMIT_S = 1.0
# docs/design/0023-collective-failures.md: 1.125 timeout + 0.3 s; and the slack of a busy test machine
HANG_LIMIT_S = 1.125 * TIMEOUT_NS / SECOND + 0.3 + 0.7
LAYOUTS = {"1x3": [0, 0, 0], "2x2": [0, 0, 1, 1]}
KINDS = ("gather", "scatter", "reduce_scatter", "allgather", "broadcast", "reduce", "barrier", "all_to_all")
AT_ONCE_NS = 60 * SECOND
"""The timeout of groups in which something is to be told without waiting for it; nor may it pass on a busy machine."""
FAST = {("gather", "2x2", signal.SIGKILL), ("reduce_scatter", "1x3", signal.SIGSTOP)}
OFTEN = {("all_to_all", "2x2", signal.SIGKILL), ("barrier", "1x3", signal.SIGSTOP)}
TURNS = rotating(expected_s=2)


def marks_of(case: Any, fast: set[Any], often: set[Any]) -> Any:
    """What is neither in `make test` nor in every `make test-slow` takes its turn."""
    return () if case in fast else pytest.mark.slow if case in often else TURNS


def cases() -> list[Any]:
    return [
        pytest.param(kind, layout, sign, marks=marks_of((kind, layout, sign), FAST, OFTEN))
        for kind in KINDS
        for layout in LAYOUTS
        for sign in (signal.SIGKILL, signal.SIGSTOP)
    ]


@pytest.mark.parametrize(("kind", "layout", "sign"), cases())
def test_a_rank_that_is_killed_or_stopped_is_named(
    kind: str, layout: str, sign: signal.Signals, tmp_path: Path
) -> None:
    nodes, victim = LAYOUTS[layout], 2
    others = [rank for rank in range(len(nodes)) if rank != victim]
    killed = sign == signal.SIGKILL
    timeout_ns, limit_s = (30 * SECOND, DEATH_LIMIT_S) if killed else (TIMEOUT_NS, HANG_LIMIT_S)
    usual = {"kind": kind, "count": 50_000}
    with ranks_running(tmp_path, nodes, "", timeout_ns=timeout_ns, module=MODULE, call=usual) as ranks:
        ranks.wait_for("under way")
        at = ranks.send_signal(victim, sign)
        for event in ranks.wait_for("failed", others, limit_s=limit_s + 20).values():
            assert (event["type"], event["culprit"]) == ("PeerFailed", victim), event
            assert f"rank {victim} (node " in event["message"], event
            # A killed rank may be found dead between two operations, or when this rank has done its part. A stopped
            # one may be in the barrier after one, which has no chunks.
            inside = f"{kind} #" in event["message"] and "has not entered" not in event["message"]
            if inside and not killed and kind in ("allgather", "reduce_scatter"):
                assert re.search(r"[a-z_]+ #\d+ had completed \d+ of \d+ chunks on this rank", event["message"]), event
            assert event["at"] - at < allowed_s(limit_s), event


def mismatches() -> list[Any]:
    """Each operation with each thing that ranks may differ in; the fast ones are one of a kind."""
    ways: dict[str, dict[str, Any]] = {
        "root": {"root": 1},
        "op": {"op": "max"},
        "dtype": {"dtype": "i4"},
        "count": {"count": 1001},
    }
    takes = {
        "root": ("gather", "scatter", "broadcast", "reduce"),
        "op": ("reduce_scatter", "reduce", "allreduce"),
        "dtype": KINDS[:6],
        "count": KINDS[:6],
    }
    rows = [(kind, way, ways[way]) for way in ways for kind in takes[way]]
    rows += [("all_to_all", "dtype", ways["dtype"])]
    rows += [(kind, "order", {"kind": "barrier"}) for kind in KINDS if kind != "barrier"]
    fast = {("scatter", "root", "1x3"), ("allgather", "order", "1x3")}
    often = {("allreduce", "op", "2x2"), ("gather", "dtype", "1x3"), ("broadcast", "count", "2x2")}
    return [
        pytest.param(
            kind,
            other,
            layout,
            id=f"{kind}-{way}-{layout}",
            marks=marks_of((kind, way, layout), fast, often),
        )
        for kind, way, other in rows
        for layout in LAYOUTS
    ]


@pytest.mark.parametrize(("kind", "other", "layout"), mismatches())
def test_calls_that_differ_are_both_named_by_all_ranks(
    kind: str, other: dict[str, Any], layout: str, tmp_path: Path
) -> None:
    nodes = LAYOUTS[layout]
    usual = {"kind": kind, "count": 1000}
    with ranks_running(
        tmp_path, nodes, "", timeout_ns=AT_ONCE_NS, module=MODULE, call=usual, other=other, odd=1, at=3
    ) as ranks:
        for event in ranks.wait_for("failed", limit_s=HANG_LIMIT_S + 20).values():
            assert event["type"] == "UsageError", event
            assert f"called {kind}" in event["message"], event
            assert f"called {other.get('kind', kind)}" in event["message"], event
            assert event["message"].count("called ") >= 2, event


@pytest.mark.parametrize("layout", [pytest.param("1x3", marks=TURNS), "2x2"])
def test_splits_that_differ_are_both_named_by_all_ranks(layout: str, tmp_path: Path) -> None:
    nodes, usual = LAYOUTS[layout], {"kind": "all_to_all", "count": 1000}
    with ranks_running(
        tmp_path, nodes, "", timeout_ns=AT_ONCE_NS, module=MODULE, call=usual, other={"count": 1001}, odd=1, at=3
    ) as ranks:
        for event in ranks.wait_for("failed", limit_s=HANG_LIMIT_S + 20).values():
            assert event["type"] == "UsageError", event
            assert "rank 1" in event["message"], event
            assert "4000" in event["message"], event
            assert "4004" in event["message"], event


@pytest.mark.slow
def test_a_dropped_connection_of_an_all_to_all_is_named_by_both_ends(tmp_path: Path) -> None:
    """The node that is cut off cannot tell itself from the other; whoever is connected names it."""
    proxy = Proxy()
    try:
        with ranks_running(
            tmp_path,
            [0, 1],
            "",
            timeout_ns=TIMEOUT_NS,
            module=MODULE,
            call={"kind": "all_to_all", "count": 100_000},
            proxies={"0": proxy.port},
        ) as ranks:
            proxy.begin(ranks.wait_for("listening", [0])[0]["port"])
            ranks.wait_for("under way")
            at = time.monotonic()
            proxy.freeze()
            for rank, event in ranks.wait_for("failed", limit_s=HANG_LIMIT_S + 20).items():
                assert (event["type"], event["culprit"]) == ("PeerFailed", 1 - rank), event
                assert event["at"] - at < allowed_s(HANG_LIMIT_S), event
    finally:
        proxy.close()


@pytest.mark.slow
def test_the_dumps_of_bytes_that_stopped_on_a_connection_name_its_ends(tmp_path: Path) -> None:
    """Only data connections freeze; heartbeats go on, so that each end says that the other's bytes do not arrive."""
    proxy, nodes = Proxy(), [0, 0, 1]
    try:
        with ranks_running(
            tmp_path / "job",
            nodes,
            "",
            timeout_ns=TIMEOUT_NS,
            module=MODULE,
            call={"kind": "allreduce", "count": 1_000_000},
            dump_dir=str(tmp_path / "flight"),
            proxies={"0": proxy.port},
        ) as ranks:
            proxy.begin(ranks.wait_for("listening", [0])[0]["port"])
            ranks.wait_for("under way")
            proxy.freeze(spare=1)  # the control connection is made first
            failed = ranks.wait_for("failed", limit_s=HANG_LIMIT_S + 20)
        verdict = explain([dump for _, dump in read_dumps(find_dumps([str(tmp_path / "flight")]))])
    finally:
        proxy.close()
    assert all(row.dump for row in verdict.table)
    ends = {0, 2}  # of the connection, never rank 1
    assert {culprit.rank for culprit in verdict.culprits} == ends, verdict
    assert {event["culprit"] for event in failed.values()} <= ends
    assert verdict.kind == "link", verdict
    assert any("half-open connection" in line for line in (verdict.summary, *verdict.evidence)), verdict
