"""`ff health --prometheus`: a round of checks as figures, for the textfile collector of node_exporter."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Sequence
from typing import Final

import click

from fireflyer.base.health_event import SEVERITIES, HealthEvent
from fireflyer.base.os_errors import translate_os_error
from fireflyer.base.units import SECOND
from fireflyer.runtime.metrics import Series, exposition
from fireflyer.validators.core.checks.evidence import Evidence
from fireflyer.validators.core.checks.gpu_figures import FIGURES, gpu_figures

__all__ = ["SLURM_STATES", "figures_of", "slurm_figures", "write_figures"]

_XID: Final = re.compile(r"xid_([0-9]{1,3})")
XID_ERRORS: Final = "DCGM_FI_DEV_XID_ERRORS"


SLURM_STATES: Final = ("serves", "drained", "held", "unknown")
"""Of a node, as the last round of `ff health slurm` has left it: whatever drained it, by the breaker, Slurm did not
answer."""


def write_figures(
    path: str, events: Sequence[HealthEvent], evidence: Evidence | None, more: Sequence[Series] = ()
) -> None:
    """Replaces the file as a whole, as node_exporter may read it at any time; `-`: the terminal. Raises
    `FireflyerError`."""
    text = exposition([*figures_of(events, evidence), *more])
    if path == "-":
        click.echo(text, nl=False)
        return
    new = f"{path}.new"
    try:
        with open(new, "wb") as file:
            file.write(text)
        os.chmod(new, 0o644)
        os.replace(new, path)
    except OSError as error:
        raise translate_os_error(error, f"write {path}") from error


def figures_of(events: Sequence[HealthEvent], evidence: Evidence | None) -> list[Series]:
    checks = list(dict.fromkeys(event.check for event in events))
    found = Counter((event.check, event.severity) for event in events if not event.could_not_run)
    happened = Counter((event.check, event.severity) for event in events if event.once)
    failed = {event.check for event in events if event.could_not_run}
    missed = {event.check for event in events if event.could_not_run and event.severity != "ok"}
    return [
        Series.one("fireflyer_health_round_timestamp_seconds", "gauge", "When the last round was, in Unix time",
                   max((event.seen_ns for event in events), default=0) / SECOND),
        Series("fireflyer_health_findings", "gauge", "Findings of each check in the last round", [
            ({"check": check, "severity": severity}, found[check, severity])
            for check in checks for severity in SEVERITIES[1:]
        ]),
        Series("fireflyer_health_events", "gauge", "Of these, what has happened and is found by one round only", [
            ({"check": check, "severity": severity}, happened[check, severity])
            for check in checks for severity in SEVERITIES[1:]
        ]),
        Series("fireflyer_health_required_check_failed", "gauge", "1 if a required check could not run, else 0",
               [({"check": check}, check in missed) for check in checks]),
        Series("fireflyer_health_check_failed", "gauge", "1 if the check could not run, else 0",
               [({"check": check}, check in failed) for check in checks]),
        *_of_gpus(events, evidence),
    ]  # fmt: skip


def slurm_figures(state: str) -> Series:
    return Series("fireflyer_health_slurm_node", "gauge", "1 for how the last round has left this node in Slurm",
                  [({"state": one}, one == state) for one in SLURM_STATES])  # fmt: skip


def _of_gpus(events: Sequence[HealthEvent], evidence: Evidence | None) -> list[Series]:
    """Under the names and labels of dcgm-exporter, as far as the round has read them."""
    gpus = gpu_figures(evidence) if evidence is not None else ()
    labels = {
        gpu.address: {
            "gpu": str(gpu.number),
            "UUID": gpu.uuid,
            "pci_bus_id": gpu.address,
            "device": f"nvidia{gpu.number}",
        }
        for gpu in gpus
    }
    series = []
    for name, (text, _) in FIGURES.items():
        values = [(labels[gpu.address], gpu.values[name]) for gpu in gpus if name in gpu.values]
        if values:
            series.append(Series(name, "gauge", text, values))
    xids = _newest_xids(events)
    values = [(labels.get(address, {"pci_bus_id": address}), xids.get(address, 0)) for address in {**labels, **xids}]
    if values:
        series.append(
            Series(XID_ERRORS, "gauge", "The newest Xid that the kernel has logged since the round before", values)
        )
    return series


def _newest_xids(events: Sequence[HealthEvent]) -> dict[str, int]:
    """By address of the GPU."""
    xids = {}
    for event in sorted(events, key=lambda event: event.seen_ns):
        match = _XID.fullmatch(event.cause)
        if match is not None and event.part.startswith("gpu:"):
            xids[event.part.removeprefix("gpu:")] = int(match[1])
    return xids
