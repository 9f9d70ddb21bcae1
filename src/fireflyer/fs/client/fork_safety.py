"""A client belongs to the process that opened it. A forked child gets a copy of it, on the same connections, and what
both said there would be mixed: so a child may not use the copy, and opens its own.

    samples = PerProcess(open_ring_to, "fs")       # in the parent, before workers are started
    samples.get().prepare_reads(…)                 # in each worker: its own ring, opened when it is first wanted
"""

from __future__ import annotations

import os
from collections.abc import Callable
from multiprocessing.util import Finalize
from typing import Any, Generic, NoReturn, Protocol, TypeVar

from fireflyer.base.errors import UsageError

__all__ = ["PerProcess", "ProcessBound", "refuse_pickling"]


class ProcessBound:
    """`check_process` raises `UsageError` in any but the one that made the object."""

    def __init__(self) -> None:
        self._process = os.getpid()

    @property
    def elsewhere(self) -> bool:
        """This is a child's copy."""
        return os.getpid() != self._process

    def check_process(self) -> None:
        if os.getpid() != self._process:
            raise UsageError(
                f"this client belongs to process {self._process}; a forked child must open its own, with "
                "fireflyer.fs.client.PerProcess"
            )


def refuse_pickling(client: object) -> NoReturn:
    """As `__reduce__`: connections and open files stay where they are."""
    raise UsageError(
        f"a {type(client).__name__} cannot be used in another process; each process opens its own, with "
        "fireflyer.fs.client.PerProcess(fireflyer.fs.connect, …)"
    )


_kept: list[object] = []
"""Copies of what the parent opened: to take one apart would touch its event loop and its connections."""


class _Closes(Protocol):
    def close(self) -> None: ...


_T = TypeVar("_T", bound=_Closes)


class PerProcess(Generic[_T]):
    """Value that `open_it(*given, **named)` returns, once for each process that asks: forked ones, and those to which
    this object was pickled. Not for several threads. What workers of `multiprocessing` (and so of PyTorch) opened is
    closed when they end."""

    def __init__(self, open_it: Callable[..., _T], *given: Any, **named: Any) -> None:
        self._open, self._given, self._named = open_it, given, named
        self._opened: _T | None = None
        self._process = 0

    def get(self) -> _T:
        """Raises what `open_it` raises."""
        if self._opened is None or self._process != os.getpid():
            if self._opened is not None:
                _kept.append(self._opened)
            self._opened = self._open(*self._given, **self._named)
            self._process = os.getpid()
            Finalize(self, self._opened.close, exitpriority=0)
        return self._opened

    def __reduce__(self) -> tuple[Any, ...]:
        return _again, (self._open, self._given, self._named)


def _again(open_it: Callable[..., _T], given: tuple[Any, ...], named: dict[str, Any]) -> PerProcess[_T]:
    return PerProcess(open_it, *given, **named)
