"""The gate takes the experts that the DeepSeek-V3 paper defines, and balances them by its bias."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from torch.utils.checkpoint import checkpoint

from fireflyer.base.errors import UsageError
from fireflyer.codesign.model import Experts
from fireflyer.recipes.deepseek import PRESETS, Gate
from fireflyer.recipes.deepseek.gate import choose_experts

TINY = PRESETS["tiny"]
EXPERTS = Experts(routed=8, per_token=3, feed_forward=16, groups=4, groups_per_token=2)


def gate(experts: Experts = EXPERTS, seed: int = 0) -> Gate:
    made = Gate(TINY, experts).double()
    torch.nn.init.normal_(made.weight, generator=torch.Generator().manual_seed(seed))
    return made


def tokens(count: int = 40, seed: int = 1) -> torch.Tensor:
    return torch.randn(count, TINY.shape.hidden, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def chosen_by_definition(choice: list[float], experts: Experts) -> set[int]:
    size = experts.routed // experts.groups
    groups = [range(group * size, (group + 1) * size) for group in range(experts.groups)]
    groups.sort(key=lambda group: -sum(sorted((choice[e] for e in group), reverse=True)[:2]))
    reachable = [e for group in groups[: experts.groups_per_token] for e in group]
    return set(sorted(reachable, key=lambda e: -choice[e])[: experts.per_token])


@settings(max_examples=60)
@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 4), st.integers(1, 4), st.integers(0, 999))
def test_experts_are_chosen_by_the_definition(
    groups: int, size: int, groups_per_token: int, per_token: int, seed: int
) -> None:
    groups_per_token = min(groups, groups_per_token)
    experts = Experts(
        routed=groups * size,
        per_token=min(per_token, groups_per_token * size),
        feed_forward=8,
        groups=groups,
        groups_per_token=groups_per_token,
    )
    choice = torch.rand(9, experts.routed, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    found = choose_experts(choice, experts)
    for row, indices in zip(choice.tolist(), found.tolist(), strict=True):
        assert len(set(indices)) == experts.per_token
        assert set(indices) == chosen_by_definition(row, experts)


def test_weights_are_the_scores_divided_by_their_sum_times_the_scaling() -> None:
    made, x = gate(), tokens()
    routing = made(x)
    scores = torch.sigmoid(x @ made.weight.T).gather(1, routing.indices)
    assert torch.allclose(routing.weights, 2.5 * scores / scores.sum(1, keepdim=True), rtol=1e-12)
    assert torch.allclose(routing.weights.sum(1), torch.full((40,), 2.5, dtype=torch.float64))


def test_without_renormalisation_weights_are_the_scores_times_the_scaling() -> None:
    made = Gate(replace(TINY, renormalised=False, routed_scaling=16.0), EXPERTS).double()
    torch.nn.init.normal_(made.weight)
    x = tokens()
    routing = made(x)
    assert torch.allclose(routing.weights, 16 * torch.sigmoid(x @ made.weight.T).gather(1, routing.indices))


def test_the_bias_decides_the_choice_and_not_the_weights() -> None:
    made, x = gate(), tokens()
    before = made(x)
    made.e_score_correction_bias[5] = 10.0
    after = made(x)
    assert (after.indices == 5).any(dim=1).all()
    assert not (before.indices == 5).any(dim=1).all()
    scores = torch.sigmoid(x @ made.weight.T).gather(1, after.indices)
    assert torch.allclose(after.weights, 2.5 * scores / scores.sum(1, keepdim=True), rtol=1e-12)


def test_counts_are_summed_over_micro_batches_and_moved_once() -> None:
    made, micro_batches = gate(), (tokens(seed=1), tokens(seed=2))
    routings = [made(x) for x in micro_batches]
    wanted = torch.stack([torch.bincount(r.indices.flatten(), minlength=8) for r in routings]).sum(0)
    assert torch.equal(made.counts, wanted)
    made.move_bias(made.counts, 0.01)
    assert torch.equal(made.e_score_correction_bias.sign(), torch.sign(wanted.double().mean() - wanted))
    assert set(made.e_score_correction_bias.abs().tolist()) <= {0.0, 0.01}
    assert not made.counts.any()


def test_the_bias_balances_experts_that_one_direction_of_tokens_overloads() -> None:
    made = gate()
    x = tokens(200) + 2 * made.weight[3].detach()

    def worst() -> float:
        made.counts.zero_()
        made(x)
        return float(made.counts.max() / made.counts.double().mean())

    unbalanced = worst()
    for _ in range(300):
        made.counts.zero_()
        made(x)
        made.move_bias(made.counts, 0.005)
    assert unbalanced > 2.2
    assert worst() < 1.3


def test_nothing_is_counted_in_evaluation() -> None:
    made = gate().eval()
    made(tokens())
    assert not made.counts.any()


def test_a_forward_in_backward_is_not_counted() -> None:
    made, x = gate(), tokens()
    weights = made(x).weights
    weights.register_hook(lambda gradient: gradient + 0 * made(x).weights.detach())
    weights.square().sum().backward()
    assert int(made.counts.sum()) == 40 * 3


@pytest.mark.slow  # imports of seconds
@pytest.mark.parametrize("reentrant", [False, True])
def test_a_recomputed_forward_is_counted_once(reentrant: bool) -> None:
    made, x = gate(), tokens().requires_grad_()
    weights = checkpoint(lambda x: made(x).weights, x, use_reentrant=reentrant)
    assert isinstance(weights, torch.Tensor)
    weights.square().sum().backward()  # type: ignore[no-untyped-call]
    assert int(made.counts.sum()) == 40 * 3


def test_a_bias_that_was_cast_to_bf16_still_takes_small_steps() -> None:
    made = gate().bfloat16()
    made.e_score_correction_bias += 1
    for _ in range(3):
        made.move_bias(torch.arange(8), 1e-3)
    assert made.e_score_correction_bias.tolist() == pytest.approx([1.003] * 4 + [0.997] * 4, abs=1e-6)


def test_routing_is_replayed() -> None:
    made, x = gate(), tokens()
    first = made(x)
    made.e_score_correction_bias += torch.arange(8) % 3
    assert not torch.equal(made(x).indices, first.indices)
    again = made(x, indices=first.indices)
    assert torch.equal(again.indices, first.indices)
    assert torch.equal(again.weights, first.weights)
    with pytest.raises(UsageError, match=r"replayed routing has shape \(40, 2\); 40 tokens go to 3 experts each"):
        made(x, indices=first.indices[:, :2])
