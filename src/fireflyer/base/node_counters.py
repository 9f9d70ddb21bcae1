"""What the kernel of a node has counted so far: two readings say what went wrong between them."""

from __future__ import annotations

from typing import Annotated, Final

import msgspec

__all__ = ["COUNTERS_NAME", "MAX_NAMED", "MAX_PEERS", "PEERS_NAME", "LinkCounters", "NodeCounters"]

COUNTERS_NAME: Final = "FF_NODE_COUNTERS"
"""Variable in which the check of a node finds the counters as they were when the ranks were started, as JSON."""
PEERS_NAME: Final = "FF_NODE_PEERS"
"""And this one has addresses, HOST:PORT, at which other nodes of the job listen; separated by commas."""
MAX_PEERS: Final = 16
MAX_NAMED: Final = 64
"""Of the links, memory controllers and file systems of a node so many are read, the first by name."""

_Number = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
_Name = Annotated[str, msgspec.Meta(max_length=300)]
_Counts = Annotated[dict[_Name, _Number], msgspec.Meta(max_length=MAX_NAMED)]


class LinkCounters(msgspec.Struct, frozen=True):
    """Of a network interface that has hardware behind it."""

    carrier: bool
    speed_mbps: _Number = 0
    """0: not known."""
    packets: _Number = 0
    errors: _Number = 0
    drops: _Number = 0


class NodeCounters(msgspec.Struct, frozen=True, kw_only=True):
    boot: _Name = ""
    """Counters of another boot are not comparable."""
    uncorrected: _Counts = {}
    """Memory errors by memory controller (EDAC)."""
    corrected: _Counts = {}
    poisoned_kib: _Number = 0
    """Memory that the kernel uses no more, because of errors that could not be corrected."""
    file_system_errors: _Counts = {}
    """That the kernel found in the structures of a file system, by device."""
    turned_read_only: Annotated[tuple[_Name, ...], msgspec.Meta(max_length=MAX_NAMED)] = ()
    """Mount points that were mounted to be written to and that the kernel does not write to any more."""
    links: Annotated[dict[_Name, LinkCounters], msgspec.Meta(max_length=MAX_NAMED)] = {}
