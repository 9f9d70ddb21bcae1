"""Incidents and node-days are of the same time; what is not known to have happened does not count."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest

from fireflyer.analytics.reliability import characterisation, failures, losses
from fireflyer.analytics.reliability.characterisation import Characterisation, characterise
from fireflyer.analytics.reliability.coverage import coverage_notes
from fireflyer.analytics.reliability.failures import DAY_NS
from fireflyer.analytics.reliability.importing import import_rows, import_run, import_sacct
from fireflyer.analytics.reliability.local_times import Clock
from fireflyer.analytics.reliability.page import headline, render_page, tables_of
from fireflyer.analytics.reliability.rows import EventRow, JobRow
from fireflyer.analytics.reliability.signals import node_signals
from fireflyer.analytics.reliability.tables import TableWriter, open_tables
from fireflyer.base.events import (
    AttemptFailed,
    AttemptSized,
    AttemptStarted,
    JobFinished,
    JobStarted,
    Logged,
    StepReport,
)
from fireflyer.base.units import SECOND
from fireflyer.cli.main import main

BEGIN_S = 1_700_006_400  # midnight
DAY_S = 86_400
HEADER = "JobID|User|State|Submit|Start|End|NNodes|NodeList|AllocTRES|ExitCode\n"


def at(day: float) -> int:
    return int((BEGIN_S + day * DAY_S) * SECOND)


def job(number: int | str, state: str, start: float, end: float | None, nodes: str, count: int = 1) -> str:
    times = [BEGIN_S + int(start * DAY_S), "Unknown" if end is None else BEGIN_S + int(end * DAY_S)]
    return f"{number}|ada|{state}|{times[0]}|{times[0]}|{times[1]}|{count}|{nodes}|gres/gpu={8 * count}|0:0"


def write_jobs(directory: Path, *rows: str, name: str = "sacct") -> None:
    (directory / name).write_text(HEADER + "".join(f"{row}\n" for row in rows))
    assert not import_sacct(str(directory / name), str(directory / "t"), clock=Clock()).rejected


def write_events(directory: Path, rows: Iterable[tuple[float, str]], *, name: str = "e") -> None:
    writer = TableWriter(str(directory / "t"), "events")
    for day, node in rows:
        writer.add(EventRow(at(day), node, "pcie", "", "high", "health", "pcie", "", "", False, ""))
    writer.finish(f"{name:0<16}".encode().hex()[:16])


def characterised(directory: Path, **options: int) -> Characterisation:
    with open_tables(str(directory / "t")) as tables:
        return characterise(tables, **options)


def node_days(directory: Path) -> float:
    with open_tables(str(directory / "t")) as tables:
        failures.prepare_failures(tables, gpus_per_node=8)
        return float(
            tables.sql(f"SELECT sum((until_ns - start_ns) / {DAY_NS} * parts / parts_of_node) FROM sized").fetchall()[
                0
            ][0]
        )


def notes(directory: Path) -> tuple[str, ...]:
    with open_tables(str(directory / "t")) as tables:
        failures.prepare(tables, gpus_per_node=8)
        return coverage_notes(tables, of_jobs=True)


def days_of(directory: Path) -> dict[str, float]:
    with open_tables(str(directory / "t")) as tables:
        return {one.node: one.days for one in node_signals(tables)}


def test_a_rate_counts_the_incidents_of_the_time_of_the_jobs_and_tells_of_the_others(tmp_path: Path) -> None:
    """A journal of a year beside the accounting of December."""
    write_jobs(tmp_path, job(1, "COMPLETED", 334, 365, "gpu[0-99]", 100))
    write_events(tmp_path, [(day + 0.5, f"gpu{day % 100}") for day in range(365)])
    found = characterised(tmp_path)
    (symptom,) = found.symptoms
    assert symptom.rate.failures == 31
    assert symptom.rate.per_node_day * 1000 == pytest.approx(10)
    assert "334 of 365 incidents were before or after the jobs" in found.notes[0]
    assert found.notes[0] in render_page(found)
    (rolling,) = found.rolling
    assert rolling.per_1000_node_days[333] is None, "incidents, and no node-days"
    assert rolling.per_1000_node_days[334] == pytest.approx(10), "of that day, and of its incident"
    assert sum(one.incidents for one in found.days) == 365, "what happened is told, whatever it is compared with"


def test_a_job_without_an_end_is_known_to_have_run_until_its_export_and_not_until_the_last_journal(
    tmp_path: Path,
) -> None:
    write_jobs(tmp_path, job(1, "RUNNING", 0, None, "gpu[0-63]", 64), job(2, "COMPLETED", 0, 1, "gpu99"))
    write_events(tmp_path, [(90, "gpu1"), (0, "gpu1")])
    assert node_days(tmp_path) == pytest.approx(65)
    write_jobs(tmp_path, job(1, "RUNNING", 0, None, "gpu[0-63]", 64), job(3, "COMPLETED", 9, 10, "gpu99"), name="next")
    assert node_days(tmp_path) == pytest.approx(10 * 64 + 2), "a later export knows it for longer"
    write_jobs(tmp_path, job(1, "RUNNING", 0, None, "gpu[0-63]", 64), job(2, "COMPLETED", 0, 1, "gpu99"))
    assert node_days(tmp_path) == pytest.approx(10 * 64 + 2), "an older one takes nothing back"


def test_logs_of_a_part_of_the_time_are_told(tmp_path: Path) -> None:
    write_jobs(tmp_path, job(1, "COMPLETED", 0, 100, "gpu[0-9]", 10))
    write_events(tmp_path, [(50, "gpu1"), (99, "gpu1")])
    (note,) = notes(tmp_path)
    assert note.startswith("The first report of a node is of 2024-01-04 and the last of 2024-02-22")
    write_events(tmp_path, [(1, "gpu1")], name="f")
    assert not notes(tmp_path)


def test_a_task_of_the_platform_that_runs_is_known_for_as_long_as_its_history_tells_anything(tmp_path: Path) -> None:
    running = JobRow("7", "ada", "RUNNING", 1, 8, at(0), at(0), None, -1, 0, "a", "", source="platform")
    import_rows("platform", "p", "jobs", [[running]], str(tmp_path / "t"))
    seen = EventRow(at(3), "a", "other", "", "warn", "platform", "", "", "", False, "")
    import_rows("platform", "p", "events", [[seen]], str(tmp_path / "t"))
    write_events(tmp_path, [(90, "gpu1")])
    assert node_days(tmp_path) == pytest.approx(3)


def test_a_run_that_goes_on_has_its_time_without_failures(tmp_path: Path) -> None:
    started = JobStarted("train", (), 1, 8, 3, float(BEGIN_S))
    log = [
        Logged(0, started),
        Logged(0, AttemptStarted(0)),
        Logged(DAY_NS, AttemptFailed(0, "node 0 was lost", restarting=True, node=0, kind="infrastructure")),
        Logged(DAY_NS, AttemptStarted(1)),
        Logged(30 * DAY_NS, StepReport(0, 1, 7, 1, 1, None, 1)),
    ]
    import_run("train", log, str(tmp_path / "t"), clock=Clock())
    with open_tables(str(tmp_path / "t")) as tables:
        states = tables.sql("SELECT state, end_ns IS NULL, known_ns FROM jobs ORDER BY start_ns").fetchall()
    assert states == [("NODE_FAIL", False, None), ("RUNNING", True, at(30))]
    (size,) = characterised(tmp_path).sizes
    assert size.mttf_h == pytest.approx(720)
    import_run("train", [*log, Logged(31 * DAY_NS, JobFinished(0, "done"))], str(tmp_path / "t"), clock=Clock())
    with open_tables(str(tmp_path / "t")) as tables:
        states = tables.sql("SELECT state, end_ns FROM jobs ORDER BY start_ns").fetchall()
    assert states == [("NODE_FAIL", at(1)), ("COMPLETED", at(31))], "in its place"


def test_an_attempt_of_fewer_nodes_has_their_gpus(tmp_path: Path) -> None:
    hosts = tuple(f"n{number}" for number in range(16))
    log = [
        Logged(0, JobStarted("train", (), 16, 8, 3, float(BEGIN_S))),
        Logged(1, AttemptStarted(0)),
        Logged(1, AttemptSized(0, 16, hosts)),
        Logged(2, AttemptFailed(0, "it ended", restarting=True)),
        Logged(3, AttemptStarted(1)),
        Logged(3, AttemptSized(1, 8, hosts[:8])),
        Logged(4, AttemptFailed(1, "it ended", restarting=True)),
        Logged(5, AttemptStarted(2)),
        Logged(5, AttemptSized(2, 2, hosts[:2], (), (8, 4))),
        Logged(6, JobFinished(0, "done")),
    ]
    import_run("train", log, str(tmp_path / "t"), clock=Clock())
    with open_tables(str(tmp_path / "t")) as tables:
        assert tables.sql("SELECT gpus FROM jobs ORDER BY start_ns").fetchall() == [(128,), (64,), (12,)]


def test_a_job_that_is_queued_again_is_one_job_and_one_that_never_started_is_none(tmp_path: Path) -> None:
    write_jobs(
        tmp_path, job(1, "REQUEUED", 0, 1, "a"), job(1, "NODE_FAIL", 1, 2, "b"), job(1, "COMPLETED", 2, 3, "a"),
        f"2_[4-99]|ada|PENDING|{BEGIN_S}|Unknown|Unknown|1|None assigned||0:0",
    )  # fmt: skip
    found = characterised(tmp_path)
    assert (found.jobs, found.attempts, found.never_started) == (1, 3, 1)
    assert "1 jobs in 3 attempts, and" in headline(found)
    assert {one.state for one in found.states} == {"REQUEUED", "NODE_FAIL", "COMPLETED"}
    shown = {table.title: table for table in tables_of(found)}
    assert shown["Attempts by state"].note == "Without 1 that never started."
    assert [one.attempts for one in found.sizes] == [3]


def test_a_run_inside_of_a_job_is_told_to_count_twice(tmp_path: Path) -> None:
    write_jobs(tmp_path, job(1, "COMPLETED", 0, 2, "a"))
    log = [
        Logged(0, JobStarted("train", (), 1, 8, 3, float(BEGIN_S + DAY_S))),
        Logged(1, AttemptStarted(0)),
        Logged(DAY_NS // 2, JobFinished(0, "done")),
    ]
    import_run("train", log, str(tmp_path / "t"), clock=Clock())
    (note,) = notes(tmp_path)
    assert note.startswith("1 attempts of `ff run` are of the time of jobs from other sources")


def test_nodes_of_a_job_that_began_before_the_window_and_runs_are_of_the_fleet(tmp_path: Path) -> None:
    write_jobs(tmp_path, job(1, "RUNNING", 0, None, "gpu[1-100]", 100), job(2, "COMPLETED", 99, 100, "other"))
    days = days_of(tmp_path)
    assert len(days) == 101
    assert days["gpu7"] == 90


def test_a_node_that_joined_or_left_counts_for_its_own_time(tmp_path: Path) -> None:
    write_jobs(
        tmp_path,
        *(job(day, "COMPLETED", day, day + 0.5, "old") for day in range(85)),
        *(job(day, "COMPLETED", day, day + 0.5, "old,new", 2) for day in range(85, 90)),
        *(job(100 + day, "COMPLETED", day, day + 0.5, "left") for day in range(10)),
        *(job(200 + day, "COMPLETED", day, day + 0.1, "idle") for day in range(20, 90, 10)),
    )  # fmt: skip
    write_events(tmp_path, [(86, "new"), (87, "new"), (88, "new"), (3, "faulty"), (4, "faulty"), (5, "faulty")])
    days = days_of(tmp_path)
    assert days["old"] == pytest.approx(89.5)
    assert days["new"] == pytest.approx(5, abs=1)
    assert days["left"] == pytest.approx(10, abs=1)
    assert days["idle"] == days["faulty"] == days["old"], "silence of an idle node, or after faults, is no absence"


def test_lists_of_nodes_that_are_compared_take_bounded_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failures, "MAX_CACHED_NAMES", 250)
    sets = failures._NodeSets()
    for number in range(20):
        assert len(sets.of(f"a{number}n[1-100]")) == 100
        assert sets.of("gpu[1-10]") == {f"gpu{node}" for node in range(1, 11)}
        assert sets.names <= 250


def test_what_is_cut_is_the_oldest_and_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_events(tmp_path, [(day, f"gpu{day}") for day in range(50)])
    assert main(["reliability", "report", str(tmp_path / "t")]) == 0
    shown = capsys.readouterr().out
    days = shown[shown.index("Incidents by day") : shown.index("Incidents by month")]
    assert "2024-01-03" in days, "the newest"
    assert "2023-11-15" not in days
    assert "10 more rows in --html and --json" in days
    monkeypatch.setattr(characterisation, "_DAYS", characterisation._DAYS.replace("10000", "20"))
    monkeypatch.setattr(characterisation, "MAX_CASCADES", 2)
    write_jobs(tmp_path, *(job(n, "NODE_FAIL", 5 * n + k, 5 * n + k + 1, "x") for n in range(5) for k in range(3)))
    found = characterised(tmp_path)
    assert [one.day - BEGIN_S // DAY_S for one in found.days] == list(range(49, 29, -1))
    assert len(found.cascades) == 2
    assert (found.left_out["days"], found.left_out["cascades"], found.left_out["months"]) == (30, 3, 0)
    notes = {table.title: table.note for table in tables_of(found)}
    assert "30 older rows are left out" in notes["Incidents by day"]
    assert (
        "3 jobs, which cost less, are left out"
        in notes["Jobs that failed again and again, or whose restarts preempted others"]
    )


def test_nodes_that_lost_less_are_told_to_be_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(losses, "MAX_NODES_SHOWN", 3)
    write_jobs(tmp_path, *(job(n, "NODE_FAIL", 0, 1, f"n{n}") for n in range(5)))
    write_events(tmp_path, [(0.999, f"n{n}") for n in range(5)])
    found = characterised(tmp_path)
    assert (len(found.losses.nodes), found.left_out["nodes"]) == (3, 2)
    assert "2 further nodes are left out" in render_page(found)
