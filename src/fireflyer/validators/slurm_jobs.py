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
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from time import monotonic_ns, sleep
from typing import Final, Protocol

import msgspec

from fireflyer.base.errors import FireflyerError, PermanentError, TransientError, UsageError
from fireflyer.base.units import SECOND
from fireflyer.cluster.agent.accounts import Account
from fireflyer.cluster.core.slurm.fleet import FleetNode
from fireflyer.cluster.core.slurm.output import Phase, SlurmJob, plain
from fireflyer.runtime.processes.trusted_path import changed_by_others
from fireflyer.validators.cluster_tasks import Ended, Job
from fireflyer.validators.core.validation.queue import ValidationQueue
from fireflyer.validators.core.validation.reports import NodeReport, parse_node_report
from fireflyer.validators.slurm_job_files import JobFiles, file_text

__all__ = ["Slurm", "check_outputs", "job_arguments", "reservations_of", "run_slurm_jobs"]

LOOK_S: Final = 2.0
_PATIENCE_NS: Final = 120 * SECOND
"""Without an answer of Slurm."""
_WAITS: Final = 15
"""Looks at a job whose node another one has got first, or that Slurm has a reason not to start; and at a file that a
shared file system does not show yet."""
_WAITS_IDLE: Final = 150
"""Looks at a job that waits for nothing but its turn, on a node that is idle: the scheduler of Slurm that starts jobs
of the lowest priority runs every 30 s by default (`bf_interval`), on large sites every few minutes."""
_UNHEARD_LOOKS: Final = 300
"""Looks for a job of which `sbatch` has not said whether Slurm has it."""
_NICE: Final = 1_000_000
_LOST: Final = ("PREEMPTED", "CANCELLED", "NODE_FAIL", "DEADLINE")
"""States of jobs that something else has ended."""
_PASSING: Final = ("COMPLETING", "CONFIGURING", "SIGNALING", "STAGE_OUT")
"""States that pass by themselves; a job that is suspended or held may stay so for ever."""
_OF_OTHERS: Final = ("", "None", "Priority", "Resources")
"""Reasons of a job that waits as other jobs have its node."""


class Slurm(Protocol):
    """Of `SlurmCommands`."""

    async def fleet(self, node: str = "") -> dict[str, FleetNode]: ...
    async def jobs(self, names: Sequence[str]) -> tuple[SlurmJob, ...]: ...
    async def submit(self, arguments: Sequence[str], script: str, account: Account | None) -> int: ...
    async def cancel(self, slurm_id: int, name: str) -> None: ...


class _Submitted(msgspec.Struct):
    job: Job
    output: str
    number: int = 0
    """0: Slurm has not said whether it has the job."""
    looks: int = 0
    """While it waits, or while Slurm does not show it, or its file is not there."""


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
    """As `cluster_tasks.run_jobs`. `outputs`: directory that the nodes have, too, and that nobody else can change
    (`check_outputs`); files of jobs are in a private one below it. `options`: of `sbatch`, the site's. A job that Slurm
    refuses ends with its words. Raises `FireflyerError` where Slurm does not answer for two minutes."""
    files = JobFiles(outputs)
    running = _Running(slurm, {job.nodes: job for job in jobs}, files, apart, most_nodes, options, say)
    began_ns = heard_ns = monotonic_ns()
    try:
        while not running.queue.done:
            failed: FireflyerError | None = None
            files.touch()
            try:
                asyncio.run(running.look(late=monotonic_ns() - began_ns >= limit_ns))
                heard_ns = monotonic_ns()
            except FireflyerError as error:
                failed = error
            yield from running.taken()  # before the error: their files are gone
            silent = monotonic_ns() - heard_ns > _PATIENCE_NS
            if failed is not None and (silent or not isinstance(failed, TransientError)):
                raise failed
            if not running.queue.done:
                sleep(LOOK_S)
    finally:
        asyncio.run(running.stop())
        files.close()


