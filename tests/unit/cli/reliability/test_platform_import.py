"""The history of a platform becomes rows; what a manager answers is checked, and read once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from fireflyer.analytics.reliability.importing import import_rows
from fireflyer.analytics.reliability.local_times import Clock
from fireflyer.analytics.reliability.log_lines import Rejected
from fireflyer.analytics.reliability.platform_progress import PROGRESS, Until, read_progress, write_progress
from fireflyer.analytics.reliability.rows import JobRow
from fireflyer.analytics.reliability.tables import table_names
from fireflyer.base.errors import DataCorruption, UsageError
from fireflyer.base.units import SECOND
from fireflyer.cli.reliability import platform_import
from fireflyer.cli.reliability.platform_import import import_platform
from fireflyer.cli.reliability.platform_rows import attempt_of, events_of
from fireflyer.cluster.core.health.findings import Finding
from fireflyer.cluster.core.platform.history_pages import NodeEntry, NodePage, RunEntry, RunPage

BEGIN_NS = 1_750_000_000 * SECOND
CLOCK = Clock(latest_ns=BEGIN_NS + 86_400 * SECOND)
XID = Finding(check="gpu_xid", severity="high", cause="xid_79", part="gpu:0", at_once=True, seen_ns=BEGIN_NS)


def run_of(**changed: Any) -> RunEntry:
    fields: dict[str, Any] = {
        "change": 1, "task": 7, "number": 0, "user": "ada", "submitted_ns": BEGIN_NS, "state": "over",
        "nodes": ("n1", "n2"), "scheduled_ns": BEGIN_NS + SECOND, "started_ns": BEGIN_NS + 2 * SECOND,
        "ended_ns": BEGIN_NS + 100 * SECOND, "wish": "ended", "leave_reason": "", "cause": "succeeded", "exit_code": 0,
        "saved_ns": None, "overhead_ns": 3 * SECOND,
    }  # fmt: skip
    return RunEntry(**{**fields, **changed})


def change_of(state: str, **changed: Any) -> NodeEntry:
    fields: dict[str, Any] = {"change": 1, "at_ns": BEGIN_NS, "node": "n1", "reason": "", "fault": None, "ticket": 0}
    return NodeEntry(state=state, **{**fields, **changed})


@pytest.mark.parametrize(
    ("changed", "state"),
    [
        ({}, "COMPLETED"),
        ({"ended_ns": None, "cause": None}, "RUNNING"),
        ({"cause": "program"}, "FAILED"),
        ({"cause": "infrastructure"}, "NODE_FAIL"),
        ({"cause": "stopped", "wish": "node_fault"}, "NODE_FAIL"),
        ({"cause": "suspended", "wish": "node_fault"}, "NODE_FAIL"),
        ({"cause": "succeeded", "wish": "node_fault"}, "COMPLETED"),
        ({"cause": None, "wish": "lost"}, "NODE_FAIL"),
        ({"cause": "suspended", "wish": "interrupt"}, "PREEMPTED"),
        ({"cause": "stopped", "wish": "lost"}, "NODE_FAIL"),
        ({"cause": "suspended", "wish": "lost"}, "NODE_FAIL"),
        ({"cause": "interrupted", "wish": "lost"}, "NODE_FAIL"),
        ({"cause": "program", "wish": "lost"}, "FAILED"),
        ({"cause": "stopped", "wish": "ended", "exit_code": 143}, "NODE_FAIL"),
        ({"cause": "interrupted", "wish": "ended", "exit_code": 137}, "NODE_FAIL"),
        ({"cause": "interrupted", "wish": "ended", "exit_code": 1, "started_ns": None}, "NODE_FAIL"),
        ({"cause": "interrupted", "wish": "ended", "exit_code": 1}, "PREEMPTED"),
        ({"cause": "suspended", "wish": "ended"}, "PREEMPTED"),
        ({"cause": "stopped", "wish": ""}, "CANCELLED"),
        ({"cause": "suspended", "wish": ""}, "SUSPENDED"),
        ({"cause": "interrupted", "wish": ""}, "SUSPENDED"),
        ({"cause": "suspended", "wish": "user_suspend"}, "SUSPENDED"),
        ({"cause": "stopped", "wish": "user_stop"}, "CANCELLED"),
        ({"cause": "program", "wish": "user_stop"}, "FAILED"),
        ({"cause": None, "wish": "time_limit"}, "TIMEOUT"),
        ({"cause": None, "wish": "no_start", "started_ns": None}, "BOOT_FAIL"),
        ({"cause": "stopped", "wish": "no_start"}, "NODE_FAIL"),
        ({"cause": "hung"}, "FAILED"),
    ],
)
def test_a_run_ends_in_the_words_of_slurm(changed: dict[str, Any], state: str) -> None:
    row = attempt_of(run_of(**changed), {}, CLOCK)
    assert isinstance(row, JobRow)
    assert row.state == state


def test_a_run_tells_its_gpus_and_what_it_had_not_saved() -> None:
    row = attempt_of(run_of(saved_ns=BEGIN_NS + 60 * SECOND), {"n1": 8, "n2": 4}, CLOCK)
    assert isinstance(row, JobRow)
    assert (row.job, row.gpus, row.node_list, row.unsaved_ns) == ("7", 12, "n1,n2", 40 * SECOND)
    assert (row.start_ns, row.overhead_ns) == (BEGIN_NS + SECOND, 3 * SECOND), "from when it had its nodes"
    later = attempt_of(run_of(ready_ns=2 * SECOND), {}, CLOCK)
    assert isinstance(later, JobRow)
    assert later.overhead_ns == 2 * SECOND, "what passed after its end is part of the wait, or of its work"
    unknown = attempt_of(run_of(), {"n1": 8}, CLOCK)
    assert isinstance(unknown, JobRow)
    assert (unknown.gpus, unknown.unsaved_ns) == (None, None)
    old = attempt_of(run_of(saved_ns=1), {}, CLOCK)
    assert isinstance(old, JobRow)
    assert old.unsaved_ns == 99 * SECOND, "not more than it ran"


@pytest.mark.parametrize(
    "changed",
    [{"nodes": ()}, {"nodes": ("a,b",)}, {"nodes": ("gpu[1-9]",)}, {"nodes": ("\x1b[2J",)}, {"submitted_ns": 1},
     {"scheduled_ns": 1 << 62}, {"ended_ns": BEGIN_NS}, {"ended_ns": 1 << 62}],
)  # fmt: skip
def test_a_run_that_makes_no_sense_is_left_out(changed: dict[str, Any]) -> None:
    assert isinstance(attempt_of(run_of(**changed), {}, CLOCK), Rejected)


def test_what_took_a_node_out_has_its_severity_and_a_ticket() -> None:
    event, ticket = events_of(change_of("drained", fault=XID, ticket=5, reason="gpu_xid\x1b"), CLOCK)
    assert not isinstance(event, Rejected)
    assert not isinstance(ticket, Rejected)
    assert (event.symptom, event.cause, event.severity) == ("gpu_unavailable", "xid_79", "high")
    assert event.source == "platform"
    assert event.words.isprintable()
    assert (ticket.source, ticket.part, ticket.severity) == ("ticket", "5", "ok")


@pytest.mark.parametrize(
    ("entry", "severity", "symptom"),
    [
        (change_of("suspect", fault=XID), "warn", "gpu_unavailable"),
        (change_of("warned", fault=XID), "warn", "gpu_unavailable"),
        (change_of("reset", fault=XID), "ok", "gpu_unavailable"),
        (change_of("returned"), "ok", "other"),
        (change_of("probation", fault=XID), "ok", "other"),
        (change_of("drained", reason="maintenance"), "warn", "other"),
        (change_of("lost"), "high", "node_lost"),
        (change_of("up"), "ok", "other"),
    ],
)
def test_only_what_is_certain_counts_as_a_fault(entry: NodeEntry, severity: str, symptom: str) -> None:
    (event,) = events_of(entry, CLOCK)
    assert not isinstance(event, Rejected)
    assert (event.severity, event.symptom) == (severity, symptom)


def test_what_a_user_can_have_made_stays_marked() -> None:
    (event,) = events_of(change_of("drained", fault=msgspec.structs.replace(XID, user_made=True)), CLOCK)
    assert not isinstance(event, Rejected)
    assert event.user_made


def test_changes_without_a_time_or_a_name_are_left_out() -> None:
    assert all(isinstance(row, Rejected) for row in events_of(change_of("lost", at_ns=1), CLOCK))
    assert all(isinstance(row, Rejected) for row in events_of(change_of("lost", node="a b"), CLOCK))


class Manager:
    """What a client of it has, with two runs to a page."""

    def __init__(self, *runs: RunEntry, word: str = "c") -> None:
        self.runs, self.asked, self.word = list(runs), 0, word
        self.manager = self
        self.url = "https://manager"

    def all_nodes(self) -> list[Any]:
        return []

    def run_page(self, *, cluster: str = "", since: int = 0, limit: int = 2) -> RunPage:
        self.asked += 1
        later = [run for run in self.runs if run.change >= since]
        return RunPage(cluster=self.word, clusters=(self.word,), entries=tuple(later[:limit]), more=len(later) > limit)

    def node_page(self, *, cluster: str = "", since: int = 0) -> NodePage:
        return NodePage(cluster=self.word, clusters=(self.word,), entries=(), more=False)


def rows(manager: Manager, directory: Path) -> int:
    found = import_platform(manager, str(directory), clock=CLOCK)  # type: ignore[arg-type]
    return sum(one.jobs for one in found)


def test_an_import_goes_on_where_the_one_before_had_come_to(tmp_path: Path) -> None:
    manager = Manager(*(run_of(change=number, task=number) for number in range(5)))
    assert rows(manager, tmp_path) == 5
    manager.asked = 0
    assert rows(manager, tmp_path) == 0
    assert manager.asked == 2, "the clusters, and one page"
    manager.runs.append(run_of(change=9, task=9))
    assert rows(manager, tmp_path) == 1
    assert read_progress(str(tmp_path), ("c",)) == {"c": Until(runs=10)}


def test_a_second_platform_is_refused_as_its_tasks_have_the_same_numbers(tmp_path: Path) -> None:
    runs = [run_of(change=number, task=number) for number in range(3)]
    assert rows(Manager(*runs), tmp_path) == 3
    tables = table_names(str(tmp_path))
    with pytest.raises(UsageError, match=r"has the history of another platform, .* a directory of its own"):
        rows(Manager(*runs, word="d"), tmp_path)
    for table in tables[1:]:
        (tmp_path / table).unlink()
    with pytest.raises(UsageError, match="another platform"):  # also where a table is gone, and all is read anew
        rows(Manager(*runs, word="d"), tmp_path)
    assert table_names(str(tmp_path)) == tables[:1]
    assert rows(Manager(*runs, word="d"), tmp_path / "other") == 3


def test_an_import_that_was_killed_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manager = Manager(*(run_of(change=number, task=number) for number in range(5)))
    with monkeypatch.context() as patch:
        patch.setattr(Manager, "node_page", None)
        with pytest.raises(TypeError):  # as a kill between the two tables
            rows(manager, tmp_path)
    assert read_progress(str(tmp_path), ("c",)) == {"c": Until(runs=5)}
    manager.asked = 0
    manager.runs.append(run_of(change=9, task=9))
    assert rows(manager, tmp_path) == 1
    assert manager.asked == 2, "the clusters, and one page: it goes on where it was"


def test_an_import_that_was_killed_in_the_middle_of_the_runs_goes_on_with_the_piece_that_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(platform_import, "_PIECE_PAGES", 1)
    manager = Manager(*(run_of(change=number, task=number) for number in range(5)))
    page_of = manager.run_page

    def killed_at_the_third(*, since: int = 0, **asked: Any) -> RunPage:
        if since >= 4:
            raise KeyboardInterrupt
        return page_of(since=since, **asked)

    with monkeypatch.context() as patch:
        patch.setattr(manager, "run_page", killed_at_the_third)
        with pytest.raises(KeyboardInterrupt):
            rows(manager, tmp_path)
    assert read_progress(str(tmp_path), ("c",)) == {"c": Until(runs=4)}
    assert rows(manager, tmp_path) == 1, "two pages of two are in place"
    assert len(table_names(str(tmp_path))) == 3


def test_a_table_that_is_gone_is_read_again(tmp_path: Path) -> None:
    manager = Manager(run_of())
    assert rows(manager, tmp_path) == 1
    (tmp_path / table_names(str(tmp_path))[0]).unlink()
    assert rows(manager, tmp_path) == 1


@pytest.mark.parametrize("content", [b"", b"{", b'{"clusters":{"c":{"runs":-1}},"tables":[]}', b'{"tables":[]}'])
def test_a_damaged_progress_begins_anew(content: bytes, tmp_path: Path) -> None:
    write_progress(str(tmp_path), {"c": Until(runs=4)})
    (tmp_path / PROGRESS).write_bytes(content)
    assert read_progress(str(tmp_path), ("c",)) == {}


@pytest.mark.parametrize("changes", [(3, 2), (2, 2), (0, 1)])
def test_changes_out_of_their_order_are_refused(changes: tuple[int, int], tmp_path: Path) -> None:
    manager = Manager(*(run_of(change=number) for number in range(1)))
    rows(manager, tmp_path)
    manager.run_page = lambda **_: RunPage(  # type: ignore[method-assign]
        cluster="c", clusters=("c",), entries=tuple(run_of(change=number) for number in changes), more=True
    )
    with pytest.raises(DataCorruption, match="out of their order"):
        rows(manager, tmp_path)


def test_a_page_without_entries_that_says_that_there_are_more_is_no_endless_loop(tmp_path: Path) -> None:
    manager = Manager()
    manager.run_page = lambda **_: RunPage(cluster="c", clusters=("c",), entries=(), more=True)  # type: ignore[method-assign]
    with pytest.raises(DataCorruption):
        rows(manager, tmp_path)


def test_rows_that_were_left_out_are_counted(tmp_path: Path) -> None:
    found = import_rows("platform", "p", "jobs", [[Rejected("why")], [Rejected("why")]], str(tmp_path))
    assert (found.lines, found.jobs, found.rejected) == (2, 0, {"why": 2})
