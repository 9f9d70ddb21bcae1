"""Between gate and experts: `Dispatch` brings the rows of tokens to their experts, and results back.

`LocalDispatch` serves one process that has all experts. What sends rows to other ranks has the same two methods; each
returns before the rows have arrived if it likes, and `wait()` gives them, so that a pipeline computes another
micro-batch meanwhile. Both are differentiable.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor

from fireflyer.recipes.deepseek.gate import Routing

__all__ = ["Arrived", "Dispatch", "LocalDispatch", "Pending", "Ready"]

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Pending(Protocol[T_co]):
    """Result that may be on its way."""

    def wait(self) -> T_co:
        """The result; waits for it. Called once."""


@dataclass(slots=True, frozen=True)
class Ready(Generic[T]):
    """Result that is there."""

    value: T

    def wait(self) -> T:
        """The result."""
        return self.value


@dataclass(slots=True, frozen=True)
class Arrived:
    """Rows of the experts of this process."""

    rows: Tensor
    """`[M, h]`, in the order of the experts."""
    counts: Tensor
    """`[experts]` int64: rows of each."""
    origin: object = None
    """State that `combine` needs to send results back."""


class Dispatch(Protocol):
    """Interface of what sends rows to experts and back."""

    def dispatch(self, tokens: Tensor, routing: Routing) -> Pending[Arrived]:
        """Sends each of `tokens [N, h]` to its experts."""

    def combine(self, rows: Tensor, arrived: Arrived) -> Pending[Tensor]:
        """Sends the experts' results `rows [M, h]` back: `[N, h]`, for each token the sum of its results times their
        weights. Sums are formed in fp32 or wider, in ascending order of the experts' numbers, and rounded once."""


@dataclass(slots=True, frozen=True)
class _Origin:
    position: Tensor
    """`[N, K]`: row of each token's result, in ascending order of its experts."""
    weights: Tensor
    """`[N, K]`, in the same order."""


@dataclass(slots=True, frozen=True)
class LocalDispatch:
    """Dispatch in one process with all `experts`: it sorts rows and sends nothing."""

    experts: int

    def dispatch(self, tokens: Tensor, routing: Routing) -> Ready[Arrived]:
        """Rows of `tokens`, sorted by expert, those of one expert by token."""
        indices, order = routing.indices.sort(dim=1)
        weights = routing.weights.gather(1, order)
        by_expert = indices.flatten().argsort(stable=True)
        rows = tokens.index_select(0, by_expert // indices.shape[1])
        counts = torch.bincount(indices.flatten(), minlength=self.experts)
        position = torch.empty_like(by_expert)
        position[by_expert] = torch.arange(len(by_expert), device=by_expert.device)
        return Ready(Arrived(rows, counts, _Origin(position.view_as(indices), weights)))

    def combine(self, rows: Tensor, arrived: Arrived) -> Ready[Tensor]:
        """Weighted sums, in the order of the tokens."""
        origin = arrived.origin
        assert isinstance(origin, _Origin)  # noqa: S101 - made by `dispatch`
        wide = torch.promote_types(rows.dtype, torch.float32)
        results = rows.index_select(0, origin.position.flatten()).view(*origin.position.shape, -1).to(wide)
        weights = origin.weights.to(wide)
        total = weights[:, :1] * results[:, 0]
        for k in range(1, results.shape[1]):
            total = total + weights[:, k : k + 1] * results[:, k]
        return Ready(total.to(rows.dtype))
