"""How often a user, or an address that has not proven who it is, may ask: token buckets, bounded in number."""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

from fireflyer.base.units import SECOND

__all__ = ["Rates"]

MAX_BUCKETS: Final = 20_000


class Rates:
    """`per_s` requests a second each, `burst` at once. A bucket that has not been used for longest is forgotten when
    there are too many: it is full by then, unless as many others were used since."""

    def __init__(self, per_s: float, burst: int) -> None:
        self._per_ns = per_s / SECOND
        self._burst = burst
        self._buckets: OrderedDict[str, tuple[float, int]] = OrderedDict()

    def wait_ns(self, who: str, now_ns: int) -> int:
        """0: go on; else how long to wait, and this request does not count."""
        left, at_ns = self._buckets.pop(who, (float(self._burst), now_ns))
        left = min(float(self._burst), left + (now_ns - at_ns) * self._per_ns)
        allowed = left >= 1
        self._buckets[who] = (left - 1 if allowed else left, now_ns)
        while len(self._buckets) > MAX_BUCKETS:
            self._buckets.popitem(last=False)
        return 0 if allowed else int((1 - left) / self._per_ns) + 1
