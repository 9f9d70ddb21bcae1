"""Why a job failed: differential diagnosis over domains of failure (arXiv:2410.21680, II-E). Pure.

What was seen from 10 minutes before the end to 5 after becomes hypotheses, each with the evidence for it. Reports of
one fault by several checks are one hypothesis: a PCIe error, Xid 79 and a critical event of the management controller
co-occur. A timeout of a collective says only that a rank did not arrive: it is a consequence of any hypothesis that
explains it, and weighs little where there is none. The weights order hypotheses; they are no probabilities.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final, Literal

import msgspec

from fireflyer.analytics.reliability.rows import ABSENT_EXIT
from fireflyer.analytics.reliability.taxonomy import DOMAINS, SYMPTOMS, Domain, xid_class
from fireflyer.base.health_event import Severity

__all__ = ["Diagnosis", "DomainRank", "FlightFinding", "Hypothesis", "JobEvidence", "Observation", "diagnose"]


class Observation(msgspec.Struct, frozen=True, kw_only=True):
    """Something that a node of the job reported."""

    after_end_s: float
    """Seconds after the job's end; negative before."""
    node: str
    symptom: str
    cause: str = ""
    severity: Severity
    source: str
    user_made: bool = False
    words: str = ""


class FlightFinding(msgspec.Struct, frozen=True, kw_only=True):
    """Verdict over the flight recorder's dumps of the job's ranks."""

    kind: Literal[
        "nothing", "mismatch", "absent", "asleep", "stalled", "gone", "link", "deadlock", "aborted", "corrupted",
        "undecided",
    ]  # fmt: skip
    summary: str


class JobEvidence(msgspec.Struct, frozen=True, kw_only=True):
    job: str
    state: str
    exit_code: int
    """`ABSENT_EXIT`: not known."""
    signal: int
    nodes: tuple[str, ...]
    observations: tuple[Observation, ...]
    flight: tuple[FlightFinding, ...] = ()
    start_ns: int | None = None
    end_ns: int | None = None
    attempt: int = 1
    attempts: int = 1
    """That have ended."""
    left_out: int = 0
    """Further observations, of no higher severity than those that are there."""


class Hypothesis(msgspec.Struct, frozen=True, kw_only=True):
    """One fault that explains a part of what was seen."""

    title: str
    domains: tuple[Domain, ...]
    weight: float
    nodes: tuple[str, ...]
    evidence: tuple[str, ...]
    causes: tuple[str, ...]
    remedy: str = ""


class DomainRank(msgspec.Struct, frozen=True, kw_only=True):
    domain: Domain
    share: float
    """Of the weight of all hypotheses."""


class Diagnosis(msgspec.Struct, frozen=True, kw_only=True):
    job: str
    summary: str
    domains: tuple[DomainRank, ...]
    """The heaviest first; all three, also those that nothing speaks for."""
    hypotheses: tuple[Hypothesis, ...]
    consequences: tuple[str, ...]
    """What was seen and is explained by the first hypothesis: not a cause."""
    left_out: int = 0
    """Observations that were too many to be looked at."""


MAX_EVIDENCE: Final = 8
"""Lines of a hypothesis."""
_WEIGHTS: Final = {
    "oom": 8.0, "pcie": 8.0, "gpu_memory": 8.0, "nvlink": 7.0, "gpu_unavailable": 7.0, "ib_link": 6.0,
    "main_memory": 6.0, "gpu_driver": 5.0, "block_device": 5.0, "filesystem_mount": 5.0, "program_error": 5.0,
    "gpu_program": 4.0, "platform_management": 4.0, "eth_link": 3.0, "system_service": 3.0, "node_lost": 2.0,
    "nccl_timeout": 1.0, "other": 1.0, "corruption": 7.0,
}  # fmt: skip
"""How much a symptom says about its cause: what has one cause says most."""
_SEVERITY: Final[dict[Severity, float]] = {"high": 1.0, "low": 0.6, "warn": 0.3, "ok": 0.0}
_USER_MADE: Final = 0.8
_AFTERWARDS: Final = 0.6
"""What is first seen after the job has ended may follow from its end."""
_ANOTHER_NODE: Final = 0.1
"""For each further node that saw the same."""
_PCIE_BUS: Final = ("pcie", "gpu_unavailable", "platform_management")
_CONSEQUENCES: Final = ("nccl_timeout", "node_lost")
_ENDED_BY: Final = (6, 9, 15)
"""Signals with which a rank ends that waited in vain, and those with which its peers are ended."""
_FOLLOWS: Final = 0.3
"""Weight of an exit that follows from a timeout or a lost node as well: it explains neither."""
_ENOUGH: Final = 2.5
"""Weight from which a hypothesis explains a timeout and a node that stopped answering."""

