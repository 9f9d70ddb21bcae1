"""`NumpyFlowRun`: the twin of `native.FlowRun`, with all rates solved anew after each event. Pure.

Some thousand flows to completion take minutes. It is what the native one is compared with, and is chosen by
`Settings(engine="numpy")`.
"""

from __future__ import annotations

import heapq
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

from fireflyer.netsim.fair import Incidence, max_min_rates

__all__ = ["FlowEngine", "NumpyFlowRun"]

NO_BYTES: Final = 1e-6
"""Bytes that count as none: less than one, more than what rounding leaves."""
SAME_TIME: Final = 1e-13
"""Events that differ by less, over the time since the beginning, happen together."""
_WAITING, _OPEN, _ENDED = 0, 1, 2

Reals = NDArray[np.float64]
Integers = NDArray[np.int64]


class FlowEngine(Protocol):
    """What runs transfers; the meaning is in cpp/include/fireflyer/netsim/flow_run.hpp."""

    def add_path(self, links: NDArray[np.uint32], shares: Reals, weight: float = 1.0) -> int: ...
    def add_transfers(
        self,
        nbytes: Reals,
        delay_s: Reals,
        latency_s: Reals,
        flow_starts: Integers,
        flow_paths: Integers,
        flow_shares: Reals,
        after_starts: Integers,
        after: Integers,
    ) -> None: ...
    def run_until(self, time_s: float) -> None: ...
    def set_route(self, flow: int, path: int) -> None: ...
    def pending_flows(self) -> Integers: ...
    @property
    def start_s(self) -> Reals: ...
    @property
    def finish_s(self) -> Reals: ...
    @property
    def path_bytes(self) -> Reals: ...
    @property
    def events(self) -> int: ...


class NumpyFlowRun:
    def __init__(self, capacities: Reals) -> None:
        self._capacities = capacities.copy()
        self._rows: list[tuple[tuple[int, ...], tuple[float, ...]]] = []
        self._weights: list[float] = []
        self._starts: list[tuple[float, int]] = []
        self._path_bytes: list[float] = []
        self._now_s = 0.0
        self._begun = False
        self.events = 0

    def add_path(self, links: NDArray[np.uint32], shares: Reals, weight: float = 1.0) -> int:
        self._rows.append((tuple(links.tolist()), tuple(shares.tolist())))
        self._weights.append(weight)
        self._path_bytes.append(0.0)
        return len(self._rows) - 1

    def add_transfers(
        self,
        nbytes: Reals,
        delay_s: Reals,
        latency_s: Reals,
        flow_starts: Integers,
        flow_paths: Integers,
        flow_shares: Reals,
        after_starts: Integers,
        after: Integers,
    ) -> None:
        count = len(nbytes)
        self._delay_s, self._latency_s = delay_s, latency_s
        self._flow_starts = flow_starts
        self._path = flow_paths.copy()
        self._owner = np.repeat(np.arange(count), np.diff(flow_starts))
        self._left = nbytes[self._owner] * flow_shares
        self._state = np.full(len(flow_paths), _WAITING)
        self._waits = np.diff(after_starts)
        self._followers: list[list[int]] = [[] for _ in range(count)]
        for place, other in zip(np.repeat(np.arange(count), self._waits).tolist(), after.tolist(), strict=True):
            self._followers[other].append(place)
        self.start_s = np.full(count, np.inf)
        self.finish_s = np.full(count, np.inf)

    @property
    def path_bytes(self) -> Reals:
        return np.array(self._path_bytes, np.float64)

    def run_until(self, time_s: float) -> None:
        if not self._begun:
            self._begun = True
            for place in np.flatnonzero(self._waits == 0).tolist():
                self._begin(place)
        while True:
            moving = np.flatnonzero((self._state == _OPEN) & (self._path >= 0))
            rows = Incidence.of([self._rows[path] for path in self._path[moving]])
            rates = max_min_rates(
                self._capacities, rows, np.array([self._weights[path] for path in self._path[moving]])
            )
            ends_s = self._now_s + self._left[moving] / rates
            next_s = min(float(ends_s.min(initial=np.inf)), self._starts[0][0] if self._starts else np.inf)
            self._move(moving, rates, min(next_s, time_s) if min(next_s, time_s) < np.inf else self._now_s)
            if next_s > time_s or next_s == np.inf:
                return
            self.events += 1
            self._end_flows(moving, rates)
            while self._starts and self._starts[0][0] <= self._now_s * (1 + SAME_TIME):
                self._open(heapq.heappop(self._starts)[1])

    def set_route(self, flow: int, path: int) -> None:
        self._path[flow] = path

    def pending_flows(self) -> Integers:
        return np.flatnonzero(self._state != _ENDED)

    def _move(self, moving: Integers, rates: Reals, until_s: float) -> None:
        lasts = max(0.0, until_s - self._now_s)
        moved = np.minimum(rates * lasts, self._left[moving])
        self._left[moving] -= moved
        for path, nbytes in zip(self._path[moving].tolist(), moved.tolist(), strict=True):
            self._path_bytes[path] += nbytes
        self._now_s = max(self._now_s, until_s)

    def _begin(self, place: int) -> None:
        """All that it waits for has arrived: its first byte arrives after the delays."""
        self.start_s[place] = self._now_s + self._delay_s[place]
        heapq.heappush(self._starts, (float(self.start_s[place] + self._latency_s[place]), place))

    def _open(self, place: int) -> None:
        flows = slice(self._flow_starts[place], self._flow_starts[place + 1])
        self._state[flows] = np.where(self._left[flows] > 0, _OPEN, _ENDED)
        if (self._state[flows] == _ENDED).all():
            self._finish(place)

    def _end_flows(self, moving: Integers, rates: Reals) -> None:
        ended = moving[self._left[moving] <= np.maximum(NO_BYTES, rates * self._now_s * SAME_TIME)]
        self._state[ended] = _ENDED
        for place in dict.fromkeys(self._owner[ended].tolist()):
            if (self._state[self._flow_starts[place] : self._flow_starts[place + 1]] == _ENDED).all():
                self._finish(place)

    def _finish(self, place: int) -> None:
        self.finish_s[place] = self._now_s
        for follower in self._followers[place]:
            self._waits[follower] -= 1
            if self._waits[follower] == 0:
                self._begin(follower)
