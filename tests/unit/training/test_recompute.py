"""Recomputation changes no gradient, keeps what it says, and is counted."""

from __future__ import annotations

import copy
import weakref

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.flop_counter import FlopCounterMode

from fireflyer.base.errors import UsageError
from fireflyer.codesign.parallel.budget import choose_recompute
from fireflyer.codesign.parallel.memory import activation_bytes
from fireflyer.codesign.parallel.plan import RECOMPUTE, Recompute
from fireflyer.recipes.gpt import GPTConfig, GPTModel
from fireflyer.recipes.trainer.core.checks import shape_of_gpt
from fireflyer.recipes.trainer.core.recipe import GptTable
from fireflyer.training.fp8 import Fp8Linear, convert
from fireflyer.training.recompute import measure_choices, recompute, recompute_each

CONFIG = GPTConfig(vocab_size=64, layers=3, heads=4, width=32, context=16)
TOKENS = torch.arange(48).view(3, 16)
FLOPS_PER_S, BYTES_PER_S = 1e12, 1e11


def trained(model: GPTModel) -> list[Tensor]:
    model(TOKENS, TOKENS).backward()
    return [one.grad for one in model.parameters() if one.grad is not None]


@pytest.mark.parametrize("fp8", [False, True], ids=["fp32", "fp8"])
@pytest.mark.parametrize("mode", RECOMPUTE)
def test_gradients_are_bitwise_those_without_recomputation(mode: Recompute, fp8: bool) -> None:
    model, plain = GPTModel(CONFIG), GPTModel(CONFIG)
    for one in (model, plain) if fp8 else ():
        convert(one)
    names = list(model.state_dict())
    recompute(model, mode, blocks=list(model.blocks))
    assert list(model.state_dict()) == names
    for found, expected in zip(trained(model), trained(plain), strict=True):
        assert torch.equal(found, expected)


def test_a_bias_does_not_change_the_fp8_product_that_is_kept() -> None:
    plain = nn.Sequential(Fp8Linear(16, 16), nn.GELU(), Fp8Linear(16, 8))
    again = copy.deepcopy(plain)
    recompute_each([again], ["operators"])
    rows = torch.randn(4, 16)
    for model in (plain, again):
        model(rows).square().sum().backward()
    for expected, found in zip(plain.parameters(), again.parameters(), strict=True):
        assert expected.grad is not None
        assert found.grad is not None
        assert torch.equal(found.grad, expected.grad)


def test_blocks_of_one_model_differ() -> None:
    model, plain = GPTModel(CONFIG), GPTModel(CONFIG)
    recompute(model, ("blocks", "none", "operators"), blocks=list(model.blocks))
    for found, expected in zip(trained(model), trained(plain), strict=True):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("fp8", [False, True], ids=["fp32", "fp8"])
def test_products_are_computed_again_with_blocks_and_not_with_operators(fp8: bool) -> None:
    flops = []
    for mode in ("none", "operators", "blocks"):
        model = GPTModel(CONFIG)
        if fp8:
            convert(model)
        recompute(model, mode, blocks=list(model.blocks))
        with FlopCounterMode(display=False) as counted:
            trained(model)
        flops.append(counted.get_total_flops())
    assert flops[0] == flops[1] < flops[2]


def test_kept_bytes_are_those_that_autograd_saves() -> None:
    """Of one block: `none` is everything saved, `blocks` its input."""
    model = GPTModel(CONFIG)
    block = model.blocks[0]
    hidden = torch.randn(3, 16, 32, requires_grad=True)
    rotation = (model.get_buffer("cosine"), model.get_buffer("sine"))
    none, operators, blocks = measure_choices(
        block, (hidden, rotation), flops_per_s=FLOPS_PER_S, bytes_per_s=BYTES_PER_S
    )
    assert blocks.kept_bytes == hidden.numel() * 4
    parameters = {one.data_ptr() for one in block.parameters()}
    saved = {}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() not in parameters:
            saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with saved_tensors_hooks(pack, lambda one: one):
        result = block(hidden, rotation)
    assert none.kept_bytes == sum(saved.values())
    # Results of products and attention: 3 + 1 + 1 + 4 + 1 of the hidden width, the sums of its exponentials, the input.
    assert operators.kept_bytes == 11 * hidden.numel() * 4 + 3 * 4 * 16 * 4
    assert result.shape == hidden.shape
    assert none.seconds == 0 < operators.seconds < blocks.seconds


