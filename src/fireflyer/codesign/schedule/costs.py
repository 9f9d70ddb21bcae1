"""What the passes and messages of a step cost. Times are in seconds, or in any one unit: everything is linear."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import msgspec

from fireflyer.base.errors import UsageError
from fireflyer.codesign.schedule.actions import Placement

__all__ = ["Costs", "uniform_costs"]

_BY_STAGE: Final = ("forward_s", "backward_s", "input_s", "weights_s", "reduce_s", "optimizer_s")


class Costs(msgspec.Struct, frozen=True, kw_only=True):
    """Costs of passes by stage, so stages may be unequal.

    Raises `UsageError` for lists of different lengths and negative times.
    """

    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    """Time of B, backward for input and weights together, by stage."""
    input_s: tuple[float, ...]
    weights_s: tuple[float, ...]
    pair_ratio: float = 1.0
    """Time of a pair over the sum of its forward and its backward: 1 where nothing is hidden."""
    send_s: tuple[float, ...] = ()
    """Time of a message on the wire at full speed, its bytes over the bandwidth, by boundary: between stages s and
    s + 1, the same both ways. Empty: none."""
    latency_s: float = 0.0
    """Latency of every message between ranks, beside `send_s`."""
    reduce_s: tuple[float, ...] = ()
    """Sum of a stage's gradients over the data-parallel ranks. It may begin when the last gradient of the stage is
    there; those of one rank run one after another. Empty: none."""
    optimizer_s: tuple[float, ...] = ()
    """Optimizer step of a stage's parameters, after all sums of its rank. Empty: none."""

    def __post_init__(self) -> None:
        stages = len(self.forward_s)
        for name in _BY_STAGE:
            values: tuple[float, ...] = getattr(self, name)
            if len(values) != stages and (values or name not in ("reduce_s", "optimizer_s")):
                raise UsageError(f"{name} has {len(values)} entries, forward_s has {stages}; give one for each stage")
            _check_times(name, values)
        if self.send_s and len(self.send_s) != stages - 1:
            raise UsageError(f"send_s has {len(self.send_s)} entries; give one for each of the {stages - 1} boundaries")
        _check_times("send_s", self.send_s)
        _check_times("latency_s", (self.latency_s,))
        if not 0 < self.pair_ratio < math.inf:
            raise UsageError(f"pair_ratio {self.pair_ratio} is not a positive number")

    def delays_s(self) -> list[float]:
        """Delay of a message by boundary where no NIC is shared; a last entry, 0, for outputs of the same rank."""
        boundaries = len(self.forward_s) - 1
        return [self.latency_s + wire for wire in self.send_s or (0.0,) * boundaries] + [0.0]


def _check_times(name: str, values: tuple[float, ...]) -> None:
    for value in values:
        if not 0 <= value < math.inf:
            raise UsageError(f"{name} has {value}; a time is a finite number, at least 0")


def uniform_costs(
    placement: Placement,
    *,
    forward: float,
    backward: float,
    weights: float,
    pair: float | None = None,
    send: float = 0.0,
    shares: Sequence[float] = (),
) -> Costs:
    """Costs of all stages from those of one. `forward`, `backward` (input and weights) and `weights` are times of one
    micro-batch on a P-th of the layers of the model, P = `placement.ranks`: a stage with half as many layers takes half
    as long. `pair` is the time of an overlapped forward and backward, by default their sum; `send` that of one message.
    `shares` are the relative costs of the stages, by default equal; they do not change the sum over all stages.

    Raises `UsageError` where `weights` is more than `backward`, or `pair` less than the longer of its passes.
    """
    if weights > backward:
        raise UsageError(f"weights {weights:g} is a part of backward {backward:g}; give at most that")
    if pair is not None and not max(forward, backward) <= pair <= forward + backward:
        raise UsageError(
            f"overlapped {pair:g} is the time of forward {forward:g} and backward {backward:g} at once; "
            f"give {max(forward, backward):g} to {forward + backward:g}"
        )
    stages = placement.stages
    if shares and (len(shares) != stages or not math.fsum(shares) > 0):
        raise UsageError(f"{len(shares)} shares of the cost do not fit {stages} stages; give one for each, not all 0")
    mean = math.fsum(shares) / stages if shares else 1.0
    factors = [share / mean * placement.ranks / stages for share in shares or (1.0,) * stages]

    def of_all(value: float) -> tuple[float, ...]:
        return tuple(value * factor for factor in factors)

    return Costs(
        forward_s=of_all(forward),
        backward_s=of_all(backward),
        input_s=of_all(backward - weights),
        weights_s=of_all(weights),
        pair_ratio=pair / (forward + backward) if pair else 1.0,
        send_s=(send,) * (stages - 1),
    )
