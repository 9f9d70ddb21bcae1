"""Numbers under which operations, ways to reduce, element types and failures cross into native code.

The tables are native: `OpKind`, `ReduceOp`, `DType` and `FailureKind` below cpp/include/fireflyer/collectives. Nothing
here repeats an order of theirs; what Python must name itself is held to them by tests/unit/collectives/groups.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Final

from fireflyer.native import DTYPES, OP_KINDS, REDUCE_OPS

__all__ = ["DTYPE_CODES", "KIND_CODES", "OP_CODES", "FailureKind"]

KIND_CODES: Final = {name: code for code, name in enumerate(OP_KINDS)}
OP_CODES: Final = {name: code for code, name in enumerate(REDUCE_OPS)}
DTYPE_CODES: Final = {name: code for code, (name, _) in enumerate(DTYPES)}


class FailureKind(IntEnum):
    """How an operation failed."""

    NONE = 0
    PEER_FAILED = 1
    USAGE = 2
    ABORTED = 3
    DATA_CORRUPTION = 4
    MISMATCH = 5
    """Of one message, whose calls do not fit: the group goes on."""
