"""Tables of both papers as data."""

from __future__ import annotations

import pytest

from fireflyer.analytics.reliability import published_failures
from fireflyer.analytics.reliability.published_failures import (
    COLUMNS,
    ECC_XIDS,
    LINK_FAILURES,
    MONTHS,
    disagreements,
    solved_months,
)
from fireflyer.analytics.reliability.taxonomy import DOMAINS, SYMPTOMS, TABLE_I, XID_CLASSES, symptom_of_xid, xid_class
from fireflyer.base.errors import UsageError

TABLE_I_MARKS = {
    "oom": "+--", "gpu_unavailable": "-++", "gpu_memory": "--+", "gpu_driver": "-+-", "nvlink": "--+", "ib_link": "--+",
    "filesystem_mount": "-+-", "main_memory": "--+", "eth_link": "--+", "pcie": "--+", "nccl_timeout": "+++",
    "system_service": "+++",
}  # fmt: skip


def test_table_i_has_the_marks_of_the_paper() -> None:
    found = {
        key: "".join("+" if domain in symptom.domains else "-" for domain in DOMAINS)
        for key, symptom in TABLE_I.items()
    }
    assert found == TABLE_I_MARKS
    assert all(symptom.causes for symptom in SYMPTOMS.values())


def test_table_v_names_each_xid_once() -> None:
    named = [xid for one in XID_CLASSES for xid in one.xids]
    assert sorted(named) == sorted({13, 31, 43, 45, 74, 63, 64, 94, 95, 44, 48, 61, 62, 69, 79, 119})
    assert len(named) == len(set(named))
    assert xid_class(43) == XID_CLASSES[0]
    assert xid_class(1) is None
    assert all(symptom_of_xid(xid) in SYMPTOMS for xid in range(200))
    assert symptom_of_xid(79) == "gpu_unavailable"
    assert {symptom_of_xid(xid) for xid in (*ECC_XIDS, 48)} == {"gpu_memory"}


def test_the_four_cells_that_cannot_be_read_are_1_each() -> None:
    table = solved_months()
    assert [table["2024-01"][column] for column in ("xid_64", "xid_94", "xid_95")] == [1, 1, 1]
    assert table["total"]["xid_64"] == 1
    for row in (*MONTHS, "total"):
        assert sum(table[row][column] for column in COLUMNS) == table[row]["total"]
    for column in (*COLUMNS, "total"):
        assert sum(table[month][column] for month in MONTHS) == table["total"][column]


def test_a_printed_cell_that_contradicts_the_sums_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = {**published_failures.PRINTED_MONTHS, "2023-10": (5, 29, 21, 0, 0, 0, 0, 54)}
    monkeypatch.setattr(published_failures, "PRINTED_MONTHS", wrong)
    with pytest.raises(UsageError, match="add up to 55, not to 54"):
        solved_months()


def test_the_tables_disagree_about_october_2023_alone() -> None:
    assert disagreements() == (("2023-10", 29, 13),)


def test_links_are_30_percent_of_the_failures_without_xid_74() -> None:
    total = solved_months()["total"]
    assert f"{total['network'] / total['total']:.0%}" == "30%"
    assert len(LINK_FAILURES) == 101
    assert sum(LINK_FAILURES.values()) == 213