def check_outputs(directory: str) -> None:
    """Raises `UsageError` for one that is none, or in which others could put a directory in the place of ours, or the
    place of which they could take."""
    if not os.path.isdir(directory):
        raise UsageError(f"--output {directory} is no directory; give one that the nodes have, too")
    if why := changed_by_others(os.path.abspath(directory)):
        raise UsageError(
            f"--output {directory} can be changed by other users, who could write reports ({why}); give a directory of "
            "your own"
        )


def reservations_of(options: Sequence[str]) -> tuple[str, ...]:
    """In which jobs with these options of `sbatch` start, which may be abbreviated; on other nodes Slurm refuses
    them."""
    for number, option in enumerate(options):
        word, equals, names = option.partition("=")
        if "--reservation".startswith(word) and len(word) >= len("--res"):
            following = options[number + 1 : number + 2]
            return tuple(names.split(",") if equals else following)
    return ()


def job_arguments(job: Job, name: str, output: str, options: Sequence[str]) -> tuple[str, ...]:
    """Of `sbatch`."""
    return (
        "--parsable", f"--job-name={name}", f"--nodes={len(job.nodes)}", f"--nodelist={','.join(job.nodes)}",
        "--exclusive", "--mem=0", "--no-requeue", f"--nice={_NICE}", "--chdir=/", f"--output={output}",
        f"--time={-(-job.limit_ns // (60 * SECOND))}", *options,
    )  # fmt: skip


