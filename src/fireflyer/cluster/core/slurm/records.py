"""What is left of a job after its end, where Slurm or a site keeps it: `sacct`, `scontrol show job`, and the file of
`jobcomp/filetxt`.

source      knows                                               for how long
──────────────────────────────────────────────────────────────────────────────────────────
sacct       all, also who cancelled it                          as the site likes; needs accounting storage
scontrol    exit code, times, nodes; whether it was preempted    MinJobAge after its end
jobcomp     exit code, times, nodes                             as long as the file is kept
squeue      times, nodes                                        MinJobAge

Users write parts of all of these. `sacct` is asked for exact names, as `squeue` is. The name of a job is in the file of
jobcomp as its user wrote it, line breaks too, so a user can write a line there that looks like that of any job: two
lines that claim one job make both worthless.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Final

import msgspec

from fireflyer.base.errors import UsageError
from fireflyer.cluster.core.slurm.output import Phase, SlurmJob, SlurmOutputError, plain
from fireflyer.cluster.schema.hosts import expand_nodelist

__all__ = ["JOBCOMP_BYTES", "SACCT_FORMAT", "LocalTime", "best", "parse_jobcomp", "parse_sacct", "parse_shown"]

SACCT_FORMAT: Final = "JobIDRaw,State,UID,Submit,Start,End,ExitCode,NodeList,JobName"
"""Of `sacct --parsable2 --format`, with SLURM_TIME_FORMAT=%s."""
JOBCOMP_BYTES: Final = 16 << 20
"""Of the end of the file: a job whose line is before that is not found."""
MAX_RECORDS: Final = 100_000
MAX_LINE: Final = 1024
"""`jobcomp/filetxt` cuts longer ones."""
MAX_SHOWN: Final = 1 << 20

LocalTime = Callable[[str], int | None]
"""`2026-11-26T13:27:33` as the site's clock shows it -> Unix time."""

_NODES: Final = r"[A-Za-z0-9._,\[\]-]{0,65536}"
_SECONDS: Final = r"[0-9]{1,12}|Unknown|None|N/A"
_SACCT: Final = re.compile(
    rf"(?P<id>[0-9]{{1,10}})\|(?P<state>[A-Z_]{{2,30}})(?: by (?P<by>[0-9]{{1,10}}))?\|(?P<uid>[0-9]{{1,10}})"
    rf"\|(?P<submit>{_SECONDS})\|(?P<start>{_SECONDS})\|(?P<end>{_SECONDS})"
    rf"\|(?P<code>[0-9]{{1,3}}):(?P<signal>[0-9]{{1,3}})\|(?P<nodes>{_NODES}|None assigned)"
    r"\|(?P<name>[A-Za-z0-9][A-Za-z0-9._-]{0,63})"
)
_HEAD: Final = re.compile(
    r"JobId=(?P<id>[0-9]{1,10}) JobName=(?P<name>[A-Za-z0-9][A-Za-z0-9._-]{0,63})"
    r" UserId=[^ ]{0,256}\((?P<uid>[0-9]{1,10})\) "
)
_FIELDS: Final = ("JobState", "ExitCode", "SubmitTime", "StartTime", "EndTime", "PreemptTime", "NodeList")
"""In this order, and before everything that the job's user writes."""
_SHOWN: Final = re.compile(
    rf"(?P<state>[A-Z_]{{2,30}}) (?P<code>[0-9]{{1,3}}):(?P<signal>[0-9]{{1,3}}) (?P<submit>{_SECONDS})"
    rf" (?P<start>{_SECONDS}) (?P<end>{_SECONDS}) (?P<preempt>{_SECONDS}) (?P<nodes>\(null\)|{_NODES})"
)
_LOCAL: Final = r"[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}"
_JOBCOMP: Final = re.compile(
    r"JobId=(?P<id>[0-9]{1,10}) UserId=[^ ()]*\((?P<uid>[0-9]{1,10})\) GroupId=[^ ()]*\([0-9]{1,10}\)"
    r" Name=(?P<name>[A-Za-z0-9][A-Za-z0-9._-]{0,63}) JobState=(?P<state>[A-Z_]{2,30}) Partition=[^ ]* TimeLimit=[^ ]*"
    rf" StartTime=(?P<start>{_LOCAL}|Unknown) EndTime=(?P<end>{_LOCAL}) NodeList=(?P<nodes>\(null\)|{_NODES})"
    rf" NodeCnt=.* SubmitTime=(?P<submit>{_LOCAL}) .*ExitCode=(?P<code>[0-9]{{1,3}}):(?P<signal>[0-9]{{1,3}}) *"
)


