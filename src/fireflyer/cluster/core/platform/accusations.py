"""What the runs that are remembered say of a node: how many accuse it, of whom, since when."""

from __future__ import annotations

from typing import Final

from fireflyer.cluster.core.platform.store.ledger import Ledger
from fireflyer.cluster.core.platform.store.rows import RunRow
from fireflyer.cluster.core.platform.views import Accusation, Accused

__all__ = ["MAX_SHOWN", "accusations_of", "accused_of"]

MAX_SHOWN: Final = 32
"""Runs, the newest."""


def accused_of(ledger: Ledger, node: str) -> Accused | None:
    """None: nothing accuses it since it was resumed."""
    runs = _accusing(ledger, node)
    if not runs:
        return None
    ended_ns = [run.ended_ns or 0 for run in runs]
    return Accused(
        runs=len(runs),
        tasks=len({run.task for run in runs}),
        users=len({_user(ledger, run) for run in runs}),
        since_ns=min(ended_ns),
        last_ns=max(ended_ns),
    )


def accusations_of(ledger: Ledger, node: str) -> tuple[Accusation, ...]:
    """The newest first."""
    runs = sorted(_accusing(ledger, node), key=lambda run: (-(run.ended_ns or 0), -run.task, -run.number))
    return tuple(
        Accusation(
            task=run.task,
            run=run.number,
            user=_user(ledger, run),
            at_ns=run.ended_ns or 0,
            reason=run.ended.reason if run.ended is not None and run.ended.reason else run.wish_reason,
        )
        for run in runs[:MAX_SHOWN]
    )


def _accusing(ledger: Ledger, node: str) -> list[RunRow]:
    """Of what is committed: the index has the draft, too."""
    row = ledger.nodes.committed.get(node)
    since_ns = row.resumed_ns if row is not None else 0
    found = map(ledger.runs.committed.get, ledger.index.accusing.get(node, ()))
    return [run for run in found if run is not None and run.ended_ns is not None and run.ended_ns > since_ns]


def _user(ledger: Ledger, run: RunRow) -> str:
    task = ledger.tasks.committed.get(run.task)
    return task.user if task is not None else ""
