"""How much each user has used: node-seconds in a window that decays by half in each `half_life_ns`.

Between samples the numbers are not recomputed: decisions read the last sample, which is taken at multiples of the
policy's `usage_step_ns`. So usage is data of the snapshot, and two that were given the same events agree on it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from fireflyer.base.units import SECOND

__all__ = ["UsageWindow"]

FORGOTTEN = 1e-3
"""Node-seconds: a user with less and without a run is no longer listed."""


class UsageWindow:
    """Node-seconds of each user."""

    def __init__(self, half_life_ns: int) -> None:
        self._set_half_life(half_life_ns)
        self._used: dict[str, float] = {}
        self._nodes: dict[str, int] = {}
        self._at_ns: dict[str, int] = {}

    def _set_half_life(self, half_life_ns: int) -> None:
        self._half_life_ns = half_life_ns
        self._window_s = half_life_ns / SECOND / math.log(2)

    def half_life(self, half_life_ns: int, now_ns: int) -> None:
        """From now on it is this."""
        self.sample(now_ns)
        self._set_half_life(half_life_ns)

    def set(self, usage: Mapping[str, float], now_ns: int) -> None:
        """From now on it is this; the nodes that run stay as they are."""
        for user in [*self._used, *usage]:
            self._used[user] = usage.get(user, 0.0)
            self._at_ns[user] = now_ns

    def change(self, user: str, nodes: int, now_ns: int) -> None:
        """The user runs on so many nodes more; fewer than 0 gives them back."""
        self._bring(user, now_ns)
        self._nodes[user] = self._nodes.get(user, 0) + nodes

    def sample(self, now_ns: int) -> dict[str, float]:
        forgotten, window_s = [], self._window_s
        kept_of: dict[int, float] = {}
        """Most users were brought to the same moment before."""
        for user, used in self._used.items():
            passed_ns = now_ns - self._at_ns[user]
            nodes = self._nodes.get(user, 0)
            if passed_ns:
                kept = kept_of.get(passed_ns)
                if kept is None:
                    kept = kept_of[passed_ns] = self._kept(passed_ns)
                used = used * kept + nodes * window_s * (1.0 - kept)
                self._used[user] = used
                self._at_ns[user] = now_ns
            if used < FORGOTTEN and not nodes:
                forgotten.append(user)
        for user in forgotten:
            del self._used[user], self._at_ns[user]
            self._nodes.pop(user, None)
        return dict(self._used)

    def _kept(self, passed_ns: int) -> float:
        return float(2.0 ** (-passed_ns / self._half_life_ns))

    def _bring(self, user: str, now_ns: int) -> None:
        """To this moment."""
        passed_ns = now_ns - self._at_ns.get(user, now_ns)
        used = self._used.get(user, 0.0)
        if passed_ns:
            kept = self._kept(passed_ns)
            used = used * kept + self._nodes.get(user, 0) * self._window_s * (1.0 - kept)
        self._used[user] = used
        self._at_ns[user] = now_ns
