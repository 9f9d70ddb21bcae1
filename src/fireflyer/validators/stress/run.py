"""Runs the validators on this machine, one after the other."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

import msgspec

from fireflyer.base.health_event import HealthEvent
from fireflyer.runtime.node_counters import read_meminfo
from fireflyer.validators.checks.capture import capture
from fireflyer.validators.checks.rounds import HealthRounds
from fireflyer.validators.core.checks.catalogue import chosen_checks, sources_of
from fireflyer.validators.core.checks.evidence import Finding
from fireflyer.validators.core.checks.health_round import as_event
from fireflyer.validators.core.checks.part_serials import part_serials, with_serial
from fireflyer.validators.core.checks.policy import HealthPolicy
from fireflyer.validators.core.checks.settings import CheckSettings
from fireflyer.validators.core.validation.node_models import as_its_peers, lacking_gpus, usual_model
from fireflyer.validators.core.validation.records import (
    Found,
    NodeRecord,
    compare_digests,
    compare_figures,
    peers_of,
    usual_figures,
)
from fireflyer.validators.core.validation.repetition import MEASUREMENTS, LowFigures
from fireflyer.validators.stress import cuda, cuda_paths, paths, processor, storage

__all__ = [
    "LINK_CHECKS",
    "VALIDATORS",
    "Load",
    "events_of",
    "gpu_serials",
    "links",
    "model_of_node",
    "record_of",
    "repeat_low",
    "validate",
]

LINK_CHECKS: Final = ("processors", "pcie", "ethernet", "infiniband", "gpu_clocks", "gpu_count")
"""Frequency, speed and status of links: checks of `ff health`."""
VALIDATION: Final = "validation"
"""Check of what no validator has found, but the comparison of the node with its peers."""
_MAX_MEMORY_SHARE: Final = 0.5
_NODE_OF_SLURM: Final = "SLURMD_NODENAME"
_MAX_FAULTS: Final = 16
"""Of one validator that are told."""


class Load(NamedTuple):
    limit_s: float
    """Of each validator."""
    directory: str
    """On the storage that is tested."""
    torch: Any
    """None where there is no GPU."""


def _with_gpu(run: Callable[[Any, float], Found], name: str) -> Callable[[Load], Found]:
    def validator(load: Load) -> Found:
        if load.torch is None:
            return Found(validator=name, could_not_run=cuda.WHY_NOT)
        return run(load.torch, load.limit_s)

    return validator


def _memory(load: Load) -> Found:
    available = read_meminfo().get("MemAvailable", 0) << 10
    return processor.memory_patterns(load.limit_s, int(available * _MAX_MEMORY_SHARE))


VALIDATORS: Final[dict[str, Callable[[Load], Found]]] = {
    "cpu_stress": lambda load: processor.multiply(load.limit_s),
    "memory_bandwidth": lambda load: processor.memory_bandwidth(load.limit_s),
    "memory": _memory,
    "paths": lambda load: paths.host_paths(load.limit_s),
    "allreduce": lambda load: processor.allreduce_in_memory(load.limit_s),
    "storage": lambda load: storage.stress_storage(load.directory, load.limit_s),
    "repeated": lambda load: processor.repeat_computation(load.limit_s),
    "gpu_memory": _with_gpu(cuda.gpu_memory, "gpu_memory"),
    "gpu_gemm": _with_gpu(cuda.gpu_multiply, "gpu_gemm"),
    "gpu_paths": _with_gpu(cuda_paths.gpu_paths, "gpu_paths"),
    "gpu_allreduce": _with_gpu(cuda.gpu_allreduce, "gpu_allreduce"),
}


def validate(names: Iterable[str], load: Load) -> Iterator[Found]:
    """A validator that fails by itself could not run: the others go on."""
    for name in names:
        try:
            yield VALIDATORS[name](load)
        except (MemoryError, OSError, RuntimeError) as error:  # torch raises RuntimeError for all that CUDA says
            yield Found(validator=name, could_not_run=f"{type(error).__name__}: {' '.join(str(error).split())[:200]}")


def links(policy: HealthPolicy) -> list[HealthEvent]:
    """Frequency, speed and status of links."""
    return HealthRounds(None).run(policy, LINK_CHECKS)


def gpu_serials(*, tool_path: str | None = None) -> dict[str, str]:
    """Serial numbers by UUID, as the driver knows them."""
    sources = sources_of(chosen_checks(HealthPolicy(), ["gpu_count"]), HealthPolicy())
    return part_serials(capture(sources, time.time_ns(), tool_path=tool_path))


def events_of(
    found: Sequence[Found], record: NodeRecord, records: Sequence[NodeRecord], now_ns: int,
    serials: Mapping[str, str] = {},
) -> list[HealthEvent]:  # fmt: skip
    """An event for each fault, by itself or beside the peers, one of a node that lacks GPUs of its peers; else one for
    each validator. `serials`: of GPUs, by UUID: the checks know them by their serial numbers."""
    usual = usual_model(record, records)
    record = as_its_peers(record, usual)
    peers = peers_of(record, records)
    settings = CheckSettings()
    events = [as_event(VALIDATION, one, settings, now_ns) for one in lacking_gpus(usual)]
    for one in found:
        own = NodeRecord(
            node=record.node, model=record.model, seen_ns=record.seen_ns, figures=one.figures, digests=one.digests
        )
        low = compare_figures(own, peers, figures=len(record.figures), measured=one.measured)
        faults = _first_of([*one.faults, *compare_digests(own, peers), *low])
        told = (as_event(one.validator, fault, settings, now_ns) for fault in faults)
        events += [with_serial(event, serials) if event.serial else event for event in told]
        if not faults:
            events.append(
                HealthEvent(
                    check=one.validator, severity="ok", words=(one.could_not_run or one.words)[:400], seen_ns=now_ns,
                    could_not_run=bool(one.could_not_run),
                )
            )  # fmt: skip
    return events


def _first_of(faults: list[Finding]) -> list[Finding]:
    """Of a slow node each of hundreds of paths is slow: who reads the events takes a few hundred lines at most."""
    more = len(faults) - _MAX_FAULTS
    if more <= 0:
        return faults
    last = msgspec.structs.replace(faults[_MAX_FAULTS - 1], words=f"{faults[_MAX_FAULTS - 1].words}; and {more} more")
    return [*faults[: _MAX_FAULTS - 1], last]


def repeat_low(
    found: Sequence[Found], record: NodeRecord, records: Sequence[NodeRecord],
    measure: Callable[[Iterable[str]], Iterable[Found]],
) -> list[Found]:  # fmt: skip
    """With figures that are low beside the peers measured again (`core.validation.repetition`); faults that come up
    meanwhile count as well. `measure`: runs the validators of these names."""
    record = as_its_peers(record, usual_model(record, records))
    usual = usual_figures(record, peers_of(record, records))
    low = LowFigures(record.figures, {name: one.least for name, one in usual.items()})
    faults: dict[str, tuple[Finding, ...]] = {}
    for _ in range(MEASUREMENTS - 1):
        names = [one.validator for one in found if set(one.figures).intersection(low.undecided)]
        for again in measure(names) if names else ():
            low.add(again.figures)
            faults[again.validator] = (*faults.get(again.validator, ()), *again.faults)
    measured, counted = low.measured, low.counted
    return [
        msgspec.structs.replace(
            one,
            figures={name: counted.get(name, value) for name, value in one.figures.items()},
            measured={name: measured[name] for name in one.figures if name in measured},
            faults=(*one.faults, *faults.get(one.validator, ())),
        )
        for one in found
    ]


def record_of(found: Sequence[Found], model: str, now_ns: int) -> NodeRecord:
    """Of this node, by the name that Slurm has for it where its environment says one, as records of its jobs are."""
    figures = {name: value for one in found for name, value in one.figures.items()}
    digests = {name: value for one in found for name, value in one.digests.items()}
    repeated = {name: values for one in found for name, values in one.measured.items()}
    name = os.environ.get(_NODE_OF_SLURM) or socket.gethostname()
    return NodeRecord(
        node=name[:128], model=model, seen_ns=now_ns, figures=figures, digests=digests,
        repeated=repeated,
    )  # fmt: skip


def model_of_node() -> str:
    """Of the machine, its processors and its GPUs, as the firmware and the kernel name them."""
    product = _line("/sys/class/dmi/id/product_name")
    model = next(
        (
            line.partition(":")[2].strip()
            for line in _text("/proc/cpuinfo").splitlines()
            if line.startswith("model name")
        ),
        "",
    )
    gpus = sorted(
        _line(f"/proc/driver/nvidia/gpus/{name}/information") for name in _entries("/proc/driver/nvidia/gpus")
    )
    names = [name for gpu in gpus if (name := gpu.partition(":")[2].strip())]
    told = [f"{len(gpus)} x {names[0]}"] if names else []  # a driver may say nothing of a GPU that it has lost
    return " / ".join(part for part in (product, f"{os.cpu_count()} x {model}", *told) if part)[:200]


def _line(path: str) -> str:
    return (_text(path).splitlines() or [""])[0].strip()


def _text(path: str) -> str:
    try:
        with open(path, "rb") as file:
            return file.read(1 << 16).decode(errors="replace")
    except OSError:
        return ""


def _entries(directory: str) -> list[str]:
    try:
        return sorted(os.listdir(directory))[:64]
    except OSError:
        return []
