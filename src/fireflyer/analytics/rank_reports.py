"""The event log of a run that no launcher watched, from what each of its ranks wrote by itself.

Files of one rank are its starts, in order of time. Which of them belong together follows from the attempt that each
names (torchrun's restart count), and where a run was started again in the same directory from how often the rank has
named that attempt before. Attempts are numbered anew in the order of their starts. What ended an attempt is guessed
from who wrote that it ended, and how: a rank that was killed wrote nothing. Times are wall clocks of several machines.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import msgspec

from fireflyer.base.errors import DataCorruption
from fireflyer.base.events import (
    AttemptFailed,
    AttemptStarted,
    CheckpointReport,
    CorruptionReport,
    JobEvent,
    JobFinished,
    JobStarted,
    Logged,
    PeerFailureReport,
    RankExited,
    ResumeReport,
    StepReport,
)

__all__ = ["merge_rank_reports"]

_NAME = re.compile(r"rank-([0-9]{5,7})-([0-9]{5,9})-([0-9]{20})-[0-9]{1,10}\.jsonl")


class _Start(msgspec.Struct, frozen=True):
    """One start of one rank."""

    rank: int
    attempt: int
    start_ns: int
    entries: list[Logged]

    @property
    def exit_code(self) -> int | None:
        for entry in self.entries:
            if isinstance(entry.event, RankExited):
                return entry.event.exit_code
        return None


def merge_rank_reports(files: Mapping[str, Sequence[Logged]]) -> list[Logged]:
    """`files`: the entries of each file by its name. One log in the order of time, as a launcher would have written
    it. Raises `DataCorruption` where no file is one of a rank."""
    starts = [
        _Start(int(match[1]), int(match[2]), int(match[3]), list(entries))
        for name, entries in files.items()
        if entries and (match := _NAME.fullmatch(name))
    ]
    first = _first_of([entry.event for start in starts for entry in start.entries])
    if first is None:
        raise DataCorruption("the reports of the ranks hold no start of a job")
    origin_ns = min(start.entries[0].at_ns for start in starts)
    log: list[Logged] = [Logged(origin_ns, first)]
    groups = _attempts(starts)
    for number, group in enumerate(groups):
        last = number == len(groups) - 1
        entries = [entry for start in group for entry in start.entries]
        begin_ns = max(log[-1].at_ns, min(entry.at_ns for entry in entries))
        log.append(Logged(begin_ns, AttemptStarted(number)))
        kept = [Logged(entry.at_ns, event) for entry in entries if (event := _renumbered(entry.event, number))]
        log += sorted(kept, key=lambda entry: entry.at_ns)
        log += _end(group, number, first, log[-1].at_ns, last=last)
    return _from_zero(log, origin_ns)


def _first_of(events: Sequence[JobEvent]) -> JobStarted | None:
    found = [event for event in events if isinstance(event, JobStarted)]
    return min(found, key=lambda event: event.wall_time_s, default=None)


def _attempts(starts: Sequence[_Start]) -> list[list[_Start]]:
    """Those that belong together, in order of rank, and the groups in order of time."""
    groups: dict[tuple[int, int], list[_Start]] = {}
    named: dict[tuple[int, int], int] = {}
    for start in sorted(starts, key=lambda start: start.start_ns):
        times = named[start.rank, start.attempt] = named.get((start.rank, start.attempt), 0) + 1
        groups.setdefault((start.attempt, times), []).append(start)
    ordered = sorted(groups.values(), key=lambda group: min(start.start_ns for start in group))
    return [sorted(group, key=lambda start: start.rank) for group in ordered]


_OF_ATTEMPT = (StepReport, ResumeReport, CheckpointReport, PeerFailureReport, CorruptionReport, RankExited)


def _renumbered(event: JobEvent, number: int) -> JobEvent | None:
    if isinstance(event, _OF_ATTEMPT):
        return msgspec.structs.replace(event, attempt=number)
    return None


def _end(group: Sequence[_Start], number: int, job: JobStarted, at_ns: int, *, last: bool) -> list[Logged]:
    """How the attempt ended, as far as its ranks have written it."""
    failed = [start.rank for start in group if start.exit_code not in (None, 0)]
    silent = [start.rank for start in group if start.exit_code is None]
    accused = [
        entry.event.peer for start in group for entry in start.entries if isinstance(entry.event, PeerFailureReport)
    ]
    if not failed and (not silent or last):
        whole = not silent and len(group) == job.world_size
        return [Logged(at_ns, JobFinished(0, "all ranks have ended"))] if whole and last else []
    if accused:
        rank, reason = accused[0], f"rank {accused[0]} failed the others, as rank {failed[0] if failed else '?'} saw it"
    elif silent:
        rank, reason = silent[0], f"rank {silent[0]} was killed: it reported no end"
    else:
        rank, reason = failed[0], f"rank {failed[0]} ended by an exception"
    ended = [Logged(at_ns, AttemptFailed(number, reason, restarting=not last, rank=rank))]
    return [*ended, Logged(at_ns, JobFinished(1, reason))] if last else ended


def _from_zero(log: Sequence[Logged], origin_ns: int) -> list[Logged]:
    """Times since the job's start that never go back, although clocks of machines differ."""
    now_ns = 0
    result: list[Logged] = []
    for entry in log:
        now_ns = max(now_ns, entry.at_ns - origin_ns)
        result.append(Logged(now_ns, entry.event))
    return result
