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
    add_in_order,
    plan_arrival,
    plan_forward,
)
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


@dataclass(frozen=True, slots=True)
class Routed:
    """What this rank knows of the routes of one dispatch."""

    call: int
    source: SourcePlan
    forward: ForwardPlan
    arrival: ArrivalPlan


@dataclass(frozen=True, slots=True)
class Dispatched:
    """What arrived at the experts of this rank."""

    rows: Array
    """(entries, width), in ascending order of experts, then of source ranks, then of their tokens."""
    weights: Array
    """(entries,)"""
    counts: Array
    """Entries of each expert of this rank, ascending."""
    routed: Routed
    """For the combine."""


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
        self.sent_bytes = np.zeros(comm.world_size, np.int64)
        """To each other rank, headers included."""

    def dispatch(self, call: int, values: Array, source: SourcePlan, weights: Array) -> Dispatched:
        """Routes, then rows."""
        routed, arrived = self._route(call, source, weights.reshape(-1).astype(self.sum_dtype))
        return Dispatched(self.rows(call, routed, values), arrived, routed.arrival.counts, routed)

    def rows(self, call: int, routed: Routed, values: Array) -> Array:
        """Those of `values` that arrive here, repeated for each entry."""
        codec, forward, arrival = self._codecs[0], routed.forward, routed.arrival
        payload = self._encoded(codec, values)
        across = [payload[tokens] for tokens in routed.source.token_of_row]
        passing = np.concatenate(
            self._swap_rows("rows to nodes", self._across, call, routed, across, np.diff(forward.first_row))
        )
        inside = [passing[needed] for needed in forward.needed]
        arrived = self._swap_rows("rows to ranks", self._inside, call, routed, inside, np.diff(arrival.first_row))
        rows = self._decoded(codec, np.concatenate(arrived), self._dtype)
        return rows[arrival.row]

    def combine(self, call: int, routed: Routed, outputs: Array, scalars: Array | None) -> tuple[Array, Array | None]:
        """(tokens, width) sums and (tokens, per_token) scalars."""
        codec, source, forward, arrival = self._codecs[1], routed.source, routed.forward, routed.arrival
        by_arrival = np.empty_like(outputs)
        by_arrival[arrival.order] = outputs
        single = None
        if scalars is not None:
            single = np.empty(len(scalars), self.sum_dtype)
            single[arrival.order] = scalars
        inside, alone = self._swap_sums(
            "outputs to nodes", self._inside, call, routed, self._encoded(codec, by_arrival), arrival.first_entry,
            [len(one) for one in forward.sent], single, arrival.first_entry, [len(one) for one in forward.sent],
        )  # fmt: skip
        entries = len(forward.entries)
        gathered = np.empty((entries, self._width), self.sum_dtype)
        passing = None if alone is None else np.empty(entries, self.sum_dtype)
        for number, place in enumerate(forward.place):
            gathered[place] = self._decoded(codec, inside[number], self.sum_dtype)
            if passing is not None and alone is not None:
                passing[place] = alone[number]
        sums = add_in_order(gathered, forward.entries.row, forward.entries.rows)
        across, alone = self._swap_sums(
            "sums to ranks", self._across, call, routed, self._encoded(codec, sums), forward.first_row,
            [one.rows for one in source.entries], passing, forward.first_entry, [len(one) for one in source.entries],
        )  # fmt: skip
        token = np.concatenate(source.token_of_row)
        order = np.argsort(token, kind="stable")  # ascending nodes within a token
        rows = self._decoded(codec, np.concatenate(across), self.sum_dtype)
        total = self._as_values(add_in_order(rows[order], token[order], source.tokens))
        if alone is None:
            return total, None
        back = np.zeros(source.tokens * source.per_token, self.sum_dtype)
        back[np.concatenate(source.choice)] = np.concatenate(alone)
        return total, back.reshape(source.tokens, source.per_token)

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
        found = self._swap(self._across, header, counts, bodies, self._limits, lambda said: said.entries * of_entry)
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
        found = self._swap(
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

    def _encoded(self, codec: TokenCodec, values: Array) -> Bytes:
        payload = np.empty((len(values), codec.row_bytes(self._width)), np.uint8)
        codec.encode_rows(values, payload)
        return payload

    def _decoded(self, codec: TokenCodec, payload: Bytes, dtype: np.dtype[Any]) -> Array:
        values = np.empty((len(payload), self._width), dtype)
        codec.decode_rows(payload, values)
        return values

    def _as_values(self, sums: Array) -> Array:
        values = np.empty(sums.shape, self._dtype)
        self._to_values.encode_rows(sums, values.view(np.uint8))
        return values

    def _swap_rows(
        self,
        step: str,
        peers: list[int],
        call: int,
        routed: Routed,
        rows: Sequence[Bytes],
        expected: Sequence[int] | Array,
    ) -> list[Bytes]:
        """Encoded rows to each peer; as many as are `expected` of each."""
        row_bytes = self._codecs[0].row_bytes(self._width)
        header = Header(self._number, call, routed.call, step, 0, 0)
        bodies = [one.reshape(-1) for one in rows]
        counts, allowed = [(len(one), 0) for one in rows], [(int(count), 0) for count in expected]
        found = self._swap(peers, header, counts, bodies, allowed, lambda said: said.rows * row_bytes)
        return [body.reshape(said.rows, row_bytes) for said, body in found]

    def _swap_sums(
        self,
        step: str,
        peers: list[int],
        call: int,
        routed: Routed,
        payload: Bytes,
        first: Array,
        expected: list[int],
        scalars: Array | None,
        first_scalar: Array,
        expected_scalars: list[int],
    ) -> tuple[list[Bytes], list[Array] | None]:
        """Consecutive encoded rows, and scalars, to each peer; so many come from each."""
        header = Header(self._number, call, routed.call, step, 0, 0)
        bodies, counts = [], []
        for number in range(len(peers)):
            part = payload[first[number] : first[number + 1]]
            lone = np.empty(0, self.sum_dtype)
            if scalars is not None:
                lone = scalars[first_scalar[number] : first_scalar[number + 1]]
            bodies.append(packed([part, lone]))
            counts.append((len(part), len(lone)))
        row_bytes, item = payload.shape[1], self.sum_dtype.itemsize
        allowed = [
            (count, 0 if scalars is None else single) for count, single in zip(expected, expected_scalars, strict=True)
        ]
        found = self._swap(
            peers, header, counts, bodies, allowed, lambda said: said.rows * row_bytes + said.entries * item
        )
        rows, alone = [], []
        for said, body in found:
            split = said.rows * row_bytes
            rows.append(body[:split].reshape(said.rows, row_bytes))
            alone.append(body[split:].view(self.sum_dtype))
        return rows, None if scalars is None else alone

    def _check_counts(self, said: Header, rows: int, entries: int, peer: int) -> None:
        if (said.rows, said.entries) != (rows, entries):
            raise UsageError(
                f"rank {peer} sent {said.rows} rows and {said.entries} scalars in {said.step}, but the routes of call "
                f"{said.of} have {rows} and {entries}; do all ranks pass scalars, or none?"
            )

    def _swap(
        self,
        peers: list[int],
        header: Header,
        counts: Sequence[tuple[int, int]],
        bodies: Sequence[Bytes],
        allowed: Limits | Sequence[tuple[int, int]],
        size_of: Callable[[Header], int],
    ) -> list[tuple[Header, Bytes]]:
        """To each of `peers`, which may be this rank, its body; and what each of them says. `allowed`: limits, or the
        rows and entries that the routes say of each peer."""
        rank, works = self._comm.rank, []
        own = header
        for peer, (rows, entries), body in zip(peers, counts, bodies, strict=True):
            said = header._replace(rows=rows, entries=entries)
            if peer == rank:
                own = said
                continue
            for part in (pack_header(said), body):
                if part.size:
                    self.sent_bytes[peer] += part.size
                    works.append(self._send(part, peer))
        found = []
        for number, (peer, body) in enumerate(zip(peers, bodies, strict=True)):
            if peer == rank:
                found.append((own, body))
                continue
            raw = np.empty(HEADER_BYTES, np.uint8)
            self._comm.recv(raw, source=peer, tag=self._tag)
            if isinstance(allowed, Limits):
                said = check_header(raw, header, allowed, peer)
            else:
                said = check_header(raw, header, None, peer)
                self._check_counts(said, *allowed[number], peer)
            arrived = np.empty(size_of(said), np.uint8)
            if arrived.size:
                self._comm.recv(arrived, source=peer, tag=self._tag)
            found.append((said, arrived))
        for work in works:
            work.wait()
        return found

    def _send(self, part: Bytes, peer: int) -> Work:
        return when_there_is_room(lambda: self._comm.send(part, to=peer, tag=self._tag, async_op=True))
