"""The signals of nodes, from the tables."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.support.reliability.lemon_fleet import draw_fleet

from fireflyer.analytics.reliability.lemons import find_lemons
from fireflyer.analytics.reliability.rows import EventRow, JobRow
from fireflyer.analytics.reliability.signals import node_signals
from fireflyer.analytics.reliability.tables import Kind, TableWriter, open_tables
from fireflyer.base.units import SECOND
from fireflyer.cli.main import main

BEGIN_NS = 1_700_000_000 * SECOND
DAY_NS = 86_400 * SECOND
HOUR_NS = 3600 * SECOND


def event(at_ns: int, node: str, symptom: str = "pcie", cause: str = "", source: str = "health") -> EventRow:
    return EventRow(BEGIN_NS + at_ns, node, symptom, cause, "high", source, "check", "", "", False, "")


def job(number: int, state: str, end_ns: int, nodes: str, count: int = 1, excluded: str = "") -> JobRow:
    end = BEGIN_NS + end_ns
    start = end - 8 * HOUR_NS
    return JobRow(str(number), "ada", state, count, 8 * count, start, start, end, 1, 0, nodes, excluded)


def write(directory: Path, jobs: list[JobRow], events: list[EventRow]) -> None:
    for kind, rows in (("jobs", jobs), ("events", events)):
        writer = TableWriter(str(directory), "jobs" if kind == "jobs" else "events")
        for row in rows:
            writer.add(row)
        writer.finish("0" * 16)


def test_what_is_seen_several_ways_within_an_hour_is_one_incident(tmp_path: Path) -> None:
    at = 20 * DAY_NS
    write(
        tmp_path,
        [
            job(1, "NODE_FAIL", at, "gpu[1-2]", 2),
            job(2, "COMPLETED", at, "gpu1"),
            job(3, "NODE_FAIL", at + 9 * HOUR_NS, "gpu3", excluded="gpu[1-2]"),
            job(4, "COMPLETED", 27 * DAY_NS, "gpu4", excluded="gpu1"),
        ],
        [
            event(at - 300 * SECOND, "gpu1", "gpu_unavailable", "xid_79"),
            event(at + 200 * SECOND, "gpu1", "pcie"),
            event(at + 2 * HOUR_NS, "gpu1", "gpu_memory", "xid_95", "kernel"),
            event(at - 60 * DAY_NS, "gpu1"),
        ],
    )
    with open_tables(str(tmp_path)) as tables:
        found = {one.node: one for one in node_signals(tables, nodes=6)}
    one = found["gpu1"]
    assert (one.incidents, one.xid_cnt, one.out_count, one.multi_node_node_fails) == (2, 2, 1, 1)
    assert (one.single_node_jobs, one.single_node_node_fails, one.excl_jobid_count) == (1, 0, 2)
    assert found["gpu2"].incidents == 0, "the job's other node is not to blame"
    assert (found["gpu3"].incidents, found["gpu3"].single_node_node_failure_rate) == (1, 1.0)
    assert len(found) == 6


def test_what_many_nodes_report_at_once_is_no_fault_of_theirs(tmp_path: Path) -> None:
    write(tmp_path, [], [event(DAY_NS + number, f"gpu{number}", "ib_link") for number in range(8)])
    with open_tables(str(tmp_path)) as tables:
        assert {one.incidents for one in node_signals(tables)} == {0}


@pytest.mark.parametrize("kind", ["jobs", "events"])
def test_tables_of_one_kind_suffice(kind: Kind, tmp_path: Path) -> None:
    writer = TableWriter(str(tmp_path), kind)
    writer.add(job(1, "NODE_FAIL", DAY_NS, "gpu1") if kind == "jobs" else event(DAY_NS, "gpu1"))
    writer.finish("0" * 16)
    with open_tables(str(tmp_path)) as tables:
        assert [(one.node, one.incidents) for one in node_signals(tables)] == [("gpu1", 1)]


def test_lemons_of_a_drawn_fleet_are_found_through_the_tables(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fleet = draw_fleet(1, 20.0, nodes=500)
    jobs, events = [], []
    for number, one in enumerate(fleet.incidents):
        end_ns = round(one.at_day * DAY_NS)
        name = f"gpu{one.node}"
        nodes, count = (f"{name},other{number % 50}", 2) if one.multi_node else (name, 1)
        jobs.append(job(number, "NODE_FAIL", end_ns, nodes, count))
        events.append(event(end_ns, name, "gpu_unavailable", f"xid_{one.xid}" if one.xid else ""))
    write(tmp_path, jobs, events)
    with open_tables(str(tmp_path)) as tables:
        report = find_lemons(node_signals(tables, days=90, nodes=500))
    proposed = {int(one.signals.node.removeprefix("gpu")) for one in report.proposals}
    assert proposed == fleet.lemons
    assert main(["reliability", "lemons", str(tmp_path), "--days", "90", "--nodes", "500", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["proposals"]) == len(fleet.lemons)
    assert main(["reliability", "lemons", str(tmp_path), "--days", "90", "--nodes", "500"]) == 0
    shown = capsys.readouterr().out
    assert f"{len(fleet.lemons)} proposed" in shown
    assert "jobs of one node failed on it: more than" in shown
