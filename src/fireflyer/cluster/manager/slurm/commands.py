"""Runs the commands of Slurm: each with a time limit and a bound on what is read, in an environment of its own."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
from collections.abc import Sequence
from typing import Final

from fireflyer.base.errors import InvariantViolation, PermanentError, Timeout, TransientError, Unreachable, UsageError
from fireflyer.base.os_errors import translate_os_error
from fireflyer.base.units import SECOND
from fireflyer.cluster.agent.accounts import Account
from fireflyer.cluster.core.slurm.fleet import (
    FLEET_FORMAT,
    NODE_JOB_FORMAT,
    REASON_FORMAT,
    FleetNode,
    NodeJob,
    parse_drains,
    parse_fleet,
    parse_node_jobs,
    parse_reserved,
)
from fireflyer.cluster.core.slurm.output import (
    JOB_FORMAT,
    MAX_OUTPUT_BYTES,
    NODE_FORMAT,
    PREEMPT_FORMAT,
    SlurmJob,
    SlurmNode,
    SlurmOutputError,
    parse_job_id,
    parse_jobs,
    parse_nodes,
    parse_preempted,
    plain,
)
from fireflyer.cluster.core.slurm.records import SACCT_FORMAT, parse_sacct, parse_shown

__all__ = ["SlurmCommands"]

_NAMES_PER_CALL: Final = 1000
_NODE: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_AWAY: Final = re.compile(
    r"Unable to contact slurm controller|Socket timed out|Connection refused|Zero Bytes|Slurm controller.*not respond"
    r"|slurm_receive_msg|Resource temporarily unavailable|Unexpected message received|backup controller",
    re.IGNORECASE,
)
"""What its commands print when slurmctld may or may not have heard of them."""
_HOLDING: Final = "RUNNING,CONFIGURING,COMPLETING,SUSPENDED,STOPPED,SIGNALING,STAGE_OUT"
_KEPT: Final = ("PATH", "SLURM_CONF", "LANG", "LD_LIBRARY_PATH")


class SlurmCommands:
    """Methods raise `TransientError` where Slurm does not answer in time or in the form that is expected, and
    `PermanentError` with Slurm's words where it refuses."""

    def __init__(self, path: str, timeout_ns: int) -> None:
        self._path = path
        self._timeout_ns = timeout_ns
        self._environment = {name: os.environ[name] for name in _KEPT if name in os.environ}
        self._environment["SLURM_TIME_FORMAT"] = "%s"

    async def jobs(self, names: Sequence[str]) -> tuple[SlurmJob, ...]:
        """All that have one of the names, those that ended lately too."""
        jobs: list[SlurmJob] = []
        for first in range(0, len(names), _NAMES_PER_CALL):
            some = names[first : first + _NAMES_PER_CALL]
            command = ["squeue", "--noheader", "--all", "--states=all", f"--name={','.join(some)}"]
            jobs += parse_jobs(await self._run([*command, f"--format={JOB_FORMAT}"]), some)
        return tuple(jobs)

    async def preempted(self, names: Sequence[str]) -> dict[int, int]:
        """Of jobs that run: since when Slurm waits for them to leave."""
        found: dict[int, int] = {}
        for first in range(0, len(names), _NAMES_PER_CALL):
            some = names[first : first + _NAMES_PER_CALL]
            command = ["squeue", "--noheader", "--all", "--states=RUNNING", f"--name={','.join(some)}"]
            found |= parse_preempted(await self._run([*command, f"--Format={PREEMPT_FORMAT}"]))
        return found

    async def show(self, job: SlurmJob) -> SlurmJob:
        """More of one that `jobs` gave."""
        return parse_shown(await self._run(["scontrol", "--oneliner", "show", "job", str(job.id)]), job)

    async def accounted(self, names: Sequence[str], since_s: int) -> tuple[SlurmJob, ...]:
        """What accounting storage has of jobs of these names that were submitted since then."""
        command = ["sacct", "--noheader", "--allusers", "--allocations", "--duplicates", "--parsable2"]
        jobs: list[SlurmJob] = []
        for first in range(0, len(names), _NAMES_PER_CALL):
            some = names[first : first + _NAMES_PER_CALL]
            asked = [f"--starttime=uts{since_s}", f"--name={','.join(some)}", f"--format={SACCT_FORMAT}"]
            jobs += parse_sacct(await self._run([*command, *asked]), some)
        return tuple(jobs)

    async def nodes(self) -> tuple[SlurmNode, ...]:
        return parse_nodes(await self._run(["sinfo", "--noheader", "--all", "--Node", f"--format={NODE_FORMAT}"]))

    async def fleet(self, node: str = "") -> dict[str, FleetNode]:
        """All nodes by name, or only one."""
        command = ["sinfo", "--noheader", "--all", "--Node", *([f"--nodes={_checked(node)}"] if node else ())]
        rows = await self._run([*command, f"--format={FLEET_FORMAT}"])
        return parse_fleet(rows, await self._run([*command, f"--format={REASON_FORMAT}"]))

    async def reserved(self, reservation: str) -> tuple[str, ...]:
        """Nodes of a reservation. Raises `PermanentError` where Slurm knows none of this name."""
        shown = await self._run(["scontrol", "--oneliner", "show", "reservation", _checked(reservation)])
        hosts = parse_reserved(shown, reservation)
        return tuple((await self._run(["scontrol", "show", "hostnames", hosts])).split()) if hosts else ()

    async def drains(self, node: str) -> bool:
        """Of one node, which costs slurmctld less than `fleet`. Raises `UsageError` for one that Slurm has not."""
        try:
            return parse_drains(await self._run(["scontrol", "--oneliner", "show", "node", _checked(node)]), node)
        except PermanentError as error:
            if "not found" not in str(error):
                raise
            raise UsageError(f"Slurm knows no node {node}; give its name with --node") from None

    async def jobs_on(self, node: str, *, running: bool = True) -> tuple[NodeJob, ...]:
        """That run there; or all that have processors of it."""
        states = "RUNNING" if running else _HOLDING
        command = ["squeue", "--noheader", "--all", f"--states={states}", f"--nodelist={_checked(node)}"]
        return parse_node_jobs(await self._run([*command, f"--Format={NODE_JOB_FORMAT}"]))

    async def requeue(self, slurm_id: int) -> None:
        await self._run(["scontrol", "requeue", str(slurm_id)])

    async def submit(self, arguments: Sequence[str], script: str, account: Account | None) -> int:
        """The number of the job. A `TransientError` leaves open whether Slurm has it."""
        user = () if account is None else (f"--uid={account.uid}", f"--gid={account.gid}")
        return parse_job_id(await self._run(["sbatch", *arguments, *user], script))

    async def cancel(self, slurm_id: int, name: str) -> None:
        """Also of one that has ended. slurmctld may have lost it and given its number to another job."""
        try:
            await self._run(["scancel", f"--name={name}", str(slurm_id)])
        except PermanentError as error:
            if "Invalid job id" not in str(error):
                raise

    async def drain(self, node: str, reason: str) -> None:
        words = plain(reason) or "drained by the platform"
        await self._run(["scontrol", "update", f"NodeName={_checked(node)}", "State=DRAIN", f"Reason={words}"])

    async def resume(self, node: str) -> None:
        await self._run(["scontrol", "update", f"NodeName={_checked(node)}", "State=RESUME"])

    async def undrain(self, node: str) -> None:
        """A node that is down as well stays down."""
        await self._run(["scontrol", "update", f"NodeName={_checked(node)}", "State=UNDRAIN"])

    async def _run(self, command: Sequence[str], given: str = "") -> str:
        program = shutil.which(command[0], path=self._path or None)
        if program is None:
            raise Unreachable(f"there is no {command[0]} here; install Slurm's commands, or set slurm.path")
        stdin = _file_of(given)
        try:
            process = await asyncio.create_subprocess_exec(
                program,
                *command[1:],
                stdin=stdin,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                env=self._environment,
                cwd="/",
            )
        except OSError as error:
            raise translate_os_error(error, f"start {program}") from error
        finally:
            os.close(stdin)
        try:
            async with asyncio.timeout(self._timeout_ns / SECOND):
                out, errors = await _communicate(process)
        except TimeoutError:
            raise Timeout(f"{command[0]} did not end within {self._timeout_ns / SECOND:g} s") from None
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        if process.returncode:
            # scontrol tells of a node that there is not on its output; what others print may be words of users.
            said = out[-4096:] if command[0] == "scontrol" and not errors.strip() else errors[-4096:]
            words = plain(said.decode(errors="replace")) or f"it ended with {process.returncode}"
            kind: type[TransientError | PermanentError] = Unreachable if _AWAY.search(words) else PermanentError
            raise kind(f"{command[0]}: {words}")
        return out.decode(errors="replace")


def _file_of(text: str) -> int:
    """In memory, to be read from its beginning: a program that ends without reading it does no harm."""
    fd = os.memfd_create("input", os.MFD_CLOEXEC)
    with open(fd, "wb", closefd=False) as file:
        file.write(text.encode())
    os.lseek(fd, 0, os.SEEK_SET)
    return fd


async def _communicate(process: asyncio.subprocess.Process) -> tuple[bytes, bytes]:
    """Both outputs, as far as they may go; a program that prints more is killed by who called."""
    if process.stdout is None or process.stderr is None:
        raise InvariantViolation("a command without pipes")
    out, errors = await asyncio.gather(_bounded(process.stdout), _bounded(process.stderr))
    await process.wait()
    return out, errors


async def _bounded(stream: asyncio.StreamReader) -> bytes:
    data = bytearray()
    while piece := await stream.read(1 << 16):
        data += piece
        if len(data) > MAX_OUTPUT_BYTES:
            raise SlurmOutputError(f"a command of Slurm printed more than {MAX_OUTPUT_BYTES} bytes")
    return bytes(data)


def _checked(node: str) -> str:
    if _NODE.fullmatch(node) is None:
        raise UsageError(f"{node[:80]!r} is no name of a node; `ff nodes` shows them")
    return node
