"""The hops of a dispatch and of a combine, on one rank: encode, swap with peers, plan, decode, add up.

Runs in the dispatcher's thread. Blocks until the peers have sent what is theirs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from fireflyer.base.errors import UsageError
from fireflyer.collectives.dispatch.buffers import ResultBuffers, StepBuffers
from fireflyer.collectives.dispatch.messages import (
    HEADER_BYTES,
    Header,
    Limits,
    check_entries,
    check_header,
    pack_header,
    packed,
)
from fireflyer.collectives.dispatch.placement import ExpertPlacement
from fireflyer.collectives.dispatch.plan import (
    ArrivalPlan,
    Entries,
    ForwardPlan,
    SourcePlan,
    inverse,
    plan_arrival,
    plan_forward,
    row_starts,
)
from fireflyer.collectives.dispatch.rows import decode_rows, encode_rows, gather_rows, same_bytes, sum_rows
from fireflyer.collectives.group import Group
from fireflyer.collectives.tokens import TokenCodec, token_codec
from fireflyer.collectives.work import Work, when_there_is_room

__all__ = ["VALUE_TYPES", "Dispatched", "Hops", "Routed"]

Array = npt.NDArray[Any]
Bytes = npt.NDArray[np.uint8]

VALUE_TYPES: Final[dict[str, np.dtype[Any]]] = {
    "bf16": np.dtype(np.uint16),
    "f32": np.dtype(np.float32),
    "f64": np.dtype(np.float64),
}
_ROUTE: Final = np.dtype("<i4")
_NOTHING: Final = np.empty(0, np.uint8)


@dataclass(frozen=True, slots=True)
class Routed:
    """Routes of one dispatch, as far as this rank knows them."""

    call: int
    source: SourcePlan
    forward: ForwardPlan
    arrival: ArrivalPlan


@dataclass(frozen=True, slots=True)
class Dispatched:
    """Rows that arrived at the experts of this rank."""

    rows: Array
    """(entries, width), in ascending order of experts, then of source ranks, then of their tokens."""
    weights: Array
    """(entries,)"""
    counts: Array
    """Entries of each expert of this rank, ascending."""
    routed: Routed
    """Routing of these rows, which the combine needs."""


class Hops:
    """Of one dispatcher on one rank."""

    def __init__(
        self,
        comm: Group,
        placement: ExpertPlacement,
        *,
        number: int,
        tag: int,
        width: int,
        dtype: str,
        codecs: tuple[TokenCodec, TokenCodec],
        limits: Limits,
    ) -> None:
        """`codecs` of dispatch and combine; `limits` of what one rank sends to one node."""
        self._comm = comm
        self._placement = placement
        self._number = number
        self._tag = tag
        self._width = width
        self._dtype = VALUE_TYPES[dtype]
        self.sum_dtype: np.dtype[Any] = np.dtype(np.float64 if dtype == "f64" else np.float32)
        self._to_values = token_codec(dtype)
        self._codecs = codecs
        self._limits = limits
        self._node = int(placement.node_of_rank[comm.rank])
        number_in_node = placement.number_in_node(comm.rank)
        self._across: list[int] = placement.ranks_of_node[:, number_in_node].tolist()
        self._inside: list[int] = placement.ranks_of_node[self._node].tolist()
        self._buffers, self._results = StepBuffers(), ResultBuffers()
        self.sent_bytes = np.zeros(comm.world_size, np.int64)
        """To each other rank, headers included."""

    def dispatch(self, call: int, values: Array, source: SourcePlan, weights: Array) -> Dispatched:
        """Routes, then rows."""
        routed, arrived = self._route(call, source, weights.reshape(-1).astype(self.sum_dtype))
        return Dispatched(self.rows(call, routed, values), arrived, routed.arrival.counts, routed)

    def rows(self, call: int, routed: Routed, values: Array) -> Array:
        """Those of `values` that arrive here, repeated for each entry."""
        forward, arrival = routed.forward, routed.arrival
        across = self._rows_to_nodes(values, routed.source)
        passing = self._swap_rows("rows to nodes", self._across, call, routed, across, np.diff(forward.first_row))
        inside = [
            # what stays on this rank is read where it lies
            None if peer == self._comm.rank else self._gathered(f"to rank {peer}", passing, needed)
            for peer, needed in zip(self._inside, forward.needed, strict=True)
        ]
        expected = np.diff(arrival.first_row)
        arrived = self._swap_rows("rows to ranks", self._inside, call, routed, inside, expected)
        payloads, numbers, first = [], [], 0
        for number, peer in enumerate(self._inside):
            own = peer == self._comm.rank
            numbers.append(first + (forward.needed[number] if own else np.arange(expected[number])))
            payloads += passing if own else [arrived[number]]
            first += int(forward.first_row[-1] if own else expected[number])
        rows = self._results.take((arrival.row.size, self._width), self._dtype)
        decode_rows(rows, payloads, np.concatenate(numbers)[arrival.row], self._codecs[0])
        return rows

    def combine(self, call: int, routed: Routed, outputs: Array, scalars: Array | None) -> tuple[Array, Array | None]:
        """(tokens, width) sums and (tokens, per_token) scalars."""
        codec, source, forward, arrival = self._codecs[1], routed.source, routed.forward, routed.arrival
        row_bytes, back = codec.row_bytes(self._width), inverse(arrival.order)

        def put_outputs(body: Bytes, first: int, last: int) -> None:
            encode_rows(body.reshape(-1, row_bytes), np.ascontiguousarray(outputs), back[first:last], codec)

        single = None if scalars is None else scalars.astype(self.sum_dtype)[back]
        inside, alone = self._swap_sums(
            "outputs to nodes", self._inside, call, routed, put_outputs, arrival.first_entry,
            [len(one) for one in forward.sent], single, arrival.first_entry, [len(one) for one in forward.sent],
        )  # fmt: skip
        order = inverse(np.concatenate(forward.place))
        first = row_starts(forward.entries.row, forward.entries.rows)
        passing = None if alone is None else np.concatenate(alone)[order]

        def put_sums(body: Bytes, begin: int, end: int) -> None:
            starts = first[begin : end + 1]
            chosen = order[starts[0] : starts[-1]]
            self._sum(body.reshape(-1, row_bytes), inside, chosen, starts - starts[0], codec)

        across, alone = self._swap_sums(
            "sums to ranks", self._across, call, routed, put_sums, forward.first_row,
            [one.rows for one in source.entries], passing, forward.first_entry, [len(one) for one in source.entries],
        )  # fmt: skip
        token = np.concatenate(source.token_of_row)
        by_token = np.argsort(token, kind="stable")  # ascending nodes within a token
        total = self._results.take((source.tokens, self._width), self._dtype)
        starts = row_starts(token[by_token], source.tokens)
        self._sum(total.view(np.uint8), across, by_token, starts, self._to_values)
        if alone is None:
            return total, None
        lone = np.zeros(source.tokens * source.per_token, self.sum_dtype)
        lone[np.concatenate(source.choice)] = np.concatenate(alone)
        return total, lone.reshape(source.tokens, source.per_token)

    # --- routes ---

    def _route(self, call: int, source: SourcePlan, weights: Array) -> tuple[Routed, Array]:
        """And the weights that arrive, in the order of rows."""
        placement, rank = self._placement, self._comm.rank
        of_entry = 2 * _ROUTE.itemsize + self.sum_dtype.itemsize
        bodies = [
            packed([one.row.astype(_ROUTE), one.expert.astype(_ROUTE), weights[choice]])
            for one, choice in zip(source.entries, source.choice, strict=True)
        ]
        header = Header(self._number, call, call, "routes to nodes", 0, 0)
        counts = [(one.rows, len(one)) for one in source.entries]
        found = self._swap_routes(
            self._across, header, counts, bodies, self._limits, lambda said: said.entries * of_entry
        )
        allowed = placement.node_of_expert == self._node
        received, passed = [], []
        for peer, (said, body) in zip(self._across, found, strict=True):
            received.append(self._entries(said, body, allowed, peer))
            passed.append(body[2 * _ROUTE.itemsize * said.entries :].view(self.sum_dtype))
        forward = plan_forward(received, placement, rank)
        every = np.concatenate(passed)
        bodies = [
            packed(
                [
                    one.row.astype(_ROUTE),
                    one.expert.astype(_ROUTE),
                    forward.source_of_row[needed].astype(_ROUTE),
                    every[place],
                ]
            )
            for needed, one, place in zip(forward.needed, forward.sent, forward.place, strict=True)
        ]
        counts = [(one.rows, len(one)) for one in forward.sent]
        limits = Limits(self._limits.rows * placement.nodes, self._limits.entries * placement.nodes)
        found = self._swap_routes(
            self._inside, header._replace(step="routes to ranks"), counts, bodies, limits,
            lambda said: said.rows * _ROUTE.itemsize + said.entries * of_entry,
        )  # fmt: skip
        allowed = placement.rank_of_expert == rank
        received, passed, sources = [], [], []
        for peer, (said, body) in zip(self._inside, found, strict=True):
            received.append(self._entries(said, body, allowed, peer))
            first = 2 * _ROUTE.itemsize * said.entries
            last = first + _ROUTE.itemsize * said.rows
            sources.append(body[first:last].view(_ROUTE).astype(np.int64))
            passed.append(body[last:].view(self.sum_dtype))
        arrival = plan_arrival(received, sources, placement, rank)
        return Routed(call, source, forward, arrival), np.concatenate(passed)[arrival.order]

    def _entries(self, said: Header, body: Bytes, allowed: npt.NDArray[np.bool_], peer: int) -> Entries:
        numbers = body[: 2 * _ROUTE.itemsize * said.entries].view(_ROUTE).astype(np.int64)
        entries = Entries(said.rows, numbers[: said.entries], numbers[said.entries :])
        check_entries(entries, allowed, self._placement, peer)
        return entries

    # --- rows ---

    def _rows_to_nodes(self, values: Array, source: SourcePlan) -> list[Bytes]:
        """Encoded, for each node; a token that goes to several is encoded once."""
        codec, values = self._codecs[0], np.ascontiguousarray(values)
        if same_bytes(codec, self._dtype):
            payload = values.view(np.uint8)
        else:
            payload = self._taken("encoded", len(values), codec.row_bytes(self._width))
            encode_rows(payload, values, np.arange(len(values)), codec)
        return [
            payload if len(tokens) == len(values) else self._gathered(f"to node {node}", [payload], tokens)
            for node, tokens in enumerate(source.token_of_row)
        ]

    def _gathered(self, name: str, payloads: list[Bytes], index: Array) -> Bytes:
        rows = self._taken(name, index.size, payloads[0].shape[1])
        gather_rows(rows, payloads, index)
        return rows

    def _taken(self, name: str, rows: int, row_bytes: int) -> Bytes:
        return self._buffers.take(name, rows * row_bytes).reshape(rows, row_bytes)

    def _sum(self, out: Bytes, payloads: list[Bytes], index: Array, first: Array, to: TokenCodec) -> None:
        sum_rows(out, payloads, index, first, (self._codecs[1], to), self._width, self.sum_dtype)

    def _swap_rows(
        self,
        step: str,
        peers: list[int],
        call: int,
        routed: Routed,
        rows: Sequence[Bytes | None],
        expected: Sequence[int] | Array,
    ) -> list[Bytes]:
        """Encoded rows to each peer; as many as are `expected` of each. None for this rank: it takes them itself."""
        row_bytes = self._codecs[0].row_bytes(self._width)
        header = Header(self._number, call, routed.call, step, 0, 0)
        bodies = [_NOTHING if one is None else one.reshape(-1) for one in rows]
        counts = [(0 if one is None else len(one), 0) for one in rows]
        found = self._swap_known(peers, header, counts, bodies, [(int(count), 0) for count in expected], row_bytes)
        return [body.reshape(-1, row_bytes) for body in found]

    def _swap_sums(
        self,
        step: str,
        peers: list[int],
        call: int,
        routed: Routed,
        put: Callable[[Bytes, int, int], None],
        first: Array,
        expected: list[int],
        scalars: Array | None,
        first_scalar: Array,
        expected_scalars: list[int],
    ) -> tuple[list[Bytes], list[Array] | None]:
        """To each peer the rows from `first` on, which `put` writes, and scalars; so many come from each."""
        header = Header(self._number, call, routed.call, step, 0, 0)
        row_bytes, item = self._codecs[1].row_bytes(self._width), self.sum_dtype.itemsize
        bodies, counts = [], []
        for number, peer in enumerate(peers):
            rows = int(first[number + 1] - first[number])
            lone = _NOTHING.view(self.sum_dtype)
            if scalars is not None:
                lone = scalars[first_scalar[number] : first_scalar[number + 1]]
            body = self._buffers.take(f"{step}: to rank {peer}", rows * row_bytes + lone.nbytes)
            put(body[: rows * row_bytes], int(first[number]), int(first[number + 1]))
            body[rows * row_bytes :] = lone.view(np.uint8)
            bodies.append(body)
            counts.append((rows, len(lone)))
        allowed = [
            (count, 0 if scalars is None else single) for count, single in zip(expected, expected_scalars, strict=True)
        ]
        found = self._swap_known(peers, header, counts, bodies, allowed, row_bytes)
        rows_found, alone = [], []
        for body, (rows, entries) in zip(found, allowed, strict=True):
            split = rows * row_bytes
            rows_found.append(body[:split].reshape(rows, row_bytes))
            alone.append(body[split : split + entries * item].view(self.sum_dtype))
        return rows_found, None if scalars is None else alone

    def _check_counts(self, said: Header, rows: int, entries: int, peer: int) -> None:
        if (said.rows, said.entries) != (rows, entries):
            raise UsageError(
                f"rank {peer} sent {said.rows} rows and {said.entries} scalars in {said.step}, but the routes of call "
                f"{said.of} have {rows} and {entries}; do all ranks pass scalars, or none?"
            )

    def _swap_known(
        self,
        peers: list[int],
        header: Header,
        counts: Sequence[tuple[int, int]],
        bodies: Sequence[Bytes],
        allowed: Sequence[tuple[int, int]],
        row_bytes: int,
    ) -> list[Bytes]:
        """To each of `peers` its body, and what each of them says, of as many rows and entries as the routes say
        (`allowed`): so all receives are posted before anything is waited for. This rank's own body is what it gives."""
        works = self._send_all(peers, header, counts, bodies)
        found, arriving = [], []
        for peer, body, (rows, entries) in zip(peers, bodies, allowed, strict=True):
            if peer == self._comm.rank:
                found.append(body)
                continue
            size = rows * row_bytes + entries * self.sum_dtype.itemsize
            raw = np.empty(HEADER_BYTES, np.uint8)
            arrived = self._buffers.take(f"{header.step}: from rank {peer}", size)
            heading = self._receive(raw, peer)
            arriving.append((peer, raw, heading, self._receive(arrived, peer) if size else None, rows, entries))
            found.append(arrived)
        for peer, raw, heading, arrival, rows, entries in arriving:
            heading.wait()
            self._check_counts(check_header(raw, header, None, peer), rows, entries, peer)
            if arrival is not None:
                arrival.wait()
        for work in works:
            work.wait()
        return found

    def _swap_routes(
        self,
        peers: list[int],
        header: Header,
        counts: Sequence[tuple[int, int]],
        bodies: Sequence[Bytes],
        limits: Limits,
        size_of: Callable[[Header], int],
    ) -> list[tuple[Header, Bytes]]:
        """To each of `peers`, which may be this rank, its body; and what each of them says, within `limits`."""
        works = self._send_all(peers, header, counts, bodies)
        raws = [np.empty(HEADER_BYTES, np.uint8) for _ in peers]
        headings = [
            None if peer == self._comm.rank else self._receive(raw, peer) for peer, raw in zip(peers, raws, strict=True)
        ]
        found, arriving = [], []
        for peer, heading, raw, (rows, entries), body in zip(peers, headings, raws, counts, bodies, strict=True):
            if heading is None:
                found.append((header._replace(rows=rows, entries=entries), body))
                continue
            heading.wait()
            said = check_header(raw, header, limits, peer)
            arrived = np.empty(size_of(said), np.uint8)
            if arrived.size:
                arriving.append(self._receive(arrived, peer))
            found.append((said, arrived))
        for work in (*arriving, *works):
            work.wait()
        return found

    def _send_all(
        self, peers: list[int], header: Header, counts: Sequence[tuple[int, int]], bodies: Sequence[Bytes]
    ) -> list[Work]:
        works = []
        for peer, (rows, entries), body in zip(peers, counts, bodies, strict=True):
            if peer == self._comm.rank:
                continue
            for part in (pack_header(header._replace(rows=rows, entries=entries)), body):
                if part.size:
                    self.sent_bytes[peer] += part.size
                    works.append(self._send(part, peer))
        return works

    def _receive(self, into: Bytes, peer: int) -> Work:
        return when_there_is_room(lambda: self._comm.recv(into, source=peer, tag=self._tag, async_op=True))

    def _send(self, part: Bytes, peer: int) -> Work:
        return when_there_is_room(lambda: self._comm.send(part, to=peer, tag=self._tag, async_op=True))
