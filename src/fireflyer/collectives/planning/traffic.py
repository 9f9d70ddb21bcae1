"""An operation as transfers between nodes, for network simulators: programs walked chunk by chunk. Pure.

Each send of a program is a transfer of the bytes of its blocks. It is after what the program says, after the frame
before it in its lane between the two nodes, and, where it is the first that a node does with a chunk, after all that
the node does with the chunk `depth` places before, whose slot it takes. Slots of receivers, sums, and copies on a node
take no time here. `Transfer.connection` is the lane: its frames between two nodes take one way through a fabric.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from typing import Final, NamedTuple

from fireflyer.base.errors import UsageError
from fireflyer.collectives.planning.plan import PARTED, Plan, chunk_lane
from fireflyer.collectives.planning.programs import LANES, RECEIVES, SENDS, Action, Program, Step, build, stride_of
from fireflyer.topology.traffic import Transfer

__all__ = ["traffic"]

BLOCK_ALIGN: Final = 64
"""Elements: blocks are whole multiples."""
MAX_TRANSFERS: Final = 1 << 24


class _Chunk(NamedTuple):
    place: int
    """In its lane."""
    elements: int
    """Of each part."""


class _Sent(NamedTuple):
    """Names a transfer by both of its ends."""

    source: int
    target: int
    round: int
    block: int
    is_sum: bool


def traffic(
    plan: Plan, kind: str, elements: int, *, element_bytes: int = 4, sum_bytes: int = 4, root: int | None = None
) -> list[Transfer]:
    """Transfers of one operation on an array of so many elements, of each part for a reduce_scatter or allgather.
    `element_bytes`: of the array, and of results; `sum_bytes`: of partial sums, wider for small floats; `root`: the
    root's node. Transfers between two nodes are in the order in which they are sent. Raises `UsageError` where the plan
    has no such operation, or there would be more than 2^24 transfers."""
    parts = plan.world_size if kind in PARTED else 1
    route = plan.route(kind, elements * parts * element_bytes)
    chunk_elements = max(1, route.chunk_bytes // sum_bytes // parts)
    chunks = -(-elements // chunk_elements)
    found: list[Transfer] = []
    numbers = count()
    for lane in LANES:
        programs = build(plan, kind, route.algorithm, lane, root)
        frames = chunks * sum(step.action in SENDS for program in programs for step in program.steps)
        if frames > MAX_TRANSFERS:
            raise UsageError(f"{frames} transfers of {kind}; at most {MAX_TRANSFERS}: use larger chunks")
        mine = [
            _Chunk(place, min(chunk_elements, elements - chunk * chunk_elements))
            for place, chunk in enumerate(chunk for chunk in range(chunks) if chunk_lane(chunk) == lane)
        ]
        found += _Lane(plan, kind, lane, programs, element_bytes, sum_bytes).transfers(mine, numbers)
    return found


class _Lane:
    def __init__(
        self, plan: Plan, kind: str, lane: int, programs: tuple[Program, ...], element_bytes: int, sum_bytes: int
    ) -> None:
        self._plan, self._kind, self._lane, self._programs = plan, kind, lane, programs
        self._element_bytes, self._sum_bytes = element_bytes, sum_bytes
        self._depth = plan.window // len(LANES)
        ranks = [len(plan.ranks_of(node)) for node in range(plan.nodes)]
        self._first_rank = [sum(ranks[:node]) for node in range(plan.nodes + 1)]

    def transfers(self, chunks: list[_Chunk], numbers: Iterator[int]) -> list[Transfer]:
        """In the order of keys, in which whatever a transfer is after comes before it."""
        stride = stride_of(self._programs[0].rounds, self._depth)
        order = sorted(
            (chunk.place * stride + step.round, chunk.place, node, index)
            for chunk in chunks
            for node, program in enumerate(self._programs)
            for index, step in enumerate(program.steps)
            if step.action in SENDS
        )
        known: dict[tuple[int, _Sent], int] = {}
        last: dict[tuple[int, int], int] = {}
        of_node: dict[tuple[int, int], list[int]] = {}
        found = []
        for _, place, node, index in order:
            step = self._programs[node].steps[index]
            after = [known[place, sent] for sent in self._before(node, index)]
            if not step.after:
                after += of_node.get((place - self._depth, node), ())
            if (node, step.peer) in last:
                after.append(last[node, step.peer])
            number = next(numbers)
            known[place, _named(node, step)] = last[node, step.peer] = number
            for end in (node, step.peer):
                of_node.setdefault((place, end), []).append(number)
            found.append(
                Transfer(
                    id=number,
                    source=node,
                    target=step.peer,
                    nbytes=self._bytes(step, chunks[place]),
                    after=tuple(dict.fromkeys(after)),
                    connection=self._lane,
                )
            )
        return found

    def _before(self, node: int, index: int) -> Iterator[_Sent]:
        """Transfers that a step needs, over steps that are none."""
        steps = self._programs[node].steps
        for before in steps[index].after:
            step = steps[before]
            if step.action in SENDS:
                yield _named(node, step)
                continue
            if step.action in RECEIVES:
                sums = step.action is Action.RECEIVE_ADD
                yield _Sent(step.peer, node, step.round, step.block, sums)
            yield from self._before(node, before)

    def _bytes(self, step: Step, chunk: _Chunk) -> int:
        size = self._sum_bytes if step.action is Action.SEND_ACC else self._element_bytes
        blocks = self._programs[0].blocks
        if self._kind in PARTED:
            ranks = self._first_rank[step.block + step.span] - self._first_rank[step.block]
            return ranks * chunk.elements * size
        if blocks == 1:
            return chunk.elements * size
        shared = (chunk.elements + blocks - 1) // blocks
        each = (shared + BLOCK_ALIGN - 1) // BLOCK_ALIGN * BLOCK_ALIGN
        first = min(chunk.elements, step.block * each)
        return (min(chunk.elements, (step.block + step.span) * each) - first) * size


def _named(node: int, step: Step) -> _Sent:
    return _Sent(node, step.peer, step.round, step.block, step.action is Action.SEND_ACC)
