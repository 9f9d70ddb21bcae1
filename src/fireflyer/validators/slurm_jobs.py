"""Validations as jobs of Slurm on idle nodes: submitted, withdrawn where another job was faster, and read.

A job has its node alone, and the lowest priority that a user can give (`--nice`); it is not requeued: one that Slurm
preempts ends, and another one is submitted when its node is idle again. Whether Slurm preempts it is up to the site's
partitions and QOS (`options`). Its report is in a file that the node and this machine share.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import shlex
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Final, Protocol

import msgspec

from fireflyer.base.errors import FireflyerError, TransientError
from fireflyer.base.units import SECOND
from fireflyer.cluster.agent.accounts import Account
from fireflyer.cluster.core.slurm.fleet import FleetNode
from fireflyer.cluster.core.slurm.output import Phase, SlurmJob
from fireflyer.validators.cluster_tasks import Ended, Job
from fireflyer.validators.core.validation.queue import ValidationQueue
from fireflyer.validators.core.validation.reports import MAX_REPORT_BYTES, NodeReport, parse_node_report

__all__ = ["Slurm", "job_arguments", "run_slurm_jobs"]

LOOK_S: Final = 2.0
_PATIENCE_NS: Final = 120 * SECOND
"""Without an answer of Slurm."""
_WAITS: Final = 15
"""Looks at a job that does not start on its idle node, as another one was faster; and at a file that a shared file
system does not show yet."""
_NICE: Final = 1_000_000
_LOST: Final = ("PREEMPTED", "CANCELLED", "NODE_FAIL", "DEADLINE")
"""States of jobs that something else has ended."""


class Slurm(Protocol):
    """Of `SlurmCommands`."""

    async def fleet(self, node: str = "") -> dict[str, FleetNode]: ...
    async def jobs(self, names: Sequence[str]) -> tuple[SlurmJob, ...]: ...
    async def submit(self, arguments: Sequence[str], script: str, account: Account | None) -> int: ...
    async def cancel(self, slurm_id: int, name: str) -> None: ...


class _Submitted(msgspec.Struct):
    job: Job
    name: str
    output: str
    looks: int = 0
    """While it waits, or while its file is not there."""


def run_slurm_jobs(
    slurm: Slurm,
    jobs: Iterable[Job],
    outputs: str,
    apart: Collection[frozenset[str]],
    *,
    most_nodes: int,
    limit_ns: int,
    options: Sequence[str],
    say: Callable[[str], None],
) -> Iterator[Ended[NodeReport]]:
    """As `cluster_tasks.run_jobs`. `outputs`: directory of the files of jobs, which their nodes have, too. `options`:
    of `sbatch`, the site's. Raises `FireflyerError` where Slurm refuses a job, or does not answer for two minutes."""
    running = _Running(slurm, {job.nodes: job for job in jobs}, outputs, apart, most_nodes, options, say)
    began_ns = heard_ns = time.monotonic_ns()
    try:
        while not running.queue.done:
            try:
                yield from asyncio.run(running.look(late=time.monotonic_ns() - began_ns >= limit_ns))
                heard_ns = time.monotonic_ns()
            except TransientError:
                if time.monotonic_ns() - heard_ns > _PATIENCE_NS:
                    raise
            if not running.queue.done:
                time.sleep(LOOK_S)
    finally:
        asyncio.run(running.stop())


def job_arguments(job: Job, name: str, output: str, options: Sequence[str]) -> tuple[str, ...]:
    """Of `sbatch`."""
    return (
        "--parsable", f"--job-name={name}", f"--nodes={len(job.nodes)}", f"--nodelist={','.join(job.nodes)}",
        "--exclusive", "--no-requeue", f"--nice={_NICE}", "--chdir=/", f"--output={output}",
        f"--time={-(-job.limit_ns // (60 * SECOND))}", *options,
    )  # fmt: skip


class _Running:
    """Which job of Slurm is of which validation."""

    def __init__(
        self, slurm: Slurm, jobs: dict[tuple[str, ...], Job], outputs: str, apart: Collection[frozenset[str]],
        most_nodes: int, options: Sequence[str], say: Callable[[str], None],
    ) -> None:  # fmt: skip
        self.queue = ValidationQueue(jobs, apart, most_nodes=most_nodes)
        self._slurm, self._jobs, self._outputs, self._options, self._say = slurm, jobs, outputs, options, say
        self._submitted: dict[int, _Submitted] = {}

    async def look(self, *, late: bool) -> list[Ended[NodeReport]]:
        """What has ended since; begins what can begin, or, where it is `late`, ends what has not begun."""
        names = [one.name for one in self._submitted.values()]
        found = {one.id: one for one in await self._slurm.jobs(names)} if names else {}
        looked_at = [await self._looked_at(number, found.get(number), late=late) for number in list(self._submitted)]
        ended = [one for one in looked_at if one is not None]
        if late:
            for waiting in self.queue.waiting:
                self.queue.ended(waiting)
                ended.append(Ended(self._jobs[waiting], None, "its node was not idle in time; see --wait"))
            return ended
        fleet = await self._slurm.fleet()
        for begun in self.queue.begin([node.name for node in fleet.values() if node.state == "idle" and node.answers]):
            await self._submit(self._jobs[begun])
        return ended

    async def stop(self) -> None:
        """At the end of a command too, where a Slurm that does not answer is no reason to say more: jobs have a time
        limit and a low priority."""
        for number, one in self._submitted.items():
            with contextlib.suppress(FireflyerError):
                await self._slurm.cancel(number, one.name)

    async def _submit(self, job: Job) -> None:
        name = f"ff-validate-{secrets.token_hex(4)}"
        output = os.path.join(self._outputs, f"{name}.out")
        script = f"#!/bin/sh\nexec {shlex.join([sys.executable, '-P', '-m', 'fireflyer.validators.task', *job.args])}\n"
        number = await self._slurm.submit(job_arguments(job, name, output, self._options), script, None)
        self._submitted[number] = _Submitted(job, name, output)
        self._say(f"job {number} validates {' and '.join(job.nodes)}")

    async def _looked_at(self, number: int, said: SlurmJob | None, *, late: bool) -> Ended[NodeReport] | None:
        one = self._submitted[number]
        if said is not None and said.phase is not Phase.ENDED:
            one.looks += said.phase is Phase.WAITING
            if said.phase is Phase.WAITING and (late or one.looks >= _WAITS):
                await self._slurm.cancel(number, one.name)
                return self._interrupted(number)
            return None
        state = said.state if said is not None else "forgotten by Slurm"
        report = parse_node_report(_text(one.output))
        if report is None and state == "COMPLETED" and one.looks < _WAITS:
            one.looks += 1
            return None
        if report is None and state in _LOST:
            return self._interrupted(number)
        del self._submitted[number]
        self.queue.ended(one.job.nodes)
        if report is None:
            return Ended(one.job, None, f"job {number} is {state}, and has written no report; see {one.output}")
        with contextlib.suppress(OSError):
            os.unlink(one.output)
        return Ended(one.job, report, "")

    def _interrupted(self, number: int) -> Ended[NodeReport] | None:
        one = self._submitted.pop(number)
        with contextlib.suppress(OSError):
            os.unlink(one.output)
        if self.queue.interrupted(one.job.nodes):
            return None
        return Ended(one.job, None, "other jobs have interrupted it again and again")


def _text(path: str) -> str:
    """The end of it: the report is the last line."""
    try:
        with open(path, "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - 2 * MAX_REPORT_BYTES))
            return file.read(2 * MAX_REPORT_BYTES).decode(errors="replace")
    except OSError:
        return ""
