"""Random transactions, interleaved operation by operation, and whether some serial order explains what they saw.

Each written value is unique, so a read tells whose write it saw. The checker tries every order of the committed
transactions that keeps one that ended before another began before it, and replays them on a plain dictionary.
"""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, field

from tests.support.kvstore.engines import Opened

from fireflyer.kvstore import Conflict, Engine, Transaction

__all__ = ["Operation", "Planned", "Ran", "explained", "random_plans", "run_interleaved"]

KEYS = (b"a", b"b", b"c", b"d")
Operation = tuple[str, bytes, bytes | None]
"""`get`, `range`, `set`, `clear`, `clear range`; key or begin; value or end."""
Seen = tuple[tuple[bytes, bytes], ...] | bytes | None


@dataclass
class Planned:
    name: str
    operations: list[Operation]


@dataclass
class Ran:
    plan: Planned
    began: int
    ended: int = -1
    seen: list[Seen] = field(default_factory=list)
    committed: bool = False


def random_plans(rng: random.Random, *, transactions: int = 4, operations: int = 4) -> list[Planned]:
    plans = []
    for number in range(transactions):
        listed: list[Operation] = []
        for step in range(rng.randint(1, operations)):
            kind = rng.choice(["get", "get", "range", "set", "set", "clear", "clear range"])
            key = rng.choice(KEYS)
            if kind in ("range", "clear range"):
                listed.append((kind, key, rng.choice([None, b"c", b"e", key + b"\0"])))
            else:
                listed.append((kind, key, f"{number}.{step}".encode() if kind == "set" else None))
        plans.append(Planned(f"t{number}", listed))
    return plans


async def run_interleaved(kv: Engine, plans: list[Planned], rng: random.Random) -> list[Ran]:
    """One operation of one of them after the other; each ends with its commit."""
    clock = itertools.count()
    waiting = list(plans)
    running: list[tuple[Opened, Transaction, Ran, list[Operation]]] = []
    ran: list[Ran] = []
    while waiting or running:
        if waiting and (not running or rng.random() < 0.4):
            plan = waiting.pop()
            side = Opened(kv)
            running.append((side, await side.begin(), Ran(plan, next(clock)), list(plan.operations)))
            continue
        index = rng.randrange(len(running))
        side, tx, record, left = running[index]
        if left:
            try:
                await _perform(tx, left.pop(0), record)
                continue
            except Conflict:
                await side.abandon()
        else:
            try:
                await side.commit()
                record.committed = True
            except Conflict:
                pass
        record.ended = next(clock)
        ran.append(record)
        del running[index]
    return ran


async def _perform(tx: Transaction, operation: Operation, record: Ran) -> None:
    kind, key, other = operation
    if kind == "get":
        record.seen.append(await tx.get(key))
    elif kind == "range":
        record.seen.append(tuple((await tx.get_range(key, other)).items))
    elif kind == "set":
        assert other is not None
        tx.set(key, other)
    elif kind == "clear":
        tx.clear(key)
    else:
        tx.clear_range(key, other)


def explained(ran: list[Ran], before: dict[bytes, bytes], after: dict[bytes, bytes]) -> bool:
    """Whether some serial order of those that committed leads from `before` to `after` with what each has seen."""
    committed = [record for record in ran if record.committed]
    return any(
        _keeps_time(order) and _replays(order, dict(before), after) for order in itertools.permutations(committed)
    )


def _keeps_time(order: tuple[Ran, ...]) -> bool:
    return all(not later.ended < earlier.began for earlier, later in itertools.combinations(order, 2))


def _replays(order: tuple[Ran, ...], state: dict[bytes, bytes], after: dict[bytes, bytes]) -> bool:
    for record in order:
        seen: list[Seen] = []
        for kind, key, other in record.plan.operations:
            inside = sorted(k for k in state if key <= k and (other is None or k < other))
            if kind == "get":
                seen.append(state.get(key))
            elif kind == "range":
                seen.append(tuple((k, state[k]) for k in inside))
            elif kind == "set":
                assert other is not None
                state[key] = other
            elif kind == "clear":
                state.pop(key, None)
            else:
                for k in inside:
                    del state[k]
        if seen != record.seen:
            return False
    return state == after
