"""A stage that shows the parts of its layers, so that two micro-batches of an overlapped pair compute under each
other's exchanges of tokens (DualPipeV with experts on several ranks).

    embedding, attention, gate | dispatch | experts, shared experts | combine | sum, attention, gate | dispatch | ...

What is computed between two transfers is one phase: the sum that ends a layer with experts, dense layers, and the
attention of the next layer with experts. Values are those of `Block.forward`, to the bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from fireflyer.recipes.deepseek.block import Block, MixtureOfExperts
from fireflyer.recipes.trainer.stages import Stage
from fireflyer.training.experts.layers import RankDispatch
from fireflyer.training.experts.transfers import LayerTransfers
from fireflyer.training.pipeline import Compute, Transfer

__all__ = ["PhasedStage"]

_Hidden = Callable[..., Tensor]
"""From what a phase is given to hidden states `[B, T, h]`."""


class PhasedStage(Stage):
    """Its layers with experts exchange tokens with other ranks."""

    def phases(self) -> Sequence[Compute | Transfer]:
        """Of one micro-batch, from what `forward` takes to what it gives."""
        embedding, layers = self.run
        found: list[Compute | Transfer] = []
        hidden: _Hidden = embedding if embedding is not None else _same
        layer: Any
        for layer in layers:
            dispatcher = _dispatcher_of(layer)
            if dispatcher is not None:
                transfers = LayerTransfers(dispatcher)
                found += [
                    Compute("attention", self._attention(hidden, layer)),
                    transfers.dispatch(),
                    Compute("experts", self._experts(layer.mlp, dispatcher)),
                    transfers.combine(),
                ]
                hidden = _sum
            else:
                hidden = self._behind(hidden, layer)
        return [*found, Compute("output", self._within(hidden))]

    def _within(self, run: Callable[..., Any]) -> Callable[..., Any]:
        def within(*given: Tensor) -> Any:
            with self.products():
                return run(*given)

        return within

    def _behind(self, hidden: _Hidden, layer: Any) -> _Hidden:
        def behind(*given: Tensor) -> Tensor:
            before = hidden(*given)
            result: Tensor = layer(before, self.rotation(before))
            return result

        return behind

    def _attention(self, hidden: _Hidden, layer: Any) -> Callable[..., Sequence[Tensor]]:
        def attention(*given: Tensor) -> Sequence[Tensor]:
            before = hidden(*given)
            gated = layer.gate(layer.attention(before, self.rotation(before)))
            routing = gated.routing
            assert routing is not None  # noqa: S101 - a layer with experts
            beside = (gated.hidden,) if layer.mlp.shared_experts is None else (gated.hidden, gated.tokens)
            return (*beside, gated.tokens, routing.weights, routing.indices)

        return self._within(attention)

    def _experts(self, mlp: Any, dispatcher: RankDispatch) -> Callable[..., Sequence[Tensor]]:
        def experts(hidden: Tensor, *given: Tensor) -> Sequence[Tensor]:
            *shared, rows, weights, counts = given
            results = dispatcher.weighted(mlp.experts(rows, counts), weights)
            return (hidden, *(mlp.shared_experts(tokens) for tokens in shared), results)

        return self._within(experts)


def _dispatcher_of(layer: Any) -> RankDispatch | None:
    """Of a layer whose experts are on several ranks."""
    mlp = layer.mlp if isinstance(layer, Block) else None
    dispatcher: Any = mlp.dispatcher if isinstance(mlp, MixtureOfExperts) else None
    return dispatcher if isinstance(dispatcher, RankDispatch) else None


def _same(hidden: Tensor) -> Tensor:
    return hidden


def _sum(hidden: Tensor, *results: Tensor) -> Tensor:
    """The output of a layer: what came by attention, of shared experts, and of routed ones."""
    *shared, total = results
    for one in shared:
        total = total + one
    return hidden + total.view_as(hidden)
