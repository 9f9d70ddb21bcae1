"""Dispatch and combine of a layer as transfers of a pipeline stage that is run phase by phase (`pipeline.phases`).

    Compute: attention, gate        -> (*beside, tokens, weights, indices)
    Transfer: dispatch              -> (*beside, rows, weights of rows, counts)
    Compute: experts, weighting     -> (*beside, weighted rows)
    Transfer: combine               -> (*beside, sums)

`beside` passes unchanged: a residual, what shared experts gave. Values are those of `RankDispatch`, without autograd:
in backward a gradient is sent when the pass comes to it and waited for when the pass goes on, so that another
micro-batch computes meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fireflyer.base.errors import InvariantViolation
from fireflyer.collectives.dispatch import Routed
from fireflyer.training.experts.exchange import InFlightCombine, InFlightTokens
from fireflyer.training.experts.layers import RankDispatch
from fireflyer.training.pipeline.phases import Gradients, Pending, Tensors, Transfer

__all__ = ["COMBINE", "DISPATCH", "LayerTransfers"]

DISPATCH, COMBINE = "dispatch", "combine"


class LayerTransfers:
    """Of one layer and one micro-batch: the combine needs what the dispatch has kept."""

    def __init__(self, dispatcher: RankDispatch) -> None:
        self._of_layer = dispatcher
        self._kept: Routed | None = None

    def dispatch(self) -> Transfer:
        """From `(*beside, tokens [N, h], weights [N, K], indices [N, K] int64)` to `(*beside, rows [M, h],
        weights [M], counts [experts] int64)`."""
        return Transfer(DISPATCH, self._start_dispatch, self._start_dispatch_backward)

    def combine(self) -> Transfer:
        """From `(*beside, rows [M, h])`, weighted and as `RankDispatch.weighted` gives them, to `(*beside,
        sums [N, h])`."""
        return Transfer(COMBINE, self._start_combine, self._start_combine_backward)

    def _start_dispatch(self, *given: Tensor) -> tuple[Pending, Any]:
        *beside, tokens, weights, indices = given
        flight = self._of_layer.start(tokens, weights, indices)
        return _Arriving(self, tuple(beside), flight, tokens.device), (tokens.dtype, weights.dtype, tokens.device)

    def _start_dispatch_backward(self, saved: Any, gradients: Gradients) -> Pending:
        *beside, rows, weights, _ = gradients
        if rows is None or weights is None:
            raise InvariantViolation("a dispatch got no gradient for its rows or their weights")
        tokens_dtype, weights_dtype, device = saved
        flight = self._of_layer.exchange.start_dispatch_gradient(self._routed, rows.cpu(), weights.cpu())

        def wait() -> Gradients:
            of_tokens, of_weights = flight()
            return (*beside, of_tokens.to(device, tokens_dtype), of_weights.to(device, weights_dtype), None)

        return _Later(wait)

    def _start_combine(self, *given: Tensor) -> tuple[Pending, Any]:
        *beside, rows = given
        flight = self._of_layer.exchange.start_combine_of(rows.cpu(), self._routed)
        return _Combining(tuple(beside), flight, rows.device), rows.device

    def _start_combine_backward(self, saved: Any, gradients: Gradients) -> Pending:
        *beside, sums = gradients
        if sums is None:
            raise InvariantViolation("a combine got no gradient for its sums")
        flight = self._of_layer.exchange.start_combine_gradient(self._routed, sums.cpu())
        return _Later(lambda: (*beside, flight().to(saved)))

    @property
    def _routed(self) -> Routed:
        if self._kept is None:
            raise InvariantViolation("a transfer of a layer begins before its dispatch has ended")
        return self._kept

    def keep(self, routed: Routed) -> None:
        """Of the dispatch, which has ended. Not its rows: those of each micro-batch in flight would stay."""
        self._kept = routed


@dataclass(slots=True, frozen=True)
class _Arriving:
    layer: LayerTransfers
    beside: Tensors
    flight: InFlightTokens
    device: torch.device

    def wait(self) -> Tensors:
        arrived = self.flight.wait()
        self.layer.keep(arrived.routed)
        counts = torch.tensor(arrived.counts, dtype=torch.int64)
        return (*self.beside, arrived.rows.to(self.device), arrived.weights.to(self.device), counts)


@dataclass(slots=True, frozen=True)
class _Combining:
    beside: Tensors
    flight: InFlightCombine
    device: torch.device

    def wait(self) -> Tensors:
        return (*self.beside, self.flight.wait().to(self.device))


@dataclass(slots=True, frozen=True)
class _Later:
    waits: Callable[[], Gradients]

    def wait(self) -> Gradients:
        return self.waits()
