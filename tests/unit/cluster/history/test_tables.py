"""From rows of the outbox to rows of tables: parts that add up, and what copying twice and a restore do."""

from __future__ import annotations

import json
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.platform.desk import Desk, spec
from tests.support.platform.tables import MemoryTables

from fireflyer.base.units import SECOND
from fireflyer.cluster.core.platform.commands import ResumeTask, StopTask, SuspendTask
from fireflyer.cluster.core.platform.messages import Copied, Refused
from fireflyer.cluster.core.platform.store.history import (
    ClusterTotals,
    CommandDone,
    HistoryRow,
    NodeChange,
    decode_history,
)
from fireflyer.cluster.core.platform.store.rows import OUTBOX_PREFIX
from fireflyer.cluster.schema.tasks import Cause, RunParts

CLUSTER = "c1"


def outbox(desk: Desk) -> list[tuple[int, HistoryRow]]:
    keys = sorted(key for key in desk.rows if key.startswith(OUTBOX_PREFIX))
    return [(int.from_bytes(key[len(OUTBOX_PREFIX) :], "big"), decode_history(key, desk.rows[key])) for key in keys]


def lived(seed: int) -> Desk:
    """A platform of two nodes whose tasks are suspended, interrupted by infrastructure, stopped, and ended."""
    rng = random.Random(seed)
    desk = Desk("n0", "n1", history=True, requeue_pause_ns=SECOND, totals_every_ns=SECOND)
    tasks = [desk.task(spec(f"t{number}"), user=rng.choice(["ann", "bob"])) for number in range(3)]
    for _ in range(12):
        desk.pass_time(rng.randrange(1, 4 * SECOND))
        task = rng.choice(tasks)
        nodes = desk.nodes_of(task)
        done = desk.machine.task(task, desk.now_ns).outcome is not None
        step = rng.randrange(6)
        if done:
            continue
        if step == 0:
            desk.command(SuspendTask(task), user="ann", roles=("platform:admin",))
        elif step == 1:
            desk.command(ResumeTask(task), user="ann", roles=("platform:admin",))
        elif step == 2 and rng.random() < 0.3:
            desk.command(StopTask(task), user="ann", roles=("platform:admin",))
        elif nodes:
            desk.runs_on(task, *nodes)
            desk.pass_time(rng.randrange(1, 4 * SECOND))
            cause = rng.choice([Cause.INFRASTRUCTURE, Cause.INTERRUPTED, Cause.SUSPENDED, Cause.SUCCEEDED])
            parts = RunParts(productive_ns=rng.randrange(3 * SECOND), lost_ns=rng.randrange(SECOND))
            desk.gone(task, cause, parts=parts)
    return desk


@given(st.integers(0, 10_000), st.integers(1, 30))
def test_the_parts_of_a_tasks_runs_add_up_to_its_life_to_the_nanosecond(seed: int, batch: int) -> None:
    desk = lived(seed)
    rows, tables = outbox(desk), MemoryTables()
    for place in range(0, len(rows), batch):
        tables.copy(CLUSTER, rows[place : place + batch])
    for task, row in tables.tasks.items():
        view = desk.machine.task(task, desk.now_ns)
        total_ns = sum(row[name] for name in view.account.__struct_fields__)
        assert tables.parts_of(task) == total_ns
        if view.ended_ns is not None:
            assert total_ns == view.ended_ns - view.submitted_ns
        assert all(ns > 0 for (of, _, _), ns in tables.parts.items() if of == task)
        assert all(run <= row["runs"] for of, run, _ in tables.parts if of == task)
    assert any(isinstance(row, ClusterTotals) for _, row in rows)


@given(st.integers(0, 10_000), st.lists(st.tuples(st.integers(0, 400), st.integers(1, 60)), max_size=6))
def test_rows_that_are_copied_again_in_any_order_change_nothing(seed: int, again: list[tuple[int, int]]) -> None:
    rows = outbox(lived(seed))
    once, tables = MemoryTables(), MemoryTables()
    once.copy(CLUSTER, rows)
    tables.copy(CLUSTER, rows)
    for begin, count in again:
        tables.copy(CLUSTER, rows[begin : begin + count])
    assert tables.contents() == once.contents()


def test_a_store_that_was_restored_goes_on_with_its_own_account() -> None:
    rows, tables = outbox(lived(1)), MemoryTables()
    tables.copy(CLUSTER, rows)
    first = [row for row in rows if row[0] < 8]
    tables.copy("c2", first)  # the same numbers, of an older state
    again = MemoryTables()
    again.copy("c2", first)
    for task in again.tasks:
        assert tables.tasks[task] == again.tasks[task]
        assert tables.parts_of(task) == again.parts_of(task)
    assert len(tables.audit) > len(again.audit), "what was audited before stays"


def test_a_full_outbox_refuses_submissions_until_it_is_copied() -> None:
    desk = Desk("n0", history=True, max_outbox_rows=20)
    number = 0
    while not isinstance(answer := desk.submit(spec(f"t{number}")), Refused):
        number += 1
        assert number < 30
    assert answer.code == "busy"
    assert "the history is away and its outbox is full" in answer.message
    assert desk.state(1) is not None, "all else goes on"
    desk.handle(Copied(desk.machine.outbox(desk.now_ns)[2]))
    assert not outbox(desk)
    desk.task(spec("later"))


def test_names_of_nodes_and_who_asked_are_in_the_tables() -> None:
    desk, tables = Desk("n0", "n1", history=True), MemoryTables()
    task = desk.task(spec("pair", least_nodes=2, most_nodes=2), address="10.0.0.7")
    tables.copy(CLUSTER, outbox(desk))
    assert sorted(json.loads(tables.runs[task, 0]["node_names"])) == ["n0", "n1"]
    (entry,) = [row for row in tables.audit.values() if row["command"] == "submit"]
    assert (entry["user_name"], entry["target"], entry["address"]) == ("ann", str(task), "10.0.0.7")


def test_a_new_leader_says_which_nodes_it_has_not_heard() -> None:
    first = Desk("n0", "n1", history=True)
    second = Desk(rows=first.rows, holder="m1", history=True, lost_ns=5 * SECOND)
    second.say("n0")
    second.pass_time(8 * SECOND)
    states = [(row.node, row.state) for _, row in outbox(second)[-20:] if isinstance(row, NodeChange)]
    assert states.count(("n1", "lost")) == 1
    assert ("n0", "lost") not in states


@pytest.mark.parametrize("outcome", ["done", "begun"])
def test_older_rows_of_the_audit_have_no_address(outcome: str) -> None:
    row = CommandDone(1, "ann", "StopTask", "7", "task 7 is stopped", outcome=outcome)
    assert (row.address, row.outcome) == ("", outcome)
