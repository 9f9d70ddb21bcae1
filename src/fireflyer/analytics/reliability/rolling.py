"""Rates of incidents over the 30 days up to each day."""

from __future__ import annotations

import math
from typing import Any, Final

import msgspec

from fireflyer.analytics.reliability.failures import DAY_NS

__all__ = ["ROLLING_DAYS", "RollingRates", "rolling_rates"]

ROLLING_DAYS: Final = 30


class RollingRates(msgspec.Struct, frozen=True):
    """Of one symptom: incidents per 1000 node-days over the 30 days up to each day."""

    symptom: str
    days: tuple[int, ...]
    """Since 1970."""
    per_1000_node_days: tuple[float | None, ...]
    """None where there is no node-day in these 30 days."""


def rolling_rates(connection: Any, nodes: int, begin_ns: int, end_ns: int, counted: str) -> tuple[RollingRates, ...]:
    """`nodes`: of which each day has as many node-days; 0: those of jobs. `counted`: the column of `of_symptoms`.
    `prepare` has made its tables."""
    first, last = begin_ns // DAY_NS, end_ns // DAY_NS
    per_day = [float(nodes)] * (last - first + 1) if nodes else _per_day(connection, first, last)
    counts: dict[str, list[int]] = {}
    for symptom, day, count in connection.execute(f"SELECT symptom, day, {counted} FROM of_symptoms").fetchall():
        counts.setdefault(symptom, [0] * len(per_day))[day - first] = count
    most = sorted(counts, key=lambda symptom: (-sum(counts[symptom]), symptom))
    return tuple(_rolled(symptom, counts[symptom], per_day, first) for symptom in most)


def _per_day(connection: Any, first: int, last: int) -> list[float]:
    """Node-days of jobs: of those that run when a day begins all of it; then those that start add the rest of the day,
    and those that end take it away."""
    changes = [(0, 0.0)] * (last - first + 2)
    ((parts_of_node,),) = connection.execute("SELECT coalesce(any_value(parts_of_node), 1) FROM sized").fetchall()
    for sign, time in ((1, "start_ns"), (-1, "until_ns")):
        for day, count, rest in connection.execute(
            f"""SELECT time_ns // {DAY_NS} AS day, sum(parts)::BIGINT,
                       sum(parts * (({DAY_NS} - time_ns % {DAY_NS}) / {DAY_NS}))
                FROM (SELECT parts, {time} AS time_ns FROM sized WHERE start_ns < until_ns)
                GROUP BY day"""
        ).fetchall():
            parts, days = changes[day - first]
            changes[day - first] = (parts + sign * count, days + sign * rest)
    per_day, running = [], 0
    for parts, days in changes[:-1]:
        per_day.append(round((running + days) / parts_of_node, 9))  # rounded: differences that are nothing are 0
        running += parts
    return per_day


def _rolled(symptom: str, counts: list[int], per_day: list[float], first: int) -> RollingRates:
    rates: list[float | None] = []
    for end in range(1, len(counts) + 1):
        begin = max(0, end - ROLLING_DAYS)
        days = math.fsum(per_day[begin:end])
        rates.append(1000 * sum(counts[begin:end]) / days if days > 0 else None)
    return RollingRates(symptom, tuple(range(first, first + len(counts))), tuple(rates))
