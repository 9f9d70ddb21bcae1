"""Asks for what is left of jobs that have ended: `sacct`, `scontrol`, the file of `jobcomp/filetxt`.

A source that does not answer is left out for a while: the end of a job waits for none of them.
"""

from __future__ import annotations

import asyncio
import datetime
import logging
import os
import time
from collections.abc import Callable, Sequence
from typing import Final

from fireflyer.base.errors import FireflyerError
from fireflyer.base.os_errors import translate_os_error
from fireflyer.cluster.core.slurm.output import Phase, SlurmJob
from fireflyer.cluster.core.slurm.records import JOBCOMP_BYTES, best, parse_jobcomp
from fireflyer.cluster.manager.slurm.commands import SlurmCommands

__all__ = ["SlurmRecords"]

_log = logging.getLogger(__name__)
_SHOWN_PER_ROUND: Final = 50
_PAUSE_S: Final = 60.0
_DAY_S: Final = 86400
_KEPT_DAYS: Final = 30
"""How far back accounting storage is asked for a job of which the time of submission is not known."""


class SlurmRecords:
    def __init__(
        self,
        commands: SlurmCommands,
        jobcomp: str,
        *,
        monotonic_s: Callable[[], float] = time.monotonic,
        unix_s: Callable[[], float] = time.time,
    ) -> None:
        self._commands = commands
        self._jobcomp = jobcomp
        self._monotonic_s, self._unix_s = monotonic_s, unix_s
        self._not_before_s: dict[str, float] = {}
        """Source -> when it may be asked again."""

    async def completed(self, shown: Sequence[SlurmJob], lost: Sequence[SlurmJob]) -> tuple[SlurmJob, ...]:
        """`shown`, with more about those that have ended; and those of `lost`, which Slurm does not show, whose end is
        recorded somewhere."""
        ended = [job for job in shown if job.phase is Phase.ENDED]
        if not ended and not lost:
            return tuple(shown)
        records = await self._sacct([*ended, *lost])
        for job in ended[:_SHOWN_PER_ROUND]:
            records += await self._scontrol(job)
        if not all(best(job, records).state for job in lost):
            records += await self._file([job.name for job in lost])
        found = [best(job, records) for job in lost]
        return (*(best(job, records) for job in shown), *(job for job in found if job.state))

    def _may_ask(self, source: str) -> bool:
        return self._monotonic_s() >= self._not_before_s.get(source, 0.0)

    def _failed(self, source: str, error: FireflyerError) -> None:
        if source not in self._not_before_s:
            _log.info("ends of jobs are known without %s reason=%s", source, error)
        self._not_before_s[source] = self._monotonic_s() + _PAUSE_S

    async def _sacct(self, jobs: Sequence[SlurmJob]) -> list[SlurmJob]:
        if not self._may_ask("sacct"):
            return []
        long_ago_s = int(self._unix_s()) - _KEPT_DAYS * _DAY_S
        since_s = min(job.submit_s if job.submit_s is not None else long_ago_s for job in jobs)
        try:
            return list(await self._commands.accounted(sorted({job.name for job in jobs}), since_s))
        except FireflyerError as error:
            self._failed("sacct", error)
            return []

    async def _scontrol(self, job: SlurmJob) -> list[SlurmJob]:
        try:
            return [await self._commands.show(job)]
        except FireflyerError as error:
            _log.info("scontrol does not say more of a job job=%d reason=%s", job.id, error)
            return []

    async def _file(self, names: Sequence[str]) -> list[SlurmJob]:
        if not self._jobcomp or not self._may_ask("jobcomp"):
            return []
        try:
            text = await asyncio.to_thread(_end_of, self._jobcomp)
        except FireflyerError as error:
            self._failed("jobcomp", error)
            return []
        return list(parse_jobcomp(text, frozenset(names), _local))


def _end_of(path: str) -> str:
    """Whole lines. Raises `FireflyerError`."""
    try:
        with open(path, "rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - JOBCOMP_BYTES))
            data = file.read(JOBCOMP_BYTES)
    except OSError as error:
        raise translate_os_error(error, f"read {path}") from error
    if size > JOBCOMP_BYTES:
        data = data.partition(b"\n")[2]
    return data.decode(errors="replace")


def _local(text: str) -> int | None:
    try:
        return int(datetime.datetime.fromisoformat(text).timestamp())
    except (ValueError, OverflowError, OSError):
        return None
