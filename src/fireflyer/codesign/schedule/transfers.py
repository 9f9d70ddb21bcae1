"""A pipeline's step as transfers between nodes, for network simulators: passes and the messages between them. Pure.

A pass is a transfer of no bytes from a node to itself that lasts as long as the pass (`delay_ns`). It is after the pass
before it on its rank and after the messages that it needs. A message is after the pass that computes it, and after the
message before it from the same rank to the same rank, as on one connection. Sums of gradients over replicas and the
optimizer are not among them: `collectives.traffic` gives the former.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from typing import NamedTuple

from fireflyer.base.errors import UsageError
from fireflyer.codesign.schedule.actions import Kind, Pair, passes
from fireflyer.codesign.schedule.costs import Costs
from fireflyer.codesign.schedule.program import Program
from fireflyer.codesign.schedule.timing import durations_s
from fireflyer.topology.traffic import Transfer

__all__ = ["MessageBytes", "pipeline_transfers"]


class MessageBytes(NamedTuple):
    """Bytes of a message by boundary: between stages s and s + 1."""

    activations: tuple[int, ...]
    gradients: tuple[int, ...]


class _Output(NamedTuple):
    """What an item sends: to which item, and its bytes."""

    item: int
    nbytes: int


def pipeline_transfers(
    program: Program,
    costs: Costs,
    message_bytes: MessageBytes,
    *,
    nodes: Sequence[int] = (),
    lane: int = 0,
    first_id: int = 0,
    first_connection: int = 0,
) -> list[Transfer]:
    """Transfers of one step. The one numbered `first_id` + i is item i of the program, those after the items are
    messages; each comes after all that it waits for. `costs`: of passes; its messages and sums are not used, since the
    network gives their times. `nodes`: of each rank, by default rank r on node r; messages between ranks of one node
    take no time. Messages from rank a to rank b have the connection `first_connection` + a R + b with R ranks.

    Raises `UsageError` for sizes of another number of boundaries, or nodes of another number of ranks.
    """
    boundaries, ranks = program.schedule.placement.stages - 1, len(program.rows)
    for name, sizes in message_bytes._asdict().items():
        if len(sizes) != boundaries or min(sizes, default=0) < 0:
            raise UsageError(f"{name} has the bytes {sizes}; give one size, at least 0, for each of {boundaries}")
    places = tuple(nodes) or tuple(range(ranks))
    if len(places) != ranks:
        raise UsageError(f"{len(places)} nodes for {ranks} ranks; give the node of each rank")
    outputs = _outputs(program, message_bytes)
    durations = durations_s(program, costs)
    numbers = count(first_id + len(program.items))
    before_on_rank: dict[int, int] = {}
    before_on_way: dict[tuple[int, int], int] = {}
    arrived: list[list[int]] = [[] for _ in program.items]
    found: list[Transfer] = []
    for index, item in enumerate(program.items):
        after = [before_on_rank[item.rank]] if item.rank in before_on_rank else []
        before_on_rank[item.rank] = number = first_id + index
        node = places[item.rank]
        found.append(
            Transfer(
                id=number,
                source=node,
                target=node,
                nbytes=0,
                after=(*after, *arrived[index]),
                delay_ns=round(durations[item.work] * 1e9),
                lane=lane,
            )
        )
        for output in outputs[index]:
            to = program.items[output.item].rank
            waits = (number, before_on_way[item.rank, to]) if (item.rank, to) in before_on_way else (number,)
            sent = Transfer(
                id=next(numbers),
                source=node,
                target=places[to],
                nbytes=output.nbytes,
                after=waits,
                lane=lane,
                connection=first_connection + item.rank * ranks + to,
            )
            before_on_way[item.rank, to] = sent.id
            arrived[output.item].append(sent.id)
            found.append(sent)
    return found


def _outputs(program: Program, message_bytes: MessageBytes) -> list[list[_Output]]:
    """By item, in the order in which other ranks need them."""
    found: list[list[_Output]] = [[] for _ in program.items]
    local = program.schedule.placement.stages - 1
    for entries, row in zip(program.schedule.rows, program.rows, strict=True):
        for entry, index in zip(entries, row, strict=True):
            item = program.items[index]
            needs = ((item.need, item.boundary), (item.other_need, item.other_boundary))
            kinds = [one.kind for one in passes(entry)]
            if not isinstance(entry, Pair):
                kinds *= 2
            for kind, (need, boundary) in zip(kinds, needs, strict=True):
                if need >= 0 and boundary != local:
                    sizes = message_bytes.activations if kind is Kind.FORWARD else message_bytes.gradients
                    found[need].append(_Output(index, sizes[boundary]))
    for some in found:
        some.sort()
    return found
