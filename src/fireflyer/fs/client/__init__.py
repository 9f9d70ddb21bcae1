"""Clients of the chunk store: `connect` for asyncio, `open_ring` for threads that prepare, submit and wait.

To a cluster on this machine, as `ff fs up` makes it: `connect_to` and `open_ring_to`, with its directory. Forked
children do not use what their parent opened: `PerProcess`.
"""

from fireflyer.fs.client.chunks import Chunks, Options, Read, Write, connect
from fireflyer.fs.client.fork_safety import PerProcess
from fireflyer.fs.client.local import connect_to, open_ring_to
from fireflyer.fs.client.replica_selector import READ
from fireflyer.fs.client.ring import MISSING, Completed, Ring, open_ring
from fireflyer.fs.core.requests.effects import Limits
from fireflyer.fs.schema.ids import ChunkId

__all__ = [
    "MISSING",
    "READ",
    "ChunkId",
    "Chunks",
    "Completed",
    "Limits",
    "Options",
    "PerProcess",
    "Read",
    "Ring",
    "Write",
    "connect",
    "connect_to",
]
__all__ += ["open_ring", "open_ring_to"]
