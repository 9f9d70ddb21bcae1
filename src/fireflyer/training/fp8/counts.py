"""What quantization lost, counted for each operand of each layer."""

from __future__ import annotations

from typing import Final, Literal

import msgspec
import torch
from torch import Tensor

__all__ = ["KINDS", "OPERANDS", "Counts", "Operand", "OperandCounts"]

Operand = Literal["input", "weight", "gradient", "input_of_wgrad", "gradient_of_wgrad"]
OPERANDS: Final[tuple[Operand, ...]] = ("input", "weight", "gradient", "input_of_wgrad", "gradient_of_wgrad")
"""Input and weight of Fprop, gradient of Dgrad, and both operands of Wgrad, whose tiles run along tokens. The weight of
Dgrad has the codes of that of Fprop."""
KINDS: Final = ("elements", "underflowed", "saturated", "nonfinite")


class OperandCounts(msgspec.Struct, frozen=True, kw_only=True):
    """One operand of one layer, summed over passes since the counts began, on this rank."""

    layer: str
    operand: str
    elements: int
    underflowed: int
    """Elements that are not zero and whose code is zero."""
    saturated: int
    """Cut to 448 times the scale. None with scales of this package unless they are wrong."""
    nonfinite: int
    """NaN or infinite; each makes its tile NaN."""

    def __str__(self) -> str:
        share = self.underflowed / self.elements if self.elements else 0.0
        return (
            f"{self.layer} {self.operand}: {self.elements} elements, underflow {self.underflowed} ({share:.2%}), "
            f"overflow {self.saturated} saturated, {self.nonfinite} not finite"
        )


class Counts:
    """The counts of one layer, on the device of what is counted; read only when asked for, so nothing waits."""

    def __init__(self) -> None:
        self._sums: dict[Operand, Tensor] = {}

    def add(self, operand: Operand, counts: Tensor) -> None:
        """int64 of `KINDS`. The first ones are added, too: recomputation that keeps results of operators wants the same
        operators in both passes."""
        before = self._sums.get(operand)
        before = torch.zeros_like(counts) if before is None else before.to(counts.device)
        self._sums[operand] = before + counts

    def of(self, layer: str) -> list[OperandCounts]:
        """In the order of `OPERANDS`; those that were never quantized are left out."""
        rows: list[OperandCounts] = []
        for operand in OPERANDS:
            if (sums := self._sums.get(operand)) is not None:
                elements, underflowed, saturated, nonfinite = sums.tolist()
                rows.append(
                    OperandCounts(
                        layer=layer,
                        operand=operand,
                        elements=elements,
                        underflowed=underflowed,
                        saturated=saturated,
                        nonfinite=nonfinite,
                    )
                )
        return rows

    def reset(self) -> None:
        self._sums.clear()
