"""What ranks say to each other when they dispatch: a header, then a body whose size follows from it. Pure.

Nothing of a header is believed before it is checked: another dispatcher, another call or another step is an error, and
so are more rows than there can be. Numbers are little-endian.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from fireflyer.base.errors import PeerFailed, UsageError
from fireflyer.collectives.dispatch.placement import ExpertPlacement
from fireflyer.collectives.dispatch.plan import Entries

__all__ = ["HEADER_BYTES", "STEPS", "Header", "Limits", "check_entries", "check_header", "pack_header", "packed"]

_MAGIC: Final = 0x46465F4449535031  # "FF_DISP1"
STEPS: Final = (
    "routes to nodes",
    "routes to ranks",
    "rows to nodes",
    "rows to ranks",
    "outputs to nodes",
    "sums to ranks",
)
"""In the order of their codes: append, never renumber."""
_FIELDS: Final = 7
HEADER_BYTES: Final = 8 * _FIELDS
Bytes = npt.NDArray[np.uint8]


class Header(NamedTuple):
    dispatcher: int
    """Number of the dispatcher among those of its communicator."""
    call: int
    """Of this dispatcher, counting all its operations."""
    of: int
    """Call whose routes are used: a dispatch is of itself."""
    step: str
    rows: int
    entries: int


class Limits(NamedTuple):
    """Of what one message may hold."""

    rows: int
    entries: int


def pack_header(header: Header) -> Bytes:
    """`HEADER_BYTES` bytes."""
    numbers = (_MAGIC, *header[:3], STEPS.index(header.step), header.rows, header.entries)
    return np.array(numbers, "<i8").view(np.uint8)


def check_header(data: Bytes, expected: Header, limits: Limits | None, rank: int) -> Header:
    """What `rank` says. Rows and entries of `expected` are not compared; without `limits` the caller checks them.

    Raises `UsageError` where the ranks are at different operations, `PeerFailed` for what no rank of ours says.
    """
    magic, dispatcher, call, of, step, rows, entries = (int(number) for number in data.view("<i8"))
    if magic != _MAGIC or not 0 <= step < len(STEPS):
        raise PeerFailed(f"rank {rank} sent no header of a dispatch; do all ranks run the same version?", rank=rank)
    found = Header(dispatcher, call, of, STEPS[step], rows, entries)
    if found[:4] != expected[:4]:
        raise UsageError(
            f"rank {rank} is at {_said(found)}, this rank at {_said(expected)}; all ranks must call the same "
            "operations of the same dispatchers in the same order"
        )
    if limits is not None and not (0 <= rows <= limits.rows and 0 <= entries <= limits.entries):
        raise PeerFailed(
            f"rank {rank} announced {rows} rows and {entries} entries, of at most {limits.rows} and {limits.entries}",
            rank=rank,
        )
    return found


def check_entries(entries: Entries, allowed: npt.NDArray[np.bool_], placement: ExpertPlacement, rank: int) -> None:
    """`allowed[expert]`: it is where these entries are sent. Raises `PeerFailed`."""
    row, expert = entries.row, entries.expert
    ascending = (row[1:] > row[:-1]) | ((row[1:] == row[:-1]) & (expert[1:] > expert[:-1]))
    in_range = bool(np.all((row >= 0) & (row < entries.rows)) and np.all((expert >= 0) & (expert < placement.experts)))
    if not in_range or not ascending.all() or not allowed[expert].all():
        raise PeerFailed(f"rank {rank} sent routes that no plan has; do all ranks run the same version?", rank=rank)


def _said(header: Header) -> str:
    return f"call {header.call} of dispatcher {header.dispatcher} ({header.step}, with the routes of call {header.of})"


def packed(arrays: list[npt.NDArray[Any]]) -> Bytes:
    """One after the other."""
    return np.concatenate([np.ascontiguousarray(array).reshape(-1).view(np.uint8) for array in arrays])
