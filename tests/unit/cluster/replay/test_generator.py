"""The month that policies are compared with was fixed before any of them was tuned: its bytes have these hashes."""

from __future__ import annotations

import hashlib

import msgspec
import pytest

from fireflyer.base.errors import UsageError
from fireflyer.base.units import SECOND
from fireflyer.cluster.core.replay.generator import MONTH, TraceSettings, generate
from fireflyer.cluster.core.replay.trace import TraceTask, read_trace, write_trace

SEED = 1
DAY_NS = 86400 * SECOND
SHA256_OF_MONTHS = {
    1.1: "a78bb62661783bbe841e8d2718b002239c0f56aa14a6ce267c0e34dfd54879cf",
    1.3: "eabd274722535c0c33b509dad76b294824e4d37d6d8687594fec65695fb28ef5",
}
SMALL = TraceSettings(nodes=200, days=4)


def node_time(tasks: tuple[TraceTask, ...]) -> int:
    return sum(task.nodes * task.work_ns for task in tasks)


@pytest.mark.slow
@pytest.mark.parametrize("demand", SHA256_OF_MONTHS)
def test_the_month_is_the_one_that_was_committed(demand: float) -> None:
    tasks = generate(msgspec.structs.replace(MONTH, demand=demand), SEED)
    digest = hashlib.sha256("".join(write_trace(tasks)).encode()).hexdigest()
    assert len(tasks) == 216_000
    assert digest == SHA256_OF_MONTHS[demand]


def test_a_seed_gives_one_trace_and_another_seed_another_one() -> None:
    assert generate(SMALL, 1) == generate(SMALL, 1)
    assert generate(SMALL, 1) != generate(SMALL, 2)


def test_the_work_is_the_demand_times_the_node_time_of_the_days() -> None:
    for demand in (0.5, 1.1):
        tasks = generate(msgspec.structs.replace(SMALL, demand=demand), 3)
        assert node_time(tasks) / (200 * 4 * DAY_NS) == pytest.approx(demand, rel=0.01)


def test_tasks_of_one_node_are_most_tasks_and_little_work_as_in_the_paper() -> None:
    tasks = generate(TraceSettings(nodes=2000, days=5), 1)
    small = tuple(task for task in tasks if task.nodes == 1)
    large = tuple(task for task in tasks if task.nodes >= 32)
    assert len(small) / len(tasks) > 0.9
    assert node_time(small) / node_time(tasks) < 0.1
    assert node_time(large) / node_time(tasks) == pytest.approx(0.67, abs=0.01)
    assert max(task.work_ns for task in tasks) <= 7 * DAY_NS


def test_what_is_declared_is_more_than_the_work() -> None:
    declared = [task for task in generate(SMALL, 1) if task.time_ns is not None]
    assert declared
    assert all(task.time_ns is not None and task.time_ns >= 1.25 * task.work_ns for task in declared)


def test_a_trace_that_was_written_is_read_again() -> None:
    tasks = generate(SMALL, 1)
    assert read_trace(write_trace(tasks)) == tasks


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"nodes": 0}, "nodes must be between 1 and 100,000, not 0"),
        ({"days": 0}, "days must be between 1 and 3,660, not 0"),
        ({"demand": 0.0}, "demand must be between 0.01 and 100, not 0.0"),
        ({"nodes": 100_000, "days": 3660}, "a trace has 1 to 4,999,999 tasks"),
    ],
)
def test_settings_that_cannot_be_are_refused(changes: dict[str, float], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        msgspec.structs.replace(MONTH, **changes)
