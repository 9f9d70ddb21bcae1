"""Reports computed from the tables: published tables come back cell by cell from logs that have them."""

from __future__ import annotations

import re
from collections.abc import Iterable
from datetime import date
from pathlib import Path

import pytest
from scipy.stats import chi2
from tests.support.reliability.published_logs import log_of_days, log_of_months, log_of_shares

from fireflyer.analytics.reliability.characterisation import Characterisation, characterise
from fireflyer.analytics.reliability.failures import DAY_NS
from fireflyer.analytics.reliability.importing import import_lines, import_rows, import_sacct
from fireflyer.analytics.reliability.intervals import rate_of
from fireflyer.analytics.reliability.local_times import Clock
from fireflyer.analytics.reliability.page import render_page, tables_of
from fireflyer.analytics.reliability.published_failures import (
    COLUMNS,
    ECC_XIDS,
    LINK_FAILURES,
    MONTHS,
    XID_SHARES_PERCENT,
    solved_months,
)
from fireflyer.analytics.reliability.rows import EventRow, JobRow
from fireflyer.analytics.reliability.tables import TableWriter, open_tables
from fireflyer.base.errors import UsageError
from fireflyer.base.units import SECOND

HEADER = "JobID|User|State|Submit|Start|End|NNodes|NodeList|AllocTRES|ExitCode\n"
BEGIN_S = 1_700_006_400  # midnight
HOUR_S, DAY_S = 3600, 86_400


def of_log(tmp_path: Path, lines: Iterable[str]) -> Characterisation:
    (tmp_path / "kern.log").write_text("".join(lines))
    found = import_lines("kernel-log", str(tmp_path / "kern.log"), str(tmp_path / "t"), node="", clock=Clock())
    assert not found.rejected
    return characterised(tmp_path)


def characterised(tmp_path: Path, **options: int) -> Characterisation:
    with open_tables(str(tmp_path / "t")) as tables:
        return characterise(tables, **options)


def write_jobs(tmp_path: Path, rows: Iterable[str]) -> None:
    path = tmp_path / "sacct"
    path.write_text(HEADER + "".join(f"{row}\n" for row in rows))
    assert not import_sacct(str(path), str(tmp_path / "t"), clock=Clock()).rejected


def write_events(tmp_path: Path, rows: Iterable[tuple[int, str, str]]) -> None:
    """Seconds since the beginning, node and symptom; of high severity."""
    writer = TableWriter(str(tmp_path / "t"), "events")
    for at_s, node, symptom in rows:
        at_ns = (BEGIN_S + at_s) * SECOND
        writer.add(EventRow(at_ns, node, symptom, "", "high", "health", f"check_{symptom}", "", "", False, ""))
    writer.finish("0" * 16)


def job(number: int | str, state: str, start_s: int, end_s: int, nodes: str, gpus: int, count: int = 1) -> str:
    start, end = BEGIN_S + start_s, BEGIN_S + end_s
    return f"{number}|ada|{state}|{start}|{start}|{end}|{count}|{nodes}|gres/gpu={gpus}|1:0"


def test_table_vii_comes_back_cell_by_cell(tmp_path: Path) -> None:
    cells = {month: {column: solved_months()[month][column] for column in COLUMNS} for month in MONTHS}
    keys = {"main_memory": ("main_memory", "memory"), "network": ("ib_link", "link_down")}
    counted = {
        (one.month, one.symptom, one.cause): one.incidents for one in of_log(tmp_path, log_of_months(cells)).months
    }
    for month in MONTHS:
        for column in COLUMNS:
            symptom = "gpu_unavailable" if column == "xid_79" else "gpu_memory"
            key = (month, *keys.get(column, (symptom, column)))
            assert counted.get(key, 0) == cells[month][column], key
    assert sum(counted.values()) == 292


