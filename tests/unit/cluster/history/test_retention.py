"""What is old leaves the tables of the history, and what reports need of it stays."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy import Connection, Table, func, insert, select
from tests.support.patience import allowed_s
from tests.support.platform.desk import Desk
from tests.unit.cluster.history.test_tables import CLUSTER, lived, outbox

from fireflyer.base.errors import Busy
from fireflyer.base.toml_text import to_toml
from fireflyer.base.units import SECOND
from fireflyer.cli import main
from fireflyer.cluster.core.platform.reports import Span
from fireflyer.cluster.core.platform.store.history import ClusterTotals
from fireflyer.cluster.core.platform.store.retention import (
    DAY_NS,
    MIN_AGE_NS,
    TABLES,
    HistoryKeep,
    PastEnd,
    PastRunTime,
    fold_usage,
)
from fireflyer.cluster.core.platform.views import UsageReport
from fireflyer.cluster.history import queries
from fireflyer.cluster.history import retention as retention_module
from fireflyer.cluster.history.copier import Outbox
from fireflyer.cluster.history.database import Database
from fireflyer.cluster.history.removal import REMOVE
from fireflyer.cluster.history.retention import Retention
from fireflyer.cluster.history.schema import AUDIT, NODE_STATES, RUN_PARTS, RUNS, TASKS, TOTALS, USAGE_DAYS
from fireflyer.cluster.history.writing import copy_rows
from fireflyer.cluster.manager.config import PlatformConfig

NOW: Final = 20_000 * DAY_NS + 7 * 3600 * SECOND
SHORT: Final = HistoryKeep(
    parts_days=1, tasks_days=2, node_states_days=1, totals_days=1, audit_days=1, usage_days=30, rows=1 << 40
)
"""Days that tests step over."""


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retention_module, "PAUSE_S", 0.0)


class Leader:
    def __init__(self) -> None:
        self.leads = True

    def outbox(self) -> Outbox | None:
        return Outbox(CLUSTER, 0, 0) if self.leads else None

    def copied(self, until: int) -> None:
        raise AssertionError(until)


def with_tables(url: str, body: Callable[[Database], Any]) -> None:
    async def whole() -> None:
        database = Database(url)
        await database.prepare()
        await body(database)
        await database.close()

    asyncio.run(whole())


async def sweep(database: Database, keep: HistoryKeep, now_ns: int = NOW) -> Retention:
    retention = Retention(Leader(), lambda: now_ns, database, keep)
    await retention.sweep()
    return retention


async def rows_in(database: Database, table: Table) -> int:
    return int(await database.call(lambda c: c.execute(select(func.count()).select_from(table)).scalar_one()))


def put(connection: Connection, table: Table, **values: Any) -> None:
    """A row with something in each column that has to have it."""
    needed = {
        column.name: 0 if column.type.python_type is int else ""
        for column in table.columns
        if not column.nullable and column.server_default is None
    }
    connection.execute(insert(table), [{**needed, **values}])


def put_task(connection: Connection, number: int, ended_ns: int | None, **values: Any) -> None:
    """With one run of an hour on a node, and parts of it."""
    begun_ns = (ended_ns or NOW) - 3600 * SECOND
    task: dict[str, Any] = {"id": number, "cluster": CLUSTER, "change": number, "user_name": "ann", "runs": 1}
    task |= {"outcome": "succeeded", "ended_ns": ended_ns, **values}
    put(connection, TASKS, **task)
    run: dict[str, Any] = {"task": number, "cluster": task["cluster"], "change": number, "nodes": 1, "node_names": "[]"}
    run |= {"scheduled_ns": begun_ns, "ended_ns": ended_ns, "over_ns": ended_ns, "productive_ns": 1800 * SECOND}
    put(connection, RUNS, **run)
    put(connection, RUN_PARTS, task=number, part="productive", ns=1)


# --- pure ---


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["ann", "bob"]),
            st.integers(0, 5 * DAY_NS),
            st.integers(0, 5 * DAY_NS),
            st.integers(0, DAY_NS),
            st.integers(1, 9),
            st.integers(0, 100),
        ),
        max_size=6,
    )
)
def test_what_days_have_adds_up_to_what_the_runs_had(lives: list[tuple[str, int, int, int, int, int]]) -> None:
    tasks, runs = [], []
    for number, (user, begin_ns, length_ns, late_ns, nodes, percent) in enumerate(lives):
        ended_ns = begin_ns + length_ns
        tasks.append(PastEnd(number, user, "", "failed", ended_ns))
        runs.append(
            PastRunTime(number, nodes, begin_ns, ended_ns, ended_ns + late_ns, length_ns * percent // 100)
        )  # fmt: skip
    days = fold_usage(tasks, runs)
    for user in ("ann", "bob"):
        mine = [run for run, task in zip(runs, tasks, strict=True) if task.user == user]
        found = [day for (_, of, _), day in days.items() if of == user]
        assert sum(day.node_ns for day in found) == sum(
            run.nodes * ((run.over_ns or 0) - run.scheduled_ns) for run in mine
        )
        assert sum(day.productive_ns for day in found) == sum(
            run.nodes * run.productive_ns for run in mine if (run.over_ns or 0) > run.scheduled_ns
        )
        assert sum(day.runs for day in found) == sum(day.tasks for day in found) == len(mine)
        assert sum(day.failed for day in found) == len(mine)
    assert all(day_ns % DAY_NS == 0 for day_ns, _, _ in days)
    assert all(0 <= day.productive_ns <= day.node_ns for day in days.values())


# --- the tables ---


def ended_of(desk: Desk) -> list[int]:
    return [task for task in range(1, 4) if desk.machine.task(task, desk.now_ns).ended_ns is not None]


def lines_of(report: UsageReport) -> dict[str, tuple[Any, ...]]:
    return {
        line.name: (line.tasks, line.succeeded, line.failed, line.stopped, line.runs,
                    pytest.approx(line.node_seconds), pytest.approx(line.productive))
        for line in report.lines
    }  # fmt: skip


def test_a_report_says_the_same_before_and_after_the_tasks_are_removed_and_nothing_comes_back(url: str) -> None:
    desk = lived(6)
    rows = outbox(desk)
    now_ns = desk.machine.time_ns(desk.now_ns)
    begin_ns = now_ns - now_ns % DAY_NS
    ended = ended_of(desk)
    assert len(ended) == 2

    async def body(database: Database) -> None:
        await database.call(lambda c: copy_rows(c, CLUSTER, rows), writes=True)

        async def usage(by: Any) -> dict[str, Any]:
            until_ns = begin_ns + DAY_NS
            return lines_of(
                await database.call(lambda c: queries.usage_report(c, CLUSTER, begin_ns, until_ns, by, now_ns))
            )

        before = await usage("user"), await usage("group")
        assert sum(line[0] for line in before[0].values()) == len(ended)
        swept = await sweep(database, SHORT, now_ns + 4 * DAY_NS)
        left = await database.call(lambda c: [row.id for row in c.execute(select(TASKS.c.id))])
        assert not set(ended) & set(left)
        assert (await usage("user"), await usage("group")) == before
        assert swept.sizes is not None
        assert swept.sizes.tables["tasks"].removed == len(ended)
        assert swept.sizes.tables["tasks"].rows == len(left)

        await database.call(lambda c: copy_rows(c, CLUSTER, rows), writes=True)  # by one that leads no more
        assert await database.call(lambda c: [row.id for row in c.execute(select(TASKS.c.id))]) == left
        await sweep(database, SHORT, now_ns + 4 * DAY_NS)
        assert (await usage("user"), await usage("group")) == before

    with_tables(url, body)


def test_details_of_runs_go_before_their_tasks_which_go_when_they_are_old(url: str) -> None:
    async def body(database: Database) -> None:
        def fill(connection: Connection) -> None:
            for number, age_days in ((1, 5), (2, 5), (3, 1.5), (4, 0.1)):
                put_task(connection, number, NOW - int(age_days * DAY_NS))

        await database.call(fill, writes=True)
        await sweep(database, SHORT)
        assert [await rows_in(database, table) for table in (TASKS, RUNS, RUN_PARTS)] == [2, 2, 1]
        answer = await database.call(lambda c: queries.past_task(c, 3))
        assert (len(answer.runs), answer.parts) == (1, {})
        assert (await database.call(lambda c: queries.past_task(c, 4))).parts

    with_tables(url, body)


def test_what_has_not_ended_stays_and_what_a_restored_store_has_lost_goes(url: str) -> None:
    old_ns = NOW - 9 * DAY_NS

    async def body(database: Database) -> None:
        def fill(connection: Connection) -> None:
            put_task(connection, 1, None, since_ns=old_ns)
            put_task(connection, 2, old_ns)
            connection.execute(RUNS.update().where(RUNS.c.task == 2).values(over_ns=None))  # has nodes still
            put_task(connection, 3, None, since_ns=old_ns, cluster="before the restore")

        await database.call(fill, writes=True)
        await sweep(database, SHORT)
        assert await database.call(lambda c: sorted(row.id for row in c.execute(select(TASKS.c.id)))) == [1, 2]
        assert await rows_in(database, USAGE_DAYS) == 0, "nobody knows how long it ran"

    with_tables(url, body)


def test_over_the_bound_the_oldest_rows_go_but_none_that_is_younger_than_an_hour(url: str) -> None:
    keep = msgspec.structs.replace(HistoryKeep(), rows=3)

    async def body(database: Database) -> None:
        def fill(connection: Connection) -> None:
            for number in range(1, 9):
                put_task(connection, number, NOW - (10 - number) * MIN_AGE_NS)
            for number in range(9, 14):
                put_task(connection, number, NOW - SECOND)

        await database.call(fill, writes=True)
        swept = await sweep(database, keep)
        assert await database.call(lambda c: sorted(row.id for row in c.execute(select(TASKS.c.id)))) == [*range(9, 14)]
        assert swept.sizes is not None
        assert swept.sizes.tables["tasks"] == (5, swept.sizes.tables["tasks"].oldest_ns, 8)
        report = await database.call(lambda c: queries.usage_report(c, CLUSTER, 0, NOW + DAY_NS, "user", NOW))
        assert [(line.tasks, line.runs, line.node_seconds) for line in report.lines] == [(13, 13, 13 * 3600.0)]

    with_tables(url, body)


def test_one_reading_of_each_old_day_stays_and_the_newest_state_of_each_node(url: str) -> None:
    first_day = NOW - NOW % DAY_NS - 5 * DAY_NS
    readings = [first_day + DAY_NS * day + 3600 * SECOND * hour for day in range(5) for hour in (1, 9, 17)]

    async def body(database: Database) -> None:
        def fill(connection: Connection) -> None:
            for number, at_ns in enumerate(readings):
                grown_ns = at_ns - first_day
                put(connection, TOTALS, cluster=CLUSTER, change=number, at_ns=at_ns, healthy_ns=grown_ns)
            for number, (node, age_days) in enumerate((("a", 9), ("a", 8), ("b", 7), ("a", 0.2), ("a", 0.1))):
                put(connection, NODE_STATES, cluster=CLUSTER, change=number, node=node,
                    at_ns=NOW - int(age_days * DAY_NS))  # fmt: skip
            for age_days in (3, 2, 0):
                put(connection, AUDIT, entry=f"{age_days}", at_ns=NOW - age_days * DAY_NS)

        await database.call(fill, writes=True)
        span = Span.of(first_day + DAY_NS, first_day + 4 * DAY_NS, 3)
        now = ClusterTotals(NOW, 0, NOW - first_day, 0, 0)
        before = await database.call(lambda c: queries.utilisation_report(c, span, now))
        for _ in range(2):
            await sweep(database, SHORT)
            kept = await database.call(
                lambda c: [row.at_ns for row in c.execute(select(TOTALS).order_by(TOTALS.c.at_ns))]
            )
            assert kept == [*readings[0:12:3], *readings[12:]]
            states = await database.call(lambda c: sorted(row.change for row in c.execute(select(NODE_STATES))))
            assert states == [2, 3, 4]
            assert await rows_in(database, AUDIT) == 1
        after = await database.call(lambda c: queries.utilisation_report(c, span, now))
        assert [step.healthy for step in after.steps] == pytest.approx([step.healthy for step in before.steps])

    with_tables(url, body)


def test_productive_time_of_a_span_whose_runs_were_removed_is_that_of_the_counters(url: str) -> None:
    async def body(database: Database) -> None:
        def fill(connection: Connection) -> None:
            put_task(connection, 1, NOW - 5 * DAY_NS)
            for number, at_ns in enumerate((NOW - 6 * DAY_NS, NOW - 4 * DAY_NS)):
                put(connection, TOTALS, cluster=CLUSTER, change=number, at_ns=at_ns, productive_ns=number * 7 * SECOND)

        await database.call(fill, writes=True)
        await sweep(database, msgspec.structs.replace(HistoryKeep(), tasks_days=2))
        span = Span.of(NOW - 6 * DAY_NS, NOW - 4 * DAY_NS, 1)
        now = ClusterTotals(NOW, 0, 0, 0, 7 * SECOND)
        report = await database.call(lambda c: queries.utilisation_report(c, span, now))
        assert [step.productive for step in report.steps] == [7.0]

    with_tables(url, body)


def test_a_transaction_is_short_and_a_manager_that_leads_no_more_does_no_other(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def body(database: Database) -> None:
        def fill(connection: Connection) -> None:
            for number in range(1, 251):
                put_task(connection, number, NOW - 9 * DAY_NS)

        await database.call(fill, writes=True)
        leader = Leader()
        steps: list[Any] = []
        remove = REMOVE["tasks"]

        def counted(connection: Connection, cluster: str, before_ns: int) -> Any:
            gone = remove(connection, cluster, before_ns)
            steps.append(gone)
            leader.leads = len(steps) < 2
            return gone

        monkeypatch.setitem(REMOVE, "tasks", counted)
        retention = Retention(leader, lambda: NOW, database, SHORT)
        with pytest.raises(Busy):
            await retention.sweep()
        assert [step["tasks"] for step in steps] == [100, 100]
        assert [await rows_in(database, table) for table in (TASKS, RUNS)] == [50, 50]
        report = await database.call(lambda c: queries.usage_report(c, CLUSTER, 0, NOW, "user", NOW))
        assert report.lines[0].node_seconds == 250 * 3600.0, "each transaction is whole"

    with_tables(url, body)


def test_a_leader_measures_when_it_begins_and_then_removes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for pause in ("LOOK_S", "FIRST_S"):
        monkeypatch.setattr(retention_module, pause, 0.0)

    async def body(database: Database) -> None:
        await database.call(lambda c: put_task(c, 1, NOW - 9 * DAY_NS), writes=True)
        retention = Retention(Leader(), lambda: NOW, database, SHORT)
        seen: list[int] = []
        removed = asyncio.Event()

        def prepared() -> bool:
            if retention.sizes is not None:
                seen.append(retention.sizes.tables["tasks"].removed)
                if seen[-1] == 1:
                    removed.set()
            return True

        running = asyncio.create_task(retention.run(prepared))
        await asyncio.wait_for(removed.wait(), allowed_s(30))
        running.cancel()
        assert seen[0] == 0, "measured before anything is removed"
        assert not retention.failing

    with_tables(f"sqlite:///{tmp_path / 'history.sqlite'}", body)


def test_ff_manager_sizes_shows_the_tables_and_makes_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = PlatformConfig(
        name="m", cluster="5eed" * 8, store=f"embedded:{tmp_path / 's'}", directory=str(tmp_path), secret_file="/f",
        history_keep=HistoryKeep(tasks_days=9, rows=5000),
    )  # fmt: skip
    path = tmp_path / "platform.toml"
    path.write_text(to_toml(msgspec.to_builtins(config)))
    assert main(["manager", "sizes", str(path)]) != 0
    assert "no history at" in capsys.readouterr().err
    assert not (tmp_path / "history.sqlite").exists()

    async def body(database: Database) -> None:
        await database.call(lambda c: put_task(c, 1, NOW - DAY_NS), writes=True)

    with_tables(f"sqlite:///{tmp_path / 'history.sqlite'}", body)
    assert main(["manager", "sizes", str(path)]) == 0
    said = capsys.readouterr().out
    lines = {line.split()[0]: line.split()[1:] for line in said.splitlines()}
    assert set(TABLES) <= set(lines)
    assert lines["tasks"][0::2] == ["1", "9d"]
    assert "at most 5000 rows" in said


def test_any_moment_of_a_removal_may_be_the_last(url: str) -> None:
    """Random sweeps, each of which ends after some transactions, and copies that come again."""
    rng = random.Random(5)
    desk = lived(6)
    rows = outbox(desk)
    now_ns = desk.machine.time_ns(desk.now_ns)

    async def body(database: Database) -> None:
        await database.call(lambda c: copy_rows(c, CLUSTER, rows), writes=True)

        async def usage() -> dict[str, Any]:
            return lines_of(
                await database.call(lambda c: queries.usage_report(c, CLUSTER, 0, now_ns + 9 * DAY_NS, "user", now_ns))
            )

        before = await usage()
        for _ in range(20):
            table = rng.choice(TABLES[:6])
            before_ns = now_ns + rng.randrange(-SECOND * 20, 4 * DAY_NS)
            await database.call(lambda c, t=table, b=before_ns: REMOVE[t](c, CLUSTER, b), writes=True)  # type: ignore[misc]
            begin = rng.randrange(len(rows))
            await database.call(lambda c, b=begin: copy_rows(c, CLUSTER, rows[b:]), writes=True)  # type: ignore[misc]
            assert await usage() == before

    with_tables(url, body)
