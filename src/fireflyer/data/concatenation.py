"""Several data sets as one, numbered one after another: what the numbers of a `MixtureSampler` mean."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from fireflyer.base.errors import UsageError
from fireflyer.data.shard_reader import check_numbers

__all__ = ["Concatenation", "Items", "fetch"]

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Items(Protocol[T_co]):
    """A data set with random access by number. Where it has `__getitems__` too (as torch's loaders know it), the items
    of a batch are asked for together: `RecordSet`, `TokenWindows` and `Concatenation` read them in one batch."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> T_co: ...


def fetch(items: Items[T], indices: Sequence[int]) -> Sequence[T]:
    """The items of a batch, in its order."""
    together: Any = getattr(items, "__getitems__", None)
    if together is not None:
        found: Sequence[T] = together(indices)
        return found
    return [items[index] for index in indices]


class Concatenation(Generic[T]):
    """Item i of data set k is item `len(0) + … + len(k-1) + i`. As thread-safe as the data sets are."""

    def __init__(self, parts: Sequence[Items[T]]) -> None:
        if not parts:
            raise UsageError("a concatenation of no data sets; give at least one")
        self.parts = tuple(parts)
        self._ends = np.cumsum([len(part) for part in parts], dtype=np.int64)

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, index: int) -> T:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int] | NDArray[np.int64]) -> list[T]:
        """One batch of each data set. Raises `IndexError`, and what they raise."""
        numbers = check_numbers(indices, len(self), "the concatenation")
        of = np.searchsorted(self._ends, numbers, side="right")
        firsts = np.concatenate((np.zeros(1, np.int64), self._ends))
        found: list[Any] = [None] * len(numbers)
        for part in np.unique(of).tolist():
            mine = np.flatnonzero(of == part)
            items = fetch(self.parts[part], (numbers[mine] - firsts[part]).tolist())
            for place, item in zip(mine.tolist(), items, strict=True):
                found[place] = item
        return found

    def __iter__(self) -> Iterator[T]:
        for part in self.parts:
            for index in range(len(part)):
                yield part[index]
