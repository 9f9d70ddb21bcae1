"""The line that a validation writes into the log of its task, and that may have been written by anybody."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fireflyer.base.health_event import HealthEvent
from fireflyer.validators.core.validation.records import NodeRecord
from fireflyer.validators.core.validation.reports import (
    LinkReport,
    NodeReport,
    parse_link_report,
    parse_node_report,
    report_line,
)

REPORT = NodeReport(
    events=(HealthEvent(check="storage", severity="ok", seen_ns=1),),
    record=NodeRecord(node="a", model="m", seen_ns=1, figures={"x_per_s": 2.5}),
)


def test_the_last_report_of_a_log_counts() -> None:
    other = LinkReport(bytes_per_s=1.0)
    log = f"warning: something\n{report_line(other)}\nx {report_line(REPORT)}\n{report_line(REPORT)}\nbye\n"
    assert parse_node_report(log) == REPORT


@pytest.mark.parametrize(
    "line",
    [
        "",
        "fireflyer-validation: ",
        'fireflyer-validation: {"bytes_per_s": 0}',
        'fireflyer-validation: {"bytes_per_s": -1, "wrong_blocks": 0}',
        'fireflyer-validation: {"bytes_per_s": 1e99}',
        'fireflyer-validation: {"bytes_per_s": "fast"}',
        'fireflyer-validation: {"bytes_per_s": 1.0, "wrong_blocks": -1}',
        'fireflyer-validation: {"bytes_per_s": 1.0, "x": "' + "x" * (1 << 20) + '"}',
    ],
)
def test_what_cannot_be_true_is_no_report(line: str) -> None:
    assert parse_link_report(line) is None


@given(st.text())
def test_any_text_is_read_without_an_error(text: str) -> None:
    assert parse_node_report(f"fireflyer-validation: {text}") is None
