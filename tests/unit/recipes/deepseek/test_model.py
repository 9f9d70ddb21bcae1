"""The model is causal, has the parameters that `codesign` counts, its parts compose to its forward, and it learns."""

from __future__ import annotations

import pytest
import torch
from msgspec.structs import replace

from fireflyer.base.errors import UsageError
from fireflyer.codesign.model import Attention, Experts
from fireflyer.recipes.deepseek import (
    PRESETS,
    Arrived,
    DeepseekConfig,
    DeepseekModel,
    LocalDispatch,
    Ready,
    Routing,
    recorded_routing,
    replayed_routing,
)
from fireflyer.recipes.deepseek.block import Block, MixtureOfExperts
from fireflyer.recipes.deepseek.initialisation import initialise

TINY = PRESETS["tiny"]
VOCABULARY = TINY.shape.vocabulary


def with_shape(**changes: object) -> DeepseekConfig:
    return replace(TINY, shape=replace(TINY.shape, **changes))


def tokens(batch: int = 2, length: int = 12, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    "config",
    [
        TINY,
        PRESETS["small"],
        with_shape(tied_embeddings=True, mtp_layers=2),
        with_shape(attention=replace(TINY.shape.attention, query_rank=None, bias=True)),
        with_shape(experts=None),
    ],
    ids=["tiny", "small", "tied", "biases", "dense"],
)
def test_the_model_has_the_parameters_that_codesign_counts(config: DeepseekConfig) -> None:
    with torch.device("meta"):
        model = DeepseekModel(config)
    count = config.parameters
    assert sum(one.numel() for one in model.parameters()) == count.total + count.mtp
    assert sum(one.numel() for one in model.mtp.parameters()) == count.mtp


def test_the_small_model_has_1_to_3_million_parameters() -> None:
    assert 1_000_000 <= PRESETS["small"].parameters.total <= 3_000_000


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")  # of torch, about a slower norm
def test_under_autocast_gates_compute_in_fp32_and_experts_in_bf16() -> None:
    model, dtypes = DeepseekModel(TINY), set()

    def see_gate(gate: torch.nn.Module, given: tuple[torch.Tensor, ...], routing: Routing) -> None:
        with torch.autocast("cpu", enabled=False):
            assert torch.equal(routing.weights, gate.forward(*given).weights)
        dtypes.add(("gate", routing.weights.dtype))

    def see_experts(_: torch.nn.Module, __: tuple[torch.Tensor, ...], rows: torch.Tensor) -> None:
        dtypes.add(("experts", rows.dtype))

    layers = [module for module in model.modules() if isinstance(module, MixtureOfExperts)]
    for layer in layers:
        layer.gate.register_forward_hook(see_gate)
        layer.experts.register_forward_hook(see_experts)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model(tokens()[:, :-1], tokens()[:, 1:])
    loss.backward()
    assert dtypes == {("gate", torch.float32), ("experts", torch.bfloat16)}
    assert {one.grad.dtype for layer in layers for one in layer.parameters() if one.grad is not None} == {torch.float32}


def test_the_loss_of_a_model_in_bf16_is_computed_in_fp32() -> None:
    model, given = DeepseekModel(TINY).bfloat16(), tokens()
    loss = model(given, given)
    assert loss.dtype == torch.float32
    logits = model.head(model.hidden(given)).float()
    main = torch.nn.functional.cross_entropy(logits.flatten(0, 1), given.flatten(), reduction="sum")
    assert torch.equal(model.losses(given, given).main, main)
    assert DeepseekModel(TINY).double()(given, given).dtype == torch.float64


def test_no_token_sees_a_later_one() -> None:
    model, given = DeepseekModel(TINY).eval(), tokens()
    changed = given.clone()
    changed[:, 7:] = (changed[:, 7:] + 20) % VOCABULARY
    before, after = model(given), model(changed)
    assert torch.allclose(before[:, :7], after[:, :7], atol=1e-6)
    assert not torch.allclose(before[:, 7:], after[:, 7:], atol=1e-3)


def test_the_parts_of_a_block_are_its_forward() -> None:
    model = DeepseekModel(TINY).double()
    hidden = torch.randn(2, 5, TINY.shape.hidden, dtype=torch.float64)
    rotation = model.rotation(0, 5)
    for block in model.layers:
        assert isinstance(block, Block)
        gated = block.gate(block.attention(hidden, rotation))
        arrived = block.dispatch(gated).wait()
        parts = block.combine(gated, block.experts(arrived), arrived).wait()
        assert torch.equal(parts, block(hidden, rotation))
        if isinstance(block.mlp, MixtureOfExperts):
            attended = block.attention(hidden, rotation)
            normed = block.post_attention_layernorm(attended)
            assert block.mlp.shared_experts is not None
            routed = parts - attended - block.mlp.shared_experts(normed)
            assert routed.norm() > 0


