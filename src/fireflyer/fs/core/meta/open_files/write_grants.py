"""Which files users with tokens may still write to, whatever they have said.

A capability to write is good for some minutes, whatever becomes of the file meanwhile: it is closed, with an end that
is told too low, or unlinked and collected. So each opening and each closing of such a user notes the file, with its
layout, under the minute from which no capability given until then counts any more; `write_survey` looks at it then.

    FP + minute (8) + id (8)        a user may change its chunks until then: `Layout`

There is one row of a file for each minute. Trusted mounts say what they do, and need none.
"""

from __future__ import annotations

from typing import Final

from fireflyer.base.units import SECOND
from fireflyer.fs.core.capability import LIFETIME_S, MAX_SKEW_S
from fireflyer.fs.core.meta.context import Context
from fireflyer.fs.core.meta.tables import Coder, number_key, pair_key
from fireflyer.fs.schema.inodes import InodeId, Layout

__all__ = ["COUNTS_NS", "GRANTS", "GRANT_ROWS", "MINUTE_NS", "due_end", "put_grant", "put_off"]

GRANTS: Final = b"FP"
GRANT_ROWS: Final = Coder(Layout)
COUNTS_NS: Final = (LIFETIME_S + 2 * MAX_SKEW_S) * SECOND
"""A capability, by the clock of whoever surveys: storage nodes and the service that gave it may be wrong by so much."""
MINUTE_NS: Final = 60 * SECOND


def put_grant(context: Context, inode_id: InodeId, layout: Layout) -> None:
    """Who asks may have a capability to write, or has had one until now."""
    put_off(context, inode_id, GRANT_ROWS.encode(layout), COUNTS_NS)


def put_off(context: Context, inode_id: InodeId, value: bytes, delay_ns: int) -> None:
    minute = -(-max(0, context.now_ns + delay_ns) // MINUTE_NS)
    context.rows.set(pair_key(GRANTS, minute, inode_id), value)


def due_end(context: Context) -> bytes:
    """Behind the rows whose time has come."""
    return number_key(GRANTS, max(0, context.now_ns) // MINUTE_NS + 1)
