"""Rows get to their experts and back: the sum over a token's experts, whatever product computes it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fireflyer.base.errors import UsageError
from fireflyer.recipes.deepseek import LocalDispatch, Routing
from fireflyer.recipes.deepseek.experts import RoutedExperts, grouped_linear


def made(experts: int, hidden: int, inner: int, dtype: torch.dtype) -> RoutedExperts:
    module = RoutedExperts(hidden, inner, range(experts))
    generator = torch.Generator().manual_seed(7)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, generator=generator)
    return module.to(dtype)


def routing_of(tokens: int, per_token: int, experts: int, seed: int) -> Routing:
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(tokens, experts, generator=generator, dtype=torch.float64)
    chosen = scores.topk(per_token, dim=1)
    return Routing(chosen.indices, chosen.values)


def one_by_one(tokens: torch.Tensor, routing: Routing, experts: RoutedExperts) -> torch.Tensor:
    rows = []
    for token, indices, weights in zip(tokens, routing.indices, routing.weights, strict=True):
        total = torch.zeros_like(token)
        for expert, weight in zip(indices.tolist(), weights, strict=True):
            inner = torch.nn.functional.silu(experts.gate_proj[expert] @ token) * (experts.up_proj[expert] @ token)
            total = total + weight * (experts.down_proj[expert] @ inner)
        rows.append(total)
    return torch.stack(rows)


@settings(max_examples=25)
@given(st.integers(1, 20), st.integers(1, 5), st.integers(0, 99))
def test_dispatch_experts_and_combine_are_the_weighted_sum(count: int, per_token: int, seed: int) -> None:
    experts = made(5, 6, 4, torch.float64)
    tokens = torch.randn(count, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    routing = routing_of(count, per_token, 5, seed)
    local = LocalDispatch(5)
    arrived = local.dispatch(tokens, routing).wait()
    assert int(arrived.counts.sum()) == count * per_token
    found = local.combine(experts(arrived.rows, arrived.counts), arrived).wait()
    assert torch.allclose(found, one_by_one(tokens, routing, experts), rtol=1e-12, atol=1e-12)


def test_gradients_reach_tokens_weights_and_experts() -> None:
    experts, local = made(4, 6, 4, torch.float64), LocalDispatch(4)
    routing = routing_of(7, 2, 4, 3)
    tokens = torch.randn(7, 6, dtype=torch.float64, requires_grad=True)
    weights = routing.weights.clone().requires_grad_()

    arrived = local.dispatch(tokens, Routing(routing.indices, weights)).wait()
    found = local.combine(experts(arrived.rows, arrived.counts), arrived).wait()
    wanted = one_by_one(tokens, Routing(routing.indices, weights), experts)
    given = (tokens, weights, *experts.parameters())
    pull = torch.randn(7, 6, dtype=torch.float64)
    pairs = zip(torch.autograd.grad(found, given, pull), torch.autograd.grad(wanted, given, pull), strict=True)
    for one, other in pairs:
        assert torch.allclose(one, other, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize(
    ("dtype", "hidden", "tolerance"),
    [(torch.float32, 16, 1e-5), (torch.bfloat16, 16, 3e-2), (torch.float32, 6, 1e-5), (torch.float64, 16, 1e-12)],
    ids=["fp32", "bf16", "unaligned", "fp64"],
)
def test_the_grouped_product_equals_one_for_each_group(dtype: torch.dtype, hidden: int, tolerance: float) -> None:
    counts = torch.tensor([3, 0, 5, 2])
    rows = torch.randn(10, hidden, dtype=dtype, requires_grad=True)
    weights = torch.randn(4, 8, hidden, dtype=dtype, requires_grad=True)
    found = grouped_linear(rows, weights, counts)
    wanted = torch.cat(
        [part @ w.T for part, w in zip((rows[:3], rows[3:3], rows[3:8], rows[8:]), weights, strict=True)]
    )
    assert torch.allclose(found, wanted, rtol=tolerance, atol=tolerance)
    wanted_gradients = torch.autograd.grad(wanted.sum(), (rows, weights))
    for one, other in zip(torch.autograd.grad(found.sum(), (rows, weights)), wanted_gradients, strict=True):
        assert torch.allclose(one, other, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    ("dtype", "hidden", "result"),
    [(torch.float32, 16, torch.bfloat16), (torch.float32, 6, torch.bfloat16), (torch.float64, 16, torch.float64)],
    ids=["fp32", "unaligned", "fp64"],
)
def test_autocast_counts_for_the_grouped_product(dtype: torch.dtype, hidden: int, result: torch.dtype) -> None:
    counts = torch.tensor([3, 0, 5, 2])
    rows, weights = torch.randn(10, hidden, dtype=dtype), torch.randn(4, 8, hidden, dtype=dtype)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = grouped_linear(rows, weights, counts)
    assert found.dtype == result
    assert torch.equal(found, grouped_linear(rows.to(result), weights.to(result), counts))


def test_no_rows_at_all_give_zero_gradients() -> None:
    experts = made(3, 16, 8, torch.float32)
    experts(torch.empty(0, 16), torch.zeros(3, dtype=torch.int64)).sum().backward()
    for parameter in experts.parameters():
        assert parameter.grad is not None
        assert not parameter.grad.any()


def test_sums_are_formed_in_fp32_in_the_order_of_experts_and_rounded_once() -> None:
    local = LocalDispatch(3)
    routing = Routing(torch.tensor([[2, 0, 1]]), torch.tensor([[3.0, 1.0, 2.0]]))
    arrived = local.dispatch(torch.ones(1, 1, dtype=torch.bfloat16), routing).wait()
    # 1 · 256 + 2 · 0.25 + 3 · 0.25: in bf16 each addition would be lost.
    rows = torch.tensor([[256.0], [0.25], [0.25]], dtype=torch.bfloat16)
    assert local.combine(rows, arrived).wait().item() == torch.tensor(257.25).bfloat16().item()
    orders = [Routing(routing.indices[:, order], routing.weights[:, order]) for order in ([0, 1, 2], [2, 1, 0])]
    values = torch.tensor([[-2e8], [1.0], [2e8 / 3]])  # ascending: -2e8 + 2, rounded, + 2e8
    results = [local.combine(values, local.dispatch(torch.ones(1, 1), one).wait()).wait().item() for one in orders]
    assert results == [0.0, 0.0]


def test_a_range_of_experts_is_one_or_more() -> None:
    with pytest.raises(UsageError, match="no range of one or more"):
        RoutedExperts(4, 4, range(3, 3))
