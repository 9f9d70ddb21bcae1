"""How an operation on memory of a device is cut into pieces that fit into slots of host memory. Pure.

A *piece* is copied to the host into a slot, goes through the same operation of the communicator in host memory, and is
copied up again. Which bytes go where is all that is decided here:

    allreduce, reduce, broadcast   slot: |  c elements  |                        in place
    reduce_scatter                 slot: | c of part 0 | c of part 1 | ... |  c of the result |
    allgather                      slot: | own c | c of rank 0 | c of rank 1 | ... |

Every rank must cut alike, so nothing but the operation, its size and the size of slots may decide. An operation without
elements is one piece without moves: the other ranks wait for this one all the same.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from fireflyer.base.errors import InvariantViolation, UsageError
from fireflyer.base.units import MIB

__all__ = ["AT_ONCE_BYTES", "PIECES_WANTED", "SMALLEST_PIECE_BYTES", "Move", "Piece", "cut", "span_bytes"]

PIECES_WANTED: Final = 8
"""An operation that fits into one slot is cut nevertheless, so that copies run beside sums."""
SMALLEST_PIECE_BYTES: Final = 2 * MIB
"""What is shorter is not worth the three hand-overs between threads that a piece costs: some 0.5 ms on an H200."""
AT_ONCE_BYTES: Final = 4 * MIB
"""Operations for which the caller waits, and of which all pieces fit into so much, need no other thread."""
_ALIGN_ELEMENTS: Final = 64

IN_PLACE: Final = ("allreduce", "reduce", "broadcast")


class Move(NamedTuple):
    """Bytes [`device`, `device` + `size`) of the array on the device, [`slot`, ...) of the slot."""

    device: int
    slot: int
    size: int


class Piece(NamedTuple):
    device_to_host: tuple[Move, ...]
    """From the input to the slot."""
    host_to_device: tuple[Move, ...]
    """From the slot to the output."""
    source: tuple[int, int]
    """First byte in the slot and number of bytes of what the communicator reads."""
    target: tuple[int, int]
    """... and writes; the same for operations in place."""


def span_bytes(piece: Piece) -> int:
    """How much of a slot it uses."""
    return max(sum(piece.source), sum(piece.target))


def cut(
    kind: str,
    elements: int,
    item_bytes: int,
    world_size: int,
    slot_bytes: int,
    *,
    reads: bool = True,
    writes: bool = True,
) -> list[Piece]:
    """Pieces of an operation on `elements` elements: of the array for those in place, of the result for a
    reduce_scatter, of the input for an allgather. `reads`: this rank has an input; `writes`: it has a result.

    Raises `UsageError` where not even one element fits into a slot.
    """
    width = 1 if kind in IN_PLACE else world_size + 1
    largest = slot_bytes // (width * item_bytes)
    if largest < 1:
        raise UsageError(
            f"a slot of {slot_bytes} bytes is too small for {kind} of {world_size} ranks; pass slot_bytes="
        )
    count = _elements_of_a_piece(elements, item_bytes * width, largest)
    starts = range(0, elements, count) if elements else (0,)
    return [
        _piece(kind, start, min(count, elements - start), elements, item_bytes, world_size, reads, writes)
        for start in starts
    ]


def _elements_of_a_piece(elements: int, bytes_each: int, largest: int) -> int:
    wanted = max(-(-elements // PIECES_WANTED), SMALLEST_PIECE_BYTES // bytes_each, 1)
    wanted = -(-wanted // _ALIGN_ELEMENTS) * _ALIGN_ELEMENTS
    aligned = largest // _ALIGN_ELEMENTS * _ALIGN_ELEMENTS
    return min(wanted, aligned or largest)


def _piece(
    kind: str, start: int, count: int, elements: int, item: int, world_size: int, reads: bool, writes: bool
) -> Piece:
    at, size, whole = start * item, count * item, elements * item
    own: tuple[Move, ...] = (Move(at, 0, size),)
    if kind in IN_PLACE:
        to_host, to_device, source, target = own, own, (0, size), (0, size)
    elif kind == "reduce_scatter":
        to_host = tuple(Move(rank * whole + at, rank * size, size) for rank in range(world_size))
        to_device, source, target = (
            (Move(at, world_size * size, size),),
            (0, world_size * size),
            (world_size * size, size),
        )
    elif kind == "allgather":
        to_device = tuple(Move(rank * whole + at, (rank + 1) * size, size) for rank in range(world_size))
        to_host, source, target = own, (0, size), (size, world_size * size)
    else:
        raise InvariantViolation(f"{kind} is not cut into pieces")
    if not count:
        to_host = to_device = ()
    return Piece(to_host if reads else (), to_device if writes else (), source, target)
