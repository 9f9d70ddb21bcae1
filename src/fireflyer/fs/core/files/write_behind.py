"""Bytes that were written to one file and are not at the storage nodes yet (write-back).

    write(offset, data) ──> extents ──ready() or ready(everything=True)──> sent ──ended──> gone

A file is divided into *units* (a chunk, or a part of a large one). An extent lies in one unit; writes that continue or
overlap the last one of their unit go into it until it is sent. So small writes one after the other become one update of
a whole unit, and what comes later in a unit is later in the list: extents that overlap are sent in the order in which
they were written, and the chunk client keeps that order for each chunk.

Extents stay until they have ended, so who reads meanwhile finds in them, `over` what the storage nodes have, what was
written. When to send and how much may be kept is up to the caller: `kept_bytes` and `sent_bytes` tell.
"""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["MAX_UNIT_BYTES", "Extent", "WriteBehindBuffer", "unit_of"]

MAX_UNIT_BYTES = 4 << 20
_FEW = 16
"""A write of less than such a part of a unit gets memory of its size."""
MAX_OPEN = 64
"""Extents that wait for more of their unit; with another one, the oldest is sent."""


def unit_of(chunk_bytes: int) -> int:
    """Of files with such chunks."""
    return min(chunk_bytes, MAX_UNIT_BYTES)


@dataclass(slots=True, eq=False)
class Extent:
    """Bytes [begin, end) of the file, which are the first of `data`."""

    begin: int
    data: bytearray | memoryview
    """A view: memory that was lent, and stays as it is."""
    size: int
    sent: bool = False
    cut: int = 0
    """Of the file, when it was written."""

    @property
    def end(self) -> int:
        return self.begin + self.size


@dataclass(slots=True)
class WriteBehindBuffer:
    unit: int
    extents: dict[Extent, None] = field(default_factory=dict)
    """In the order in which they were written."""
    kept_bytes: int = 0
    """In extents that are not sent."""
    sent_bytes: int = 0
    buffers: list[bytearray] = field(default_factory=list)
    """Of a unit, to be used again: fresh memory costs as much as the copying."""
    _last: dict[int, Extent] = field(default_factory=dict)
    """Of each unit the extent that may grow: none that was sent, and none that has a later one in its unit."""
    _full: list[Extent] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.extents)

    @property
    def waiting_bytes(self) -> int:
        """Written, and not ended."""
        return self.kept_bytes + self.sent_bytes

    def write(self, offset: int, data: memoryview, cut: int = 0, *, lent: bool = False) -> None:
        """Copies `data` (bytes); whole units are taken as they are if they are `lent`: then nobody changes them."""
        at, size = 0, len(data)
        while at < size:
            unit, within = divmod(offset + at, self.unit)
            count = min(self.unit - within, size - at)
            if lent and count == self.unit:
                self._put_whole(unit, Extent(offset + at, data[at : at + count], count, cut=cut))
            else:
                self._put(unit, offset + at, data[at : at + count], cut)
            at += count
        while len(self._last) > MAX_OPEN:
            self._shut(next(iter(self._last)))

    def _put_whole(self, unit: int, extent: Extent) -> None:
        if unit in self._last:
            self._shut(unit)
        self.extents[extent] = None
        self.kept_bytes += extent.size
        self._full.append(extent)

    def _put(self, unit: int, begin: int, data: memoryview, cut: int) -> None:
        extent = self._last.get(unit)
        if extent is None or not extent.begin <= begin <= extent.end or extent.cut != cut:
            if extent is not None:
                self._shut(unit)
            extent = self._last[unit] = self._extent(begin, data, cut)
            self.extents[extent] = None
            self.kept_bytes += len(data)
        else:
            at = begin - extent.begin
            extent.data[at : at + len(data)] = data
            more = max(0, at + len(data) - extent.size)
            extent.size += more
            self.kept_bytes += more
        if extent.end == (unit + 1) * self.unit:
            self._shut(unit)

    def _extent(self, begin: int, data: memoryview, cut: int) -> Extent:
        if begin % self.unit or len(data) * _FEW < self.unit:  # it may stay small
            return Extent(begin, bytearray(data), len(data), cut=cut)
        memory = self.buffers.pop() if self.buffers else bytearray(self.unit)
        memory[: len(data)] = data
        return Extent(begin, memory, len(data), cut=cut)

    def _shut(self, unit: int) -> None:
        self._full.append(self._last.pop(unit))

    def ready(self, *, everything: bool = False) -> list[Extent]:
        """Those to be sent now, in this order; they count as sent."""
        if everything:
            for unit in list(self._last):
                self._shut(unit)
        ready, self._full = self._full, []
        for extent in ready:
            extent.sent = True
            self.kept_bytes -= extent.size
            self.sent_bytes += extent.size
        return ready

    def ended(self, extent: Extent) -> None:
        """It is at the storage nodes, or is lost."""
        if self.extents.pop(extent, self) is None:
            self.sent_bytes -= extent.size

    def drop(self) -> int:
        """Forgets what was not sent, and returns how many bytes that were."""
        dropped, self.kept_bytes = self.kept_bytes, 0
        self.extents = {one: None for one in self.extents if one.sent}
        self._last, self._full = {}, []
        return dropped

    def end(self) -> int:
        """Of the last byte that is in an extent; 0 without any."""
        return max((one.end for one in self.extents), default=0)

    def overlaps(self, offset: int, size: int) -> bool:
        return any(one.begin < offset + size and offset < one.end for one in self.extents)

    def over(self, offset: int, memory: memoryview) -> None:
        """Lays what waits over `memory`, which is bytes [offset, offset + size) of the file."""
        for at, data in self.cut_out(offset, len(memory)):
            memory[at : at + len(data)] = data

    def cut_out(self, offset: int, size: int) -> list[tuple[int, bytearray | memoryview]]:
        """Copies, or lent memory, of what waits of these bytes, in the order in which it was written: where in them,
        and what."""
        found = []
        for one in self.extents:
            begin, until = max(one.begin, offset), min(one.end, offset + size)
            if begin < until:
                found.append((begin - offset, one.data[begin - one.begin : until - one.begin]))
        return found

    def covers(self, offset: int, size: int) -> bool:
        """All of it is in extents: there is no need to ask for it."""
        at = offset
        for one in sorted(self.extents, key=lambda each: each.begin):
            if one.begin <= at < one.end:
                at = one.end
        return at >= offset + size
