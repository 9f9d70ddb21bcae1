"""A trace like the jobs of a research cluster, from a seed.

From Kokolis, Kuchnik et al. 2024, *Revisiting Reliability in Large-Scale Machine Learning Research Clusters*: 7,200
jobs a day on 2,000 nodes (section II-A); more than 90 % of the jobs ask for one server or less and use less than 10 %
of the GPU time (observation 7); jobs of 256 GPUs and more use 66 % of it (figure 6); those of 4,096 GPUs are far less
than 1 % of the jobs and use 12 % (section I); no job runs for more than seven days; large jobs tend to have high
priority (section III). A node has 8 GPUs and is given away whole, so what asks for less than 8 GPUs counts as one node.

Assumed, since the paper does not say: the split of node-time over the sizes in between, the mean length of each size,
lognormal lengths, hours of the day and days of the week, users (Zipf) and declared times. The shares of node-time are
exact: the lengths of each size are scaled until they are met. `demand` is the work over the node-time of the days.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate
from typing import Final, NamedTuple

import msgspec

from fireflyer.base.errors import UsageError
from fireflyer.base.units import SECOND
from fireflyer.cluster.core.replay.streams import Stream, cumulated
from fireflyer.cluster.core.replay.trace import MAX_ROWS, TraceTask

__all__ = ["MONTH", "TraceSettings", "generate"]

HOUR_S: Final = 3600
DAY_S: Final = 24 * HOUR_S
MAX_WORK_S: Final = 7 * DAY_S
LEAST_WORK_S: Final = 60
LARGEST_SHARE: Final = 0.26
"""Of the cluster; sizes above are left out. 4,096 GPUs are a quarter of the paper's."""


class _Size(NamedTuple):
    nodes: int
    node_time: float
    """Its share."""
    hours: float
    """Mean length, with demand 1.1."""
    sigma: float
    priorities: tuple[float, ...]
    """Weights of `PRIORITIES`."""


PRIORITIES: Final = (30, 20, 10, 5, 0)
_SMALL: Final = (0.02, 0.08, 0.5, 0.2, 0.2)
_MIDDLE: Final = (0.1, 0.3, 0.5, 0.1, 0.0)
_LARGE: Final = (0.4, 0.4, 0.2, 0.0, 0.0)

_SIZES: Final = (
    _Size(1, 0.09, 0.707, 1.6, _SMALL),
    _Size(2, 0.03, 4.0, 1.4, _SMALL),
    _Size(4, 0.05, 5.0, 1.4, _SMALL),
    _Size(8, 0.08, 6.0, 1.4, _SMALL),
    _Size(16, 0.08, 8.0, 1.2, _MIDDLE),
    _Size(32, 0.12, 10.0, 1.2, _MIDDLE),
    _Size(64, 0.12, 12.0, 1.2, _MIDDLE),
    _Size(128, 0.15, 15.0, 1.0, _LARGE),
    _Size(256, 0.16, 18.0, 1.0, _LARGE),
    _Size(512, 0.12, 20.0, 0.8, _LARGE),
)

_HOURS_OF_DAY: Final = (0.6,) * 8 + (1.0,) * 2 + (1.5,) * 9 + (1.0,) * 5
_DAYS_OF_WEEK: Final = (1.1, 1.15, 1.15, 1.15, 1.05, 0.7, 0.7)
DECLARE_SHARE: Final = 0.7
DECLARE_MARGIN: Final = 1.25
"""What is declared is at least so many times the work: nobody is stopped because a checkpoint took a while."""
DECLARE_SIGMA: Final = 0.8
DECLARE_STEP_S: Final = 900


class TraceSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What is generated."""

    nodes: int = 2000
    days: int = 30
    demand: float = 1.1
    """Work over the node-time of the nodes in these days."""
    tasks_per_day: int | None = None
    """3.6 for each node where it is None."""
    users: int = 400
    groups: int = 8

    def __post_init__(self) -> None:
        for name, least, most in (("nodes", 1, 100_000), ("days", 1, 3660), ("users", 1, 100_000), ("groups", 1, 1000)):
            if not least <= getattr(self, name) <= most:
                raise UsageError(f"{name} must be between {least} and {most:,}, not {getattr(self, name)}")
        if not 0.01 <= self.demand <= 100:
            raise UsageError(f"demand must be between 0.01 and 100, not {self.demand}")
        if not 1 <= self.tasks <= MAX_ROWS - 1:
            raise UsageError(
                f"a trace has 1 to {MAX_ROWS - 1:,} tasks, not {self.tasks:,}; ask for fewer days or tasks"
            )

    @property
    def tasks(self) -> int:
        per_day = 3.6 * self.nodes if self.tasks_per_day is None else self.tasks_per_day
        return round(per_day * self.days)


MONTH: Final = TraceSettings()


def generate(settings: TraceSettings, seed: int) -> tuple[TraceTask, ...]:
    """In the order of submission. The same settings and seed give the same trace on any machine."""
    sizes = [size for size in _SIZES if size.nodes == 1 or size.nodes <= LARGEST_SHARE * settings.nodes]
    counts = _counts(sizes, settings.tasks)
    order = _shuffled([place for place, count in enumerate(counts) for _ in range(count)], Stream(seed, 1))
    works_s = _works(sizes, counts, settings, seed)
    times_s = _submissions(settings, Stream(seed, 2))
    users = cumulated([1.0 / (rank + 5) for rank in range(settings.users)])
    who, priority, declared = Stream(seed, 3), Stream(seed, 4), Stream(seed, 5)
    priorities = [cumulated(size.priorities) for size in sizes]
    tasks = []
    for submit_s, place in zip(times_s, order, strict=True):
        user = who.index(users)
        work_s = works_s[place].pop()
        time_s = _declared_s(work_s, declared)
        tasks.append(
            TraceTask(
                submit_ns=submit_s * SECOND,
                nodes=sizes[place].nodes,
                work_ns=work_s * SECOND,
                user=f"u{user:03d}",
                group=f"g{user % settings.groups}",
                priority=PRIORITIES[priority.index(priorities[place])],
                time_ns=None if time_s is None else time_s * SECOND,
            )
        )
    return tuple(tasks)


def _counts(sizes: Sequence[_Size], tasks: int) -> list[int]:
    """How many tasks of each size; one node has what is left."""
    weights = [size.node_time / (size.nodes * size.hours) for size in sizes]
    counts = [round(weight / sum(weights) * tasks) for weight in weights]
    counts[0] = tasks - sum(counts[1:])
    return counts


def _shuffled(places: list[int], stream: Stream) -> list[int]:
    keys = [stream.bits() for _ in places]
    return [place for _, place in sorted(zip(keys, places, strict=True))]


def _works(sizes: Sequence[_Size], counts: Sequence[int], settings: TraceSettings, seed: int) -> list[list[int]]:
    """Lengths in seconds of the tasks of each size, which together have its share of the demand."""
    present = sum(size.node_time for size, count in zip(sizes, counts, strict=True) if count)
    found = []
    for number, (size, count) in enumerate(zip(sizes, counts, strict=True)):
        stream = Stream(seed, 100 + number)
        drawn = [stream.lognormal(1.0, size.sigma) for _ in range(count)]
        node_s = settings.demand * settings.nodes * settings.days * DAY_S * size.node_time / present
        found.append(_scaled(drawn, node_s / size.nodes))
    return found


def _scaled(drawn: Sequence[float], total_s: float) -> list[int]:
    """Multiplied until the sum is `total_s`, with each between its bounds; where that cannot be, as near as can be."""
    scale = total_s / sum(drawn) if drawn else 0.0
    for _ in range(20):
        works = [min(max(each * scale, LEAST_WORK_S), MAX_WORK_S) for each in drawn]
        if not works or abs(sum(works) / total_s - 1.0) < 1e-4:
            break
        scale *= total_s / sum(works)
    return [round(min(max(each * scale, LEAST_WORK_S), MAX_WORK_S)) for each in drawn]


def _submissions(settings: TraceSettings, stream: Stream) -> list[int]:
    hours = [
        _HOURS_OF_DAY[hour % 24] * _DAYS_OF_WEEK[hour // 24 % len(_DAYS_OF_WEEK)] for hour in range(24 * settings.days)
    ]
    sums = [0.0, *accumulate(hours)]
    found = []
    for _ in range(settings.tasks):
        at = stream.uniform() * sums[-1]
        hour = max(bisect_left(sums, at) - 1, 0)
        found.append(int((hour + (at - sums[hour]) / hours[hour]) * HOUR_S))
    return sorted(found)


def _declared_s(work_s: int, stream: Stream) -> int | None:
    if stream.uniform() >= DECLARE_SHARE:
        return None
    margin = DECLARE_MARGIN * stream.lognormal(1.0, DECLARE_SIGMA)
    wanted = work_s * max(margin, DECLARE_MARGIN) + DECLARE_STEP_S
    return int(-(-wanted // DECLARE_STEP_S)) * DECLARE_STEP_S
