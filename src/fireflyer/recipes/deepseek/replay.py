"""Routing that is recorded in one run and taken again in another.

Two runs that differ by rounding may send a token to different experts, and then differ by much more. To compare them,
the second takes the experts of the first:

    with recorded_routing(model) as routing:
        wanted = model(tokens)
    with replayed_routing(other, routing):
        found = other(tokens)
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from fireflyer.base.errors import UsageError
from fireflyer.recipes.deepseek.gate import Gate, Routing
from fireflyer.training.reducer import in_backward

__all__ = ["recorded_routing", "replayed_routing"]


@contextlib.contextmanager
def recorded_routing(model: nn.Module) -> Iterator[dict[str, list[Tensor]]]:
    """Dictionary that gets, by the name of each gate in `model`, the indices `[N, K]` of each of its forwards in the
    block, in their order. A forward that is computed again in backward is not recorded twice."""
    recorded: dict[str, list[Tensor]] = {}
    with contextlib.ExitStack() as hooks:
        for name, gate in _gates(model):
            calls = recorded.setdefault(name, [])

            def record(_: nn.Module, __: Any, routing: Routing, calls: list[Tensor] = calls) -> None:
                if not in_backward():
                    calls.append(routing.indices.detach().clone())

            hooks.callback(gate.register_forward_hook(record).remove)
        yield recorded


@contextlib.contextmanager
def replayed_routing(model: nn.Module, recorded: Mapping[str, list[Tensor]]) -> Iterator[None]:
    """Gates of `model` take the experts of `recorded` in the block, forward by forward; weights are from their own
    scores. Forwards that are computed again in backward are not supported: run without recomputation.

    Raises `UsageError` for a forward that was not recorded, and at the end of the block if some were not taken.
    """
    left = {name: deque(recorded.get(name, ())) for name, _ in _gates(model)}
    with contextlib.ExitStack() as hooks:
        for name, gate in _gates(model):

            def take(
                _: nn.Module, given: tuple[Any, ...], named: dict[str, Any], name: str = name
            ) -> tuple[tuple[Any, ...], dict[str, Any]]:
                if in_backward():
                    raise UsageError("routing cannot be replayed with recomputation: switch it off for the comparison")
                if not left[name]:
                    raise UsageError(f"{name}: no routing is recorded for this forward; record as many as are replayed")
                return given, named | {"indices": left[name].popleft()}

            hooks.callback(gate.register_forward_pre_hook(take, with_kwargs=True).remove)
        yield
    for name, calls in left.items():
        if calls:
            raise UsageError(f"{name}: {len(calls)} recorded forwards were not replayed; run the same forwards")


def _gates(model: nn.Module) -> Iterator[tuple[str, Gate]]:
    for name, module in model.named_modules():
        if isinstance(module, Gate):
            yield name, module
