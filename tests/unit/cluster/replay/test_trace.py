"""A row that cannot be is refused in one line that names the row, the column and what is allowed."""

from __future__ import annotations

import pytest

from fireflyer.base.errors import UsageError
from fireflyer.base.units import MS, SECOND
from fireflyer.cluster.core.replay import trace
from fireflyer.cluster.core.replay.trace import TraceTask, read_trace

HEADER = "submit_s,user,group,priority,nodes,work_s,time_s"


def test_columns_come_in_any_order_and_those_that_are_missing_have_defaults() -> None:
    assert read_trace(["nodes,work_s,submit_s\n", "4,90,0.250\n"]) == (
        TraceTask(submit_ns=250 * MS, nodes=4, work_ns=90 * SECOND, user="user", group="group", priority=10),
    )


def test_tasks_are_sorted_by_submission_and_keep_the_order_of_rows() -> None:
    read = read_trace([HEADER, "5,b,g,0,1,1,", "3,a,g,0,1,1,", "5,c,g,0,1,1,"])
    assert [task.user for task in read] == ["a", "b", "c"]


def test_empty_rows_are_left_out() -> None:
    assert len(read_trace([HEADER, "", "1,a,g,0,1,1,", "\n"])) == 1


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "row 1: the trace is empty; its first row names the columns"),
        ([HEADER], "row 2: the trace has no task"),
        (["submit_s,nodes"], "row 1: no column work_s; a trace needs submit_s, nodes, work_s"),
        (["submit_s,nodes,work_s,gpus"], "row 1: no column is named 'gpus'"),
        (["submit_s,nodes,work_s,nodes"], "row 1: a column is named twice"),
        ([HEADER, "1,a,g,0,1,1,", "2,a"], "row 3: 2 fields, the header has 7"),
        ([HEADER, "soon,a,g,0,1,1,"], "row 2: submit_s 'soon' is no number of seconds"),
        ([HEADER, "-1,a,g,0,1,1,"], "row 2: submit_s '-1' is no number of seconds"),
        ([HEADER, "1,a,g,0,1,0,"], "row 2: work_s 0 is not between 0.001 and"),
        ([HEADER, "1,a,g,0,1,9999999999,"], "row 2: work_s 9999999999 is not between"),
        ([HEADER, "1,a,g,0,0,1,"], "row 2: nodes '0' is no whole number between 1 and 1,000,000"),
        ([HEADER, "1,a,g,0,1.5,1,"], "row 2: nodes '1.5' is no whole number"),
        ([HEADER, "1,a,g,51,1,1,"], "row 2: priority '51' is no whole number between -1 and 50"),
        ([HEADER, "1,a,g,0,1,1,nan"], "row 2: time_s 'nan' is no number of seconds"),
        ([HEADER, "1,<b>,g,0,1,1,"], "row 2: user '<b>' is no name"),
        ([HEADER, '1,"a'], "row 2: unexpected end of data; write the trace as plain comma-separated values"),
        ([HEADER, "x" * 5000], "row 2: longer than 4096 characters"),
    ],
)
def test_a_bad_row_is_named(rows: list[str], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        read_trace(rows)
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


def test_a_trace_has_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace, "MAX_ROWS", 3)
    with pytest.raises(UsageError, match="row 4: a trace has at most 3 rows"):
        read_trace([HEADER, *["1,a,g,0,1,1,"] * 3])
