"""Parameters that several stages, or both directions, hold copies of: equal at the begin, gradients summed once a step.

A *tie* is all copies of one parameter: the places that the caller names (embedding and head), and, where a placement
has two directions, the same parameter of both. Ranks that hold copies of a tie send their sum over own copies to the
others and add all in the order of ranks: each gets the same bits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import nn

from fireflyer.base.errors import PeerFailed, UsageError
from fireflyer.codesign.schedule.actions import Placement
from fireflyer.training.communication import Work
from fireflyer.training.pipeline.channels import PipelineCommunicator

__all__ = ["Place", "SharedGradients"]

Place = tuple[int, str]
"""Stage, and name of a parameter in it."""


class _Tie(NamedTuple):
    name: str
    ranks: tuple[int, ...]
    copies: tuple[nn.Parameter, ...]
    """Those of this rank, each once."""


class _Exchange(NamedTuple):
    """Ties of one dtype that the same ranks hold; their gradients go as one flat tensor."""

    ranks: tuple[int, ...]
    ties: tuple[_Tie, ...]
    tag: int

    @property
    def elements(self) -> int:
        return sum(tie.copies[0].numel() for tie in self.ties)


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
        self._start_equal()

    def sum(self) -> None:
        """Puts the sum over all copies into `grad` of each; zeros where none has one."""
        begun: list[tuple[_Exchange, list[tuple[int, torch.Tensor]], list[Work]]] = []
        with torch.no_grad():
            begun.extend((exchange, *self._begin(exchange, _own_sum(exchange))) for exchange in self._exchanges)
            for exchange, parts, works in begun:
                _wait_all(works)
                total = parts[0][1].clone()
                for _, part in parts[1:]:
                    total += part
                _deliver(exchange, total)

    def _begin(self, exchange: _Exchange, own: torch.Tensor) -> tuple[list[tuple[int, torch.Tensor]], list[Work]]:
        """What each rank contributes, by rank, when the works are done."""
        parts: list[tuple[int, torch.Tensor]] = []
        works: list[Work] = []
        sent = own.cpu()
        for rank in exchange.ranks:
            if rank == self._comm.rank:
                parts.append((rank, sent))
                continue
            part = torch.empty_like(sent)
            parts.append((rank, part))
            works.append(self._comm.recv(_raw(part), source=rank, tag=exchange.tag + 1, async_op=True))
            works.append(self._comm.send(_raw(sent), to=rank, tag=exchange.tag + 1, async_op=True))
        return parts, works

    def _start_equal(self) -> None:
        with torch.no_grad():
            for exchange in self._exchanges:
                self._check_alike(exchange)
                own = torch.cat([tie.copies[0].detach().reshape(-1).cpu() for tie in exchange.ties])
                if exchange.ranks[0] == self._comm.rank:
                    _wait_all(
                        [
                            self._comm.send(_raw(own), to=rank, tag=exchange.tag, async_op=True)
                            for rank in exchange.ranks[1:]
                        ]
                    )
                else:
                    own = torch.empty_like(own)
                    self._comm.recv(_raw(own), source=exchange.ranks[0], tag=exchange.tag, async_op=True).wait()
                at = 0
                for tie in exchange.ties:
                    for copy in tie.copies:
                        copy.copy_(own[at : at + copy.numel()].view(copy.shape))
                    at += tie.copies[0].numel()

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
                    f"{rank} {told[0]} of {told[1]}, or in other shapes; give all ranks the same shared=, and stages "
                    "of the same layers"
                )


def _ties(
    placement: Placement,
    stages: Mapping[tuple[int, int], nn.Module],
    shared: Sequence[Sequence[Place]],
) -> list[_Tie]:
    """Ties that this rank holds copies of, in an order that depends on no rank."""
    _check_places(placement, stages, shared)
    ties: list[_Tie] = []
    for number, places in enumerate(shared):
        found = [stages[key].get_parameter(name) for stage, name in places for key in sorted(stages) if key[1] == stage]
        if found:
            _check_shapes(f"shared[{number}]", found)
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


def _check_shapes(name: str, copies: Iterable[nn.Parameter]) -> None:
    kinds = {(tuple(copy.shape), copy.dtype) for copy in copies}
    if len(kinds) > 1:
        raise UsageError(f"{name} ties parameters of different shapes or dtypes: {sorted(map(str, kinds))}")


def _hash_of(tie: _Tie) -> int:
    """Of the shape, the same in all processes."""
    value = 1
    for size in tie.copies[0].shape:
        value = (value * 1_000_003 + size) % (1 << 61)
    return value


def _own_sum(exchange: _Exchange) -> torch.Tensor:
    flats = []
    for tie in exchange.ties:
        gradients = [copy.grad for copy in tie.copies if copy.grad is not None]
        if not gradients:
            flats.append(torch.zeros_like(tie.copies[0]).reshape(-1))
            continue
        total = gradients[0]
        for gradient in gradients[1:]:
            total = total + gradient
        flats.append(total.reshape(-1))
    return torch.cat(flats)


def _deliver(exchange: _Exchange, total: torch.Tensor) -> None:
    at = 0
    for tie in exchange.ties:
        for copy in tie.copies:
            part = total[at : at + copy.numel()].view(copy.shape)
            if copy.grad is None:
                copy.grad = part.to(copy.device, copy=True)
            else:
                copy.grad.copy_(part)
        at += tie.copies[0].numel()


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
