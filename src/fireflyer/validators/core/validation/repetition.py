"""Figures that are low are measured again, so that one noisy measurement accuses no node. Pure.

    first measurement ──> not low: it counts, as those of its peers, which were measured once
                      └─> low: measured again until two measurements agree, three times at most

Two of three decide. The median of three has no bias beside peers that were measured once, as the best of three would: a
node that is slow two times of three would pass by its best. Of healthy nodes fewer are called slow than by one
measurement, never more, so `deviations_for` still holds; noise that is independent would have to come twice.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable, Mapping
from typing import Final, Generic, TypeVar

from fireflyer.validators.core.validation.paths import is_path
from fireflyer.validators.core.validation.records import AGREE, counted_value, is_decided

__all__ = ["MEASUREMENTS", "LowFigures", "validators_of"]

MEASUREMENTS: Final = 2 * AGREE - 1
"""Of a figure that is low at first, at most."""
_Key = TypeVar("_Key", bound=Hashable)


class LowFigures(Generic[_Key]):
    """Measurements of what was low at first: figures of a node by name, or links by their nodes."""

    def __init__(self, first: Mapping[_Key, float], least: Mapping[_Key, float]) -> None:
        """`least`: what is below it is too low; what has no least value is never low."""
        self._least = {key: bound for key, bound in least.items() if key in first and first[key] < bound}
        self._values = {key: [first[key]] for key in self._least}

    @property
    def measured(self) -> dict[_Key, tuple[float, ...]]:
        return {key: tuple(values) for key, values in self._values.items()}

    @property
    def counted(self) -> dict[_Key, float]:
        """The value of each that counts."""
        return {key: counted_value(values) for key, values in self._values.items()}

    @property
    def undecided(self) -> list[_Key]:
        """What has to be measured again; at the end, what could not be, and accuses nobody, but is not in order."""
        return [key for key, values in self._values.items() if not is_decided(values, self._least[key])]

    @property
    def good_after_all(self) -> list[_Key]:
        """What was low at first, and is not by most measurements."""
        open_ones = set(self.undecided)
        return [key for key, value in self.counted.items() if value >= self._least[key] and key not in open_ones]

    def add(self, figures: Mapping[_Key, float]) -> None:
        """One more measurement; of what is decided, or was not low at first, it does not count."""
        for key in self.undecided:
            if key in figures:
                self._values[key].append(figures[key])


_FIGURES: Final = (
    (re.compile(r"cpu_gemm_flop_per_s"), "cpu_stress"),
    (re.compile(r"memory_bytes_per_s"), "memory_bandwidth"),
    (re.compile(r"allreduce_bytes_per_s"), "allreduce"),
    (re.compile(r"storage_(?:read|write)_bytes_per_s"), "storage"),
    (re.compile(r"gpu\d+_gemm_flop_per_s"), "gpu_gemm"),
    (re.compile(r"gpu_allreduce_bytes_per_s"), "gpu_allreduce"),
)


def validators_of(figures: Iterable[str]) -> list[str]:
    """Which validators measure these figures, each once, by name; figures of another release have none."""
    return sorted({name for figure in figures if (name := _validator_of(figure))})


def _validator_of(figure: str) -> str:
    if is_path(figure):
        return "gpu_paths" if "gpu" in figure else "paths"
    return next((name for pattern, name in _FIGURES if pattern.fullmatch(figure)), "")
