"""FP8 linear layers: what is replaced, what is computed, what is counted."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from tests.support.fp8_oracle import oracle_product, oracle_quantize
from tests.support.fp8_training import held_out_loss
from torch import nn
from torch.distributed.fsdp import fully_shard

from fireflyer.base.errors import UsageError
from fireflyer.collectives import kernels
from fireflyer.recipes.deepseek import PRESETS as DEEPSEEK
from fireflyer.recipes.deepseek import DeepseekModel
from fireflyer.recipes.deepseek.experts import RoutedExperts
from fireflyer.recipes.gpt import PRESETS, GPTModel
from fireflyer.training.fp8 import (
    DEFAULT_KEEP,
    TILE,
    Fp8Config,
    Fp8Linear,
    convert,
    dequantize,
    product,
    quantize,
    report,
    reset_counts,
)

TINY = DEEPSEEK["tiny"]


def matrix(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("accumulation", ["fp32", "fp22"])
@pytest.mark.parametrize("scales", ["fp32", "ue8m0"])
def test_the_three_products_are_those_of_the_oracle_to_the_bit(scales: str, accumulation: str) -> None:
    """140 inputs, 133 outputs and 131 tokens: each dimension that is contracted ends within a tile."""
    config = Fp8Config(scales=scales, accumulation=accumulation)  # type: ignore[arg-type]
    layer = Fp8Linear(140, 133, bias=False, config=config)
    with torch.no_grad():
        layer.weight.copy_(matrix(133, 140))
    some = slice(0, 133, 19)  # the oracle takes a while for each element
    rows = matrix(131, 140, seed=1).requires_grad_()
    output = layer(rows)
    gradient = matrix(131, 133, seed=2)
    output.backward(gradient)
    assert rows.grad is not None
    assert layer.weight.grad is not None
    x, w, dy = (one.detach().numpy() for one in (rows, layer.weight, gradient))
    w_blocks, w_scales = oracle_quantize(w, TILE, scales)
    turned_codes, turned_scales = oracle_quantize(w.T, TILE, scales)
    for result, left, right in (
        (output.detach()[some, some], oracle_quantize(x[some], 1, scales), (w_blocks[some], w_scales[some])),
        (rows.grad[some, some], oracle_quantize(dy[some], 1, scales), (turned_codes[some], turned_scales[some])),
        (layer.weight.grad[some, some], oracle_quantize(dy.T[some], 1, scales), oracle_quantize(x.T[some], 1, scales)),
    ):
        assert np.array_equal(result.numpy(), oracle_product(left, right, accumulation))


def test_tiles_of_one_row_are_those_of_the_collectives() -> None:
    values = matrix(5, 3 * TILE) * torch.logspace(-40, 30, 5)[:, None]
    values[1, 7], values[2] = torch.inf, 0
    codes, scales = np.zeros(values.numel(), np.uint8), np.zeros(15, np.float32)
    kernels.quantize_fp8_blocks(codes, scales, values.numpy().reshape(-1), TILE)
    ours = quantize(values, 1)
    finite = ours.scales.isfinite().flatten()
    assert finite.tolist().count(False) == 1
    assert np.array_equal(ours.scales.flatten()[finite].numpy(), scales[finite.numpy()])
    blocks = ours.codes.view(torch.uint8).view(15, TILE)[finite].numpy()
    assert np.array_equal(blocks, codes.reshape(15, TILE)[finite.numpy()])


def test_blocks_of_the_transposed_weight_are_the_same_blocks() -> None:
    weight = matrix(200, 300)
    straight, turned = quantize(weight, TILE), quantize(weight.T, TILE)
    assert torch.equal(straight.scales.T, turned.scales)
    assert torch.equal(dequantize(straight, 300).T, dequantize(turned, 200))


def test_scales_that_are_powers_of_two_are_rounded_up() -> None:
    """1.4 * 448 has the scale 2; the nearest power, 1, would cut the value to 448."""
    values = torch.zeros(3, TILE)
    values[:, 0] = torch.tensor([1.4, 1.0, 2.0]) * 448
    quantized = quantize(values, 1, Fp8Config(scales="ue8m0"))
    assert quantized.scales.flatten().tolist() == [2.0, 1.0, 2.0]
    assert torch.equal(quantized.scales.log2(), quantized.scales.log2().round())
    assert quantized.counts[2] == 0
    assert values[0, 0].to(torch.float8_e4m3fn).float() == 448, "the cast says nothing of it"


def test_accumulation_in_fp22_loses_what_is_below_13_bits() -> None:
    """448 * 448 has the exponent 17: of a product in its group, or of another group, what is below 2**4 is lost."""
    codes = torch.zeros(2, TILE)
    codes[:, 0] = 448.0
    codes[0, 1], codes[1, 40] = 2.0**-9, 2.0**-5  # 0.875 and 14 after the product with 448
    full = torch.full((1, TILE), 448.0)
    left, right = quantize(codes, 1), quantize(full, 1)
    assert product(left, right, "fp32").flatten().tolist() == [448 * 448 + 0.875, 448 * 448 + 14]
    assert product(left, right, "fp22").flatten().tolist() == [448 * 448, 448 * 448]


def test_sums_in_fp22_are_promoted_every_128() -> None:
    """The same 14 in the next tile is kept: float32 has it."""
    codes = torch.zeros(1, 2 * TILE)
    codes[0, 0], codes[0, TILE] = 448.0, 448.0 / 2**14
    left, right = quantize(codes, 1, Fp8Config(granularity="tensor")), quantize(torch.full((1, 2 * TILE), 448.0), 1)
    assert left.codes.float()[0, TILE] == 2.0**-9 * 14
    assert product(left, right, "fp22").item() == 448 * 448 + 12.25


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_spreads_to_its_rows_and_is_counted(value: float) -> None:
    layer = nn.Linear(200, 16)
    model = nn.Sequential(layer)
    convert(model)
    rows = matrix(4, 200)
    rows[2, 150] = value
    output = model(rows)
    assert output.isnan().all(dim=1).tolist() == [False, False, True, False]
    assert [row.nonfinite for row in report(model)] == [1, 0]
    output.sum().backward()
    of_weight = layer.weight.grad
    assert of_weight is not None
    assert of_weight.isnan().all(dim=0).nonzero().flatten().tolist() == [150]
    assert sum(row.nonfinite for row in report(model) if row.operand == "input_of_wgrad") == 1


def test_underflow_is_counted_and_rows_of_zeros_are_exact() -> None:
    model = nn.Sequential(nn.Linear(TILE, 8, bias=False))
    convert(model)
    rows = torch.ones(3, TILE)
    rows[0, :5] = 1e-7
    rows[1] = 0
    output = model(rows)
    assert (output[1] == 0).all()
    (inputs, weights) = report(model)
    assert (inputs.layer, inputs.operand, inputs.elements, inputs.underflowed) == ("0", "input", 3 * TILE, 5)
    assert (inputs.saturated, weights.operand, weights.elements) == (0, "weight", 8 * TILE)
    assert "underflow 5 (1.30%)" in str(inputs)
    reset_counts(model)
    assert report(model) == []


def test_a_scale_that_is_too_small_is_counted_as_overflow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fireflyer.training.fp8.tiles._LARGEST", 900.0)
    assert quantize(torch.full((1, TILE), 3.0), 1).counts.tolist() == [TILE, 0, TILE, 0]


def test_an_input_without_tokens_has_gradients_of_zero() -> None:
    layer = Fp8Linear(10, 7)
    output = layer(torch.zeros(2, 0, 10))
    assert output.shape == (2, 0, 7)
    output.sum().backward()
    assert layer.weight.grad is not None
    assert (layer.weight.grad == 0).all()


def test_convert_keeps_embedding_head_gate_and_norms() -> None:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.RMSNorm(8)
            self.attention = nn.MultiheadAttention(8, 2)
            self.gate_proj = nn.Linear(8, 8)
            self.gate = nn.Linear(8, 4)
            self.output = nn.Linear(8, 8)

    model = nn.ModuleDict({"tokens": nn.Embedding(9, 8), "layers": nn.ModuleList([Layer()]), "tied": nn.Linear(8, 9)})
    model["tied"].weight = model["tokens"].weight
    model["lm_head"] = nn.Linear(8, 9)
    result = convert(model)
    assert result.converted == ("layers.0.gate_proj", "layers.0.output")
    assert dict(result.kept) == {
        "layers.0.attention.out_proj": "is a NonDynamicallyQuantizableLinear, not exactly an nn.Linear",
        "layers.0.gate": "matches '*.gate'",
        "tied": "shares its weight with 'tokens'",
        "lm_head": "matches 'lm_head'",
    }
    assert {type(module) for name, module in model.named_modules() if name in dict(result.kept)} <= {
        nn.Linear,
        nn.modules.linear.NonDynamicallyQuantizableLinear,
    }


def test_convert_leaves_parameters_and_checkpoints_as_they_are() -> None:
    model = GPTModel(PRESETS["tiny"])
    before = dict(model.named_parameters())
    state = copy.deepcopy(model.state_dict())
    assert len(convert(model).converted) == 8
    after = dict(model.named_parameters())
    assert list(before) == list(after)
    assert all(before[name] is after[name] for name in before)
    assert [(name, value.dtype) for name, value in model.state_dict().items()] == [
        (name, value.dtype) for name, value in state.items()
    ]
    model(torch.zeros(1, 4, dtype=torch.long)).sum().backward()
    GPTModel(PRESETS["tiny"]).load_state_dict(model.state_dict())
    copy.deepcopy(model)


def test_experts_compute_in_fp8_each_as_a_linear_layer() -> None:
    counts = torch.tensor([3, 0, 130])
    experts = RoutedExperts(140, 8, range(3))
    model = nn.ModuleDict({"experts": experts})
    assert convert(model).converted == ("experts",)
    alone = [Fp8Linear(140, 8, bias=False) for _ in range(3)]
    with torch.no_grad():
        for number, layer in enumerate(alone):
            layer.weight.copy_(matrix(8, 140, seed=number))
            experts.gate_proj[number] = layer.weight
    rows = matrix(133, 140, seed=5).requires_grad_()
    output = experts.grouped_linear(rows, experts.gate_proj, counts)
    parts = [layer(part) for layer, part in zip(alone, torch.split(rows, counts.tolist()), strict=True)]
    assert torch.equal(output, torch.cat(parts))
    output.square().sum().backward()
    torch.cat(parts).square().sum().backward()  # type: ignore[no-untyped-call]
    assert experts.gate_proj.grad is not None
    assert torch.equal(experts.gate_proj.grad, torch.stack([layer.weight.grad for layer in alone]))  # type: ignore[misc]
    assert {(one.layer, one.operand) for one in report(model)} >= {("experts.grouped_linear", "gradient")}


def test_all_matrices_of_a_model_with_experts_are_converted_but_embedding_head_and_gates() -> None:
    model = DeepseekModel(TINY)
    result = convert(model)
    assert {name.rpartition(".")[2] for name, _ in result.kept} == {"lm_head"}
    assert result.other == ()
    high = {name for name, one in model.named_parameters() if one.dim() > 1}
    for name in result.converted:
        high -= {one for one in high if one.startswith(f"{name}.")}
    assert {one.split(".")[-2] for one in high} == {"embed_tokens", "lm_head", "gate"}


def test_matrices_whose_use_is_not_known_are_named() -> None:
    model = nn.ModuleDict({"known": nn.Linear(4, 4), "attention": nn.MultiheadAttention(4, 2)})
    assert convert(model).other == ("attention.in_proj_weight",)


def test_more_layers_are_kept_by_patterns_and_a_misspelt_one_is_refused() -> None:
    model = GPTModel(PRESETS["tiny"])
    with pytest.raises(UsageError, match=r"'block\.0\.\*' matches no module"):
        convert(model, keep=(*DEFAULT_KEEP, "block.0.*"))
    result = convert(model, keep=(*DEFAULT_KEEP, "blocks.0"))
    assert all(name.startswith("blocks.1.") for name in result.converted)
    assert len(result.kept) == 4
    with pytest.raises(UsageError, match="no linear layer to convert"):
        convert(nn.Sequential(nn.ReLU()))


def test_autocast_and_bias_are_as_of_a_linear_layer() -> None:
    plain = nn.Linear(TILE, 6)
    layer = copy.deepcopy(plain)
    convert(nn.Sequential(layer))
    rows = matrix(5, TILE)
    with torch.autocast("cpu", torch.bfloat16):
        expected, found = plain(rows), layer(rows)
    assert found.dtype == expected.dtype == torch.bfloat16
    assert torch.allclose(found.float(), expected.float(), atol=0.15)
    for one in (expected, found):
        one.float().sum().backward()
    assert plain.bias.grad is not None
    assert layer.bias.grad is not None
    assert layer.weight.grad is not None
    assert torch.equal(plain.bias.grad, layer.bias.grad)
    assert layer.weight.grad.dtype == torch.float32


def test_what_cannot_be_computed_is_refused() -> None:
    with pytest.raises(UsageError, match="float64"):
        Fp8Linear(4, 4).double()(torch.zeros(1, 4, dtype=torch.float64))
    with pytest.raises(UsageError, match="on the CPU only"):
        Fp8Linear(4, 4).to("meta")(torch.zeros(1, 4, device="meta"))
    with pytest.raises(UsageError, match="1x128 or 128x128"):
        quantize(torch.zeros(4, 4), 3)
    with pytest.raises(UsageError, match="contract 128 and 256"):
        product(quantize(torch.zeros(4, 4), 1), quantize(torch.zeros(4, 140), 1))


def test_fsdp_shards_an_fp8_model_and_gives_the_same_gradients(single_rank_group: None) -> None:
    tokens = torch.arange(32).view(2, 16)
    plain = GPTModel(PRESETS["tiny"])
    convert(plain)
    sharded = copy.deepcopy(plain)
    for block in sharded.blocks:
        fully_shard(block)
    fully_shard(sharded)
    for model in (plain, sharded):
        model(tokens, tokens).backward()
    expected = {name: parameter.grad for name, parameter in plain.named_parameters()}
    for name, parameter in sharded.named_parameters():
        full = parameter.grad.full_tensor()  # type: ignore[union-attr]
        assert torch.equal(full, expected[name]), name  # type: ignore[arg-type]
    assert report(sharded)


@pytest.mark.slow
def test_a_small_model_learns_as_in_bfloat16_and_one_scale_for_a_tensor_does_not() -> None:
    """20 steps of 1.3 M parameters on real text, with planted tokens of magnitude 1e6 whose results are dropped."""
    expected = held_out_loss(None, steps=20)
    assert held_out_loss(Fp8Config(), steps=20, outliers=True) == pytest.approx(expected, rel=0.01)
    assert held_out_loss(Fp8Config(granularity="tensor"), steps=20, outliers=True) > 1.1 * expected
