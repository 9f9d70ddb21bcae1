"""A trace of some steps by `torch.profiler`."""

from __future__ import annotations

import os
from types import TracebackType
from typing import Any, Self

import torch

from fireflyer.recipes.trainer.core.course import traced
from fireflyer.recipes.trainer.core.recipe import ProfileSettings

__all__ = ["Tracer"]


class Tracer:
    """Records the steps of `profile`, where it is given, and writes their trace when the last of them has ended, or the
    run. After an exception nothing is written."""

    def __init__(self, profile: ProfileSettings | None, device_type: str) -> None:
        self._profile, self._device_type = profile, device_type
        self._profiler: Any = None

    def before(self, step: int) -> None:
        """Step `step` begins."""
        if self._profiler is None and traced(step, self._profile):
            kinds = [torch.profiler.ProfilerActivity.CPU]
            if self._device_type == "cuda":
                kinds.append(torch.profiler.ProfilerActivity.CUDA)
            self._profiler = torch.profiler.profile(activities=kinds)
            self._profiler.start()

    def after(self, step: int) -> None:
        """Step `step` has ended."""
        if self._profiler is not None and not traced(step + 1, self._profile):
            self._write()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if self._profiler is not None and error is None:
            self._write()

    def _write(self) -> None:
        assert self._profile is not None  # noqa: S101 - nothing is recorded without it
        profiler, self._profiler = self._profiler, None
        profiler.stop()
        os.makedirs(os.path.dirname(self._profile.file) or ".", exist_ok=True)
        profiler.export_chrome_trace(self._profile.file)