def test_table_viii_comes_back_day_by_day(tmp_path: Path) -> None:
    found = of_log(tmp_path, log_of_days(LINK_FAILURES))
    assert [(one.symptom, one.rate.failures) for one in found.symptoms] == [("ib_link", 213)]
    october = next(one for one in found.months if one.month == "2023-10")
    assert october.incidents == 13, "where table VII has 29"
    (rolling,) = found.rolling
    counts: list[int] = []
    windows = [0]
    for number, rate in enumerate(rolling.per_1000_node_days, start=1):
        assert rate is not None
        windows.append(round(rate * found.nodes_seen * min(number, 30) / 1000))
        leaving = counts[number - 31] if number > 30 else 0
        counts.append(windows[-1] - windows[-2] + leaving)
    days = dict(zip(rolling.days, counts, strict=True))
    assert {day: days.pop((date.fromisoformat(day) - date(1970, 1, 1)).days) for day in LINK_FAILURES} == LINK_FAILURES
    assert not any(days.values())


def test_shares_of_xids_come_back(tmp_path: Path) -> None:
    counts = {74: 4257, 43: 3348, 63: 200, 13: 2195}
    months = of_log(tmp_path, log_of_shares(counts)).months
    total = sum(one.incidents for one in months)
    shares = {one.cause: 100 * one.incidents / total for one in months}
    assert {xid: round(shares[f"xid_{xid}"], 2) for xid in XID_SHARES_PERCENT} == XID_SHARES_PERCENT
    assert round(sum(shares.get(f"xid_{xid}", 0) for xid in ECC_XIDS)) == 2


@pytest.mark.parametrize("failures", [0, 1, 7, 120, 5000])
def test_intervals_are_those_of_the_gamma_distribution(failures: int) -> None:
    rate = rate_of(failures, 1000.0)
    assert rate.low == pytest.approx(chi2.ppf(0.05, 2 * failures) / 2000 if failures else 0.0, rel=1e-9)
    assert rate.high == pytest.approx(chi2.ppf(0.95, 2 * failures + 2) / 2000, rel=1e-9)
    assert rate.low <= rate.per_node_day <= rate.high


def test_a_failed_job_is_a_failure_of_the_cluster_where_its_node_reported_something(tmp_path: Path) -> None:
    end = 10 * HOUR_S
    write_jobs(
        tmp_path,
        [
            job(1, "FAILED", 0, end, "gpu[1-32]", 256, 32),  # the link of gpu7, 9 minutes before its end
            job(2, "FAILED", 0, end, "gpu[40-71]", 256, 32),  # 11 minutes before
            job(3, "FAILED", 0, end, "gpu80", 8),  # 4 minutes after
            job(4, "FAILED", 0, end, "gpu81", 8),  # 6 minutes after
            job(5, "NODE_FAIL", 0, end, "gpu82", 8),  # nothing was reported
            job(6, "FAILED", 0, end, "gpu83", 8),  # two symptoms
            job(7, "COMPLETED", 0, end, "gpu84", 8),
        ],
    )
    write_events(
        tmp_path,
        [
            (end - 540, "gpu7", "ib_link"),
            (end - 660, "gpu41", "ib_link"),
            (end + 240, "gpu80", "pcie"),
            (end + 360, "gpu81", "pcie"),
            (end - 60, "gpu83", "nccl_timeout"),
            (end - 30, "gpu83", "gpu_memory"),
            (end - 30, "gpu84", "gpu_memory"),
        ],
    )
    found = characterised(tmp_path)
    assert dict(found.failure_symptoms) == {"ib_link": 1, "pcie": 1, "": 1, "gpu_memory": 1}
    sizes = {one.gpus: one for one in found.sizes}
    assert (sizes[256].failures, sizes[8].failures) == (1, 3)
    assert sizes[256].mttf_h == pytest.approx(20)
    assert found.large_jobs is not None
    assert found.large_jobs.rate.failures == 1
    assert found.large_jobs.rate.node_days == pytest.approx(64 * 10 / 24)
    assert found.lost_gpu_hours == pytest.approx(0.5 * (256 + 3 * 8))


