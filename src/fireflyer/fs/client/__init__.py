"""Clients of the chunk store: `connect` for asyncio, `open_ring` for threads that prepare, submit and wait."""

from fireflyer.fs.client.chunks import Chunks, Options, Read, Write, connect
from fireflyer.fs.client.ring import MISSING, Completed, Ring, open_ring
from fireflyer.fs.client.spread import READ

__all__ = ["MISSING", "READ", "Chunks", "Completed", "Options", "Read", "Ring", "Write", "connect", "open_ring"]
