"""Which crash outcomes to try: all of them while they are few, the telling ones and then seeded ones beyond."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator

from fireflyer.sim.files import DataFate, FateKind, Outcome, Pending, PendingFile

__all__ = ["choose_outcome", "enumerate_outcomes"]

_LOST = DataFate(FateKind.LOST)
_KEPT = DataFate(FateKind.KEPT)
_WITHOUT_DATA = (DataFate(FateKind.ZEROS), DataFate(FateKind.GARBAGE), DataFate(FateKind.SCATTERED, 1))


def _fates(file: PendingFile) -> list[DataFate]:
    torn = [DataFate(FateKind.TORN, cut) for cut in file.cuts if 0 < cut < file.unsynced_bytes]
    return [_LOST, _KEPT, *torn, *_WITHOUT_DATA]


def enumerate_outcomes(pending: Pending, *, limit: int, seed: int = 0) -> Iterator[Outcome]:
    """Every combination if there are at most `limit`; else all lost, all kept, each item alone kept or alone lost,
    each prefix of the directory changes, and random ones up to `limit`. Deterministic; no outcome comes twice."""
    fates = [_fates(file) for file in pending.files]
    changes = len(pending.changes)
    total = 2**changes
    for choice in fates:
        total *= len(choice)
    if total <= limit:
        for files in itertools.product(*fates):
            for bits in itertools.product((False, True), repeat=changes):
                yield Outcome(files, bits)
        return
    seen: dict[Outcome, None] = {}
    for outcome in itertools.chain(_telling(fates, changes), _random(fates, changes, seed, limit)):
        if len(seen) >= limit:
            return
        if outcome not in seen:
            seen[outcome] = None
            yield outcome


def _telling(fates: list[list[DataFate]], changes: int) -> Iterator[Outcome]:
    lost, kept = tuple(_LOST for _ in fates), tuple(_KEPT for _ in fates)
    nothing, everything = (False,) * changes, (True,) * changes
    yield Outcome(lost, nothing)
    yield Outcome(kept, everything)
    yield Outcome(lost, everything)
    for index, choice in enumerate(fates):
        for fate in choice:
            yield Outcome((*kept[:index], fate, *kept[index + 1 :]), everything)
    for index in range(changes):
        alone = tuple(position == index for position in range(changes))
        yield Outcome(kept, tuple(not bit for bit in alone))
        yield Outcome(kept, alone)
        yield Outcome(kept, tuple(position < index for position in range(changes)))
    yield Outcome(kept, nothing)


def _random(fates: list[list[DataFate]], changes: int, seed: int, limit: int) -> Iterator[Outcome]:
    rng = random.Random(f"outcomes/{seed}")
    for _ in range(4 * limit):
        files = tuple(rng.choice(choice) for choice in fates)
        yield Outcome(files, tuple(rng.random() < 0.5 for _ in range(changes)))


def choose_outcome(pending: Pending, rng: random.Random) -> Outcome:
    """One outcome by chance; torn files are cut at any byte."""
    files: list[DataFate] = []
    for file in pending.files:
        kind = rng.choice(list(FateKind))
        cut = rng.randrange(max(1, file.unsynced_bytes)) if kind is FateKind.TORN else rng.randrange(1 << 16)
        files.append(DataFate(kind, cut))
    return Outcome(tuple(files), tuple(rng.random() < 0.5 for _ in pending.changes))