def parse_sacct(text: str, names: Collection[str]) -> tuple[SlurmJob, ...]:
    """Of `sacct --noheader --allocations --duplicates --parsable2 --name=NAMES --format=SACCT_FORMAT`. Raises
    `SlurmOutputError`."""
    lines = [line for line in text.split("\n") if line]
    if len(lines) > MAX_RECORDS:
        raise SlurmOutputError(f"sacct printed {len(lines)} lines, more than {MAX_RECORDS}")
    jobs = []
    for line in lines:
        found = _SACCT.fullmatch(line)
        if found is None or found["name"] not in names:
            raise SlurmOutputError(f"sacct printed {plain(line)!r}, which is no line of a job that was asked for")
        by = int(found["by"]) if found["by"] else None
        jobs.append(_job(found.groupdict(), _seconds, source="sacct", cancelled_by=by))
    return tuple(jobs)


def parse_shown(text: str, job: SlurmJob) -> SlurmJob:
    """Of `scontrol --oneliner show job ID`, of which `squeue` says that it is `job`: everything that its user wrote
    comes after what is read. Raises `SlurmOutputError`."""
    head = _HEAD.match(text) if len(text) <= MAX_SHOWN else None
    if head is None or (int(head["id"]), head["name"], int(head["uid"])) != (job.id, job.name, job.uid):
        raise SlurmOutputError(f"scontrol printed {plain(text)!r} where job {job.id} was asked for")
    found = _SHOWN.fullmatch(_fields(text, head.end()))
    if found is None:
        raise SlurmOutputError(f"scontrol printed {plain(text)!r}, which is not the form that is known")
    said = {**head.groupdict(), **found.groupdict()}
    return _job(said, _seconds, source="scontrol", preempt_s=_seconds(said["preempt"]))


def _fields(text: str, position: int) -> str:
    """Their values, with blanks between them; empty: one is missing. A job that never ran has no `PreemptTime`."""
    values = []
    for name in _FIELDS:
        at = text.find(f" {name}=", position)
        if at >= 0:
            position = at + len(name) + 2
            values.append(text[position : text.find(" ", position)])
        elif name == "PreemptTime":
            values.append("None")
        else:
            return ""
    return " ".join(values)


def parse_jobcomp(text: str, names: Collection[str], local: LocalTime) -> tuple[SlurmJob, ...]:
    """Of the end of the file of `jobcomp/filetxt`: of each job of these names what its one line says."""
    claims: dict[tuple[int, str, int], list[SlurmJob]] = {}
    for line in text.split("\n"):
        found = _JOBCOMP.fullmatch(line) if line.startswith("JobId=") and len(line) <= MAX_LINE else None
        if found is None or found["name"] not in names:
            continue
        try:
            job = _job(found.groupdict(), local, source="jobcomp")
        except SlurmOutputError:
            continue
        claims.setdefault((job.id, job.name, job.uid), []).append(job)
    return tuple(jobs[0] for jobs in claims.values() if len(jobs) == 1)


def _job(
    found: Mapping[str, str],
    time: LocalTime,
    *,
    source: str,
    cancelled_by: int | None = None,
    preempt_s: int | None = None,
) -> SlurmJob:
    nodes = "" if found["nodes"] in ("(null)", "None assigned") else found["nodes"]
    try:
        expanded = expand_nodelist(nodes) if nodes else ()
    except UsageError as error:
        raise SlurmOutputError(f"a list of nodes that is none: {error}") from None
    return SlurmJob(
        id=int(found["id"]),
        name=found["name"],
        uid=int(found["uid"]),
        state=found["state"],
        nodes=expanded,
        submit_s=time(found["submit"]),
        start_s=time(found["start"]),
        end_s=time(found["end"]),
        exit_code=int(found["code"]),
        signal=int(found["signal"]),
        cancelled_by=cancelled_by,
        preempt_s=preempt_s,
        source=source,
    )


def _seconds(text: str) -> int | None:
    return int(text) if text.isdigit() else None


_ORDER: Final = ("sacct", "scontrol", "jobcomp")


def best(job: SlurmJob, records: Iterable[SlurmJob]) -> SlurmJob:
    """`job`: as `squeue` shows it, or, with an empty state, as the manager knows it. What the best record of the same
    job says is added to that, if it has ended there too."""
    same = [one for one in records if _is_same(job, one) and one.phase is Phase.ENDED]
    if not same or (job.state and job.phase is not Phase.ENDED):
        return job
    one = min(same, key=lambda record: _ORDER.index(record.source))
    return msgspec.structs.replace(
        one,
        state=job.state or one.state,
        reason=job.reason,
        preempt_s=next((other.preempt_s for other in same if other.preempt_s is not None), None),
        nodes=one.nodes or job.nodes,
        start_s=one.start_s if one.start_s is not None else job.start_s,
        end_s=one.end_s if one.end_s is not None else job.end_s,
    )


def _is_same(job: SlurmJob, record: SlurmJob) -> bool:
    times = {job.submit_s, record.submit_s} - {None}
    return (job.id, job.name, job.uid) == (record.id, record.name, record.uid) and len(times) <= 1