class TwoHalves:
    """Stands for two ranks with half of the experts each, in one process."""

    def __init__(self, blocks: list[Block]) -> None:
        self.blocks, self.local = blocks, LocalDispatch(8)

    def dispatch(self, tokens: torch.Tensor, routing: Routing) -> Ready[Arrived]:
        return self.local.dispatch(tokens, routing)

    def combine(self, rows: torch.Tensor, arrived: Arrived) -> Ready[torch.Tensor]:
        own = int(arrived.counts[:4].sum())
        parts = []
        for block, piece, counts in zip(
            self.blocks, (arrived.rows[:own], arrived.rows[own:]), arrived.counts.view(2, 4), strict=True
        ):
            assert isinstance(block.mlp, MixtureOfExperts)
            parts.append(block.mlp.experts(piece, counts))
        return self.local.combine(torch.cat(parts), arrived)


def test_experts_that_are_divided_begin_with_the_weights_that_one_process_draws() -> None:
    whole = DeepseekModel(TINY)
    dispatcher = LocalDispatch(8)  # not called: only weights are looked at
    for numbers in (range(4), range(4, 8)):
        part = DeepseekModel(TINY, experts=numbers, dispatcher=dispatcher)
        for (name, own), parameter in zip(part.named_parameters(), whole.parameters(), strict=True):
            wanted = parameter[numbers.start : numbers.stop] if ".experts." in name else parameter
            assert torch.equal(own, wanted), name


def test_a_dispatcher_between_gate_and_experts_serves_divided_experts() -> None:
    whole = DeepseekModel(TINY).double()
    halves = [Block(TINY, 1, experts=numbers, dispatcher=LocalDispatch(8)) for numbers in (range(4), range(4, 8))]
    for half in halves:
        initialise(half, TINY, "layers.1.")
        half.double()
    block, one = whole.layers[1], halves[0]
    assert isinstance(block, Block)
    assert isinstance(one.mlp, MixtureOfExperts)
    one.mlp.dispatcher = TwoHalves(halves)
    hidden = torch.randn(2, 5, TINY.shape.hidden, dtype=torch.float64)
    rotation = whole.rotation(0, 5)
    gated = one.gate(one.attention(hidden, rotation))
    arrived = one.dispatch(gated).wait()
    found = one.combine(gated, torch.empty(0, TINY.shape.hidden), arrived).wait()
    assert torch.allclose(found, block(hidden, rotation), atol=1e-12)


def test_a_part_of_the_experts_needs_a_dispatcher() -> None:
    with pytest.raises(UsageError, match="experts 0 to 3 of 8 need a dispatcher"):
        DeepseekModel(TINY, experts=range(4))


def test_initial_weights_depend_on_seed_and_name_alone() -> None:
    model, again = DeepseekModel(TINY), DeepseekModel(TINY)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))
    block = Block(TINY, 1)
    initialise(block, TINY, "layers.1.")
    for name, parameter in block.named_parameters():
        assert torch.equal(parameter, model.get_parameter(f"layers.1.{name}")), name
    experts = block.mlp.experts
    assert isinstance(experts, torch.nn.Module)
    drawn = [matrix for parameter in experts.parameters() for matrix in parameter.detach()]
    first = {round(float(matrix.flatten()[0]), 9) for matrix in drawn}
    assert len(first) == len(drawn)
    other = DeepseekModel(replace(TINY, seed=1))
    assert not torch.equal(model.embed_tokens.weight, other.embed_tokens.weight)
    assert torch.allclose(torch.cat([m.flatten() for m in drawn]).std(), torch.tensor(TINY.deviation), rtol=0.1)


def test_each_prediction_module_predicts_one_token_further() -> None:
    model = DeepseekModel(with_shape(mtp_layers=2)).double()
    sequence = tokens(length=13)
    losses = model.losses(sequence[:, :-1], sequence[:, 1:])
    hidden = model.hidden(sequence[:, :-1])
    for depth, module in enumerate(model.mtp, start=1):
        embedded = model.embed_tokens(sequence[:, depth:-1])
        hidden = module(hidden[:, : 12 - depth], embedded, model.rotation(0, 12 - depth))
        logits = model.head(hidden)
        wanted = -logits.log_softmax(-1).gather(-1, sequence[:, depth + 1 :, None]).sum()
        assert losses.mtp[depth - 1].item() == pytest.approx(wanted.item(), rel=1e-12)
    total = losses.main + 0.3 / 2 * (losses.mtp[0] + losses.mtp[1])
    assert model(sequence[:, :-1], sequence[:, 1:]).item() == pytest.approx(total.item(), rel=1e-12)


def test_a_prediction_module_sees_no_token_that_it_predicts() -> None:
    model, sequence = DeepseekModel(TINY).double(), tokens(length=13)
    changed = sequence.clone()
    changed[:, 9:] = (changed[:, 9:] + 1) % VOCABULARY

    def seen(sequence: torch.Tensor) -> torch.Tensor:
        hidden = model.hidden(sequence[:, :11])
        result: torch.Tensor = model.mtp[0](hidden, model.embed_tokens(sequence[:, 1:12]), model.rotation(0, 11))
        return result

    before, after = seen(sequence), seen(changed)  # position i reads tokens up to i + 1
    assert torch.allclose(before[:, :8], after[:, :8], atol=1e-12)
    assert not torch.allclose(before[:, 8], after[:, 8], atol=1e-6)


