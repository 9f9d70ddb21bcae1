"""The event log: JSON lines that survive a crash in the middle of the last one and refuse anything else."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fireflyer.base.errors import DataCorruption
from fireflyer.base.events import (
    AttemptStarted,
    JobFinished,
    Logged,
    Report,
    ResumeReport,
    SkippedCheckpoint,
    StepReport,
    decode_log,
    encode_log_line,
)

_LOG = [
    Logged(0, AttemptStarted(0)),
    Logged(5, ResumeReport(0, 0, 20, "step-00000020", (SkippedCheckpoint("step-00000030", "CRC"),))),
    Logged(9, StepReport(0, 0, 21, 4, 512, 0.1 + 0.2, 1_000)),
    Logged(11, JobFinished(0, "done")),
]


def _lines(log: list[Logged]) -> list[bytes]:
    return [encode_log_line(entry) for entry in log]


def test_what_is_logged_is_read_back_exactly() -> None:
    assert decode_log(_lines(_LOG)) == _LOG


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_a_loss_travels_bit_for_bit(loss: float) -> None:
    report = StepReport(3, 1, 7, 4, 512, loss, 5)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(report), type=Report) == report
    (entry,) = decode_log([encode_log_line(Logged(1, report))])
    assert isinstance(entry.event, StepReport)
    assert entry.event.loss == loss


def test_a_torn_last_line_is_dropped() -> None:
    lines = _lines(_LOG)
    lines[-1] = lines[-1][:-7]
    assert decode_log(lines) == _LOG[:-1]


def test_a_bad_line_in_the_middle_is_named() -> None:
    lines = _lines(_LOG)
    lines[1] = b'{"at_ns": "soon"}\n'
    with pytest.raises(DataCorruption, match=r"run 7, line 2: "):
        decode_log(lines, name="run 7")


@given(st.binary(max_size=200))
def test_hostile_reports_are_refused_or_are_reports(data: bytes) -> None:
    try:
        report: Report = msgspec.msgpack.decode(data, type=Report)
    except msgspec.MsgspecError:
        return
    assert isinstance(report, Report)
