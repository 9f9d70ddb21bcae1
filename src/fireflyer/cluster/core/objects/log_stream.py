"""One log of a run as its store has it: what it does with a chunk that a node sends. Pure.

A log is bytes with offsets, from 0. The node sends chunks, each with its offset, and the answer always says what the
store has (`end`), so a chunk that comes twice, late, or after one that was lost, changes nothing:

    offset <= end < offset + length     the part that is new is appended
    offset + length <= end              a repetition: nothing
    offset > end                        a gap: nothing; the node goes back to `end`
    offset > end, and the node says     the lost bytes are recorded as a gap, and the chunk is appended
    that the bytes between are lost

`end` may go back when the store is started again, since only sealed segments are durable: the node keeps what is not
(`durable`), and goes back. A log that is *cut* takes no more: the run's quota is used up, or there are too many gaps.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from fireflyer.cluster.schema.logs import LogChunk

__all__ = ["MAX_GAPS", "Append", "Gap", "StreamState", "accept", "ends"]

MAX_GAPS: Final = 1000


class Gap(NamedTuple):
    begin: int
    end: int


class StreamState(NamedTuple):
    end: int = 0
    gaps: tuple[Gap, ...] = ()
    cut: bool = False
    closed: bool = False


class Append(NamedTuple):
    """Bytes `begin` to `end` of the chunk's data go to the end of the log, behind `gap`; `state` is what it is then."""

    state: StreamState
    begin: int = 0
    end: int = 0
    gap: Gap | None = None


def accept(state: StreamState, chunk: LogChunk, room_bytes: int) -> Append:
    """`room_bytes`: what the run's quota has left."""
    length = len(chunk.data)
    if state.cut or state.closed or (length == 0 and chunk.lost_bytes == 0):
        return Append(state)
    gap = None
    begin = max(0, state.end - chunk.offset)
    if chunk.offset > state.end:
        if chunk.offset - chunk.lost_bytes > state.end:
            return Append(state)
        if len(state.gaps) >= MAX_GAPS:
            return Append(state._replace(cut=True))
        gap = Gap(state.end, chunk.offset)
        state = state._replace(end=chunk.offset, gaps=(*state.gaps, gap))
    if begin >= length:
        return Append(state, gap=gap)
    end = min(length, begin + room_bytes)
    return Append(state._replace(end=state.end + end - begin, cut=end < length), begin, end, gap)


def ends(state: StreamState, end: int) -> StreamState:
    """The node says that nothing comes after `end`. A log that does not have all of it stays open."""
    return state._replace(closed=True) if state.cut or end <= state.end else state
