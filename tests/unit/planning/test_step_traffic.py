"""A step that is simulated transfer by transfer: what it takes beside the closed form, and beside a checkpoint."""

from __future__ import annotations

from collections import Counter

import msgspec
import pytest
from tests.unit.planning.test_cluster import NODE, PLAN, cluster, network

from fireflyer.base.units import GIB, MIB
from fireflyer.codesign.model import ModelShape, shape_from_config
from fireflyer.codesign.parallel import NodeModel, ParallelPlan, estimate_step, load_node
from fireflyer.codesign.parallel.traffic import stage_traffic
from fireflyer.netsim import Settings
from fireflyer.planning import StoragePart, plan_cluster, with_simulation
from fireflyer.planning.step_traffic import SimulatedStep, checkpoint_load, simulate_step, step_traffic, transfers_of
from fireflyer.planning.traffic import StorageLoad
from fireflyer.topology.traffic import check_transfers

SMALL = msgspec.structs.replace(PLAN, batch_sequences=128)
"""8 micro-batches in 16 pipelines of 4 stages on 8 nodes."""
NODES = range(8)


@pytest.fixture(scope="module")
def shape() -> ModelShape:
    return shape_from_config({
        "model_type": "llama", "hidden_size": 5120, "intermediate_size": 13824, "num_hidden_layers": 40,
        "num_attention_heads": 40, "vocab_size": 32000, "tie_word_embeddings": False,
    })  # fmt: skip


def simulated(
    shape: ModelShape,
    plan: ParallelPlan = SMALL,
    node: NodeModel = NODE,
    load: StorageLoad | None = None,
    gbit_per_s: float = 200,
) -> SimulatedStep:
    return simulate_step(network(gbit_per_s).build(), NODES, node, plan, shape, Settings(routing="adaptive"), load)


def test_transfers_carry_the_bytes_of_the_closed_form(shape: ModelShape) -> None:
    transfers, gates = step_traffic(NODES, NODE, SMALL, shape)
    check_transfers(transfers, 8)
    assert len(transfers) == pytest.approx(transfers_of(SMALL, NODE), rel=0.1)
    assert len(gates) == len(NODES)
    sent = Counter[int]()
    for one in transfers:
        sent[one.source // 2] += one.nbytes if one.source != one.target else 0
    for stage in range(4):
        by_purpose = stage_traffic(SMALL, shape, NODE, stage).by_purpose
        sums = by_purpose["gradients"]["nic"] + by_purpose["parameters"]["nic"]
        of_node = by_purpose["pipeline"]["nic"] + sums / NODE.allreduce_efficiency
        assert sent[stage] == pytest.approx(2 * of_node, rel=0.01), stage
    ways = {(one.source, one.target, one.connection) for one in transfers if one.source != one.target}
    pipelines = {way for way in ways if way[0] // 2 != way[1] // 2}
    assert len(pipelines) == 16 * 3 * 2, "each pipeline has its own, both ways over each boundary"


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"pipeline": 1, "shard": 64},
        {"schedule": "zbv", "batch_sequences": 256},
        {"schedule": "interleaved", "chunks": 2},
        {"pipeline": 8, "shard": 8},
    ],
)
def test_a_step_takes_about_as_long_as_the_closed_form_says(shape: ModelShape, more: dict[str, object]) -> None:
    """What sums add most to, without a pipeline, takes longer than there: the busiest node of a double tree of n nodes
    sends n/(n - 1) times the mean, and trees fill and drain."""
    plan = msgspec.structs.replace(SMALL, **more)
    closed = estimate_step(plan, shape, NODE).step_s
    assert 0.95 * closed < simulated(shape, plan).step_s < (1.35 if plan.pipeline == 1 else 1.05) * closed


def test_a_slow_network_makes_the_step_longer(shape: ModelShape) -> None:
    slow, usual = (simulated(shape, gbit_per_s=gbit).step_s for gbit in (10, 200))
    assert slow > 1.2 * usual
    nics = msgspec.structs.replace(NODE, nic_bytes_per_s=1.25e9)
    assert simulated(shape, node=nics).step_s == pytest.approx(slow, rel=0.05), "ports, or NICs of the same rate"


def test_a_checkpoint_shares_the_network_with_the_step(shape: ModelShape) -> None:
    load = StorageLoad(access="write", nbytes=8 * GIB, replicas=2, chunk_bytes=32 * MIB)
    found = simulated(shape, load=load, gbit_per_s=50)
    assert found.beside_checkpoint_s is not None
    assert found.checkpoint_s is not None
    assert found.beside_checkpoint_s > 1.005 * found.step_s
    assert found.checkpoint_s >= 8 * 8 * GIB * 2 / (4 * 6.25e9), "the links of four storage nodes carry two replicas"


def test_chunks_of_a_checkpoint_are_powers_of_two_and_not_too_many() -> None:
    small, large = checkpoint_load(10.0, 4, 2), checkpoint_load(1e12, 16, 3)
    assert (small.nbytes, small.chunk_bytes) == (2, MIB)
    assert large.chunk_bytes.bit_count() == 1
    assert 32 <= large.nbytes / large.chunk_bytes <= 64


def test_the_answer_has_both_steps_up_to_a_limit(shape: ModelShape) -> None:
    given = cluster(storage=StoragePart(write_bytes_per_s=1e9))
    arguments = {"network": network(), "node": NODE, "plan": SMALL, "shape": shape}
    answer = plan_cluster(given, **arguments)  # type: ignore[arg-type]
    assert answer.simulated is None
    found = with_simulation(answer, given, **arguments, most_transfers=100_000).simulated  # type: ignore[arg-type]
    assert found is not None
    assert found.beside_checkpoint_s is not None
    assert 0.85 * answer.alone.step_s < found.step_s <= found.beside_checkpoint_s * (1 + 1e-9)
    refused = with_simulation(answer, given, **arguments, most_transfers=100)  # type: ignore[arg-type]
    assert refused.simulated is None
    assert refused.notes[-1] == "a step has 2,304 transfers, more than 100: it is not simulated"
    many = msgspec.structs.replace(given, storage=StoragePart(write_bytes_per_s=1e9, replicas=5))
    bare = with_simulation(answer, many, **arguments, most_transfers=100_000)  # type: ignore[arg-type]
    assert bare.simulated is not None
    assert bare.simulated.beside_checkpoint_s is None
    assert bare.notes[-1].startswith("traffic to storage is simulated for 5 to 256 storage nodes")


def test_sms_that_move_tokens_of_experts_slow_computation(shape: ModelShape) -> None:
    """20 of the 132 of an H800 (DeepSeek-V3 paper, 4.4); a plan without experts on other GPUs lends none."""
    h800 = load_node("h800")
    assert (h800.sms, h800.lent_sms) == (132, 20)
    dense = estimate_step(msgspec.structs.replace(PLAN, shard=16), shape, h800)
    assert dense.computing_share == 1
    mixture = shape_from_config({
        "model_type": "mixtral", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 32000, "tie_word_embeddings": False,
        "num_local_experts": 8, "num_experts_per_tok": 2,
    })  # fmt: skip
    plan = msgspec.structs.replace(PLAN, expert=8)
    taxed, free = (estimate_step(plan, mixture, msgspec.structs.replace(h800, lent_sms=sms)) for sms in (20, 0))
    assert taxed.computing_share == pytest.approx(112 / 132)
    assert taxed.parts.compute == pytest.approx(free.parts.compute * 132 / 112)
