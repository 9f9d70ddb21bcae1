"""Transactions over an ordered map of bytes to bytes: in memory, in a directory (LMDB), in PostgreSQL.

`open` opens one by its URL; `Engine` says what they all can do; `transact_once` commits exactly once for a marker key.

Names are imported when they are first used: a process that only reads rows pays for no engine and no asyncio.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
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

_HOME = {
    "Attempted": "fireflyer.kvstore.core.store",
    "CommitFault": "fireflyer.kvstore.memory",
    "CommitUnknown": "fireflyer.kvstore.errors",
    "Conflict": "fireflyer.kvstore.errors",
    "DEFAULT_TIMEOUT_NS": "fireflyer.kvstore.api",
    "Disconnected": "fireflyer.kvstore.errors",
    "Engine": "fireflyer.kvstore.api",
    "KeyRange": "fireflyer.kvstore.core.keys",
    "LoopTiming": "fireflyer.kvstore.timing",
    "MAX_KEY_BYTES": "fireflyer.kvstore.core.keys",
    "MAX_PAGE_BYTES": "fireflyer.kvstore.core.keys",
    "MAX_PAGE_ITEMS": "fireflyer.kvstore.core.keys",
    "MAX_TRANSACTION_BYTES": "fireflyer.kvstore.core.keys",
    "MAX_VALUE_BYTES": "fireflyer.kvstore.core.keys",
    "MemoryEngine": "fireflyer.kvstore.memory",
    "MemoryStore": "fireflyer.kvstore.core.store",
    "Page": "fireflyer.kvstore.core.keys",
    "Reader": "fireflyer.kvstore.api",
    "Savepoint": "fireflyer.kvstore.savepoints",
    "SteppedTiming": "fireflyer.kvstore.core.timing",
    "Timing": "fireflyer.kvstore.core.timing",
    "Transaction": "fireflyer.kvstore.api",
    "TransactionBatch": "fireflyer.kvstore.savepoints",
    "TransactionTimeout": "fireflyer.kvstore.errors",
    "key_after": "fireflyer.kvstore.core.keys",
    "open": "fireflyer.kvstore.opening",
    "prefix_range": "fireflyer.kvstore.core.keys",
    "steps": "fireflyer.kvstore.core.timing",
    "transact_once": "fireflyer.kvstore.engine",
}


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value
