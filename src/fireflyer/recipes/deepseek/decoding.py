"""Decoding: token by token with a cache, and faster by multi-token prediction.

`speculate` lets the prediction modules draft tokens and has the model check all of them in one forward (Leviathan et
al. 2023). What it returns has the distribution of `generate`: the tokens themselves without temperature, and with one
the same probability of each sequence.

    known tokens x_0 … x_{n-1}; the model has read all but the last
    draft    depth k reads hidden states of depth k-1 up to n-2, and tokens up to n-2+k, and drafts token n-1+k
    check    the model reads x_{n-1} and the drafts, which gives the distribution of each next token
    accept   drafts up to the first that is refused; one more token is drawn where they end
    forget   what caches have of refused tokens

A depth k > 1 has read drafts, so its last k-1 positions are computed again in the next round.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fireflyer.base.errors import UsageError
from fireflyer.recipes.deepseek.cache import AttentionCache
from fireflyer.recipes.deepseek.model import DeepseekModel

__all__ = ["Speculation", "acceptance", "distribution", "generate", "replacement", "speculate"]


@dataclass(slots=True, frozen=True)
class Speculation:
    """Tokens, and how often drafts were right."""

    tokens: Tensor
    """`[1, prompt + new]`."""
    drafted: int
    accepted: int
    """Drafts that became tokens, of `drafted`."""
    forwards: int
    """Calls of the model; `generate` needs one for each new token."""

    @property
    def acceptance_rate(self) -> float:
        """Share of drafts that were accepted; 0 where none was made."""
        return self.accepted / self.drafted if self.drafted else 0.0


def distribution(logits: Tensor, temperature: float) -> Tensor:
    """Probabilities `[..., V]`, fp32 or wider. Without temperature all is on the largest logit, the first if several
    are as large."""
    if temperature == 0:
        return torch.nn.functional.one_hot(logits.argmax(-1), logits.shape[-1]).float()
    return (logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature).softmax(-1)


def acceptance(wanted: Tensor, drafted: Tensor) -> Tensor:
    """Probability `[V]` with which a draft of each token is accepted: `wanted [V]` are the model's probabilities,
    `drafted [V]` those that it was drawn with."""
    return torch.where(drafted > 0, (wanted / drafted).clamp(max=1.0), 0.0)


def replacement(wanted: Tensor, drafted: Tensor) -> Tensor:
    """Probabilities `[V]` of the token that takes the place of a refused draft: what the drafts left out."""
    rest = (wanted - drafted).clamp(min=0.0)
    total = rest.sum()
    return rest / total if total > 0 else wanted  # equal distributions refuse nothing but by rounding


@torch.no_grad()
def generate(
    model: DeepseekModel,
    prompt: Tensor,
    new_tokens: int,
    *,
    temperature: float = 0.0,
    generator: torch.Generator | None = None,
) -> Tensor:
    """`prompt [B, P]` with `new_tokens` tokens behind it, `[B, P + new_tokens]`: the likeliest, or with a `temperature`
    above 0 drawn with `generator`. Raises `UsageError` for an empty prompt and for more tokens than the context has."""
    _check(model, prompt, new_tokens, temperature)
    cache = _cache(model, prompt.shape[1] + new_tokens, batch=prompt.shape[0])
    tokens = read = prompt
    for _ in range(new_tokens):
        last = model.head(model.hidden(read, cache)[:, -1])
        read = _draw(distribution(last, temperature), generator)
        tokens = torch.cat((tokens, read), dim=1)
    return tokens


@torch.no_grad()
def speculate(
    model: DeepseekModel,
    prompt: Tensor,
    new_tokens: int,
    *,
    temperature: float = 0.0,
    generator: torch.Generator | None = None,
    depths: int | None = None,
) -> Speculation:
    """Tokens as of `generate` for one sequence, `prompt [1, P]`, by drafts of the first `depths` prediction modules
    (all, where None). The distribution of what it returns is that of `generate`; without temperature both return the
    same tokens, unless two logits are equal but for rounding. Raises `UsageError` also for a model without prediction
    modules."""
    _check(model, prompt, new_tokens, temperature)
    count = len(model.mtp) if depths is None else depths
    if not 1 <= count <= len(model.mtp):
        raise UsageError(
            f"drafts of {count} prediction modules of a model that has {len(model.mtp)}; use 1 or more of them"
        )
    if prompt.shape[0] != 1:
        raise UsageError(f"{prompt.shape[0]} sequences; drafts are checked for one sequence at a time")
    end = prompt.shape[1] + new_tokens
    cache, drafter = _cache(model, end), _Drafter(model, count, end)
    hidden = model.hidden(prompt, cache)
    drafter.read(hidden)
    tokens = torch.cat((prompt, _draw(distribution(model.head(hidden[:, -1]), temperature), generator)), dim=1)
    drafted = accepted = 0
    forwards = 1
    while (known := tokens.shape[1]) < end:
        # Fewer drafts near the end only: depths that are left out once are not used again.
        drafts, odds = drafter.draft(tokens, min(count, end - known), temperature, generator)
        hidden = model.hidden(torch.cat((tokens[:, -1:], drafts), dim=1), cache)
        wanted = distribution(model.head(hidden)[0], temperature)
        taken, following = _judge(drafts[0], odds, wanted, generator)
        tokens = torch.cat((tokens, drafts[:, :taken], following), dim=1)
        cache.truncate(known + taken)
        drafter.read(hidden[:, : taken + 1])
        drafted, accepted, forwards = drafted + drafts.shape[1], accepted + taken, forwards + 1
    return Speculation(tokens[:, :end], drafted, accepted, forwards)


def _judge(drafts: Tensor, odds: list[Tensor], wanted: Tensor, generator: torch.Generator | None) -> tuple[int, Tensor]:
    """How many of `drafts [D]`, drawn with probabilities `odds` (`[V]` each), are accepted, and the token `[1, 1]` that
    follows them; `wanted [D + 1, V]` are the model's probabilities of each place."""
    for place, draft in enumerate(drafts.tolist()):
        share = acceptance(wanted[place], odds[place])[draft]
        if torch.rand((), generator=generator, device=share.device, dtype=share.dtype) >= share:
            return place, _draw(replacement(wanted[place], odds[place]).unsqueeze(0), generator)
    return len(drafts), _draw(wanted[len(drafts)].unsqueeze(0), generator)


