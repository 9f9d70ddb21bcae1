"""A job makes its plan once, keeps it, and uses it again; what was measured is not silently dropped."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.collectives.thread_ranks import together

from fireflyer.base.errors import DataCorruption, FireflyerError, UsageError
from fireflyer.base.launch import RankEnvironment
from fireflyer.base.units import KIB, MIB
from fireflyer.collectives import Communicator, Plan, Route, Speeds, make_plan, plan_for
from fireflyer.collectives.bootstrap.job import JobPlans, KeptPlan, tuned
from fireflyer.collectives.planning.cost import FLIGHT_BYTES, SLOT_BYTES
from fireflyer.collectives.planning.declaration import Declaration, RouteRow
from fireflyer.collectives.planning.plan import RING, TREE
from fireflyer.collectives.planning.routing import default_plan
from fireflyer.topology import count_crossings

HOSTS = ("a", "b")


def declared(directory: Path, declaration: Declaration) -> JobPlans:
    (directory / "topology.json").write_bytes(msgspec.json.encode(declaration))
    return JobPlans(str(directory), "world")


def test_a_second_start_uses_the_plan_of_the_first(tmp_path: Path) -> None:
    plans = declared(tmp_path, Declaration(speeds=Speeds(latency_ns=1e6)))
    first = plans.plan((0, 0, 1), HOSTS)
    assert first == plan_for((0, 0, 1), Speeds(latency_ns=1e6))
    (tmp_path / "topology.json").unlink()
    assert JobPlans(str(tmp_path), "world").plan((0, 0, 1), HOSTS) == first
    assert JobPlans(str(tmp_path), "other").plan((0, 0, 1), HOSTS) == default_plan((0, 0, 1)) != first


def test_without_a_directory_nothing_is_kept() -> None:
    plans = JobPlans(None, "world")
    assert plans.path is None
    assert plans.plan((0, 1), HOSTS) == default_plan((0, 1))
    assert plans.kept() is None


def test_a_plan_that_cannot_be_kept_is_used_all_the_same(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "collectives").touch()
    assert JobPlans(str(tmp_path), "world").plan((0, 1), HOSTS) == default_plan((0, 1))
    assert "a restart makes the plan again" in caplog.text
    with pytest.raises(FireflyerError, match="keep the plan in "):
        JobPlans(str(tmp_path), "world").keep(KeptPlan(plan=make_plan((0, 1)), measured=Speeds()))


def test_names_cannot_leave_the_directory(tmp_path: Path) -> None:
    plans = JobPlans(str(tmp_path), "../../etc/x")
    plans.plan((0,), ("a",))
    assert [path.name for path in (tmp_path / "collectives").iterdir()] == ["..%2F..%2Fetc%2Fx.json"]


def test_another_group_gets_another_plan_and_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    plans = JobPlans(str(tmp_path), "world")
    plans.plan((0, 1), HOSTS)
    with caplog.at_level(logging.WARNING):
        assert plans.plan((0, 0, 1), HOSTS).world_size == 3
    assert "holds a plan for 2 ranks on 2 nodes, and the group has 3 on 2" in caplog.text
    assert "sums may differ in the last bits" in caplog.text
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        plans.plan((0, 1, 1), HOSTS)
    assert "3 ranks on 2 nodes, and the group has 3 on 2, on other nodes" in caplog.text


def test_a_measured_plan_is_refused_for_another_group(tmp_path: Path) -> None:
    plans = JobPlans(str(tmp_path), "world")
    plans.keep(KeptPlan(plan=make_plan((0, 1)), measured=Speeds()))
    with pytest.raises(UsageError, match="measured for that group: start the same group, or remove the file"):
        plans.plan((0, 1, 2), ("a", "b", "c"))


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b'{"plan": {}}', b'{"plam": 1}', b"\xff\xfe"])
@pytest.mark.parametrize("name", ["topology.json", "collectives/world.json"])
def test_damaged_files_are_named(tmp_path: Path, name: str, data: bytes) -> None:
    (tmp_path / "collectives").mkdir()
    (tmp_path / name).write_bytes(data)
    with pytest.raises(DataCorruption, match=f"{name} is damaged: .*; remove it"):
        JobPlans(str(tmp_path), "world").plan((0, 1), HOSTS)


def test_a_damaged_file_at_rank_0_ends_the_meeting_of_all(tmp_path: Path) -> None:
    (tmp_path / "topology.json").write_bytes(b"{")
    plans = JobPlans(str(tmp_path), "world")
    errors = together([0, 1], lambda comm: None, planner=plans.plan)
    assert all(isinstance(error, UsageError) and "topology.json is damaged" in error.message for error in errors)


def test_the_plan_of_a_job_is_logged_with_its_reason(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        declared(tmp_path, Declaration(algorithms=(RING,))).plan((0, 1, 2), ("a", "b", "c"))
    (line,) = caplog.messages
    assert line.startswith("group world: 3 ranks on 3 nodes, window ")
    assert "ring: " in line
    assert " predicted against " not in line, "there was nothing to choose from"


def test_zones_by_host_and_by_number() -> None:
    by_host = Declaration(zone_of_host={"a": 0, "b": 1, "c": 0, "d": 1})
    zones = by_host.zones_of(["d", "c", "b", "a"])
    assert zones == (1, 0, 1, 0)
    assert count_crossings(by_host.plan(range(4), zones=zones).trees, zones).pairs == ((0, 1),)
    with pytest.raises(UsageError, match="host 'e' has no zone"):
        by_host.zones_of(["e"])
    with pytest.raises(UsageError, match="exclude each other"):
        Declaration(zones=(0,), zone_of_host={"a": 0})
    by_number = Declaration(zones=(0, 1))
    with pytest.raises(UsageError, match="zones names 2 nodes of 3"):
        by_number.plan(range(3), zones=by_number.zones_of(["a", "b", "c"]))


def test_declared_rows_are_taken_as_they_are() -> None:
    rows = (
        RouteRow(kind="allreduce", algorithm=TREE, chunk_bytes=4096, up_to_bytes=100),
        RouteRow(kind="allreduce", algorithm=RING, chunk_bytes=8192),
    )
    plan = Declaration(routes=rows, window=8, sockets=2).plan([0, 1], zones=())
    assert [route for route in plan.routes if route.kind == "allreduce"] == [
        Route("allreduce", 100, TREE, 4096, "declared"),
        Route("allreduce", None, RING, 8192, "declared"),
    ]
    assert (plan.window, plan.sockets) == (8, 2)
    assert plan.route("reduce", 1).reason != "declared"


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"algorithms": ["star"]}, "algorithm 'star' is not known"),
    ({"window": 3}, "window 3 must be even"),
    ({"window": 0}, "window 0 must be even"),
    ({"sockets": 9}, "sockets 9 must be from 1 to 8"),
    ({"flight_bytes": 0}, "must be positive"),
    ({"speeds": {"latency_ns": -1}}, "latency_ns -1.0 must be a positive number"),
    ({"routes": [{"kind": "allreduce", "algorithm": "ring", "chunk_bytes": 5}]}, "chunk_bytes 5 must be"),
    ({"routes": [{"kind": "broadcast", "algorithm": "ring", "chunk_bytes": 4096}]}, "cannot be done by 'ring'"),
    ({"routes": [{"kind": "allreduce", "algorithm": "ring", "chunk_bytes": 4096}] * 65}, "at most 64"),
    ({"zons": [0]}, "unknown field `zons`"),
]


@pytest.mark.parametrize(("content", "text"), WRONG)
def test_nonsense_is_refused_when_it_is_read(content: dict[str, Any], text: str) -> None:
    with pytest.raises((UsageError, msgspec.ValidationError), match=text):
        msgspec.convert(content, Declaration)


@settings(max_examples=30)
@given(nodes=st.integers(1, 300), ranks=st.integers(1, 64))
def test_the_default_plan_keeps_the_bounds(nodes: int, ranks: int) -> None:
    plan = default_plan([node for node in range(nodes) for _ in range(ranks)])
    chunk = plan.chunk_bytes
    assert plan.window * chunk <= FLIGHT_BYTES
    assert plan.window * (ranks + 2) * chunk <= SLOT_BYTES or nodes == 1
    assert all(route.algorithm in (TREE, RING) and route.reason for route in plan.routes)


def test_more_nodes_get_more_chunks_in_flight() -> None:
    windows = [default_plan([n for n in range(nodes) for _ in range(8)]).window for nodes in (2, 4, 16, 64, 1250)]
    assert windows == sorted(windows)
    assert (windows[0], windows[-1]) == (4, 32)


def test_a_short_allreduce_between_two_ranks_uses_both_lanes() -> None:
    plan = default_plan([0, 1])
    for nbytes in (32 * KIB, 64 * KIB, 128 * KIB, 256 * KIB, 512 * KIB):
        assert plan.route("allreduce", nbytes).chunk_bytes == nbytes // 2
    assert plan.route("allreduce", 8 * KIB).chunk_bytes > 8 * KIB, "two messages take longer than one"
    assert plan.largest_chunk_bytes == plan.chunk_bytes


@pytest.mark.parametrize("nodes", [[0, 1, 2], [0, 0, 1, 1], [0, 0]])
def test_other_groups_have_one_size_of_chunks(nodes: list[int]) -> None:
    plan = default_plan(nodes)
    assert {route.chunk_bytes for route in plan.routes} == {plan.chunk_bytes}


def joined(plans: JobPlans) -> Callable[[list[int]], list[Any]]:
    """Ranks as threads that join as `Communicator.from_environment` lets them with FF_TUNE=1."""
    from fireflyer.identity.secrets import new_secret
    from fireflyer.runtime.store import LocalStore

    store, secret = LocalStore(), new_secret()

    def start(nodes: list[int]) -> list[Any]:
        def body(outer: Communicator) -> tuple[Plan, int]:
            def join(plan: Plan | None) -> Communicator:
                return Communicator.create(
                    rank=outer.rank,
                    world_size=len(nodes),
                    node=nodes[outer.rank],
                    store=store,
                    secret=secret,
                    plan=plan,
                    planner=plans.plan,
                )

            with tuned(join, plans) as comm:
                array = np.full(1 * MIB, comm.rank + 1.0, np.float32)
                before = comm.stats().operations["allreduce"]
                comm.allreduce(array)
                assert array[0] == sum(range(len(nodes) + 1))
                return comm.plan, before

        return together(nodes, body)

    return start


@pytest.mark.processes
def test_what_was_measured_is_kept_and_a_restart_measures_nothing(tmp_path: Path) -> None:
    plans = declared(tmp_path, Declaration(zones=(0, 1, 1), speeds=Speeds(message_ns=1234.0)))
    start = joined(plans)
    first = start([0, 1, 2])
    assert len({msgspec.json.encode(plan) for plan, _ in first}) == 1
    kept = plans.kept()
    assert kept is not None
    assert kept.measured is not None
    assert kept.plan == first[0][0]
    assert kept.measured.message_ns == 1234.0, "what is not measured was declared"
    assert len(count_crossings(kept.plan.trees, (0, 1, 1)).pairs) == 1
    again = start([0, 1, 2])
    assert [plan for plan, _ in again] == [kept.plan] * 3
    assert plans.kept() == kept
    refused = start([0, 1])
    assert all(isinstance(error, UsageError) and "it was measured for that group" in error.message for error in refused)


def test_a_job_whose_size_may_change_keeps_a_plan_for_each_size(tmp_path: Path) -> None:
    """Also a measured one, which another group may not use otherwise."""
    three, two = (
        JobPlans.of_job(
            RankEnvironment(world_size=size, nodes=size, min_nodes=2, max_nodes=3, run_dir=str(tmp_path)), "w"
        )
        for size in (3, 2)
    )
    measured = KeptPlan(plan=make_plan((0, 1, 2)), measured=Speeds())
    three.keep(measured)
    assert two.plan((0, 1), HOSTS) == default_plan((0, 1))
    assert three.kept() == measured
    assert three.plan((0, 1, 2), ("a", "b", "c")) == measured.plan
    assert sorted(path.name for path in (tmp_path / "collectives").iterdir()) == ["w~2-2.json", "w~3-3.json"]