_FLIGHT: Final[dict[str, tuple[str, tuple[Domain, ...], float, tuple[str, ...]]]] = {
    "mismatch": ("Ranks made different calls", ("user program",), 8.0, ("bug of the program",)),
    "deadlock": ("Ranks wait for each other", ("user program",), 7.0, ("order of messages in the program",)),
    "link": ("Bytes stopped between two nodes", ("hardware", "system software"), 6.0, ("link or switch",)),
    "corrupted": ("Received data had a wrong checksum", ("hardware",), 6.0, ("link", "memory")),
    "asleep": ("A rank lived and did not enter the collective", ("user program", "system software"), 3.0,
               ("loading of data", "work of one rank only", "storage that does not answer")),
    "stalled": ("A rank stopped inside the collective", ("system software", "hardware"), 3.0, ("GPU", "driver")),
    "aborted": ("A rank aborted the group", ("user program",), 2.0, ("exception of the program",)),
    "gone": ("A rank ended", DOMAINS, 1.5, ("crash of the program", "node")),
    "absent": ("A rank never entered the collective", DOMAINS, 1.5, ("crash of the program", "node")),
}  # fmt: skip
_SIGNALS: Final[dict[int, tuple[str, tuple[Domain, ...], float]]] = {
    6: ("the program aborted itself", ("user program",), 3.0),
    9: ("killed from outside", ("user program", "system software"), 1.0),
    11: ("invalid memory access", ("user program",), 4.0),
    7: ("bus error: memory that cannot be read, or a full /dev/shm", ("system software", "hardware"), 3.0),
    4: ("illegal instruction", ("user program", "hardware"), 3.0),
}


def diagnose(job: JobEvidence) -> Diagnosis:
    """The heaviest hypothesis first; nothing that was seen is left out, it stands with a hypothesis or a
    consequence."""
    found = [*_of_observations(job.observations), *_of_flight(job.flight), *_of_exit(job)]
    found.sort(key=lambda one: (-one.weight, one.title))
    consequences: list[str] = []
    kept = [one for one in found if one.title not in _CONSEQUENCE_TITLES]
    if kept and kept[0].weight >= _ENOUGH:
        consequences = [line for one in found if one.title in _CONSEQUENCE_TITLES for line in one.evidence]
        found = kept
    timed_out = any(one.symptom == "nccl_timeout" for one in job.observations)
    return Diagnosis(
        job=job.job,
        summary=_summary(job, found, timeout_explained=bool(consequences) and timed_out),
        domains=_ranked(found),
        hypotheses=tuple(found),
        consequences=tuple(consequences),
        left_out=job.left_out,
    )


_CONSEQUENCE_TITLES: Final = tuple(SYMPTOMS[key].title for key in _CONSEQUENCES)


def _of_observations(observations: Sequence[Observation]) -> list[Hypothesis]:
    groups: dict[str, list[Observation]] = {}
    for one in sorted(observations, key=lambda one: (one.after_end_s, one.node, one.symptom, one.cause)):
        if _SEVERITY[one.severity] > 0:
            groups.setdefault(one.symptom if one.symptom in SYMPTOMS else "other", []).append(one)
    together = [one for node in _nodes(observations) for one in _of_the_bus(groups, node)]
    found = []
    if together:
        found.append(
            _co_occurrence([key for key in _PCIE_BUS if any(one.symptom == key for one in together)], together)
        )
    rest = {key: [one for one in group if one not in together] for key, group in groups.items()}
    return found + [_of_symptom(key, group) for key, group in rest.items() if group]


def _of_the_bus(groups: Mapping[str, Sequence[Observation]], node: str) -> list[Observation]:
    """What one node reported of its PCIe bus in several ways; of one way alone nothing."""
    here = {key: [one for one in groups.get(key, ()) if one.node == node] for key in _PCIE_BUS}
    bus = [key for key, group in here.items() if group and (key != "gpu_unavailable" or _off_the_bus(group))]
    return [one for key in bus for one in here[key]] if len(bus) > 1 else []


def _off_the_bus(group: Iterable[Observation]) -> bool:
    return any(one.cause in ("xid_79", "off_the_bus") for one in group)


def _co_occurrence(keys: Sequence[str], group: Sequence[Observation]) -> Hypothesis:
    """The weight of the strongest, and half of the others': they report the same fault, and confirm it."""
    weights = sorted((_weight([one for one in group if one.symptom == key], key) for key in keys), reverse=True)
    names = " and ".join(", ".join(SYMPTOMS[key].title for key in keys).rsplit(", ", 1))
    return Hypothesis(
        title=f"PCIe bus: {names} together",
        domains=("hardware",),
        weight=weights[0] + sum(weights[1:]) / 2,
        nodes=_nodes(group),
        evidence=_lines(group),
        causes=("failure of the GPU", "poor electrical contact", "PCIe switch or riser"),
        remedy="take the node out and reseat or replace the GPU: several checks that report one fault confirm it",
    )


def _of_symptom(key: str, group: Sequence[Observation]) -> Hypothesis:
    symptom = SYMPTOMS[key]
    xids = [int(one.cause[4:]) for one in group if one.cause.startswith("xid_") and one.cause[4:].isdigit()]
    known = next((found for xid in xids if (found := xid_class(xid)) is not None), None)
    return Hypothesis(
        title=symptom.title,
        domains=symptom.domains,
        weight=_weight(group, key),
        nodes=_nodes(group),
        evidence=_lines(group),
        causes=symptom.causes,
        remedy="" if known is None else known.remedy,
    )


