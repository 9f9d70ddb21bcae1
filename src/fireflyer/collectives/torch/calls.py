"""One call of torch as operations of the communicator: what they work on, and what is to be copied afterwards."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, Final

import torch

from fireflyer.base.errors import FireflyerError
from fireflyer.collectives.torch.completer import Completer
from fireflyer.collectives.torch.tensors import as_flat
from fireflyer.collectives.torch.work import GroupWork, InFlightOperation
from fireflyer.collectives.work import when_there_is_room

__all__ = ["Calls"]

_MICROSECOND_NS: Final = 1000


class Calls:
    """Arguments are checked while operations are added (and raise `UsageError`); `start` starts all of them."""

    def __init__(self, opts: Any = None) -> None:
        self._operations: list[Callable[..., InFlightOperation]] = []
        self._write_backs: list[Callable[[], None]] = []
        self._asynchronous = bool(getattr(opts, "asyncOp", True))
        timeout: timedelta = getattr(opts, "timeout", timedelta(0))
        self._limit_ns = int(timeout / timedelta(microseconds=1)) * _MICROSECOND_NS

    @property
    def waits(self) -> bool:
        """The caller waits for the work as soon as it has it."""
        return not self._asynchronous

    def argument(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """The tensors as one flat tensor that operations read."""
        return as_flat(tensors, reads=True, writes=False).tensor

    def result(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """... that they write."""
        return self._written(tensors, reads=False)

    def both(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """... that they read and write."""
        return self._written(tensors, reads=True)

    def _written(self, tensors: Sequence[torch.Tensor], *, reads: bool) -> torch.Tensor:
        flat = as_flat(tensors, reads=reads, writes=True)
        if flat.write_back is not None:
            self._write_backs.append(flat.write_back)
        return flat.tensor

    def add(self, operation: Callable[..., InFlightOperation], *arguments: Any, **options: Any) -> None:
        self._operations.append(partial(operation, *arguments, **options))

    def start(self, completer: Completer, outputs: Any, *, ordered: bool = True, source: int = -1) -> GroupWork:
        """The work of all operations. One that cannot be started any more makes it a work that has failed.

        Programs of torch know no `Busy`, and one rank alone must leave nothing out: what is `ordered` waits for room.
        Messages do not, whose room may depend on what this thread does next.
        """
        works: list[InFlightOperation] = []
        failure: FireflyerError | None = None
        try:
            # What the caller waits for anyway runs in its own thread, which is the fastest way for small messages.
            async_op = self._asynchronous or self._limit_ns > 0
            for operation in self._operations:
                start = partial(operation, async_op=async_op)
                works.append(when_there_is_room(start) if ordered else start())
        except FireflyerError as error:
            failure = error
        work = GroupWork(
            completer,
            works,
            outputs,
            finish=self._write_back if self._write_backs else None,
            error=failure,
            ordered=ordered,
            limit_ns=self._limit_ns if self._limit_ns > 0 else None,
            source=source,
        )
        if self._asynchronous:
            work.watch()
        return work

    def _write_back(self) -> None:
        for write_back in self._write_backs:
            write_back()
