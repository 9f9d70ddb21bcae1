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
            event(at - 100 * DAY_NS, "gpu1"),
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


def test_each_job_in_which_a_node_differed_counts_also_where_the_platform_does_not_name_it(tmp_path: Path) -> None:
    of_platform = [event(n * DAY_NS, "gpu1", "corruption", source="platform") for n in (1, 2, 2, 3)]
    of_run = [event(n * SECOND, "gpu2", "corruption", source="run")._replace(job="train") for n in (1, 2)]
    healed = event(4 * DAY_NS, "gpu1", "corruption", source="platform")._replace(severity="ok")
    write(tmp_path, [], [*of_platform, *of_run, healed])
    with open_tables(str(tmp_path)) as tables:
        assert {one.node: one.corruptions for one in node_signals(tables)} == {"gpu1": 3, "gpu2": 1}


def test_what_many_nodes_report_at_once_is_no_fault_of_theirs(tmp_path: Path) -> None:
    write(tmp_path, [], [event(DAY_NS + number, f"gpu{number}", "ib_link") for number in range(8)])
    with open_tables(str(tmp_path)) as tables:
        assert {one.incidents for one in node_signals(tables)} == {0}


@pytest.mark.parametrize("jobs_end_s", [30, 400])
def test_failures_of_an_outage_that_many_nodes_report_are_no_fault_of_theirs(jobs_end_s: int, tmp_path: Path) -> None:
    """Whether the jobs end in the same ten minutes of the clock, or not."""
    outage_ns = DAY_NS + 590 * SECOND
    jobs = [job(n, "NODE_FAIL", outage_ns + (jobs_end_s - 60) * SECOND, f"gpu{n}") for n in range(40)]
    events = [event(outage_ns + n * SECOND, f"gpu{n}", "ib_link") for n in range(40)]
    write(tmp_path, jobs, events)
    with open_tables(str(tmp_path)) as tables:
        assert {one.incidents for one in node_signals(tables)} == {0}


def test_jobs_that_fail_at_once_of_nothing_that_was_reported_failed_of_what_they_share(tmp_path: Path) -> None:
    write(tmp_path, [job(n, "NODE_FAIL", DAY_NS + n * SECOND, f"gpu{n}") for n in range(40)], [])
    with open_tables(str(tmp_path)) as tables:
        assert {one.incidents for one in node_signals(tables)} == {0}


def test_names_in_logs_are_no_lists_and_exclusions_count_nodes_of_the_fleet(tmp_path: Path) -> None:
    events = [event(DAY_NS * n, f"x{n}[0-99999]") for n in range(11)]
    write(tmp_path, [job(1, "COMPLETED", DAY_NS, "gpu1", excluded="gpu[0-99999]")], events)
    with open_tables(str(tmp_path)) as tables:
        found = {one.node: one for one in node_signals(tables)}
    assert len(found) == 12
    assert found["gpu1"].excl_jobid_count == 0, "nobody excludes more nodes than there are"


def test_nodes_are_observed_for_as_long_as_the_tables_know(tmp_path: Path) -> None:
    write(tmp_path, [], [event(0, "gpu1"), event(7 * DAY_NS, "gpu2")])
    with open_tables(str(tmp_path)) as tables:
        assert {one.days for one in node_signals(tables, days=28)} == {7.0}
    with open_tables(str(tmp_path)) as tables:
        assert {one.days for one in node_signals(tables, days=5)} == {5.0}


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
    assert "jobs of one node that failed on it: " in shown
