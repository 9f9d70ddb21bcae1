"""Which agents and managers go together: those whose revisions are one apart at most. Pure.

Managers are upgraded first, then agents, one after the other and while runs go on; so a manager meets agents of the
release before, and for a moment an old manager may meet an agent that is newer. New fields have defaults and unknown
ones are ignored, so one release apart is understood. Farther apart one of the two would be silent about what the other
counts on, so both sides refuse, and say which is to be upgraded.
"""

from __future__ import annotations

from typing import Final

from fireflyer.base.errors import PermissionDenied
from fireflyer.cluster.schema.sync import REVISION, Orders, Sync

__all__ = ["APART", "check_agent", "check_manager"]

APART: Final = 1


def check_agent(node: str, said: Sync, release: str) -> None:
    """By a manager of `release`. Raises `PermissionDenied`."""
    if abs(said.revision - REVISION) > APART:
        agent = f"the agent of {node} is of release {said.inventory.version[:40]} (revision {said.revision})"
        older = "the agent of this machine" if said.revision < REVISION else "the managers"
        raise PermissionDenied(f"{agent}, this manager of {release} (revision {REVISION}); {_advice(older)}")


def check_manager(orders: Orders, release: str) -> None:
    """By an agent of `release`. Raises `PermissionDenied`."""
    if abs(orders.revision - REVISION) > APART:
        manager = f"the manager is of release {orders.release[:40] or 'unknown'} (revision {orders.revision})"
        older = "the managers" if orders.revision < REVISION else "the agent of this machine"
        raise PermissionDenied(f"{manager}, this agent of {release} (revision {REVISION}); {_advice(older)}")


def _advice(older: str) -> str:
    return f"they may be {APART} apart: upgrade {older}, one release after the other"
