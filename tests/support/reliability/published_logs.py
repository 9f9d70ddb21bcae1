"""Kernel logs that have what the published tables have: a line for each failure that a cell counts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

__all__ = ["log_of_days", "log_of_months", "log_of_shares"]

_MESSAGES: Final = {
    "main_memory": "EDAC MC0: 1 UE memory read error on CPU_SrcID#0_MC#0 (page:0x1f00a offset:0xc0 grain:32)",
    "network": "mlx5_core 0000:98:00.0 ib0: Link down",
}


def _message(column: str) -> str:
    xid = column.removeprefix("xid_")
    return _MESSAGES.get(column) or f"NVRM: Xid (PCI:0000:3b:00): {xid}, pid=7, name=python"


def log_of_months(cells: Mapping[str, Mapping[str, int]]) -> Iterator[str]:
    """Each failure on another node and another minute of its month; a second line for each is the same incident."""
    node = 0
    for month, row in cells.items():
        for column, count in row.items():
            for _ in range(count):
                node += 1
                for second in (7, 42):
                    at = f"{month}-{1 + node % 28:02}T{node % 24:02}:{node % 60:02}:{second:02}+00:00"
                    yield f"{at} gpu{node:04} kernel: {_message(column)}\n"


def log_of_days(days: Mapping[str, int]) -> Iterator[str]:
    for day, count in days.items():
        for number in range(count):
            yield f"{day}T{number:02}:30:00+00:00 gpu{number:04} kernel: {_MESSAGES['network']}\n"


def log_of_shares(counts: Mapping[int, int]) -> Iterator[str]:
    """Xid errors of one day, each on another node."""
    node = 0
    for xid, count in counts.items():
        for _ in range(count):
            node += 1
            yield f"2023-06-01T12:00:00+00:00 gpu{node:05} kernel: {_message(f'xid_{xid}')}\n"