def test_the_order_of_concatenation_is_a_matter_of_the_projection() -> None:
    first, second = DeepseekModel(TINY), DeepseekModel(replace(TINY, mtp_hidden_first=True))
    sequence = tokens()
    ours, theirs = (model.losses(sequence[:, :-1], sequence[:, 1:]).mtp[0].item() for model in (first, second))
    assert ours != theirs
    projection = second.get_parameter("mtp.0.eh_proj.weight")
    with torch.no_grad():
        projection.copy_(projection.roll(TINY.shape.hidden, dims=1))
    swapped = second.losses(sequence[:, :-1], sequence[:, 1:]).mtp[0].item()
    assert swapped == pytest.approx(ours, rel=1e-6)


def test_a_sequence_too_short_for_the_prediction_modules_is_refused() -> None:
    model = DeepseekModel(with_shape(mtp_layers=2))
    model.losses(tokens(length=3), tokens(length=3))
    with pytest.raises(
        UsageError, match=r"a sequence of 2 tokens is too short for 2 prediction modules.*give 3 or more"
    ):
        model(tokens(length=2), tokens(length=2))
    with pytest.raises(UsageError, match="65 tokens; this model was made for at most context=64"):
        model(tokens(length=65))


def test_micro_batches_add_up_to_the_counts_and_gradients_of_the_batch() -> None:
    whole, parts = DeepseekModel(TINY).double(), DeepseekModel(TINY).double()
    sequence = tokens(batch=4, length=9)
    whole(sequence[:, :-1], sequence[:, 1:]).backward()
    for piece in sequence.unsqueeze(1):
        parts(piece[:, :-1], piece[:, 1:]).backward()
    assert torch.equal(whole.expert_counts(), parts.expert_counts())
    assert whole.expert_counts().shape == (2, 8)
    for (name, one), other in zip(whole.named_parameters(), parts.parameters(), strict=True):
        assert one.grad is not None, name
        assert other.grad is not None, name
        assert (one.grad - other.grad).norm() <= 1e-12 * one.grad.norm(), name
    whole.move_biases(whole.expert_counts() + parts.expert_counts(), 0.5)
    biases = [gate.e_score_correction_bias for _, gate in whole.gates()]
    assert all(set(bias.abs().tolist()) <= {0.0, 0.5} for bias in biases)
    assert not whole.expert_counts().any()


def test_routing_of_one_run_is_taken_again_in_another() -> None:
    model, other = DeepseekModel(TINY).double(), DeepseekModel(replace(TINY, seed=1)).double()
    sequence = tokens(length=9)
    with recorded_routing(model) as first:
        model(sequence[:, :-1], sequence[:, 1:])
    with recorded_routing(other) as own:
        other(sequence[:, :-1], sequence[:, 1:])
    with recorded_routing(other) as taken, replayed_routing(other, first):
        other(sequence[:, :-1], sequence[:, 1:])
    assert list(first) == list(taken) == ["layers.1.mlp.gate", "mtp.0.block.mlp.gate"]
    for name, (indices,) in first.items():
        assert torch.equal(taken[name][0], indices)
        assert not torch.equal(own[name][0], indices)
    with pytest.raises(UsageError, match="no routing is recorded for this forward"), replayed_routing(other, {}):
        other(sequence)
    with pytest.raises(UsageError, match="1 recorded forwards were not replayed"), replayed_routing(other, first):
        pass
    other(sequence)  # the hooks are gone


def test_it_learns_one_sentence_by_heart() -> None:
    model = DeepseekModel(TINY)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    sentence = torch.arange(13).reshape(1, 13) * 3
    seen = []
    for _ in range(30):
        losses = model.losses(sentence[:, :-1], sentence[:, 1:])
        (losses.total() / 12).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        model.move_biases()
        seen.append((losses.main.item() / 12, losses.mtp[0].item() / 11))
    assert min(seen[0]) > 3
    assert max(seen[-1]) < 0.5


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "deepseek_v2"}, "does not have model_type 'deepseek_v2'"),
        ({"layer_norm": True}, "does not have LayerNorm"),
        ({"attention": replace(TINY.shape.attention, rope_dim=7)}, "7 values of a key are rotated"),
        (
            {"attention": Attention(heads=2, kv_heads=1, head_dim=8)},
            "does not have experts or prediction modules beside",
        ),
        ({"experts": Experts(routed=8, per_token=3, feed_forward=4, groups=4)}, "but only 2 are in its groups"),
        (
            {"experts": Experts(routed=8, per_token=1, feed_forward=4, groups=4, groups_per_token=5)},
            "from 5 of 4 groups",
        ),
    ],
)
def test_what_this_model_is_not_is_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        with_shape(**changes)
