"""Latencies of networks as published. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Literal, NamedTuple

__all__ = ["LATENCIES", "LatencyName", "LinkLatency"]

LatencyName = Literal["infiniband", "roce"]


class LinkLatency(NamedTuple):
    """Latency of a message of a few bytes. A CPU proxy that hands work to the NIC for a GPU adds its time to
    `message_ns`; GPUs that do so themselves (IBGDA) add none."""

    message_ns: int
    """Latency before the first switch, ns."""
    switch_ns: int
    """Latency of each switch, ns."""


LATENCIES: Final[Mapping[LatencyName, LinkLatency]] = {
    "infiniband": LinkLatency(2350, 450),
    "roce": LinkLatency(2600, 1000),
}
"""From table 5 of the DeepSeek-V3 paper: 64 bytes between processors over 1 switch and over 3, two figures each."""