class _Running:
    """Which job of Slurm is of which validation. Jobs are known by their names: a job is noted before it is submitted,
    so one that Slurm has accepted without an answer is found again."""

    def __init__(
        self, slurm: Slurm, jobs: dict[tuple[str, ...], Job], files: JobFiles, apart: Collection[frozenset[str]],
        most_nodes: int, options: Sequence[str], say: Callable[[str], None],
    ) -> None:  # fmt: skip
        self.queue = ValidationQueue(jobs, apart, most_nodes=most_nodes)
        self._slurm, self._jobs, self._files, self._options, self._say = slurm, jobs, files, options, say
        self._submitted: dict[str, _Submitted] = {}
        self._ended: list[Ended[NodeReport]] = []
        self._states: dict[str, str] = {}
        """Of nodes, as Slurm said them last."""
        self._held: dict[tuple[str, ...], str] = {}
        """Why Slurm did not start the last job of a validation, which was withdrawn."""

    def taken(self) -> list[Ended[NodeReport]]:
        """What has ended since."""
        ended, self._ended = self._ended, []
        return ended

    async def look(self, *, late: bool) -> None:
        """Notes what has ended since; begins what can begin, or, where it is `late`, ends what has not begun. What was
        done before an error stays done."""
        names = list(self._submitted)
        found = await self._slurm.jobs(names) if names else ()
        for name in names:
            await self._looked_at(name, self._said_of(name, found), late=late)
        if late:
            for waiting in self.queue.waiting:
                self._end(self._jobs[waiting], self._why_not(waiting))
            return
        fleet = await self._slurm.fleet()
        self._states = {node.name: node.state for node in fleet.values()}
        reserved = bool(reservations_of(self._options))
        begun = self.queue.begin(
            [
                node.name
                for node in fleet.values()
                if node.takes_jobs_now or (reserved and node.takes_jobs_of_reservation)
            ]
        )
        while begun:
            try:
                await self._begin(self._jobs[begun.pop(0)])
            except TransientError:
                for nodes in begun:
                    self.queue.put_back(nodes)
                raise

    async def stop(self) -> None:
        """At the end of a command too, where a Slurm that does not answer is no reason to say more: jobs have a time
        limit and a low priority. The files of a job that may go on stay: by these the next command finds it."""
        with contextlib.suppress(FireflyerError):
            unknown = [name for name, one in self._submitted.items() if not one.number]
            found = await self._slurm.jobs(unknown) if unknown else ()
            for name in unknown:
                self._said_of(name, found)
        for name, one in self._submitted.items():
            try:
                if one.number:
                    await self._slurm.cancel(one.number, name)
            except FireflyerError:
                self._files.leave()
                continue
            if one.number:
                _remove(one.output)
            else:  # Slurm may have it all the same, and show it later
                self._files.leave()

    async def _begin(self, job: Job) -> None:
        """Raises `TransientError`, after which the job waits again, or is looked for in Slurm."""
        name = f"ff-validate-{secrets.token_hex(4)}"
        try:
            output = self._files.new(name)
        except TransientError:
            self.queue.put_back(job.nodes)
            raise
        except FireflyerError as error:
            self._end(job, f"its job has no file: {error}")
            return
        await self._submit(job, name, output)

    async def _submit(self, job: Job, name: str, output: str) -> None:
        self._held.pop(job.nodes, None)
        one = self._submitted[name] = _Submitted(job, output)
        script = f"#!/bin/sh\nexec {shlex.join([sys.executable, '-P', '-m', 'fireflyer.validators.task', *job.args])}\n"
        try:
            one.number = await self._slurm.submit(job_arguments(job, name, one.output, self._options), script, None)
        except PermanentError as error:
            del self._submitted[name]
            _remove(one.output)
            self._end(job, f"Slurm refuses its job: {error}")
            return
        self._say(f"job {one.number} validates {' and '.join(job.nodes)}")

    def _said_of(self, name: str, found: Sequence[SlurmJob]) -> SlurmJob | None:
        """Any user may give a job this name: it is ours by its number, or, where that is not known, by its owner."""
        one = self._submitted[name]
        for said in found:
            if said.name == name and (said.id == one.number if one.number else said.uid == os.geteuid()):
                one.number = said.id
                return said
        return None

    async def _looked_at(self, name: str, said: SlurmJob | None, *, late: bool) -> None:
        one = self._submitted[name]
        if not one.number:
            one.looks += 1
            if one.looks >= _UNHEARD_LOOKS:
                self._interrupted(name, unheard=True)
            return
        if said is not None and said.phase is not Phase.ENDED:
            waits = said.phase is Phase.WAITING
            one.looks = one.looks + 1 if waits else 0
            if waits and said.reason not in _OF_OTHERS:
                self._held[one.job.nodes] = plain(said.reason)
            stays = said.phase is Phase.UNCLEAR and said.state not in _PASSING
            if stays or (waits and (late or one.looks >= self._most_looks(one.job, said))):
                await self._slurm.cancel(one.number, name)
                self._interrupted(name)
            return
        state = said.state if said is not None else "forgotten by Slurm"
        report = parse_node_report(file_text(one.output))
        if report is None and state == "COMPLETED" and one.looks < _WAITS:
            one.looks += 1
            return
        if report is None and state in _LOST:
            self._interrupted(name)
            return
        del self._submitted[name]
        if report is None:
            self._end(one.job, f"job {one.number} is {state}, and has written no report; see {one.output}")
            return
        self.queue.ended(one.job.nodes)
        self._ended.append(Ended(one.job, report, ""))
        _remove(one.output)

    def _most_looks(self, job: Job, said: SlurmJob) -> int:
        idle = all(self._states.get(name) == "idle" for name in job.nodes)
        return _WAITS_IDLE if idle and said.reason in _OF_OTHERS else _WAITS

    def _why_not(self, nodes: tuple[str, ...]) -> str:
        if nodes in self._held:
            return f"Slurm did not start its job: {self._held[nodes]}"
        known = [self._states[name] for name in nodes if name in self._states]
        if known and set(known) == {"idle"}:
            return "it had no turn in time; see --wait and --at-once"
        states = ", ".join(one for one in known if one != "idle")
        return f"its node was not idle in time{f' ({states})' if states else ''}; see --wait"

    def _end(self, job: Job, why_not: str) -> None:
        self.queue.ended(job.nodes)
        self._ended.append(Ended(job, None, why_not))

    def _interrupted(self, name: str, *, unheard: bool = False) -> None:
        """`unheard`: Slurm may show the job later: by its file the next command, or the end of this one, cancels it."""
        one = self._submitted.pop(name)
        if unheard:
            self._files.leave()
        else:
            _remove(one.output)
        if not self.queue.interrupted(one.job.nodes):
            held = one.job.nodes in self._held
            why = self._why_not(one.job.nodes) if held else "other jobs have interrupted it again and again"
            self._ended.append(Ended(one.job, None, why))


def _remove(path: str) -> None:
    with contextlib.suppress(OSError):
        os.unlink(path)
