"""A trace of some steps by `torch.profiler`."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
from types import TracebackType
from typing import Any, Self

import torch

from fireflyer.base.os_errors import translate_os_error
from fireflyer.recipes.trainer.core.course import traced
from fireflyer.recipes.trainer.core.recipe import ProfileSettings

__all__ = ["Tracer", "check_trace_file"]

_log = logging.getLogger(__name__)


def check_trace_file(path: str) -> None:
    """Raises what the operating system says where a trace cannot be written there. What is there stays."""
    part = _part_of(path)
    try:
        os.makedirs(os.path.dirname(part), exist_ok=True)
        if os.path.isdir(path):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        os.close(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644))
        os.unlink(part)
    except OSError as error:
        raise translate_os_error(error, path) from error


class Tracer:
    """Records the steps of `profile`, where it is given, and writes their trace when the last of them has ended, or the
    run. After an exception nothing is written. A run goes on without a trace that cannot be written."""

    def __init__(self, profile: ProfileSettings | None, device_type: str) -> None:
        self._profile, self._device_type = profile, device_type
        self._profiler: Any = None
        self._ended = False

    def before(self, step: int) -> None:
        """Step `step` begins."""
        if self._profiler is None and not self._ended and traced(step, self._profile):
            kinds = [torch.profiler.ProfilerActivity.CPU]
            if self._device_type == "cuda":
                kinds.append(torch.profiler.ProfilerActivity.CUDA)
            self._profiler = torch.profiler.profile(activities=kinds)
            self._profiler.start()

    def after(self, step: int) -> None:
        """Step `step` has ended."""
        if self._profiler is not None and not traced(step + 1, self._profile):
            self._write()

    def forget(self) -> None:
        """Training went back to a checkpoint: the steps behind it are recorded when they come again. A trace that was
        written stays."""
        profiler, self._profiler = self._profiler, None
        if profiler is not None:
            profiler.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if self._profiler is not None and error is None:
            self._write()

    def _write(self) -> None:
        assert self._profile is not None  # noqa: S101 - nothing is recorded without it
        profiler, self._profiler, self._ended = self._profiler, None, True
        path, part = self._profile.file, _part_of(self._profile.file)
        profiler.stop()
        try:
            profiler.export_chrome_trace(part)
            os.replace(part, path)  # fails, too, where torch has written nothing and said so in its log alone
        except (OSError, RuntimeError) as error:
            _log.warning("the trace was not written to %r, and training goes on without it: %s", path, error)
            with contextlib.suppress(OSError):
                os.unlink(part)


def _part_of(path: str) -> str:
    """Beside `path`, with its ending, by which torch knows whether to compress."""
    return os.path.join(os.path.dirname(path) or ".", f".part.{os.path.basename(path)}")
