"""Tokens to experts on other ranks and back, as steps of autograd: the gradient of a dispatch is a combine, and of a
combine a dispatch.

>>> experts = ExpertDispatch(comm, ExpertPlacement.even(64, comm.plan.node_of_rank), width=2048, per_token=6,
...                          max_tokens=4096, dtype=torch.bfloat16, dispatch_codec="fp8")
>>> arrived = experts.start(tokens, chosen, weights).wait()
>>> outputs = (grouped_mlp(arrived.rows, arrived.counts) * arrived.weights[:, None]).to(arrived.rows.dtype)
>>> tokens = tokens + experts.start_combine(outputs, arrived).wait()

Weights travel with their rows and their gradients come back alone: multiply where the experts are, as above. What is
started goes on beside the program until it is waited for. In backward a gradient is waited for where autograd needs it;
the codecs are those of the direction in which rows travel.

All ranks must run the same operations in the same order, in backward too. What a rank has no tokens for it must still
call. On the CPU: other tensors are refused.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, cast

import numpy as np
import numpy.typing as npt
import torch

from fireflyer.base.errors import UsageError
from fireflyer.collectives import Communicator
from fireflyer.collectives.dispatch import Dispatched, Dispatcher, ExpertPlacement, InFlightDispatch, Routed
from fireflyer.collectives.tokens import TokenCodec

__all__ = ["ArrivedTokens", "ExpertDispatch", "InFlightCombine", "InFlightTokens"]

_NAMES: Final = {torch.bfloat16: "bf16", torch.float32: "f32", torch.float64: "f64"}


@dataclass(frozen=True, slots=True)
class ArrivedTokens:
    """Rows for the experts of this rank."""

    rows: torch.Tensor
    """(entries, width), in ascending order of experts, then of ranks that they come from, then of their tokens."""
    weights: torch.Tensor
    """(entries,), float32; float64 where rows are."""
    counts: list[int]
    """Rows of each expert of this rank, ascending."""
    routed: Routed


class InFlightTokens:
    """A dispatch under way."""

    def __init__(
        self,
        exchange: ExpertDispatch,
        flight: InFlightDispatch[Dispatched],
        tokens: torch.Tensor,
        weights: torch.Tensor,
    ) -> None:
        self._exchange = exchange
        self._flight = flight
        self._inputs = (tokens, weights)

    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return self._flight.done()

    def wait(self) -> ArrivedTokens:
        """Wait for the tokens; called once. Raises what the dispatch failed with."""
        dispatched = self._flight.wait()
        rows, weights = cast(
            "tuple[torch.Tensor, torch.Tensor]",
            _Dispatch.apply(*self._inputs, dispatched, self._exchange),  # type: ignore[no-untyped-call]
        )
        return ArrivedTokens(rows, weights, dispatched.counts.tolist(), dispatched.routed)


class InFlightCombine:
    """A combine under way."""

    def __init__(
        self,
        exchange: ExpertDispatch,
        flight: InFlightDispatch[tuple[npt.NDArray[Any], npt.NDArray[Any] | None]],
        outputs: torch.Tensor,
        routed: Routed,
    ) -> None:
        self._exchange = exchange
        self._flight = flight
        self._outputs = outputs
        self._routed = routed

    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return self._flight.done()

    def wait(self) -> torch.Tensor:
        """(tokens, width): sums over the experts of each token. To be called once. Raises what it failed with."""
        summed, _ = self._flight.wait()
        return cast("torch.Tensor", _Combine.apply(self._outputs, summed, self._routed, self._exchange))  # type: ignore[no-untyped-call]


class ExpertDispatch:
    """Dispatch of one layer and one rank. All ranks of `comm` make it at the same time, with the same arguments."""

    def __init__(
        self,
        comm: Communicator,
        placement: ExpertPlacement,
        *,
        width: int,
        per_token: int,
        max_tokens: int,
        dtype: torch.dtype = torch.bfloat16,
        dispatch_codec: str | TokenCodec = "bf16",
        combine_codec: str | TokenCodec = "bf16",
    ) -> None:
        """As `Dispatcher`. Collective. Raises `UsageError`."""
        if dtype not in _NAMES:
            raise UsageError(f"tokens of {dtype} cannot be dispatched; use one of {', '.join(map(str, _NAMES))}")
        self.dtype = dtype
        self.dispatcher = Dispatcher(
            comm,
            placement,
            width=width,
            per_token=per_token,
            max_tokens=max_tokens,
            dtype=_NAMES[dtype],
            dispatch_codec=dispatch_codec,
            combine_codec=combine_codec,
        )

    def start(self, tokens: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor) -> InFlightTokens:
        """Sends `tokens` (tokens, width) to the `experts` (tokens, per_token) of each, with `weights` of that shape.
        None of them may change before `wait`. Raises `UsageError` before anything is sent."""
        wide = torch.float64 if self.dtype == torch.float64 else torch.float32
        values, chosen = _array(tokens, self.dtype), experts.detach().numpy()
        flight = self.dispatcher.start_dispatch(values, chosen, weights.detach().to(wide).numpy())
        return InFlightTokens(self, flight, tokens, weights)

    def start_combine(self, outputs: torch.Tensor, arrived: ArrivedTokens) -> InFlightCombine:
        """Hands `outputs`, in the order of `arrived.rows`, back to where the tokens came from."""
        return self.start_combine_of(outputs, arrived.routed)

    def start_combine_of(self, outputs: torch.Tensor, routed: Routed) -> InFlightCombine:
        """The same, of the `routed` of what arrived."""
        flight = self.dispatcher.start_combine(routed, _array(outputs, self.dtype))
        return InFlightCombine(self, flight, outputs, routed)

    def start_dispatch_gradient(
        self, routed: Routed, rows: torch.Tensor, weights: torch.Tensor
    ) -> Callable[[], tuple[torch.Tensor, torch.Tensor]]:
        """Hands gradients of the rows (entries, width) and weights (entries,) of a dispatch back to where its tokens
        came from. What it returns waits, once, for those of the tokens (tokens, width) and weights (tokens,
        per_token)."""
        flight = self.dispatcher.start_combine(routed, _array(rows, self.dtype), weights.contiguous().numpy())

        def wait() -> tuple[torch.Tensor, torch.Tensor]:
            summed, alone = flight.wait()
            return _tensor(summed, self.dtype), torch.from_numpy(alone)

        return wait

    def start_combine_gradient(self, routed: Routed, sums: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Sends the gradient of the sums (tokens, width) of a combine to its experts. What it returns waits, once, for
        that of the outputs (entries, width)."""
        flight = self.dispatcher.start_rows(routed, _array(sums, self.dtype))
        return lambda: _tensor(flight.wait(), self.dtype)

    def abort(self, reason: str) -> None:
        """See `Dispatcher.abort`."""
        self.dispatcher.abort(reason)

    def close(self) -> None:
        """Waits for what was started. Idempotent."""
        self.dispatcher.close()


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tokens: torch.Tensor, weights: torch.Tensor, dispatched: Dispatched, exchange: ExpertDispatch
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.routed, ctx.exchange, ctx.of_weights = dispatched.routed, exchange, weights.dtype
        return _tensor(dispatched.rows, tokens.dtype), torch.from_numpy(dispatched.weights)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        of_tokens, of_weights = ctx.exchange.start_dispatch_gradient(ctx.routed, *gradients)()
        return of_tokens, of_weights.to(ctx.of_weights), None, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, outputs: torch.Tensor, summed: npt.NDArray[Any], routed: Routed, exchange: ExpertDispatch
    ) -> torch.Tensor:
        ctx.routed, ctx.exchange = routed, exchange
        return _tensor(summed, outputs.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return ctx.exchange.start_combine_gradient(ctx.routed, gradients[0])(), None, None, None


def _array(tensor: torch.Tensor, dtype: torch.dtype) -> npt.NDArray[Any]:
    """The values of a CPU tensor; of bfloat16 as uint16."""
    if tensor.device.type != "cpu" or tensor.dtype != dtype:
        raise UsageError(
            f"tokens are {tensor.dtype} on {tensor.device}; this dispatch carries {dtype} on the CPU: cast them, or "
            "make it with their dtype"
        )
    flat = tensor.detach().contiguous()
    if dtype == torch.bfloat16:
        return flat.view(torch.int16).numpy().view(np.uint16)
    return flat.numpy()


def _tensor(values: npt.NDArray[Any], dtype: torch.dtype) -> torch.Tensor:
    if dtype == torch.bfloat16:
        return torch.from_numpy(values.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(values)