def _weight(group: Sequence[Observation], key: str) -> float:
    most = max(
        (_USER_MADE if one.user_made else _SEVERITY[one.severity]) * (_AFTERWARDS if one.after_end_s > 0 else 1.0)
        for one in group
    )
    return _WEIGHTS[key] * most * (1 + _ANOTHER_NODE * min(len(_nodes(group)) - 1, 5))


def _of_flight(findings: Sequence[FlightFinding]) -> list[Hypothesis]:
    found = []
    for one in findings:
        if one.kind in _FLIGHT:
            title, domains, weight, causes = _FLIGHT[one.kind]
            line = f"flight recorder: {one.summary}"
            found.append(
                Hypothesis(title=title, domains=domains, weight=weight, nodes=(), evidence=(line,), causes=causes)
            )
    return found


def _of_exit(job: JobEvidence) -> list[Hypothesis]:
    signal = job.signal or (job.exit_code - 128 if 128 < job.exit_code < 192 else 0)
    hardware = any(
        not one.user_made and one.severity == "high" and one.symptom not in _CONSEQUENCES for one in job.observations
    )
    waited = any(one.symptom in _CONSEQUENCES for one in job.observations)
    if job.state == "OUT_OF_MEMORY":
        symptom = SYMPTOMS["oom"]
        return [_exit(symptom.title, symptom.domains, 8.0, "the scheduler ended it: OUT_OF_MEMORY", symptom.causes)]
    if signal in _SIGNALS:
        what, domains, weight = _SIGNALS[signal]
        factor = _FOLLOWS if waited and signal in _ENDED_BY else 0.5 if hardware else 1.0
        return [
            _exit(f"Signal {signal}", domains, weight * factor, f"a process ended with signal {signal}: {what}", ())
        ]
    if job.state == "FAILED" and job.exit_code not in (0, ABSENT_EXIT):
        symptom = SYMPTOMS["program_error"]
        weight = 3.0 * (_FOLLOWS if waited or signal in _ENDED_BY else 1.0 / 3.0 if hardware else 1.0)
        return [_exit(symptom.title, symptom.domains, weight, f"it ended with code {job.exit_code}", symptom.causes)]
    if job.state == "NODE_FAIL" and not job.observations:
        symptom = SYMPTOMS["node_lost"]
        return [_exit(symptom.title, symptom.domains, 2.0, "NODE_FAIL, and no node reported anything", symptom.causes)]
    return []


def _exit(title: str, domains: tuple[Domain, ...], weight: float, line: str, causes: tuple[str, ...]) -> Hypothesis:
    return Hypothesis(title=title, domains=domains, weight=weight, nodes=(), evidence=(line,), causes=causes)


def _nodes(group: Iterable[Observation]) -> tuple[str, ...]:
    return tuple(sorted({one.node for one in group}))


def _lines(group: Sequence[Observation]) -> tuple[str, ...]:
    lines = [_line(one) for one in sorted(group, key=lambda one: one.after_end_s)]
    left = len(lines) - MAX_EVIDENCE
    return (*lines[:MAX_EVIDENCE], *([f"and {left} more"] if left > 0 else []))


def _line(one: Observation) -> str:
    side = "after" if one.after_end_s > 0 else "before"
    words = f" ({one.words})" if one.words else ""
    return f"{one.node}, {abs(one.after_end_s):.0f} s {side} the end, {one.source}: {one.cause or one.symptom}{words}"


def _ranked(hypotheses: Sequence[Hypothesis]) -> tuple[DomainRank, ...]:
    weights = dict.fromkeys(DOMAINS, 0.0)
    for one in hypotheses:
        for domain in one.domains:
            weights[domain] += one.weight / len(one.domains)
    total = sum(weights.values())
    shares = {domain: weight / total if total else 0.0 for domain, weight in weights.items()}
    return tuple(
        DomainRank(domain=domain, share=share)
        for domain, share in sorted(shares.items(), key=lambda item: (-item[1], DOMAINS.index(item[0])))
    )


def _summary(job: JobEvidence, hypotheses: Sequence[Hypothesis], *, timeout_explained: bool) -> str:
    if not hypotheses:
        return f"Job {job.job} ended {job.state}, and nothing was seen that explains it."
    first = hypotheses[0]
    if first.title == SYMPTOMS["nccl_timeout"].title:
        return (
            f"Job {job.job} ended {job.state} with the timeout of a collective, which says only that a rank did not "
            "arrive; nothing was seen that explains it. Look at the flight recorder: ff collectives explain."
        )
    where = f" on {', '.join(first.nodes[:4])}{' and others' * (len(first.nodes) > 4)}" if first.nodes else ""
    timeout = "; the timeout is a consequence" if timeout_explained else ""
    return (
        f"Job {job.job} ended {job.state}; most likely: {first.title}{where} ({' or '.join(first.domains)}){timeout}."
    )
