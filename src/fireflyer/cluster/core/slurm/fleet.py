"""What Slurm says of all nodes of a site, as far as a node decides by it whether it may drain itself.

Reasons of nodes hold any text, line breaks too. Names, partitions and states are therefore asked for without reasons,
where no line has free text, and the reasons in a second answer: of a node about which that answer says two things, the
reason is not known.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

import msgspec

from fireflyer.cluster.core.slurm.output import MAX_NODES, SlurmOutputError, plain

__all__ = [
    "FLEET_FORMAT",
    "NODE_JOB_FORMAT",
    "REASON_FORMAT",
    "FleetNode",
    "NodeJob",
    "parse_drains",
    "parse_fleet",
    "parse_node_jobs",
    "parse_reserved",
]

FLEET_FORMAT: Final = "%N|%R|%T|%C"
"""Of `sinfo --all --Node --format`; a line for each partition of a node."""
REASON_FORMAT: Final = "%N|%H|%E"
"""Of `sinfo --all --Node --format`, with SLURM_TIME_FORMAT=%s."""
NODE_JOB_FORMAT: Final = "JobID:12,RestartCnt:12,Requeue:12"
"""Of `squeue --Format`."""
MAX_LINES: Final = 16 * MAX_NODES
MAX_NODE_JOBS: Final = 10_000
_UNKNOWN: Final = "(not known)"

_NAME: Final = r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}"
_COUNT: Final = r"[0-9]{1,7}(?:\.[0-9]{1,2})?[KM]?"
_ROW: Final = re.compile(
    rf"(?P<name>{_NAME})\|(?P<partition>{_NAME})\|(?P<state>[a-z_]{{2,30}})(?P<flags>[*~#!%$@^+-]{{0,4}})"
    rf"\|(?P<allocated>{_COUNT})/{_COUNT}/{_COUNT}/{_COUNT}"
)
_REASON: Final = re.compile(rf"(?P<name>{_NAME})\|(?P<since>[0-9]{{1,12}}|Unknown)\|(?P<reason>.*)")
_POWER_FLAGS: Final = frozenset("~#!%")
_JOB: Final = re.compile(r" *([0-9]{1,10}) +([0-9]{1,9}) +([01]) *")
_SHOWN: Final = re.compile(rf"NodeName=(?P<name>{_NAME}) [^\n]{{0,4096}}? State=(?P<state>[A-Z_+*~#!%$@^-]{{2,120}}) ")
_RESERVED: Final = re.compile(rf"ReservationName=(?P<name>{_NAME}) [^\n]{{0,4096}}? Nodes=(?P<nodes>\S{{1,65536}}) ")


class FleetNode(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    partitions: tuple[str, ...]
    state: str
    """As `sinfo` writes it: `idle`, `allocated`, `draining`, `drained`, …"""
    answers: bool = True
    powered: bool = True
    """It is not switched off to save energy, and is not on its way to that or back."""
    busy: bool = False
    """Processors of it are allocated to jobs."""
    reason: str = ""
    since_s: int = 0
    """Unix time when the reason was set, also of one that says more than before (`drains.drained_since_s`); 0: not
    known."""

    @property
    def drains(self) -> bool:
        return self.state in ("drained", "draining")

    @property
    def takes_jobs_now(self) -> bool:
        return self.state == "idle" and self.answers and self.powered

    @property
    def takes_jobs_of_reservation(self) -> bool:
        """Of the one that it is in, also for maintenance, which nodes show instead of being idle."""
        return self.state in ("reserved", "maint") and self.answers and self.powered and not self.busy


class NodeJob(msgspec.Struct, frozen=True):
    """A job that runs on a node."""

    id: int
    restarts: int
    requeues: bool
    """Its user allows that it is queued again."""


def parse_fleet(rows: str, reasons: str) -> dict[str, FleetNode]:
    """Of `sinfo` with FLEET_FORMAT and with REASON_FORMAT. Raises `SlurmOutputError`."""
    said = _reasons(reasons)
    nodes: dict[str, FleetNode] = {}
    for line in _lines(rows):
        found = _ROW.fullmatch(line)
        if found is None:
            raise SlurmOutputError(f"sinfo printed {plain(line)!r} where the state of a node was asked for")
        name, known = found["name"], nodes.get(found["name"])
        if known is not None:
            partitions = (*known.partitions, found["partition"])
            nodes[name] = msgspec.structs.replace(known, partitions=tuple(dict.fromkeys(partitions)))
            continue
        if len(nodes) >= MAX_NODES:
            raise SlurmOutputError(f"sinfo printed more than {MAX_NODES} nodes")
        reason, since_s = said.get(name, ("", 0))
        nodes[name] = FleetNode(
            name=name,
            partitions=(found["partition"],),
            state=found["state"],
            answers="*" not in found["flags"],
            powered=not set(found["flags"]) & _POWER_FLAGS,
            busy=found["allocated"] != "0",
            reason=reason,
            since_s=since_s,
        )
    return nodes


def _reasons(text: str) -> Mapping[str, tuple[str, int]]:
    """Since when, too. A line of another form is the rest of a reason with a line break in it."""
    found: dict[str, tuple[str, int]] = {}
    for line in _lines(text):
        match = _REASON.fullmatch(line)
        if match is None:
            continue
        reason = plain(match["reason"])
        said = ("" if reason == "none" else reason, int(match["since"]) if match["since"].isdigit() else 0)
        found[match["name"]] = said if found.get(match["name"], said) == said else (_UNKNOWN, 0)
    return found


def parse_drains(text: str, node: str) -> bool:
    """Of `scontrol --oneliner show node NODE`: whether it drains, by whomever. Before the first `State=` nothing is
    written by people. Raises `SlurmOutputError`."""
    found = _SHOWN.match(text)
    if found is None or found["name"] != node:
        raise SlurmOutputError(f"scontrol printed {plain(text)!r} where node {node} was asked for")
    return any(word.startswith("DRAIN") for word in found["state"].split("+"))


def parse_reserved(text: str, reservation: str) -> str:
    """Of `scontrol --oneliner show reservation NAME`: its nodes, as a host list of Slurm; empty without any. Raises
    `SlurmOutputError`."""
    found = _RESERVED.match(text)
    if found is None or found["name"] != reservation:
        raise SlurmOutputError(f"scontrol printed {plain(text)!r} where reservation {reservation} was asked for")
    return "" if found["nodes"] == "(null)" else found["nodes"]


def parse_node_jobs(text: str) -> tuple[NodeJob, ...]:
    """Of `squeue --noheader --states=RUNNING --Format=NODE_JOB_FORMAT`. Raises `SlurmOutputError`."""
    jobs = []
    for line in _lines(text)[:MAX_NODE_JOBS]:
        match = _JOB.fullmatch(line)
        if match is None:
            raise SlurmOutputError(f"squeue printed {plain(line)!r} where a job of a node was asked for")
        jobs.append(NodeJob(int(match[1]), int(match[2]), match[3] == "1"))
    return tuple(jobs)


def _lines(text: str) -> list[str]:
    lines = [line for line in text.split("\n") if line.strip()]
    if len(lines) > MAX_LINES:
        raise SlurmOutputError(f"a command of Slurm printed {len(lines)} lines, more than {MAX_LINES}")
    return lines
