"""The launcher's process: serves the control RPC, drives the gang machine, writes the event log."""

from __future__ import annotations

from collections.abc import Callable

from fireflyer.base.events import Logged
from fireflyer.cluster.launcher.devices import Devices
from fireflyer.cluster.schema.job import JobResult, JobSpec, RankLine

__all__ = ["run_job"]


def _ignore(_: object) -> None:
    return None


async def run_job(
    spec: JobSpec,
    *,
    on_entry: Callable[[Logged], None] = _ignore,
    on_line: Callable[[RankLine], None] = _ignore,
    devices: Devices | None = None,
) -> JobResult:
    """Runs one job to its end; see the package docstring. `devices` None: those of this machine."""
    raise NotImplementedError
