"""What a layer with experts must have to be divided, and the dispatcher that it then gets.

A layer is a module with `gate`, `experts` and `dispatcher`, as `recipes.deepseek.block.MixtureOfExperts`: found by
these attributes, so that a model needs to import nothing from here.

- `gate.weight [E, h]`; `gate.sizes` has `routed` (E) and `per_token`; `gate.counts [E]` int64 are the tokens of each
  expert since the biases were moved.
- `experts.numbers`: range of the experts that are here; each parameter of `experts` has one slice for each of them.
- `dispatcher` has `dispatch(tokens, routing)` and `combine(rows, arrived)`, whose results have `wait()`. A routing has
  `indices [N, K]` and `weights [N, K]`; what arrives has `rows [M, h]` in the order of the experts and `counts`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor, nn

from fireflyer.base.errors import UsageError
from fireflyer.training.experts.exchange import ArrivedTokens, ExpertDispatch, InFlightCombine, InFlightTokens
from fireflyer.training.mesh import PlanMesh

__all__ = ["Arrived", "NotSplit", "RankDispatch", "layers_of", "own_experts"]


class Routing(Protocol):
    """As a gate gives it; weights are fp32 or wider."""

    @property
    def indices(self) -> Tensor: ...

    @property
    def weights(self) -> Tensor: ...


@dataclass(slots=True, frozen=True)
class Arrived:
    """Rows for the experts of this rank."""

    rows: Tensor
    """`[M, h]`, in ascending order of experts, then of source ranks, then of their tokens."""
    counts: Tensor
    """`[experts]` int64: rows of each."""
    origin: ArrivedTokens


@dataclass(slots=True, frozen=True)
class InFlightRows:
    """A dispatch under way, of tokens on `device`."""

    flight: InFlightTokens
    device: torch.device

    def wait(self) -> Arrived:
        """To be called once. Raises what the dispatch failed with."""
        arrived = self.flight.wait()
        return Arrived(arrived.rows.to(self.device), torch.tensor(arrived.counts, dtype=torch.int64), arrived)


@dataclass(slots=True, frozen=True)
class InFlightResults:
    """A combine under way, of rows on `device`."""

    flight: InFlightCombine
    device: torch.device

    def wait(self) -> Tensor:
        """Sums `[N, h]`. To be called once. Raises what the combine failed with."""
        return self.flight.wait().to(self.device)


@dataclass(slots=True, frozen=True)
class RankDispatch:
    """Dispatcher of one layer whose experts are on several ranks.

    Results are weighted where their experts are: in fp32 (fp64 for a model in fp64), and rounded before they travel to
    the dtype of the exchange: under autocast the experts compute in another one. The exchange is one of the CPU:
    what is on another device goes through host memory.
    """

    exchange: ExpertDispatch

    def dispatch(self, tokens: Tensor, routing: Routing) -> InFlightRows:
        """Begins to send each of `tokens [N, h]` to the ranks of its experts."""
        return InFlightRows(self.start(tokens, routing.weights, routing.indices), tokens.device)

    def start(self, tokens: Tensor, weights: Tensor, indices: Tensor) -> InFlightTokens:
        """The same, of a routing's `weights [N, K]` and `indices [N, K]`; what arrives is on the CPU."""
        # Under autocast a layer may compute in another dtype.
        carried = tokens.to(device="cpu", dtype=self.exchange.dtype)
        return self.exchange.start(carried, indices.cpu(), weights.cpu())

    def combine(self, rows: Tensor, arrived: Arrived) -> InFlightResults:
        """Begins to send the experts' results `rows [M, h]` back; what it returns gives for each token the sum of its
        weighted results `[N, h]`."""
        carried = self.weighted(rows, arrived.origin.weights).cpu()
        return InFlightResults(self.exchange.start_combine(carried, arrived.origin), rows.device)

    def weighted(self, rows: Tensor, weights: Tensor) -> Tensor:
        """`rows [M, h]` times `weights [M]`, on the device of `rows`, in the dtype in which they travel."""
        wide = torch.promote_types(rows.dtype, torch.float32)
        return (rows.to(wide) * weights.to(device=rows.device, dtype=wide)[:, None]).to(self.exchange.dtype)


class NotSplit:
    """Dispatcher of a layer that is made with a part of the experts, until `shard_experts` gives it another."""

    def dispatch(self, tokens: Tensor, routing: Routing) -> NoReturn:  # noqa: ARG002 - the names of the interface
        """Raises `UsageError`."""
        raise UsageError("the experts of this layer are on several ranks; call shard_experts before the first forward")

    def combine(self, rows: Tensor, arrived: Any) -> NoReturn:  # noqa: ARG002 - the names of the interface
        """Raises `UsageError`."""
        raise UsageError("the experts of this layer are on several ranks; call shard_experts before the first forward")


def own_experts(mesh: PlanMesh, routed: int) -> range:
    """Numbers of the experts of this rank, of `routed` in a layer: consecutive ones, ascending with the ranks of its
    expert group. Raises `UsageError` where they do not divide."""
    ranks = mesh.plan.expert
    if routed % ranks:
        raise UsageError(f"{routed} experts do not divide among the {ranks} ranks of an expert group; change the plan")
    each = routed // ranks
    return range(mesh.coordinates.expert * each, (mesh.coordinates.expert + 1) * each)


def layers_of(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Names and layers with experts, in the order of the model."""
    for name, module in model.named_modules():
        if hasattr(module, "dispatcher") and hasattr(module, "gate") and hasattr(module, "experts"):
            yield name, module