class _Drafter:
    """Prediction modules with their caches, and the hidden states that they will read next."""

    def __init__(self, model: DeepseekModel, depths: int, limit: int) -> None:
        self._model = model
        self._modules = list(model.mtp)[:depths]
        self._caches = _cache(model, limit, layers=depths).layers
        weight = model.embed_tokens.weight
        nothing = weight.new_empty(1, 0, weight.shape[1])
        self._hidden = [nothing] * (depths + 1)
        """Of each depth, 0 for the main model, hidden states of positions from `_begins` on."""
        self._begins = [0] * (depths + 1)

    def read(self, hidden: Tensor) -> None:
        """Takes hidden states `[1, T, h]` of the main model for the next T known tokens."""
        self._hidden[0] = torch.cat((self._hidden[0], hidden), dim=1)

    def draft(
        self, tokens: Tensor, count: int, temperature: float, generator: torch.Generator | None
    ) -> tuple[Tensor, list[Tensor]]:
        """Drafts `[1, count]` of what follows `tokens [1, n]`, and the probabilities `[V]` they were drawn with."""
        known = tokens.shape[1]
        drafts: list[Tensor] = []
        odds: list[Tensor] = []
        end = known - 1
        for depth, module in enumerate(self._modules[:count], start=1):
            cache = self._caches[depth - 1]
            begin = cache.length
            hidden = self._hidden[depth - 1][:, begin - self._begins[depth - 1] : end - self._begins[depth - 1]]
            embedded = self._model.embed_tokens(tokens[:, begin + depth : end + depth])
            result = module(hidden, embedded, self._model.rotation(begin, end), cache)
            kept = self._hidden[depth][:, : begin - self._begins[depth]]
            self._hidden[depth] = torch.cat((kept, result), dim=1)
            odds.append(distribution(self._model.head(result[:, -1])[0], temperature))
            drafts.append(_draw(odds[-1].unsqueeze(0), generator))
            tokens = torch.cat((tokens, drafts[-1]), dim=1)
        for depth in range(len(self._modules) + 1):
            self._forget(depth, known - depth)
        return torch.cat(drafts, dim=1), odds

    def _forget(self, depth: int, final: int) -> None:
        """Keeps of this depth what later rounds read: the last position that read no draft, and those behind it, which
        are computed again."""
        if depth:
            self._caches[depth - 1].truncate(max(final, 0))
        begin = max(final - 1, self._begins[depth])
        self._hidden[depth] = self._hidden[depth][:, begin - self._begins[depth] :]
        self._begins[depth] = begin


def _draw(probabilities: Tensor, generator: torch.Generator | None) -> Tensor:
    """Tokens `[B, 1]` of `probabilities [B, V]`."""
    return torch.multinomial(probabilities, 1, generator=generator)


def _cache(model: DeepseekModel, limit: int, *, batch: int = 1, layers: int | None = None) -> AttentionCache:
    weight = model.embed_tokens.weight
    return AttentionCache(
        model.config.shape, limit, batch=batch, layers=layers, dtype=weight.dtype, device=weight.device
    )


def _check(model: DeepseekModel, prompt: Tensor, new_tokens: int, temperature: float) -> None:
    if prompt.dim() != 2 or prompt.shape[1] < 1 or new_tokens < 1:
        raise UsageError(
            f"a prompt of shape {tuple(prompt.shape)} and {new_tokens} new tokens; a prompt has shape [B, P], with 1 "
            "token or more, and 1 new token is the least"
        )
    if not 0 <= temperature < float("inf"):
        raise UsageError(f"temperature {temperature} is not 0 or a number above it")
    end = prompt.shape[1] + new_tokens
    if end > model.config.context:
        raise UsageError(f"{end} tokens; this model was made for at most context={model.config.context}")
