"""`save`, `async_save` and `load` of `torch.distributed.checkpoint`, with errors that are `Exception`s.

DCP raises `CheckpointException`, which derives from `BaseException`: `except Exception` does not see it.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException

from fireflyer.base.errors import FireflyerError, PermanentError
from fireflyer.checkpoint.dcp.reader import FireFlyerReader
from fireflyer.checkpoint.dcp.writer import FireFlyerWriter

__all__ = ["async_save", "load", "save"]

T = TypeVar("T")


def save(state: dict[str, Any], path: str | os.PathLike[str], *, step: int | None = None, **options: Any) -> None:
    """`dcp.save` with `FireFlyerWriter(path, step=step)`; `options` are DCP's (`planner`, `process_group`, …).
    Raises the `FireflyerError` of the lowest rank that failed, `PermanentError` for other failures."""
    writer = FireFlyerWriter(path, step=step)
    _unwrapped(lambda: state_dict_saver.save(state, storage_writer=writer, **options), "save")


def async_save(
    state: dict[str, Any], path: str | os.PathLike[str], *, step: int | None = None, **options: Any
) -> Future[None]:
    """Save in the background: `state` may change when this returns, or with a stager that says so later. The
    future raises what `save` raises."""
    answer = state_dict_saver.async_save(state, storage_writer=FireFlyerWriter(path, step=step), **options)
    upload: Future[Any] = answer if isinstance(answer, Future) else answer.upload_completion
    ours: Future[None] = Future()

    def done(theirs: Future[Any]) -> None:
        try:
            _unwrapped(theirs.result, "save")
        except Exception as error:
            ours.set_exception(error)
        else:
            ours.set_result(None)

    upload.add_done_callback(done)
    return ours


def load(state: dict[str, Any], path: str | os.PathLike[str], *, trust_pickles: bool = False, **options: Any) -> None:
    """`dcp.load` with `FireFlyerReader(path)`: fills the tensors of `state`, and replaces what else is in it. Raises as
    `save`, `NotFound` where there is no checkpoint, and `DataCorruption`; then `state` may be half filled."""
    reader = FireFlyerReader(path, trust_pickles=trust_pickles)
    try:
        _unwrapped(lambda: state_dict_loader.load(state, storage_reader=reader, **options), "load")
    except FireflyerError as error:
        if reader.error is not None and reader.error is not error:
            raise reader.error from error
        raise


def _unwrapped(call: Callable[[], T], what: str) -> T:
    try:
        return call()
    except CheckpointException as error:
        rank, (cause, _) = min(error.failures.items(), key=lambda item: item[0])
        if isinstance(cause, FireflyerError):
            raise cause from error
        raise PermanentError(f"{what} failed on rank {rank}: {type(cause).__name__}: {cause}") from error
