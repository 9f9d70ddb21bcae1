"""`TransferArrays`: transfers as the engines take them. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fireflyer.netsim.links import Links
from fireflyer.topology.traffic import Transfer

__all__ = ["NO_ROUTE", "Latency", "Route", "TransferArrays", "transfer_arrays"]


class Route(NamedTuple):
    """Of a transfer: the number of the path of each flow, and the share of its bytes."""

    paths: tuple[int, ...]
    shares: tuple[float, ...]


NO_ROUTE = Route((), ())


class Latency:
    """Until the first byte of a transfer arrives on an idle network; none from a node to itself."""

    def __init__(self, links: Links, *, message_ns: int, switch_ns: int) -> None:
        self._links, self._message_ns, self._switch_ns = links, message_ns, switch_ns
        self._known: dict[tuple[int, int], int] = {}

    def of(self, transfer: Transfer) -> int:
        ends = (transfer.source, transfer.target)
        found = self._known.get(ends)
        if found is None:
            hops = self._links.hop_count(*ends)
            found = self._message_ns + (hops - 1) * self._switch_ns if hops else 0
            self._known[ends] = found
        return found


class TransferArrays(NamedTuple):
    """`*_starts` have one element more than there are transfers: rows of the arrays that they are named for."""

    nbytes: NDArray[np.float64]
    delay_s: NDArray[np.float64]
    latency_s: NDArray[np.float64]
    flow_starts: NDArray[np.int64]
    flow_paths: NDArray[np.int64]
    flow_shares: NDArray[np.float64]
    after_starts: NDArray[np.int64]
    after: NDArray[np.int64]
    """Places of transfers."""


def transfer_arrays(
    transfers: Sequence[Transfer], routes: Sequence[Route], latencies_ns: Sequence[int]
) -> TransferArrays:
    place_of = {transfer.id: place for place, transfer in enumerate(transfers)}
    after = [[place_of[other] for other in dict.fromkeys(one.after)] for one in transfers]
    flow_starts, after_starts = _starts([len(one.paths) for one in routes]), _starts([len(others) for others in after])
    return TransferArrays(
        np.array([one.nbytes for one in transfers], np.float64),
        np.array([one.delay_ns for one in transfers], np.float64) / 1e9,
        np.array(latencies_ns, np.float64) / 1e9,
        flow_starts,
        np.fromiter((path for one in routes for path in one.paths), np.int64, flow_starts[-1]),
        np.fromiter((share for one in routes for share in one.shares), np.float64, flow_starts[-1]),
        after_starts,
        np.fromiter((place for others in after for place in others), np.int64, after_starts[-1]),
    )


def _starts(counts: list[int]) -> NDArray[np.int64]:
    return np.fromiter(accumulate(counts, initial=0), np.int64, len(counts) + 1)