def test_a_fault_that_is_reported_for_days_is_one_incident_and_its_causes_are_not_added_up(tmp_path: Path) -> None:
    day = 24 * HOUR_S
    lines = [(minute * 300, "gpu1", "xid_79") for minute in range(2 * day // 300)]
    lines += [(at_s + 60, node, "xid_63") for at_s, node, _ in lines[:5]]
    lines += [(3 * day, "gpu1", "xid_79"), (3600 - 1, "gpu2", "xid_79"), (3600 + 1, "gpu2", "xid_79")]
    writer = TableWriter(str(tmp_path / "t"), "events")
    for at_s, node, cause in sorted(lines):
        at_ns = (BEGIN_S - BEGIN_S % day + at_s) * SECOND
        writer.add(EventRow(at_ns, node, "gpu_unavailable", cause, "high", "kernel", "", "", "", False, ""))
    writer.finish("0" * 16)
    found = characterised(tmp_path)
    (symptom,) = found.symptoms
    assert symptom.rate.failures == 3, "two of gpu1, days apart; one of gpu2, on both sides of an hour of the clock"
    assert sum(one.incidents for one in found.months if one.cause == "xid_79") == 3
    assert sum(one.incidents for one in found.months if one.cause == "xid_63") == 1
    assert found.rolling[0].per_1000_node_days[-1] == pytest.approx(3 * 1000 / (2 * 4))


def test_numbers_of_jobs_that_are_used_again_are_other_jobs(tmp_path: Path) -> None:
    day = 24 * HOUR_S
    bob = job(1, "COMPLETED", 400 * day, 401 * day, "a", 8).replace("ada", "bob")
    write_jobs(
        tmp_path,
        [
            job(1, "NODE_FAIL", 0, HOUR_S, "a", 8),
            job(1, "COMPLETED", HOUR_S + 60, 2 * HOUR_S, "b", 8),  # queued again
            bob,
            job(2, "NODE_FAIL", 0, HOUR_S, "c", 8),
            job(2, "COMPLETED", 300 * day, 300 * day + HOUR_S, "c", 8),
            job(3, "COMPLETED", 0, HOUR_S, "d", 8),
            job(3, "COMPLETED", HOUR_S // 2, HOUR_S, "e", 8),  # of another cluster
        ],
    )
    found = characterised(tmp_path)
    assert (found.jobs, found.attempts) == (6, 7)
    assert found.training is not None
    assert (found.training.jobs, found.training.attempts) == (6, 7)
    assert found.training.ettr > 0.9, "nobody waited for a year"


def of_platform(number: int, state: str, start_s: float, end_s: float, node: str) -> JobRow:
    start_ns, end_ns = (int((BEGIN_S + at_s) * SECOND) for at_s in (start_s, end_s))
    return JobRow(str(number), "ada", state, 1, 8, start_ns, start_ns, end_ns, 0, 0, node, "", source="platform")


def test_slurm_and_the_platform_number_their_jobs_by_themselves(tmp_path: Path) -> None:
    """Of one user, one after the other, as attempts of a job would be; each was queued again."""
    jobs = [job(1, "NODE_FAIL", 0, HOUR_S, "a", 8), job(1, "COMPLETED", 4 * HOUR_S, 5 * HOUR_S, "b", 8)]
    write_jobs(tmp_path, jobs)
    tasks = [
        of_platform(1, "NODE_FAIL", 2 * HOUR_S, 3 * HOUR_S, "c"),
        of_platform(1, "COMPLETED", 6 * HOUR_S, 7 * HOUR_S, "d"),
    ]
    import_rows("platform", "p", "jobs", [tasks], str(tmp_path / "t"))
    with open_tables(str(tmp_path / "t")) as tables:
        found = characterise(tables)
        named = tables.sql("SELECT node_list, job, source FROM sized ORDER BY start_ns").fetchall()
    assert named == [
        ("a", "1", "slurm"), ("c", "1/2", "platform"), ("b", "1", "slurm"), ("d", "1/2", "platform"),
    ]  # fmt: skip
    assert found.training is not None
    assert (found.training.jobs, found.training.attempts) == (2, 4)
    assert sum(one.wait for one in found.losses.causes) == pytest.approx(2 * 3 * 8), "each for its own next attempt"


def test_an_attempt_of_slurm_is_none_of_the_platform(tmp_path: Path) -> None:
    """They differ in nothing else."""
    write_jobs(tmp_path, [job(1, "COMPLETED", 0, HOUR_S, "a", 8)])
    found = import_rows("platform", "p", "jobs", [[of_platform(1, "COMPLETED", 0, HOUR_S, "a")]], str(tmp_path / "t"))
    assert (found.jobs, found.known) == (1, 0)
    again = import_rows("platform", "q", "jobs", [[of_platform(1, "COMPLETED", 0, HOUR_S, "a")]], str(tmp_path / "t"))
    assert (again.jobs, again.known) == (0, 1)
    assert characterised(tmp_path).jobs == 2


def test_a_node_that_did_not_boot_failed_no_job(tmp_path: Path) -> None:
    write_jobs(tmp_path, [job(1, "BOOT_FAIL", 0, 60, "a", 8), job(1, "COMPLETED", 120, HOUR_S, "b", 8)])
    write_events(tmp_path, [(30, "a", "gpu_unavailable")])
    assert not characterised(tmp_path).failure_symptoms


def test_the_wait_before_the_first_start_is_none_of_the_training_time(tmp_path: Path) -> None:
    row = job(1, "COMPLETED", HOUR_S, 2 * HOUR_S, "a", 8).split("|")
    row[3] = str(BEGIN_S)
    write_jobs(tmp_path, ["|".join(row)])
    training = characterised(tmp_path).training
    assert training is not None
    assert training.ettr == 1


def test_a_crash_loop_and_what_it_preempts(tmp_path: Path) -> None:
    """As the paper's job of 1024 GPUs that failed again and again; each restart takes nodes from small jobs."""
    rows = []
    for attempt in range(4):
        start = attempt * HOUR_S
        rows.append(job(9, "NODE_FAIL", start, start + HOUR_S - 60, "gpu[1-128]", 1024, 128))
        if attempt:
            rows += [job(100 * attempt + k, "PREEMPTED", start - 1800, start - 30, f"gpu{k}", 8) for k in range(1, 6)]
            rows.append(job(100 * attempt + 99, "PREEMPTED", start - 1800, start - 30, "gpu900", 8))  # another's doing
    write_jobs(tmp_path, rows)
    found = characterised(tmp_path)
    assert found.complete
    (cascade,) = found.cascades
    assert (cascade.job, cascade.failures, cascade.gpus) == ("9", 4, 1024)
    assert (cascade.preempted_jobs, cascade.preempted_gpus) == (15, 120)
    assert found.lost_by_preemption_gpu_hours == pytest.approx(15 * 8 * 1770 / 3600)


def test_xids_have_their_shares_and_remedies_and_links_their_days_as_in_the_papers_tables(tmp_path: Path) -> None:
    counts = {74: 4257, 43: 3348, 63: 200, 13: 2195}
    shown = {table.title: table for table in tables_of(of_log(tmp_path, log_of_shares(counts)))}
    shares = {row[0]: row[-1] for row in shown["Xid errors"].rows}
    assert {xid: shares[str(xid)] for xid in XID_SHARES_PERCENT} == {
        xid: f"{percent:.2f}%" for xid, percent in XID_SHARES_PERCENT.items()
    }
    classes = {row[0]: row for row in shown["Xid errors by class"].rows}
    assert classes["nvlink"][1] == "74"
    assert "stress the pair" in classes["nvlink"][3]
    days = tmp_path / "days"
    days.mkdir()
    shown = {table.title: table for table in tables_of(of_log(days, log_of_days(LINK_FAILURES)))}
    found = {day: int(count) for day, symptom, count in shown["Incidents by day"].rows if symptom == "InfiniBand link"}
    assert found == {day: count for day, count in LINK_FAILURES.items() if count}


def test_each_cause_has_what_its_failures_cost(tmp_path: Path) -> None:
    """A lost GPU of a job of 16 whose restart preempted another job, a lost link, and a node that said nothing."""
    write_jobs(
        tmp_path,
        [
            job(1, "NODE_FAIL", 0, 2 * HOUR_S, "n[1-2]", 16, 2),
            job(1, "COMPLETED", 2 * HOUR_S + 900, 9 * HOUR_S, "n[3-4]", 16, 2),
            job(2, "PREEMPTED", 0, 2 * HOUR_S + 880, "n3", 8),
            job(3, "FAILED", 0, 600, "n5", 8),
            job(4, "NODE_FAIL", 0, HOUR_S, "n6", 8),
            job(4, "COMPLETED", HOUR_S, HOUR_S + 60, "n7", 8),
        ],
    )
    write_events(tmp_path, [(2 * HOUR_S - 60, "n2", "gpu_unavailable"), (500, "n5", "ib_link"), (500, "n1", "pcie")])
    found = characterised(tmp_path)
    causes = {(one.symptom, one.failures): (one.work, one.wait, one.restart, one.pushed) for one in found.losses.causes}
    assert causes == {
        ("gpu_unavailable", 1): pytest.approx((8, 4, 16 * 300 / HOUR_S, 4)),
        ("ib_link", 1): pytest.approx((8 * 600 / HOUR_S, 0, 0, 0)),
        ("", 1): pytest.approx((4, 0, 8 * 60 / HOUR_S, 0)),
    }, "work, wait, restart, preempted: an attempt that is shorter loses no more than itself"
    assert [one.node for one in found.losses.nodes] == ["n2", "", "n5"]
    assert [(one.symptom, one.gpus) for one in found.losses.sizes] == [("gpu_unavailable", 16), ("", 8), ("ib_link", 8)]
    sums = [sum(one.lost for one in part) for part in (found.losses.causes, found.losses.nodes, found.losses.sizes)]
    assert sums == pytest.approx([sums[0]] * 3)
    assert sum(one.work for one in found.losses.causes) == pytest.approx(found.lost_gpu_hours)
    assert sum(one.pushed for one in found.losses.causes) == pytest.approx(found.lost_by_preemption_gpu_hours)
    page = render_page(found)
    assert all(f"Lost GPU-hours by {what}" in page for what in ("cause", "node", "cause and size of job"))


def test_what_a_restart_preempted_counts_under_the_failure_before_it_also_where_it_fails_at_once(
    tmp_path: Path,
) -> None:
    write_jobs(
        tmp_path,
        [
            job(1, "NODE_FAIL", 0, 2 * HOUR_S, "n1", 8),
            job(1, "NODE_FAIL", 2 * HOUR_S + 900, 2 * HOUR_S + 960, "n3", 8),
            job(2, "PREEMPTED", 0, 2 * HOUR_S + 880, "n3", 8),
        ],
    )
    write_events(tmp_path, [(2 * HOUR_S - 60, "n1", "gpu_unavailable"), (2 * HOUR_S + 950, "n3", "gpu_memory")])
    pushed = {one.symptom: one.pushed for one in characterised(tmp_path).losses.causes}
    assert pushed == {"gpu_unavailable": pytest.approx(4), "gpu_memory": 0}


def test_what_is_reported_after_the_end_explains_it_only_where_nothing_did_before(tmp_path: Path) -> None:
    write_jobs(tmp_path, [job(number, "NODE_FAIL", 0, HOUR_S, f"n{number}", 8) for number in (1, 2, 3)])
    write_events(
        tmp_path,
        [(HOUR_S - 5, "n1", "ib_link"), (HOUR_S + 60, "n1", "pcie"),
         (HOUR_S - 5, "n2", "nccl_timeout"), (HOUR_S + 60, "n2", "eth_link"),
         (HOUR_S + 50, "n3", "ib_link"), (HOUR_S + 60, "n3", "pcie")],
    )  # fmt: skip
    found = {one.symptom: one.failures for one in characterised(tmp_path).losses.causes}
    assert found == {"ib_link": 1, "eth_link": 1, "pcie": 1}


def test_what_a_source_has_measured_is_taken_in_the_place_of_half_an_hour(tmp_path: Path) -> None:
    begin_ns, middle_ns, end_ns = ((BEGIN_S + hours * HOUR_S) * SECOND for hours in range(3))
    first = JobRow(
        "7", "ada", "NODE_FAIL", 1, 8, begin_ns, begin_ns, middle_ns, 1, 0, "n1", "",
        unsaved_ns=90 * SECOND, overhead_ns=SECOND,
    )  # fmt: skip
    second = first._replace(
        state="COMPLETED", start_ns=middle_ns, end_ns=end_ns, unsaved_ns=None, overhead_ns=18 * SECOND
    )
    import_rows("platform", "p", "jobs", [[first, second]], str(tmp_path / "t"))
    found = characterised(tmp_path)
    (one,) = found.losses.causes
    assert (one.work, one.restart) == pytest.approx((8 * 90 / 3600, 8 * 18 / 3600))
    assert found.lost_gpu_hours == pytest.approx(8 * 90 / 3600)
    assert found.training is not None
    assert found.training.goodput == pytest.approx(1 - 90 / 7200)


@pytest.mark.parametrize(
    ("unsaved_s", "overhead_s", "costs"),
    [
        (None, None, (1800 + 0 + 300, 900 - 300 + 60 + 300)),  # half an hour, five minutes
        (900, 120, (900 + 0 + 120, 900 - 120 + 60 + 120)),  # nothing was saved: not the start of it, which is a restart
        (300, 120, (300 + 0 + 120, 300 + 60 + 120)),
    ],
)
def test_no_minute_of_a_job_is_lost_twice(
    tmp_path: Path, unsaved_s: int | None, overhead_s: int | None, costs: tuple[int, int]
) -> None:
    """It fails, fails again after a quarter of an hour, and is done: what both failures cost."""

    def attempt(state: str, start_s: int, end_s: int) -> JobRow:
        begin_ns, end_ns = ((BEGIN_S + at_s) * SECOND for at_s in (start_s, end_s))
        return JobRow(
            "7", "ada", state, 1, 1, BEGIN_S * SECOND, begin_ns, end_ns, 1, 0, "n1", "",
            unsaved_ns=None if unsaved_s is None else unsaved_s * SECOND,
            overhead_ns=None if overhead_s is None else overhead_s * SECOND,
        )  # fmt: skip

    rows = [
        attempt("NODE_FAIL", 0, HOUR_S), attempt("NODE_FAIL", HOUR_S, HOUR_S + 900),
        attempt("COMPLETED", HOUR_S + 960, 2 * HOUR_S),
    ]  # fmt: skip
    import_rows("platform", "p", "jobs", [rows], str(tmp_path / "t"))
    write_events(tmp_path, [(HOUR_S - 5, "n1", "ib_link"), (HOUR_S + 895, "n1", "pcie")])
    lost = {one.symptom: one.lost * 3600 for one in characterised(tmp_path).losses.causes}
    assert (lost["ib_link"], lost["pcie"]) == pytest.approx(costs)


def test_jobs_that_share_a_node_take_it_once(tmp_path: Path) -> None:
    write_jobs(
        tmp_path,
        [
            *(job(number, "COMPLETED", 0, DAY_S, "gpu1", 1) for number in range(8)),
            job(8, "COMPLETED", 0, DAY_S, "gpu[2-3]", 16, 2),
            job(9, "COMPLETED", 0, DAY_S, "gpu[4-7]", 4, 4),  # one GPU of each
            job(10, "COMPLETED", 0, DAY_S // 2, "gpu8", 0),
        ],
    )
    write_events(tmp_path, [(HOUR_S, "gpu1", "pcie")])
    found = characterised(tmp_path)
    assert found.node_days == pytest.approx(1 + 2 + 0.5)
    assert {one.gpus: one.node_days for one in found.sizes} == pytest.approx({0: 0, 1: 1, 4: 0.5, 16: 2})
    assert found.symptoms[0].rate.per_node_day == pytest.approx(1 / 3.5)
    assert found.rolling[0].per_1000_node_days == pytest.approx([1000 / 3.5, 1000 / 3.5])


def test_accounting_that_names_no_gpu_of_any_job_does_not_count_them(tmp_path: Path) -> None:
    rows = (job(number, "COMPLETED", 0, DAY_S, "gpu[1-4]", 0, 4) for number in range(2))
    write_jobs(tmp_path, (row.replace("gres/gpu=0", "cpu=8,node=4") for row in rows))
    found = characterised(tmp_path)
    assert (found.node_days, [one.gpus for one in found.sizes]) == (8, [32])


def test_node_days_of_each_day_are_those_of_the_jobs_that_ran_in_it(tmp_path: Path) -> None:
    spans = [(0, 10 * HOUR_S), (5 * HOUR_S, 3 * DAY_S + 6 * HOUR_S), (DAY_S, DAY_S), (40 * DAY_S, 41 * DAY_S)]
    write_jobs(tmp_path, [job(n, "COMPLETED", begin, end, "gpu1", 8) for n, (begin, end) in enumerate(spans)])
    write_events(tmp_path, [(HOUR_S, "gpu1", "pcie"), (40 * DAY_S, "gpu1", "pcie")])
    (rolling,) = characterised(tmp_path).rolling
    days = [10 / 24 + 19 / 24, 1, 1, 6 / 24]
    assert rolling.per_1000_node_days[0] == pytest.approx(1000 / days[0])
    assert rolling.per_1000_node_days[3] == pytest.approx(1000 / sum(days))
    assert rolling.per_1000_node_days[35] is None, "nothing ran in 30 days"
    assert rolling.per_1000_node_days[40] == pytest.approx(1000)


def test_a_check_that_is_new_is_marked(tmp_path: Path) -> None:
    write_events(
        tmp_path, [(0, "gpu1", "pcie"), (40 * DAY_S, "gpu2", "filesystem_mount"), (50 * DAY_S, "gpu2", "pcie")]
    )
    found = characterised(tmp_path, nodes=100)
    assert [(one.check, one.day) for one in found.introductions] == [("check_filesystem_mount", BEGIN_S // DAY_S + 40)]
    assert found.node_days == pytest.approx(100 * 50)
    rates = {one.symptom: one.per_1000_node_days for one in found.rolling}
    assert rates["pcie"][29] == pytest.approx(1000 / 3000)
    assert rates["pcie"][30] == 0, "30 days later"


def test_the_page_draws_whole_windows_and_escapes_names(tmp_path: Path) -> None:
    write_events(tmp_path, [(0, "gpu1", "pcie"), (1, "gpu1", "<b>"), (90 * DAY_S, "gpu2", "filesystem_mount")])
    found = characterised(tmp_path, nodes=100)
    page = render_page(found)
    assert ">filesystem_mount<" not in page
    assert ">check_filesystem_mount</text>" in page, "a check that is new is marked"
    assert "<b>" not in page
    assert "&lt;b&gt;" in page
    drawn = re.search(r'<path class="series-0"[^>]* d="M([^"]*)"', page)
    assert drawn is not None
    assert drawn[1].count(",") == 91 - 29, "from the first whole window on"


def test_a_thousand_years_are_a_wrong_clock_and_nothing_is_empty(tmp_path: Path) -> None:
    write_events(tmp_path, [(0, "gpu1", "pcie")])
    writer = TableWriter(str(tmp_path / "t"), "events")
    writer.add(EventRow(DAY_NS, "gpu1", "pcie", "", "high", "kernel", "", "", "", False, ""))
    writer.add(EventRow(40_000 * DAY_NS, "gpu1", "pcie", "", "high", "kernel", "", "", "", False, ""))
    writer.finish("1" * 16)
    with pytest.raises(UsageError, match="more than a century"):
        characterised(tmp_path)
    empty = TableWriter(str(tmp_path / "u"), "events")
    empty.finish("0" * 16)
    with pytest.raises(UsageError, match="the tables are empty"), open_tables(str(tmp_path / "u")) as tables:
        characterise(tables)


def test_a_job_that_left_a_faulty_node_has_failed_and_trained_less_than_it_waited(tmp_path: Path) -> None:
    write_jobs(
        tmp_path,
        [
            job(1, "REQUEUED", 0, 2 * HOUR_S, "a", 8),
            job(1, "COMPLETED", 3 * HOUR_S, 4 * HOUR_S, "b", 8),
            job(2, "REQUEUED", 0, HOUR_S, "c", 8),
        ],
    )
    write_events(tmp_path, [(2 * HOUR_S - 60, "a", "gpu_unavailable")])
    found = characterised(tmp_path)
    assert found.failure_symptoms == (("gpu_unavailable", 1),), "job 2 was requeued by a person"
    assert [one.mttf_h for one in found.sizes] == [pytest.approx(4)]
    assert found.training is not None
    assert (found.training.jobs, found.training.attempts) == (2, 3)
    assert found.training.goodput == pytest.approx(3.5 / 4), "half an hour of four is lost"
    assert found.training.ettr == pytest.approx(3.5 / 5), "job 1 waited for an hour between its attempts"
    assert "Time that was trained" in render_page(found)


def test_the_time_of_the_largest_jobs_of_a_year_is_counted(tmp_path: Path) -> None:
    """131,072 GPUs for 300 days are more nanoseconds than 64 bits have."""
    write_jobs(tmp_path, [job(1, "COMPLETED", 0, 300 * DAY_S, "gpu[1-16384]", 131_072, 16_384)])
    found = characterised(tmp_path)
    assert found.training is not None
    assert found.training.gpu_hours == pytest.approx(131_072 * 300 * 24)
    assert found.training.ettr == pytest.approx(1)
