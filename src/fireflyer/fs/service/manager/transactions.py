"""Carries out the manager's transactions on a key-value engine, and says how they went."""

from __future__ import annotations

from fireflyer.base.errors import PermanentError, TransientError
from fireflyer.fs.core.manager.transact import (
    Committed,
    Failed,
    Outcome,
    OutcomeUnknown,
    PreconditionFailed,
    Transact,
    carry_out,
)
from fireflyer.kvstore import CommitUnknown, Engine, Transaction

__all__ = ["transact_on"]


async def transact_on(engine: Engine, order: Transact, *, timeout_ns: int) -> Outcome:
    """One outcome, whatever the store does. A commit of which nobody knows is not repeated here: the machine does it,
    with the conditions that make it safe. Raises `DataCorruption`, `UsageError` (over a limit of the store) and
    `InvariantViolation`, upon which the process must end."""

    async def body(rows: Transaction) -> Committed | PreconditionFailed:
        rows.frees_space()  # few rows, and without the manager nobody can clear anything
        return await carry_out(order, rows)

    try:
        return await engine.transact(body, timeout_ns=timeout_ns)
    except CommitUnknown as error:
        return OutcomeUnknown(order.number, error.message)
    except (TransientError, PermanentError) as error:
        return Failed(order.number, error.message)
