"""What a training run takes on a cluster: the parts agree with those that they come from."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from fireflyer.analytics.ettr import daly_young_interval_s, failure_rate_per_s, mttf_s, renewal_ettr
from fireflyer.analytics.reliability.planning import best_ettr, optimal_period_s, requirements
from fireflyer.base.errors import UsageError
from fireflyer.codesign.model import ModelShape, count_parameters, shape_from_config
from fireflyer.codesign.parallel import ParallelPlan, Precision, estimate_step, load_node
from fireflyer.planning import (
    Amount,
    CheckpointPart,
    ClusterAnswer,
    ClusterPlan,
    NetworkFile,
    NodePrice,
    Price,
    PriceList,
    SourcedValue,
    StoragePart,
    TrainingPart,
    plan_cluster,
)
from fireflyer.topology.fabrics import NodeGroup

NODE = load_node("pcie-a100")
PLAN = ParallelPlan(
    pipeline=4, shard=16, zero=1, sequence_tokens=2048, batch_sequences=512, recompute="operators",
    precision=Precision(gradients="fp32"),
)  # fmt: skip
TOKENS = 1e11


@pytest.fixture(scope="module")
def shape() -> ModelShape:
    return shape_from_config({
        "model_type": "llama", "hidden_size": 5120, "intermediate_size": 13824, "num_hidden_layers": 40,
        "num_attention_heads": 40, "vocab_size": 32000, "tie_word_embeddings": False,
    })  # fmt: skip


def network(gbit_per_s: float = 200, **more: Any) -> NetworkFile:
    groups = (NodeGroup(kind="gpu", count=16), NodeGroup(kind="storage", count=4))
    return NetworkFile(name="n", family="two-layer", gbit_per_s=gbit_per_s, radix=8, nodes=groups, **more)


def cluster(**more: Any) -> ClusterPlan:
    settings: dict[str, Any] = {
        "name": "c",
        "network": "n",
        "node": "pcie-a100",
        "training": TrainingPart(plan="p", tokens=TOKENS),
        "checkpoint": CheckpointPart(stall_s=2.0, restart_s=300.0),
        "failures_per_1000_node_days": 6.5,
    }
    return ClusterPlan(**settings | more)


def answer_of(shape: ModelShape, given: ClusterPlan | None = None, **more: Any) -> ClusterAnswer:
    arguments: dict[str, Any] = {"network": network(), "node": NODE, "plan": PLAN, "shape": shape} | more
    return plan_cluster(given or cluster(), **arguments)


def priced(price: float = 1000.0) -> PriceList:
    one: dict[str, Any] = {"price": price, "source": "s", "date": "2024-08"}
    gpu = NodePrice(price=100_000.0, watts=2500.0, gpus=8, gpu_flops=220e12, source="s", date="2024-08")
    return PriceList(
        currency="USD",
        switches={"switch": Price(**one, watts=400.0)},
        cables={"link": Price(**one), "endpoint": Price(**one)},
        nodes={"gpu": gpu, "storage": NodePrice(**one)},
    )


def test_step_failures_and_days_are_those_of_their_own_modules(shape: ModelShape) -> None:
    answer = answer_of(shape)
    assert (answer.gpu_nodes, answer.gpus, answer.job_nodes) == (16, 128, 8)
    assert answer.alone.step_s == estimate_step(PLAN, shape, NODE).step_s
    rate = 1 / mttf_s(8, 0.0065)
    period = daly_young_interval_s(stall_s=2.0, failures_per_s=rate)
    ettr = renewal_ettr(failures_per_s=rate, restart_s=300.0, period_s=period, stall_s=2.0)
    assert answer.failures.ettr == (ettr, ettr)
    assert answer.failures.period_s == pytest.approx((period, period))
    assert answer.days.low == pytest.approx(TOKENS / answer.alone.tokens_per_s / 86400 / ettr)
    assert answer.days.high == pytest.approx(TOKENS / answer.contended.tokens_per_s / 86400 / ettr)
    assert answer.cost is None
    assert answer.suffices


def test_a_faster_network_never_makes_the_run_longer_and_the_smaller_rate_counts(shape: ModelShape) -> None:
    slow, usual, fast = (answer_of(shape, network=network(gbit)) for gbit in (50, 200, 800))
    assert slow.days.high >= usual.days.high >= fast.days.high
    assert (slow.nic_bytes_per_s, fast.nic_bytes_per_s) == (6.25e9, NODE.nic_bytes_per_s)
    assert any("the smaller one counts" in note for note in fast.notes)
    assert fast.ring_share == usual.ring_share == 0.5
    assert fast.contended.step_s == fast.alone.step_s, "half of such a port is as fast as the NIC"
    assert 0 < usual.ring_share <= 1
    assert usual.contended.step_s >= usual.alone.step_s


def test_more_failures_and_a_range_of_them(shape: ModelShape) -> None:
    answer = answer_of(shape, cluster(failures_per_1000_node_days=(0.0, 6.5)))
    assert answer.failures.mttf_s.high == float("inf")
    assert answer.failures.ettr.high == 1.0
    assert answer.days.low == answer.days_without_failures.low
    assert answer.days.high > answer.days_without_failures.high
    never = answer_of(shape, cluster(failures_per_1000_node_days=1e6))
    assert not never.suffices
    assert any("is productive" in note for note in never.notes)


def test_the_optimal_period_and_what_a_goal_needs_are_told_beside_daly_and_young(shape: ModelShape) -> None:
    saves = CheckpointPart(stall_s=120.0, restart_s=1800.0)
    given = cluster(checkpoint=saves, failures_per_1000_node_days=(1.0, 650.0))
    failures = answer_of(shape, given, ettr_goal=0.9).failures
    rate = failure_rate_per_s(8, 0.65)
    assert failures.optimal_period_s.low == optimal_period_s(stall_s=120.0, failures_per_s=rate)
    assert failures.best_ettr.low == best_ettr(failures_per_s=rate, restart_s=1800.0, stall_s=120.0)
    assert failures.best_ettr.low > failures.ettr.low, "Daly and Young's is the first term"
    assert failures.goal == requirements(
        ettr=0.9, nodes=8, failures_per_node_day=0.65, restart_s=1800.0, stall_s=120.0
    ), "at the higher rate"
    assert failures.goal is not None
    assert failures.goal.best < 0.9
    rarely = CheckpointPart(stall_s=2.0, restart_s=300.0, period_s=864_000.0)
    goal = answer_of(shape, cluster(checkpoint=rarely), ettr_goal=0.9).failures.goal
    assert goal is not None
    assert (goal.at_period_s, goal.stall_s, goal.restart_s) == (864_000.0, None, None), "ten days between saves"
    assert goal.nodes is not None
    assert goal.nodes < 8
    assert answer_of(shape).failures.goal is None
    assert answer_of(shape, cluster(failures_per_1000_node_days=0.0), ettr_goal=0.9).failures.goal is None
    with pytest.raises(UsageError, match="ettr_goal is 1"):
        answer_of(shape, ettr_goal=1.0)


def test_storage_must_write_a_checkpoint_before_the_next_one_is_due(shape: ModelShape) -> None:
    size = 14 * count_parameters(shape).total
    enough = answer_of(shape, cluster(storage=StoragePart(write_bytes_per_s=1e9)))
    assert enough.checkpoint is not None
    assert enough.checkpoint.written_s == pytest.approx(size / (4 * 1e9 / 2))
    assert enough.suffices
    assert enough.checkpoint.needed_bytes_per_s == pytest.approx(size / enough.failures.period_s.low)
    saved = CheckpointPart(stall_s=2.0, restart_s=300.0, period_s=60.0)
    late = answer_of(shape, cluster(storage=StoragePart(write_bytes_per_s=1e9), checkpoint=saved))
    assert not late.suffices
    assert late.checkpoint is not None
    assert late.checkpoint.needed_bytes_per_s == pytest.approx(size / 60)
    assert late.checkpoint.needed_bytes_per_s > late.checkpoint.write_bytes_per_s
    assert any("add storage nodes" in note for note in late.notes)
    ports = answer_of(shape, cluster(storage=StoragePart(write_bytes_per_s=1e12)))
    assert ports.checkpoint is not None
    assert ports.checkpoint.write_bytes_per_s == 4 * 25e9 / 2, "a port of 200 Gbit/s is slower than such disks"
    few = msgspec.structs.replace(PLAN, pipeline=1, shard=8, tensor=1)
    one_node = answer_of(shape, cluster(storage=StoragePart(write_bytes_per_s=1e12)), plan=few)
    assert one_node.checkpoint is not None
    assert one_node.checkpoint.write_bytes_per_s == 25e9, "one node gives no more than its port"


def test_a_plan_that_needs_too_much_memory_is_told(shape: ModelShape) -> None:
    plan = msgspec.structs.replace(PLAN, pipeline=1, shard=64)
    answer = answer_of(shape, plan=plan)
    assert not answer.suffices
    assert any("the fullest rank needs" in note for note in answer.notes)


def test_the_run_costs_its_gpu_hours(shape: ModelShape) -> None:
    rent = SourcedValue(value=(1.0, 2.0), source="s", date="2024-08")
    cost = answer_of(shape, cluster(rent_per_gpu_hour=rent), prices=priced()).cost
    assert cost is not None
    listed = msgspec.structs.replace(priced(), rent_per_gpu_hour=rent)
    assert answer_of(shape, prices=listed).cost == cost
    other = SourcedValue(value=9.0, source="s", date="2024-08")
    assert answer_of(shape, cluster(rent_per_gpu_hour=rent), prices=msgspec.structs.replace(listed,
                     rent_per_gpu_hour=other)).cost == cost, "that of the cluster's file counts"  # fmt: skip
    hours = answer_of(shape).days.times(64 * 24)
    assert cost.ownership.per_gpu_hour is not None
    assert cost.node_watts == Amount(16 * 2500.0, 16 * 2500.0)
    assert cost.network_watts.low % 400 == 0 < cost.network_watts.low
    assert cost.ownership.mean_watts == cost.network_watts.plus(cost.node_watts)
    assert cost.run == cost.ownership.per_gpu_hour.times(hours)
    assert cost.rented_run == pytest.approx((hours.low, 2 * hours.high))
    assert cost.million_tokens.low == pytest.approx(cost.run.low / 1e5)
    dearer = answer_of(shape, prices=priced(2000.0)).cost
    assert dearer is not None
    assert dearer.network.low == 2 * cost.network.low


def test_what_cannot_be_planned_is_one_line(shape: ModelShape) -> None:
    def refused(**arguments: Any) -> str:
        with pytest.raises(UsageError) as error:
            answer_of(shape, **arguments)
        assert "\n" not in str(error.value)
        return str(error.value)

    large = msgspec.structs.replace(PLAN, shard=128, batch_sequences=4096)
    assert "needs 64 nodes of 8 GPUs; n has 16" in refused(plan=large)
    assert "has nodes of gpu, storage" in refused(given=cluster(gpu_kind="gpus"))
    odd = msgspec.structs.replace(PLAN, batch_sequences=513)
    assert "the plan cannot be run: " in refused(plan=odd)
    for more, words in (
        ({"training": TrainingPart(plan="p", tokens=0.0)}, "training.tokens is 0.0"),
        ({"failures_per_1000_node_days": -1.0}, "failures_per_1000_node_days is -1.0"),
        ({"storage": StoragePart(write_bytes_per_s=1.0, replicas=0)}, "storage.replicas is 0"),
    ):
        with pytest.raises(UsageError, match=words):
            cluster(**more)
