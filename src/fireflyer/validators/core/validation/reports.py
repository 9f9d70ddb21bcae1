"""What a validation that runs as a task prints for who has submitted it: one line of its log."""

from __future__ import annotations

import contextlib
from typing import Annotated, Final

import msgspec

from fireflyer.base.decoding import DECODE_ERRORS, decode_json
from fireflyer.base.health_event import HealthEvent
from fireflyer.validators.core.validation.records import NodeRecord, as_written

__all__ = ["MAX_REPORT_BYTES", "LinkReport", "NodeReport", "parse_link_report", "parse_node_report", "report_line"]

MAX_REPORT_BYTES: Final = 1 << 20
"""Of one line."""
_MARK: Final = "fireflyer-validation: "
"""Begins the line: the log has lines of launchers and libraries too."""


class NodeReport(msgspec.Struct, frozen=True, kw_only=True):
    """What the validators found on a node by itself, and what is to be compared with its peers."""

    events: Annotated[tuple[HealthEvent, ...], msgspec.Meta(max_length=4096)]
    record: NodeRecord


class LinkReport(msgspec.Struct, frozen=True, kw_only=True):
    """Of two nodes that sent to each other."""

    bytes_per_s: Annotated[float, msgspec.Meta(gt=0, le=1e15)]
    """In each direction, both at the same time."""
    wrong_blocks: Annotated[int, msgspec.Meta(ge=0, le=1 << 40)] = 0
    """That were not what had been sent."""


def report_line(report: NodeReport | LinkReport) -> str:
    written = msgspec.to_builtins(report)
    if isinstance(report, NodeReport):
        written["record"] = as_written(report.record)
    return _MARK + msgspec.json.encode(written).decode()


def parse_node_report(log: str) -> NodeReport | None:
    """The last report in the log of a task, which may have been begun more than once. None: there is none that can be
    read."""
    with contextlib.suppress(*DECODE_ERRORS):
        return decode_json(_last_report(log), NodeReport)
    return None


def parse_link_report(log: str) -> LinkReport | None:
    """As `parse_node_report`."""
    with contextlib.suppress(*DECODE_ERRORS):
        return decode_json(_last_report(log), LinkReport)
    return None


def _last_report(log: str) -> str:
    lines = (line for line in reversed(log.splitlines()) if line.startswith(_MARK))
    line = next(lines, "")
    return line[len(_MARK) :] if len(line) <= MAX_REPORT_BYTES else ""
