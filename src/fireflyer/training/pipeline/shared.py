"""Parameters that several stages, or both directions, hold copies of: equal at the begin, gradients summed once a step.

A *tie* is all copies of one parameter: the places that the caller names (embedding and head), and, where a placement
has two directions, the same parameter of both. Ranks that hold copies of a tie send their sum over own copies to the
others and add all in the order of ranks: each gets the same bits. They do so in pieces, of which two are on their way
at a time, so that beside the gradients there is never more than `SUM_BYTES` for each rank that holds copies.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Final, NamedTuple

import torch
from torch import nn

from fireflyer.base.errors import PeerFailed, UsageError
from fireflyer.base.units import MIB
from fireflyer.codesign.schedule.actions import Placement
from fireflyer.training.communication import Work
from fireflyer.training.pipeline.channels import PipelineCommunicator

__all__ = ["SUM_BYTES", "Place", "SharedGradients"]

SUM_BYTES: Final = 16 * MIB
"""Of the gradients of each rank that are on their way at a time."""

Place = tuple[int, str]
"""Stage, and name of a parameter in it."""


class _Tie(NamedTuple):
    name: str
    ranks: tuple[int, ...]
    copies: tuple[nn.Parameter, ...]
    """Those of this rank, each once. All are trained, on all ranks, or none."""

    @property
    def trained(self) -> bool:
        return self.copies[0].requires_grad


class _Span(NamedTuple):
    """Elements of a tie, from `begin` to before `end`."""

    tie: _Tie
    begin: int
    end: int


class _Exchange(NamedTuple):
    """Ties of one dtype that the same ranks hold; their values go as flat tensors, of several ties or a part of one."""

    ranks: tuple[int, ...]
    ties: tuple[_Tie, ...]
    tag: int

    @property
    def elements(self) -> int:
        return sum(tie.copies[0].numel() for tie in self.ties)

    def pieces(self, ties: Sequence[_Tie]) -> Iterator[_Piece]:
        """All elements of these of its ties, in messages of at most half of `SUM_BYTES`."""
        limit = max(1, SUM_BYTES // 2 // self.ties[0].copies[0].element_size())
        spans: list[_Span] = []
        free = limit
        for tie in ties:
            at, size = 0, tie.copies[0].numel()
            while at < size:
                end = min(size, at + free)
                spans.append(_Span(tie, at, end))
                free -= end - at
                at = end
                if not free:
                    yield _Piece(self, tuple(spans))
                    spans, free = [], limit
        if spans:
            yield _Piece(self, tuple(spans))


class _Piece(NamedTuple):
    exchange: _Exchange
    spans: tuple[_Span, ...]

    @property
    def dtype(self) -> torch.dtype:
        return self.exchange.ties[0].copies[0].dtype

    @property
    def size_bytes(self) -> int:
        return sum(end - begin for _, begin, end in self.spans) * self.dtype.itemsize

    def parts_of(self, flat: torch.Tensor) -> Iterator[tuple[_Span, torch.Tensor]]:
        """Each span, with its place in `flat`, which holds all elements."""
        at = 0
        for span in self.spans:
            size = span.end - span.begin
            yield span, flat[at : at + size]
            at += size


class _Memory:
    """Of one piece after the other, on the CPU. The same each time: a communicator may keep what it has sent for a
    while."""

    def __init__(self, size_bytes: int) -> None:
        self._size_bytes = size_bytes
        self._parts: list[torch.Tensor] = []

    def of(self, piece: _Piece, number: int) -> torch.Tensor:
        """For all elements of a piece; `number`: which of its ranks they come from."""
        while len(self._parts) <= number:
            self._parts.append(torch.empty(self._size_bytes, dtype=torch.uint8))
        return self._parts[number][: piece.size_bytes].view(piece.dtype)


class _Begun(NamedTuple):
    """A piece on its way."""

    piece: _Piece
    parts: list[torch.Tensor]
    """By rank that holds copies: its sum, when the works are done."""
    works: list[Work]


class SharedGradients:
    """Of one rank. Collective over the ranks of the pipeline."""

    def __init__(
        self,
        comm: PipelineCommunicator,
        placement: Placement,
        stages: Mapping[tuple[int, int], nn.Module],
        shared: Sequence[Sequence[Place]],
        first_tag: int,
    ) -> None:
        """Copies the values of the first rank of each tie to the others. Raises `UsageError` where a named parameter is
        not there, or has another shape elsewhere."""
        self._comm = comm
        ties = _ties(placement, stages, shared)
        by_ranks: dict[tuple[tuple[int, ...], torch.dtype], list[_Tie]] = {}
        for tie in ties:
            by_ranks.setdefault((tie.ranks, tie.copies[0].dtype), []).append(tie)
        # Two ranks that have several exchanges have the same ones in the same order: ties are named alike everywhere.
        counts: Counter[tuple[int, ...]] = Counter()
        self._exchanges: list[_Exchange] = []
        for ranks, dtype in sorted(by_ranks, key=lambda key: (key[0], str(key[1]))):
            self._exchanges.append(_Exchange(ranks, tuple(by_ranks[ranks, dtype]), first_tag + 2 * counts[ranks]))
            counts[ranks] += 1
        self.parameters = {id(copy) for tie in ties for copy in tie.copies}
        self._before: list[tuple[nn.Parameter, torch.Tensor]] = []
        """Gradients of earlier steps."""
        self._start_equal()

    def begin(self) -> None:
        """A step begins: gradients of earlier ones, which all copies have, are taken away until `sum`."""
        self._before = []
        for exchange in self._exchanges:
            for copy in (copy for tie in exchange.ties if tie.trained for copy in tie.copies):
                if copy.grad is not None:
                    self._before.append((copy, copy.grad.clone()))  # what averages has the memory of `grad`
                    copy.grad = None

    def sum(self) -> None:
        """Puts the sum over all copies into `grad` of each, zeros where none has one, and adds what was there when the
        step began. Frozen copies have none."""
        pieces = self._pieces(trained=True)
        memory = deque(_Memory(max((piece.size_bytes for piece in pieces), default=0)) for _ in range(2))
        before: _Begun | None = None
        with torch.no_grad():
            for piece in pieces:
                begun = self._begin(piece, memory[0])
                memory.rotate()
                if before is not None:
                    _finish(before)
                before = begun
            if before is not None:
                _finish(before)
            for copy, earlier in self._before:
                _gradient(copy).add_(earlier)
        self._before = []

    def _pieces(self, *, trained: bool) -> list[_Piece]:
        """Of all ties, or of those that are trained."""
        return [
            piece
            for exchange in self._exchanges
            for piece in exchange.pieces([tie for tie in exchange.ties if tie.trained or not trained])
        ]

    def _begin(self, piece: _Piece, memory: _Memory) -> _Begun:
        begun = _Begun(piece, [memory.of(piece, number) for number in range(len(piece.exchange.ranks))], [])
        own = begun.parts[piece.exchange.ranks.index(self._comm.rank)]
        for span, part in piece.parts_of(own):
            _put_own_sum(span, part)
        for rank, part in zip(piece.exchange.ranks, begun.parts, strict=True):
            if rank == self._comm.rank:
                continue
            tag = piece.exchange.tag + 1  # of all its pieces: messages of one tag come in their order
            begun.works.append(self._comm.recv(_raw(part), source=rank, tag=tag, async_op=True))
            begun.works.append(self._comm.send(_raw(own), to=rank, tag=tag, async_op=True))
        return begun

    def _start_equal(self) -> None:
        with torch.no_grad():
            for exchange in self._exchanges:
                self._check_alike(exchange)
            pieces = self._pieces(trained=False)
            memory = _Memory(max((piece.size_bytes for piece in pieces), default=0))
            for piece in pieces:
                self._take_first(piece, memory.of(piece, 0))

    def _take_first(self, piece: _Piece, values: torch.Tensor) -> None:
        ranks, tag = piece.exchange.ranks, piece.exchange.tag
        if ranks[0] == self._comm.rank:
            for span, part in piece.parts_of(values):
                part.copy_(_flat(_values(span.tie.copies[0]))[span.begin : span.end])
            _wait_all([self._comm.send(_raw(values), to=rank, tag=tag, async_op=True) for rank in ranks[1:]])
        else:
            self._comm.recv(_raw(values), source=ranks[0], tag=tag, async_op=True).wait()
        for span, part in piece.parts_of(values):
            for copy in span.tie.copies:
                _flat(_values(copy))[span.begin : span.end] = part

    def _check_alike(self, exchange: _Exchange) -> None:
        """All ranks say the shapes of their ties to the first, in a message of a size that all know."""
        shapes = [_hash_of(tie) for tie in exchange.ties]
        mine = torch.tensor([len(shapes), exchange.elements, sum(shapes) % (1 << 62)])
        others = [rank for rank in exchange.ranks if rank != self._comm.rank]
        theirs = {rank: torch.empty_like(mine) for rank in others}
        works = []
        for rank in others:
            works.append(self._comm.recv(theirs[rank], source=rank, tag=exchange.tag, async_op=True))
            works.append(self._comm.send(mine, to=rank, tag=exchange.tag, async_op=True))
        _wait_all(works)
        for rank, told in theirs.items():
            if not torch.equal(told, mine):
                names = ", ".join(tie.name for tie in exchange.ties[:8])
                raise UsageError(
                    f"rank {self._comm.rank} holds {mine[0]} shared parameters ({names}) of {mine[1]} elements, rank "
                    f"{rank} {told[0]} of {told[1]}, or in other shapes, or frozen; give all ranks the same shared=, "
                    "and stages of the same layers"
                )


def _ties(
    placement: Placement,
    stages: Mapping[tuple[int, int], nn.Module],
    shared: Sequence[Sequence[Place]],
) -> list[_Tie]:
    """Ties that this rank holds copies of, in an order that depends on no rank."""
    _check_places(placement, stages, shared)
    ties: list[_Tie] = []
    tied: dict[int, int] = {}
    for number, places in enumerate(shared):
        found = [stages[key].get_parameter(name) for stage, name in places for key in sorted(stages) if key[1] == stage]
        if found:
            _check_shapes(f"shared[{number}]", found)
            other = next((tied[id(copy)] for copy in found if id(copy) in tied), None)
            if other is not None:  # summed in one tie while another one sends it
                raise UsageError(
                    f"shared[{number}] and shared[{other}] name the same parameter; name it in one of them"
                )
            tied |= dict.fromkeys(map(id, found), number)
            ranks = {holders[stage] for stage, _ in places for holders in placement.rank_of}
            copies = tuple({id(copy): copy for copy in found}.values())
            ties.append(_Tie(f"shared[{number}]", tuple(sorted(ranks)), copies))
    seen = {id(copy) for tie in ties for copy in tie.copies}
    if placement.directions == 2:
        for direction, stage in sorted(stages, key=lambda key: (key[1], key[0])):
            both = tuple(sorted({holders[stage] for holders in placement.rank_of}))
            for name, parameter in stages[direction, stage].named_parameters():
                if id(parameter) not in seen:
                    seen.add(id(parameter))
                    ties.append(_Tie(f"stage {stage} {name}", both, (parameter,)))
    return ties


def _check_places(
    placement: Placement, stages: Mapping[tuple[int, int], nn.Module], shared: Sequence[Sequence[Place]]
) -> None:
    told = Counter(place for places in shared for place in places)
    for (stage, name), times in told.items():
        if not 0 <= stage < placement.stages:
            raise UsageError(f"shared= names stage {stage}; there are stages 0 to {placement.stages - 1}")
        if times > 1:
            raise UsageError(f"shared= names parameter {name!r} of stage {stage} twice")
        for (direction, held), module in stages.items():
            names = [own for own, _ in module.named_parameters(remove_duplicate=False)]
            if held == stage and name not in names:
                raise UsageError(
                    f"stage {stage} (direction {direction}) has no parameter {name!r}, which shared= names; it has "
                    f"{', '.join(names[:8])}"
                )


def _check_shapes(name: str, copies: Collection[nn.Parameter]) -> None:
    kinds = {(tuple(copy.shape), copy.dtype) for copy in copies}
    if len(kinds) > 1:
        raise UsageError(f"{name} ties parameters of different shapes or dtypes: {sorted(map(str, kinds))}")
    if len({copy.requires_grad for copy in copies}) > 1:
        raise UsageError(f"{name} ties a frozen parameter to one that is trained; freeze all of them, or none")


def _hash_of(tie: _Tie) -> int:
    """Of the shape, and whether it is trained; the same in all processes."""
    value = 1 + tie.trained
    for size in tie.copies[0].shape:
        value = (value * 1_000_003 + size) % (1 << 61)
    return value


def _put_own_sum(span: _Span, out: torch.Tensor) -> None:
    """Of the copies of this rank."""
    gradients = [_flat(_gradient(copy))[span.begin : span.end] for copy in span.tie.copies if copy.grad is not None]
    if not gradients:
        out.zero_()
        return
    out.copy_(gradients[0])
    for gradient in gradients[1:]:
        out += gradient.to(out.device)


def _finish(begun: _Begun) -> None:
    """Adds what the ranks have sent, and puts it into `grad` of the copies."""
    _wait_all(begun.works)
    total = begun.parts[0]
    for part in begun.parts[1:]:
        total += part
    for span, part in begun.piece.parts_of(total):
        for copy in span.tie.copies:
            _flat(_gradient(copy))[span.begin : span.end] = part


def _values(copy: nn.Parameter) -> torch.Tensor:
    """Of a parameter, which are in the order of its elements from now on."""
    if not copy.data.is_contiguous():
        copy.data = copy.data.contiguous()
    return copy.data


def _gradient(copy: nn.Parameter) -> torch.Tensor:
    """`grad`, which is there from now on, in the order of its elements."""
    if copy.grad is None:
        copy.grad = torch.zeros_like(copy, memory_format=torch.contiguous_format)
    elif not copy.grad.is_contiguous():
        copy.grad = copy.grad.contiguous()
    return copy.grad


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(-1)


def _raw(tensor: torch.Tensor) -> torch.Tensor:
    """Its bytes: messages take any element type that way."""
    return tensor.view(torch.uint8)


def _wait_all(works: Sequence[Work]) -> None:
    for work in works:
        try:
            work.wait()
        except PeerFailed as error:
            raise PeerFailed(f"the sum of shared parameters did not complete: {error.message}", rank=error.rank) from (
                error
            )
