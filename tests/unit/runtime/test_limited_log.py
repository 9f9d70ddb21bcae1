"""Lines that peers cause are bounded, each kind for itself."""

from __future__ import annotations

import logging

import pytest

from fireflyer.base.report_limit import REPORT_INTERVAL_NS, REPORTS
from fireflyer.runtime.limited_log import LimitedLog


def test_a_flood_of_one_kind_is_cut_and_counted_and_another_kind_is_seen(caplog: pytest.LogCaptureFixture) -> None:
    now_ns = 7
    log = LimitedLog(logging.getLogger("of.peers"), lambda: now_ns)
    with caplog.at_level(logging.INFO, "of.peers"):
        for number in range(1000):
            log.info("connection lost peer=%d", number)
        log.warning("capability refused peer=%s", "eve")
        now_ns += REPORT_INTERVAL_NS
        log.info("connection lost peer=%d", 1000)
        log.info("connection lost peer=%d", 1001)
    said = [record.getMessage() for record in caplog.records]
    assert said == [
        *(f"connection lost peer={number}" for number in range(REPORTS)),
        "capability refused peer=eve",
        f"connection lost peer=1000 left_out={1000 - REPORTS}",
        "connection lost peer=1001",
    ]
    assert [record.levelname for record in caplog.records].count("WARNING") == 1
