"""Transactions over an ordered map of bytes to bytes: in memory, in a directory (LMDB), in PostgreSQL.

`open` opens one by its URL; `Engine` says what they all can do; `transact_once` commits exactly once for a marker key.
"""

from __future__ import annotations

from fireflyer.kvstore.api import DEFAULT_TIMEOUT_NS, Engine, Reader, Transaction
from fireflyer.kvstore.core.keys import (
    MAX_KEY_BYTES,
    MAX_PAGE_BYTES,
    MAX_PAGE_ITEMS,
    MAX_TRANSACTION_BYTES,
    MAX_VALUE_BYTES,
    KeyRange,
    Page,
    key_after,
    prefix_range,
)
from fireflyer.kvstore.core.store import Attempted, MemoryStore
from fireflyer.kvstore.core.timing import SteppedTiming, Timing, steps
from fireflyer.kvstore.engine import transact_once
from fireflyer.kvstore.errors import CommitUnknown, Conflict, Disconnected, TransactionTimeout
from fireflyer.kvstore.memory import CommitFault, MemoryEngine
from fireflyer.kvstore.opening import open  # noqa: A004
from fireflyer.kvstore.savepoints import Savepoint, TransactionBatch
from fireflyer.kvstore.timing import LoopTiming

__all__ = [
    "DEFAULT_TIMEOUT_NS",
    "MAX_KEY_BYTES",
    "MAX_PAGE_BYTES",
    "MAX_PAGE_ITEMS",
    "MAX_TRANSACTION_BYTES",
    "MAX_VALUE_BYTES",
    "Attempted",
    "CommitFault",
    "CommitUnknown",
    "Conflict",
    "Disconnected",
    "Engine",
    "KeyRange",
    "LoopTiming",
    "MemoryEngine",
    "MemoryStore",
    "Page",
    "Reader",
    "Savepoint",
    "SteppedTiming",
    "Timing",
    "Transaction",
    "TransactionBatch",
    "TransactionTimeout",
    "key_after",
    "open",
    "prefix_range",
    "steps",
    "transact_once",
]
