"""The GPT is causal, deterministic, of the size that its config says, and it learns."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fireflyer.base.errors import UsageError
from fireflyer.recipes.gpt import PRESETS, GPTConfig, GPTModel

TINY = GPTConfig(vocab_size=50, layers=2, heads=2, width=16, context=12)


def count(model: GPTModel) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


@settings(max_examples=20)
@given(st.integers(1, 60), st.integers(1, 3), st.integers(1, 4), st.integers(1, 4))
def test_the_config_knows_the_number_of_parameters(vocab_size: int, layers: int, heads: int, pairs: int) -> None:
    config = GPTConfig(vocab_size=vocab_size, layers=layers, heads=heads, width=2 * heads * pairs)
    assert count(GPTModel(config)) == config.parameters


def test_the_default_has_one_to_three_million_parameters() -> None:
    assert 1_000_000 <= GPTConfig().parameters <= 3_000_000
    assert PRESETS["tiny"].parameters < GPTConfig().parameters < PRESETS["medium"].parameters


def test_no_token_sees_a_later_one() -> None:
    model = GPTModel(TINY)
    tokens = torch.arange(12).reshape(1, 12)
    changed = tokens.clone()
    changed[0, 7:] += 20
    before, after = model(tokens), model(changed)
    assert torch.equal(before[0, :7], after[0, :7])
    assert not torch.equal(before[0, 7:], after[0, 7:])


def test_order_matters() -> None:
    model = GPTModel(TINY)
    last = model(torch.tensor([[3, 4, 5]]))[0, -1]
    assert not torch.allclose(last, model(torch.tensor([[4, 3, 5]]))[0, -1])


def test_the_seed_alone_decides_the_weights() -> None:
    first = GPTModel(TINY)
    torch.rand(3)
    again = GPTModel(TINY)
    other = GPTModel(GPTConfig(vocab_size=50, layers=2, heads=2, width=16, context=12, seed=1))
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), again.parameters(), strict=True))
    assert not torch.equal(first.embedding.weight, other.embedding.weight)


def test_the_loss_is_the_sum_of_the_cross_entropies() -> None:
    model = GPTModel(TINY)
    tokens = torch.randint(0, 50, (3, 12), generator=torch.Generator().manual_seed(0))
    logits = model(tokens)
    wanted = -logits.log_softmax(-1).gather(-1, tokens[..., None]).sum()
    assert logits.shape == (3, 12, 50)
    assert model(tokens, tokens).item() == pytest.approx(wanted.item(), rel=1e-5)


def test_it_learns_one_sentence_by_heart_the_same_way_twice() -> None:
    def losses() -> list[float]:
        model = GPTModel(TINY)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        tokens = torch.arange(13).reshape(1, 13) * 3
        seen: list[float] = []
        for _ in range(30):
            loss = model(tokens[:, :-1], tokens[:, 1:]) / 12
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            seen.append(loss.item())
        return seen

    first = losses()
    assert first[0] > 3.5
    assert first[-1] < 0.5
    assert losses() == first


def test_misuse_is_refused() -> None:
    with pytest.raises(UsageError, match="width=30"):
        GPTConfig(width=30, heads=4)
    with pytest.raises(UsageError, match="layers=0"):
        GPTConfig(layers=0)
    with pytest.raises(UsageError, match="13 tokens"):
        GPTModel(TINY)(torch.zeros(1, 13, dtype=torch.int64))