def test_of_an_fp8_product_no_more_is_kept_than_of_another() -> None:
    kept = []
    for fp8 in (False, True):
        model = GPTModel(GPTConfig(vocab_size=64, layers=1, heads=4, width=128, context=16))
        if fp8:
            convert(model)
        hidden = torch.randn(3, 16, 128, requires_grad=True)
        rotation = (model.get_buffer("cosine"), model.get_buffer("sine"))
        _, operators, _ = measure_choices(
            model.blocks[0], (hidden, rotation), flops_per_s=FLOPS_PER_S, bytes_per_s=BYTES_PER_S
        )
        kept.append(operators.kept_bytes)
    assert kept[0] == kept[1], "four tiles of the second product of the feed-forward layer are one result"


def test_kept_bytes_of_the_plan_are_those_of_fused_kernels_and_what_others_keep_beside_is_known() -> None:
    """In BF16 on the CPU: the plan counts 32 bytes for each token and hidden value."""
    width, heads = CONFIG.width, CONFIG.heads
    model = GPTModel(CONFIG).bfloat16()
    hidden = torch.randn(3, 16, width, dtype=torch.bfloat16, requires_grad=True)
    own = {one.untyped_storage().data_ptr() for one in (*model.parameters(), *model.buffers())}
    saved: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() not in own:
            saved.setdefault(tensor.untyped_storage().data_ptr(), tensor)
        return tensor

    with saved_tensors_hooks(pack, lambda one: one):
        model.blocks[0](hidden, model.rotation(16))
    measured = sum(one.untyped_storage().nbytes() for one in saved.values()) / hidden.numel()
    shape = shape_of_gpt(GptTable(vocabulary=64, layers=3, heads=heads, width=width))
    counted = activation_bytes(shape, False, "none", "bf16").kept / width
    norms = 2 * (4 + 4 - 2)  # input and normed input in FP32, in place of the input in BF16
    stacked = 2 * 2  # of values, a view, the whole stacked projection
    copied = 2  # the output of attention in the order of tokens
    statistics = 4 * (2 + heads) / width
    assert counted == 32
    assert measured == counted + norms + stacked + copied + statistics


def test_a_budget_is_kept_by_the_blocks_that_it_needs_to_compute_again() -> None:
    model = GPTModel(CONFIG)
    hidden = torch.randn(3, 16, 32, requires_grad=True)
    rotation = (model.get_buffer("cosine"), model.get_buffer("sine"))
    choices = [
        measure_choices(block, (hidden, rotation), flops_per_s=FLOPS_PER_S, bytes_per_s=BYTES_PER_S)
        for block in model.blocks
    ]
    assert choices[0] == choices[1]
    everything = choose_recompute(choices, 3 * choices[0][0].kept_bytes)
    assert everything.names == ("none", "none", "none")
    tight = choose_recompute(choices, 3 * choices[0][0].kept_bytes - 1)
    assert set(tight.names) > {"none"} or "none" not in tight.names
    assert tight.total_bytes < everything.total_bytes
    recompute_each(list(model.blocks), tight.names)
    for found, expected in zip(trained(model), trained(GPTModel(CONFIG)), strict=True):
        assert torch.equal(found, expected)


def test_what_cannot_be_is_refused_and_changes_nothing() -> None:
    model = GPTModel(CONFIG)
    blocks: list[nn.Module] = list(model.blocks)
    with pytest.raises(UsageError, match="2 modes for 3 blocks"):
        recompute_each(blocks, ("none", "none"))
    with pytest.raises(UsageError, match="mode 'full' of block 2 is not one of none, operators, blocks"):
        recompute_each(blocks, ("blocks", "none", "full"))
    recompute_each(blocks, ("blocks", "none", "none"))
    with pytest.raises(UsageError, match="was set before"):
        recompute_each(blocks, ("operators", "none", "none"))


def test_what_a_measured_pass_has_kept_is_free_when_it_ends() -> None:
    class Block(nn.Module):
        def forward(self, hidden: Tensor) -> Tensor:
            found = hidden.exp()  # saves its own result for the backward pass
            results.append(weakref.ref(found))
            return found.sum()

    results: list[weakref.ref[Tensor]] = []
    measure_choices(Block(), (torch.ones(4, requires_grad=True),), flops_per_s=FLOPS_PER_S, bytes_per_s=BYTES_PER_S)
    assert [found() for found in results] == [None]
