"""One layer, in the parts that a pipeline interleaves:

    attention -> gate -> dispatch -> experts -> combine

`forward` calls them in this order. `dispatch` and `combine` return before their rows have arrived if the dispatcher
does, and shared experts are computed while results are on their way. A dense layer has the same parts: nothing is sent,
and its feed-forward is the only expert.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from fireflyer.base.errors import UsageError
from fireflyer.codesign.model import Experts
from fireflyer.recipes.deepseek.attention import attention_of
from fireflyer.recipes.deepseek.cache import LayerCache
from fireflyer.recipes.deepseek.config import DeepseekConfig
from fireflyer.recipes.deepseek.dispatch import Arrived, Dispatch, LocalDispatch, Pending, Ready
from fireflyer.recipes.deepseek.experts import FeedForward, RoutedExperts
from fireflyer.recipes.deepseek.gate import Gate, Routing
from fireflyer.recipes.deepseek.rope import Rotation

__all__ = ["Block", "Gated", "MixtureOfExperts"]


@dataclass(slots=True, frozen=True)
class Gated:
    """A micro-batch between attention and combine."""

    hidden: Tensor
    """`[B, T, h]` behind attention."""
    tokens: Tensor
    """`[B·T, h]`, normed: what experts read."""
    routing: Routing | None
    """None in a dense layer."""


class MixtureOfExperts(nn.Module):
    """Gate, routed and shared experts of a layer; `dispatcher` is what brings rows to experts."""

    def __init__(
        self, config: DeepseekConfig, sizes: Experts, numbers: range | None = None, dispatcher: Dispatch | None = None
    ) -> None:
        super().__init__()
        hidden = config.shape.hidden
        if dispatcher is None and numbers is not None and numbers != range(sizes.routed):
            raise UsageError(
                f"experts {numbers.start} to {numbers.stop - 1} of {sizes.routed} need a dispatcher that reaches the "
                "others"
            )
        self.dispatcher: Dispatch = LocalDispatch(sizes.routed) if dispatcher is None else dispatcher
        self.gate = Gate(config, sizes)
        self.experts = RoutedExperts(hidden, sizes.feed_forward, numbers or range(sizes.routed))
        self.shared_experts = FeedForward(hidden, sizes.shared_feed_forward) if sizes.shared_feed_forward else None


class Block(nn.Module):
    """Layer number `layer` of a model; `experts` are the numbers of the routed experts that this process has."""

    def __init__(
        self,
        config: DeepseekConfig,
        layer: int,
        *,
        experts: range | None = None,
        dispatcher: Dispatch | None = None,
    ) -> None:
        super().__init__()
        shape = config.shape
        self.input_layernorm = nn.RMSNorm(shape.hidden, eps=config.norm_eps)
        self.self_attn = attention_of(config)
        self.post_attention_layernorm = nn.RMSNorm(shape.hidden, eps=config.norm_eps)
        self.mlp: FeedForward | MixtureOfExperts
        if shape.experts is not None and shape.has_experts(layer):
            self.mlp = MixtureOfExperts(config, shape.experts, experts, dispatcher)
        else:
            self.mlp = FeedForward(shape.hidden, shape.feed_forward, bias=shape.feed_forward_bias)

    def forward(self, hidden: Tensor, rotation: Rotation, cache: LayerCache | None = None) -> Tensor:
        """The layer's output `[B, T, h]` for `hidden [B, T, h]`."""
        gated = self.gate(self.attention(hidden, rotation, cache))
        arrived = self.dispatch(gated).wait()
        return self.combine(gated, self.experts(arrived), arrived).wait()

    def attention(self, hidden: Tensor, rotation: Rotation, cache: LayerCache | None = None) -> Tensor:
        """Hidden states `[B, T, h]` behind attention, with the residual."""
        result: Tensor = hidden + self.self_attn(self.input_layernorm(hidden), rotation, cache)
        return result

    def gate(self, hidden: Tensor) -> Gated:
        """Normed tokens of `hidden [B, T, h]`, and the experts that they go to."""
        tokens = self.post_attention_layernorm(hidden).flatten(0, 1)
        routing = self.mlp.gate(tokens) if isinstance(self.mlp, MixtureOfExperts) else None
        return Gated(hidden, tokens, routing)

    def dispatch(self, gated: Gated) -> Pending[Arrived]:
        """Begins to send tokens to their experts."""
        if isinstance(self.mlp, MixtureOfExperts) and gated.routing is not None:
            return self.mlp.dispatcher.dispatch(gated.tokens, gated.routing)
        return Ready(Arrived(gated.tokens, gated.tokens.new_empty(0)))

    def experts(self, arrived: Arrived) -> Tensor:
        """Results `[M, h]` of the experts of this process for the rows that arrived."""
        mlp = self.mlp
        result: Tensor = (
            mlp.experts(arrived.rows, arrived.counts) if isinstance(mlp, MixtureOfExperts) else mlp(arrived.rows)
        )
        return result

    def combine(self, gated: Gated, rows: Tensor, arrived: Arrived) -> Pending[Tensor]:
        """Begins to send results back. What it returns gives the output of the layer `[B, T, h]`: residual, shared
        experts and weighted results."""
        mlp = self.mlp
        if not isinstance(mlp, MixtureOfExperts):
            return Ready(gated.hidden + rows.view_as(gated.hidden))
        sent = mlp.dispatcher.combine(rows, arrived)
        shared = None if mlp.shared_experts is None else mlp.shared_experts(gated.tokens)
        return _Output(gated.hidden, shared, sent)


@dataclass(slots=True, frozen=True)
class _Output:
    """The output of a layer, of which routed results are on their way."""

    hidden: Tensor
    shared: Tensor | None
    routed: Pending[Tensor]

    def wait(self) -> Tensor:
        total = self.routed.wait()
        if self.shared is not None:
            total = total + self.shared
        return self.hidden + total.view_as(self.hidden)
