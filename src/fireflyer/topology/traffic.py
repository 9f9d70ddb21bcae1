"""`Transfer`: bytes that one node sends to another, as every source of traffic exports them. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from fireflyer.base.errors import UsageError

__all__ = ["Transfer", "check_transfers"]


class Transfer(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Bytes from node `source` to node `target`. It starts `delay_ns` after the last of `after` has arrived, or after
    the beginning."""

    id: int
    source: int
    target: int
    nbytes: int
    after: tuple[int, ...] = ()
    delay_ns: int = 0
    lane: int = 0
    """Virtual lane, which shares links by weight; or a service level, of which the network has the lane."""
    connection: int | None = None
    """Transfers of the same number, source and target take the same way, as the messages of a queue pair do; None: a
    way of its own."""


def check_transfers(transfers: Sequence[Transfer], nodes: int) -> None:
    """Raises `UsageError` for a number used twice, a node that the network lacks, nothing to send, or transfers that
    wait for each other."""
    known = {transfer.id for transfer in transfers}
    if len(known) != len(transfers):
        raise UsageError("two transfers have the same number; number them anew")
    before: set[int] = set()
    in_order = True
    for one in transfers:
        if not (0 <= one.source < nodes and 0 <= one.target < nodes):
            raise UsageError(f"transfer {one.id} is from node {one.source} to {one.target}; there are {nodes} nodes")
        if one.nbytes < 0 or one.delay_ns < 0 or one.lane < 0:
            raise UsageError(f"transfer {one.id} has {one.nbytes} bytes, delay {one.delay_ns} ns, lane {one.lane}")
        if not before.issuperset(one.after):
            in_order = False
            missing = next((other for other in one.after if other not in known), None)
            if missing is not None:
                raise UsageError(f"transfer {one.id} is after transfer {missing}, which does not exist")
        before.add(one.id)
    if not in_order:
        _check_order(transfers)


def _check_order(transfers: Sequence[Transfer]) -> None:
    waiting = {transfer.id: len(set(transfer.after)) for transfer in transfers}
    followers: dict[int, list[int]] = {}
    for transfer in transfers:
        for other in set(transfer.after):
            followers.setdefault(other, []).append(transfer.id)
    ready = [number for number, count in waiting.items() if count == 0]
    done = 0
    while ready:
        done += 1
        for follower in followers.get(ready.pop(), ()):
            waiting[follower] -= 1
            if waiting[follower] == 0:
                ready.append(follower)
    if done < len(transfers):
        stuck = next(number for number, count in waiting.items() if count > 0)
        raise UsageError(f"transfer {stuck} waits for itself through others; remove one of its `after`")
