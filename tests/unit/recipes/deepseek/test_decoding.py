"""Decoding with a cache of latents is the model's own forward; speculation by prediction modules changes nothing."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from fireflyer.base.errors import UsageError
from fireflyer.codesign.model import Attention, kv_bytes_per_token
from fireflyer.recipes.deepseek import PRESETS, AttentionCache, DeepseekConfig, DeepseekModel
from fireflyer.recipes.deepseek.attention import MultiHeadLatentAttention
from fireflyer.recipes.deepseek.decoding import acceptance, generate, replacement, speculate

TINY = PRESETS["tiny"]
LLAMA = replace(
    TINY,
    shape=replace(
        TINY.shape,
        model_type="llama",
        attention=Attention(heads=4, kv_heads=2, head_dim=8),
        experts=None,
        mtp_layers=0,
    ),
    rope_interleaved=False,
)


def sharp(config: DeepseekConfig, **changes: object) -> DeepseekModel:
    """A model in fp64 whose initial weights make clear choices."""
    wide = replace(config, deviation=0.2, shape=replace(config.shape, **changes))
    return DeepseekModel(wide).double().eval()


def prompt(length: int, vocabulary: int = 96, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, vocabulary, (1, length), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("config", [TINY, LLAMA], ids=["latent", "heads"])
@torch.no_grad()
def test_reading_in_pieces_gives_the_hidden_states_of_reading_at_once(config: DeepseekConfig) -> None:
    model, sequence = sharp(config), prompt(12)
    cache = AttentionCache(model.config.shape, 12, dtype=torch.float64)
    pieces = [model.hidden(piece, cache) for piece in (sequence[:, :5], sequence[:, 5:6], sequence[:, 6:])]
    assert torch.allclose(torch.cat(pieces, dim=1), model.hidden(sequence), rtol=1e-10, atol=1e-10)
    assert cache.length == 12


@pytest.mark.parametrize("config", [TINY, LLAMA, PRESETS["small"]], ids=["latent", "heads", "small"])
def test_a_cached_token_has_the_bytes_that_codesign_counts(config: DeepseekConfig) -> None:
    for dtype, width in ((torch.bfloat16, 2), (torch.float32, 4)):
        cache = AttentionCache(config.shape, 10, dtype=dtype)
        assert cache.bytes_per_token == kv_bytes_per_token(config.shape, width)


@torch.no_grad()
def test_the_absorbed_form_equals_the_expanded_one() -> None:
    attention = sharp(TINY).layers[0].get_submodule("self_attn")
    assert isinstance(attention, MultiHeadLatentAttention)
    rotation = sharp(TINY).rotation(0, 20)
    hidden = torch.randn(3, 20, 32, dtype=torch.float64)
    query, latents = attention.queries(hidden, rotation), attention.latents(hidden, rotation)
    for rows in (20, 4, 1):
        absorbed = attention.attend_absorbed(query[:, :, -rows:], latents)
        expanded = attention.attend_expanded(query[:, :, -rows:], latents)
        assert (absorbed - expanded).abs().max() <= 1e-10 * expanded.abs().max()
    assert torch.allclose(attention(hidden, rotation, absorbed=True), attention(hidden, rotation), atol=1e-10)


@torch.no_grad()
def test_generated_tokens_are_those_of_repeated_forwards() -> None:
    model, tokens = sharp(TINY), torch.cat((prompt(3), prompt(3, seed=1)))
    found = generate(model, tokens, 10)
    for _ in range(10):
        tokens = torch.cat((tokens, model(tokens)[:, -1].argmax(-1, keepdim=True)), dim=1)
    assert torch.equal(found, tokens)


def greedy_speculation(depths: int, length: int, new: int, seed: int) -> float:
    """Acceptance rate, after a comparison with `generate`. Few tokens, so that drafts are accepted now and then."""
    model = sharp(replace(TINY, seed=seed), mtp_layers=depths + 1, vocabulary=5)
    given = prompt(length, 5, seed)
    found = speculate(model, given, new, depths=depths)
    assert torch.equal(found.tokens, generate(model, given, new))
    return found.acceptance_rate


def test_greedy_speculation_returns_the_tokens_of_greedy_generation() -> None:
    rates = [greedy_speculation(3, 1, 9, seed=0), greedy_speculation(1, 5, 6, seed=1)]
    assert 0 < sum(rates) < 2


@pytest.mark.slow  # a minute on a busy machine
@settings(max_examples=12)
@given(st.integers(1, 4), st.integers(1, 9), st.integers(1, 12), st.integers(0, 99))
def test_greedy_speculation_of_any_depth_and_length(depths: int, length: int, new: int, seed: int) -> None:
    greedy_speculation(depths, length, new, seed)


@torch.no_grad()
def test_modules_that_agree_with_the_model_save_forwards() -> None:
    # With an embedding that decides the next token alone, main model and module predict the same: token + 1.
    vocabulary, hidden = 32, 32
    model = sharp(TINY, vocabulary=vocabulary)
    for block in (*model.layers, model.mtp[0].get_submodule("block")):
        block.get_submodule("self_attn").get_parameter("o_proj.weight").zero_()
        for name, parameter in block.get_submodule("mlp").named_parameters():
            if "down_proj" in name:
                parameter.zero_()
    model.embed_tokens.weight.copy_(torch.eye(vocabulary))
    model.lm_head.weight.copy_(torch.eye(vocabulary).roll(1, dims=0))
    model.mtp[0].get_parameter("eh_proj.weight").copy_(
        torch.cat((torch.eye(hidden), torch.zeros(hidden, hidden)), dim=1)
    )
    found = speculate(model, torch.tensor([[3]]), 20)
    assert found.tokens.tolist() == [[(3 + i) % vocabulary for i in range(21)]]
    assert found.acceptance_rate == 1.0
    assert found.forwards == 11
    model.mtp[0].get_parameter("eh_proj.weight").copy_(
        torch.cat((torch.eye(hidden).roll(1, dims=1), torch.zeros(hidden, hidden)), dim=1)
    )
    found = speculate(model, torch.tensor([[3]]), 20)
    assert found.tokens.tolist() == [[(3 + i) % vocabulary for i in range(21)]]
    assert found.acceptance_rate == 0.0
    assert found.forwards == 20


@settings(max_examples=50)
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=1, max_size=6))
def test_an_accepted_or_replaced_draft_has_the_wanted_distribution(weights: list[tuple[int, int]]) -> None:
    wanted, drafted = torch.tensor(weights, dtype=torch.float64).unbind(1)
    if not wanted.sum() or not drafted.sum():
        return
    wanted, drafted = wanted / wanted.sum(), drafted / drafted.sum()
    accepted = drafted * acceptance(wanted, drafted)
    found = accepted + (1 - accepted.sum()) * replacement(wanted, drafted)
    assert torch.allclose(found, wanted, atol=1e-12)


@pytest.mark.slow  # hundreds of samples
@torch.no_grad()
def test_sampled_speculation_has_the_distribution_of_the_model() -> None:
    vocabulary, new, runs, temperature = 2, 3, 400, 1.5
    model = sharp(replace(TINY, seed=3), vocabulary=vocabulary, mtp_layers=2).float()
    given = torch.tensor([[0]])
    wanted = {}
    for sequence in itertools.product(range(vocabulary), repeat=new):
        tokens = torch.tensor([[0, *sequence]])
        odds = (model(tokens[:, :-1])[0] / temperature).softmax(-1).gather(1, tokens[0, 1:, None])
        wanted[sequence] = float(odds.prod())
    generator = torch.Generator().manual_seed(5)
    seen = dict.fromkeys(wanted, 0)
    accepted = drafted = 0
    for _ in range(runs):
        found = speculate(model, given, new, temperature=temperature, generator=generator)
        seen[tuple(found.tokens[0, 1:].tolist())] += 1
        accepted, drafted = accepted + found.accepted, drafted + found.drafted
    assert 0.2 < accepted / drafted < 0.9, "drafts differ from the model, and are not useless"
    squares = sum((seen[one] - runs * odds) ** 2 / (runs * odds) for one, odds in wanted.items())
    assert squares < 24.3, "chi-square with 7 degrees of freedom, beyond 0.1 %"


def test_misuse_is_refused() -> None:
    model = DeepseekModel(TINY)
    with pytest.raises(UsageError, match="65 tokens; this model was made for at most context=64"):
        generate(model, prompt(5), 60)
    with pytest.raises(UsageError, match="1 token or more"):
        generate(model, prompt(0), 1)
    with pytest.raises(UsageError, match="temperature -1"):
        generate(model, prompt(2), 1, temperature=-1)
    with pytest.raises(UsageError, match="drafts of 2 prediction modules of a model that has 1"):
        speculate(model, prompt(2), 1, depths=2)
    with pytest.raises(UsageError, match="one sequence at a time"):
        speculate(model, torch.zeros(2, 3, dtype=torch.int64), 1)
    with pytest.raises(UsageError, match="the cache holds 4 tokens; 5 are needed"):
        model.hidden(prompt(5), AttentionCache(TINY.shape, 4))
