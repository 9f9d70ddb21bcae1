"""Reads what the commands of Slurm print. Users of the site write parts of it (names of jobs, reasons of nodes).

A job's name may hold any character, line breaks too, so a list of all jobs can be made to show jobs that do not exist.
Jobs are therefore asked for by name (`squeue --name`, which compares the whole name), and a line that is not of the
form is no reason to guess: `SlurmOutputError`, and the whole answer counts as none.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Collection
from typing import Final

import msgspec

from fireflyer.base.errors import TransientError, UsageError
from fireflyer.cluster.schema.hosts import expand_nodelist

__all__ = [
    "JOB_FORMAT",
    "MAX_OUTPUT_BYTES",
    "NODE_FORMAT",
    "PREEMPT_FORMAT",
    "Phase",
    "SlurmJob",
    "SlurmNode",
    "SlurmOutputError",
    "parse_job_id",
    "parse_jobs",
    "parse_nodes",
    "parse_preempted",
    "plain",
]

MAX_OUTPUT_BYTES: Final = 16 << 20
MAX_JOBS: Final = 100_000
MAX_NODES: Final = 20_000
MAX_TEXT: Final = 200
JOB_FORMAT: Final = "%i|%T|%U|%D|%S|%e|%V|%N|%j|%r"
"""Of `squeue --format`, with SLURM_TIME_FORMAT=%s."""
PREEMPT_FORMAT: Final = "JobID:12,PreemptTime:24"
"""Of `squeue --Format`, with SLURM_TIME_FORMAT=%s: the other way of asking does not know it."""
NODE_FORMAT: Final = "%N|%T|%E"
"""Of `sinfo --Node --format`."""

_NAME: Final = r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}"
_TIME: Final = r"[0-9]{1,12}|N/A|NONE|Unknown|None"
_JOB: Final = re.compile(
    rf"(?P<id>[0-9]{{1,10}})\|(?P<state>[A-Z_]{{2,30}})\|(?P<uid>[0-9]{{1,10}})\|(?P<count>[0-9]{{1,7}}(?:-[0-9]{{1,7}})?)"
    rf"\|(?P<start>{_TIME})\|(?P<end>{_TIME})\|(?P<submit>{_TIME})"
    rf"\|(?P<nodes>[A-Za-z0-9._,\[\]-]{{0,65536}})\|(?P<name>{_NAME})\|(?P<reason>[^\n]{{0,4096}})"
)
_NODE: Final = re.compile(
    rf"(?P<name>{_NAME})\|(?P<state>[a-z_]{{2,30}})(?P<flags>[*~#!%$@^+-]{{0,4}})\|(?P<reason>.*)"
)
_PREEMPTED: Final = re.compile(rf" *(?P<id>[0-9]{{1,10}}) +(?P<time>{_TIME}) *")
_JOB_ID: Final = re.compile(r"([0-9]{1,10})(?:;[A-Za-z0-9._-]{1,64})?\n?")


class SlurmOutputError(TransientError):
    """The answer is not in the form that is asked for; nothing is concluded from it."""

    code = "transient"


class Phase(enum.Enum):
    WAITING = "waiting"
    RUNNING = "running"
    """Its nodes are its own."""
    UNCLEAR = "unclear"
    """On its way from one of the others to the next; nothing follows from it."""
    ENDED = "ended"
    """No process of it is left on a node that answers Slurm."""


_PHASES: Final = {
    "PENDING": Phase.WAITING,
    "RUNNING": Phase.RUNNING,
    **dict.fromkeys(
        ("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "FORGOTTEN", "NODE_FAIL", "NOT SUBMITTED",
         "OUT_OF_MEMORY", "PREEMPTED", "REVOKED", "TIMEOUT"), Phase.ENDED),
}  # fmt: skip


class SlurmJob(msgspec.Struct, frozen=True, kw_only=True):
    id: int
    name: str
    uid: int
    state: str
    reason: str = ""
    nodes: tuple[str, ...] = ()
    start_s: int | None = None
    """Unix time; of one that waits, when Slurm expects to start it."""
    end_s: int | None = None
    submit_s: int | None = None
    """Tells it from a job that had the same number before slurmctld lost it."""
    exit_code: int | None = None
    """Of its batch script; `signal`: that ended it, or 0. None: the source does not say."""
    signal: int | None = None
    cancelled_by: int | None = None
    """Account of who cancelled it, where accounting storage says that."""
    preempt_s: int | None = None
    """Since when Slurm waits for it to leave, or had waited when it ended."""
    source: str = "squeue"
    """Of what is said of it: `squeue`, `scontrol`, `sacct` or `jobcomp`."""

    @property
    def phase(self) -> Phase:
        return _PHASES.get(self.state, Phase.UNCLEAR)


class SlurmNode(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    state: str
    """`idle`, `allocated`, `mixed`, `drained`, `draining`, `down`, …"""
    answers: bool = True
    """Slurm reaches its daemon."""
    reason: str = ""

    @property
    def drains(self) -> bool:
        return self.state in ("drained", "draining")

    @property
    def is_certain(self) -> bool:
        """What Slurm says of processes there is so: it has heard of it."""
        return self.answers and not self.state.startswith(("down", "unknown", "reboot", "power"))


def plain(text: str) -> str:
    """One line of a bounded length, without control characters."""
    return "".join(char for char in " ".join(text.split()) if char.isprintable())[:MAX_TEXT]


def parse_job_id(text: str) -> int:
    """Of `sbatch --parsable`. Raises `SlurmOutputError`."""
    found = _JOB_ID.fullmatch(text)
    if found is None:
        raise SlurmOutputError(f"sbatch printed {plain(text)!r} where the number of a job was expected")
    return int(found[1])


def _without_parentheses(reason: str) -> str:
    """squeue puts the whole of some reasons in them; others have some words in them."""
    return reason[1:-1] if reason.startswith("(") and reason.endswith(")") else reason


def parse_jobs(text: str, names: Collection[str]) -> tuple[SlurmJob, ...]:
    """Of `squeue --noheader --name=NAMES --format=JOB_FORMAT`. Raises `SlurmOutputError`."""
    known = frozenset(names)
    jobs: list[SlurmJob] = []
    for line in _lines(text, MAX_JOBS, "squeue"):
        found = _JOB.fullmatch(line)
        if found is None or found["name"] not in known:
            raise SlurmOutputError(f"squeue printed {plain(line)!r}, which is no line of a job that was asked for")
        jobs.append(
            SlurmJob(
                id=int(found["id"]),
                name=found["name"],
                uid=int(found["uid"]),
                state=found["state"],
                reason=_without_parentheses(plain(found["reason"])),
                nodes=_nodes(found["nodes"]),
                start_s=_time(found["start"]),
                end_s=_time(found["end"]),
                submit_s=_time(found["submit"]),
            )
        )
    return tuple(jobs)


def parse_preempted(text: str) -> dict[int, int]:
    """Of `squeue --noheader --states=RUNNING --Format=PREEMPT_FORMAT`: number of a job -> since when Slurm waits for it
    to leave. Raises `SlurmOutputError`."""
    found: dict[int, int] = {}
    for line in _lines(text, MAX_JOBS, "squeue"):
        match = _PREEMPTED.fullmatch(line)
        if match is None:
            raise SlurmOutputError(f"squeue printed {plain(line)!r} where times of preemption were asked for")
        time_s = _time(match["time"])
        if time_s is not None:
            found[int(match["id"])] = time_s
    return found


def _nodes(text: str) -> tuple[str, ...]:
    try:
        return expand_nodelist(text) if text else ()
    except UsageError as error:
        raise SlurmOutputError(f"squeue printed a list of nodes that is none: {error}") from None


def _time(text: str) -> int | None:
    return int(text) if text.isdigit() else None


def _lines(text: str, most: int, program: str) -> list[str]:
    lines = [line for line in text.split("\n") if line]
    if len(lines) > most:
        raise SlurmOutputError(f"{program} printed {len(lines)} lines, more than {most}")
    return lines


def parse_nodes(text: str) -> tuple[SlurmNode, ...]:
    """Of `sinfo --noheader --Node --format=NODE_FORMAT`; a node of several partitions is there several times. A line
    of another form is the rest of a reason with a line break in it. Raises `SlurmOutputError`."""
    nodes: dict[str, SlurmNode] = {}
    for line in _lines(text, 4 * MAX_NODES, "sinfo"):
        found = _NODE.fullmatch(line)
        if found is None or found["name"] in nodes:
            continue
        if len(nodes) >= MAX_NODES:
            raise SlurmOutputError(f"sinfo printed more than {MAX_NODES} nodes")
        reason = plain(found["reason"])
        nodes[found["name"]] = SlurmNode(
            name=found["name"],
            state=found["state"],
            answers="*" not in found["flags"],
            reason="" if reason == "none" else reason,
        )
    return tuple(nodes.values())
