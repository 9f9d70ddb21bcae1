"""Several sources in given proportions: which source each position of the stream takes, and which sample of it. Pure.

The choice is not drawn, it is *scheduled*: weights become whole numbers `w` with the sum W (the *period*), and the
sources of W successive positions are laid out once so that after any n positions each source was taken within less than
one of `n * w / W` times. (Tijdeman, "The chairman assignment problem", 1980: it stays within 1 - 1/(2K - 2) for K
sources. His rule, as unit jobs: the j-th sample of a source may be placed from where it is 1/(2K - 2) of a sample
late, and must be before it is 1 - 1/(2K - 2) late; of those that may be placed the most urgent is.) So any window of
the stream has each source within less than two samples of its share, whatever the batch size and the number of ranks.

Each source has its own stream: its own permutation for each of its epochs, seeded by the mixture's seed and the
source's *name*, so it does not matter which other sources there are. Position p of the mixture takes sample
`period_number * w + (how often the source came before in the period)` of its source's stream.

When the weights change at a restart, the pattern begins anew there and each source's stream goes on where it is: what
was consumed of each is in the state, also of those that were left out, which go on when they come back.
"""

from __future__ import annotations

import hashlib
import heapq
import math
from array import array
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from fireflyer.base.errors import UsageError
from fireflyer.data.sampler import MAX_SAMPLES, SliceWarning, check_stream, permute, slice_of_rank

__all__ = ["MAX_PERIOD", "MAX_SOURCES", "MixtureSampler", "MixtureState", "Source", "SourceState"]

MAX_SOURCES: Final = 1024
MAX_PERIOD: Final = 1 << 16
"""Positions after which the pattern repeats. Weights whose ratio needs more are rounded to multiples of 1/65536."""


class Source(msgspec.Struct, frozen=True):
    """One data set of a mixture, and its share."""

    name: str
    size: int
    """Samples that it has."""
    weight: float
    """Share of the stream, relative to the weights of the others; 0 leaves it out."""


class SourceState(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    size: int
    consumed: int
    """Samples taken of it before `MixtureState.since`, over all its epochs."""


class MixtureState(msgspec.Struct, frozen=True, kw_only=True):
    """State of a mixture that a checkpoint keeps: where the stream is, and where the present weights began."""

    seed: int
    shuffle: bool
    position: int
    """Samples consumed by all ranks together since the job began."""
    since: int
    """Position at which the weights that are in use began."""
    weights: dict[str, int]
    """Whole numbers, of the sources that were in use."""
    sources: tuple[SourceState, ...]
    version: int = 1


class MixtureSampler:
    """`batch(position, rank, world_size)` is the rank's part of the global batch that starts at `position`.

    Samples are numbered through all sources in the order in which they are given: sample i of source k is number
    `firsts[k] + i`, which a `Concatenation` of the same sources understands.
    """

    def __init__(self, sources: Sequence[Source], *, global_batch: int, seed: int, shuffle: bool = True) -> None:
        """Raises `UsageError`."""
        _check(sources, global_batch, seed)
        self.sources = tuple(sources)
        self.global_batch = global_batch
        self.seed = seed
        self.shuffle = shuffle
        self.weights = whole_weights([one.weight for one in sources])
        """Whole numbers without a common divisor, in the order of the sources."""
        self.period = sum(self.weights)
        self.size = sum(one.size for one in sources)
        self.firsts = np.cumsum([0, *(one.size for one in sources)])[:-1].astype(np.int64)
        order = sorted(range(len(sources)), key=lambda at: sources[at].name)
        pattern, self._ranks = _layout([self.weights[at] for at in order])
        self._pattern = np.array(order, np.int64)[pattern]
        self._of_period = np.array(self.weights, np.int64)
        self._seeds = [_seed_of(seed, one.name) for one in sources]
        self._since = 0
        self._consumed = np.zeros(len(sources), np.int64)
        self._absent: tuple[SourceState, ...] = ()
        self._warning = SliceWarning()

    def batch(self, position: int, rank: int = 0, world_size: int = 1) -> NDArray[np.int64]:
        """Sample numbers of `rank`, int64 `[n]`: n is `global_batch / world_size`, rounded up or down."""
        first, end = slice_of_rank(self.global_batch, rank, world_size)
        self._warning.look(self.global_batch, rank, world_size)
        return self.stream(position + first, end - first)

    def stream(self, position: int, count: int) -> NDArray[np.int64]:
        """`count` sample numbers of the endless stream from `position` on, int64 `[count]`. Raises `UsageError` for a
        position before the one at which these weights began."""
        sources, ordinals = self.choices(position, count)
        numbers = np.empty(count, np.int64)
        for source in np.unique(sources).tolist():
            mine = np.flatnonzero(sources == source)
            numbers[mine] = self.firsts[source] + self._samples(source, ordinals[mine])
        return numbers

    def choices(self, position: int, count: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Source of each of `count` positions from `position` on, and which sample of that source's own stream it
        takes; int64 `[count]` both."""
        if position < self._since or count < 0:
            raise UsageError(
                f"position={position}, count={count}; the position must be at least {self._since}, where the weights "
                "began, and the count not negative"
            )
        ahead = np.arange(count, dtype=np.int64) + np.int64(position - self._since)
        periods, places = ahead // np.int64(self.period), ahead % np.int64(self.period)
        sources = self._pattern[places]
        ordinals = self._consumed[sources] + periods * self._of_period[sources] + self._ranks[places]
        return sources, ordinals

    def consumed(self, position: int) -> NDArray[np.int64]:
        """Count the samples of each source that the stream takes before `position`, int64 `[sources]`."""
        periods, place = divmod(position - self._since, self.period)
        within = np.bincount(self._pattern[:place], minlength=len(self.sources))
        return self._consumed + periods * self._of_period + within

    def state(self, position: int) -> MixtureState:
        sources = tuple(
            SourceState(name=one.name, size=one.size, consumed=count)
            for one, count in zip(self.sources, self._consumed.tolist(), strict=True)
        )
        return MixtureState(
            seed=self.seed,
            shuffle=self.shuffle,
            position=position,
            since=self._since,
            weights=self._weights_by_name(),
            sources=sources + self._absent,
        )

    def resume(self, state: MixtureState) -> int:
        """The position to go on from. With other weights, or other sources, the proportions change there; each source
        goes on in its own stream. Raises `UsageError` if a source has another size or the seed differs."""
        if state.version != 1:
            raise UsageError(f"mixture state has version {state.version}, this release reads 1; use the newer release")
        if not 0 <= state.since <= state.position:
            raise UsageError(f"mixture state has position {state.position} and weights since {state.since}")
        for name, ours, theirs in (("seed", self.seed, state.seed), ("shuffle", self.shuffle, state.shuffle)):
            if ours != theirs:
                raise UsageError(
                    f"the mixture state was saved with {name}={theirs}, this run has {name}={ours}: samples would be "
                    "repeated or skipped; resume with the same seed, or start in a fresh directory"
                )
        known = {one.name: one for one in state.sources}
        for source in self.sources:
            if source.name in known and known[source.name].size != source.size:
                raise UsageError(
                    f"source {source.name!r} had {known[source.name].size} samples when the state was saved, and has "
                    f"{source.size}: samples would be repeated or skipped; give changed data another name"
                )
        same = self._weights_by_name() == state.weights
        if not same:
            known = _consumed_at(state, known)
        self._since = state.since if same else state.position
        counts = [known[one.name].consumed if one.name in known else 0 for one in self.sources]
        self._consumed = np.array(counts, np.int64)
        names = {one.name for one in self.sources}
        self._absent = tuple(one for name, one in known.items() if name not in names)
        return state.position

    def _weights_by_name(self) -> dict[str, int]:
        return {one.name: weight for one, weight in zip(self.sources, self.weights, strict=True) if weight}

    def _samples(self, source: int, ordinals: NDArray[np.int64]) -> NDArray[np.int64]:
        """Numbers in the source of the samples `ordinals` of its endless stream."""
        size = self.sources[source].size
        epochs, within = np.divmod(ordinals, size)
        if not self.shuffle:
            return within
        found = np.empty_like(within)
        for epoch in np.unique(epochs).tolist():
            mine = epochs == epoch
            found[mine] = permute(within[mine], size, self._seeds[source], epoch)
        return found


def whole_weights(weights: Sequence[float]) -> list[int]:
    """In the same ratio, without a common divisor and with a sum of at most `MAX_PERIOD`; rounded by the largest
    remainder where that cannot be, but to no less than 1 where the weight is above 0. Raises `UsageError`."""
    for weight in weights:
        if not (math.isfinite(weight) and weight >= 0):
            raise UsageError(f"weight {weight}; weights are numbers of 0 and more")
    exact = [Fraction(repr(float(weight))) for weight in weights]  # 0.1 as it was typed, not its binary neighbour
    total = sum(exact)
    if not total:
        raise UsageError("all weights are 0; give at least one source a weight above 0")
    shares = [one / total for one in exact]
    period = math.lcm(*(share.denominator for share in shares))
    if period <= MAX_PERIOD:
        return [int(share * period) for share in shares]
    scaled = [share * MAX_PERIOD for share in shares]
    whole = [max(1, math.floor(one)) if one else 0 for one in scaled]
    order = sorted(range(len(whole)), key=lambda at: (whole[at] - scaled[at], at))
    for at in order[: max(0, MAX_PERIOD - sum(whole))]:
        whole[at] += 1
    divisor = math.gcd(*whole)
    return [one // divisor for one in whole]


def _layout(weights: Sequence[int]) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
    """For each position of a period its source, and how often that source came before in it. `weights`: in the order of
    the names, which decides between equals, so that the order in which sources are given does not matter."""
    period, count = sum(weights), sum(1 for one in weights if one)
    pattern, ranks = array("i"), array("q")
    if count == 1:
        only = next(at for at, one in enumerate(weights) if one)
        return np.full(period, only, np.int32), np.arange(period, dtype=np.int64)
    slack = 2 * count - 2

    # Sample j (from 1) of a source with weight w is `n * w / period - (j - 1)` late at the n-th choice (from 1).
    def released(weight: int, j: int) -> int:
        return -(-(period * (slack * (j - 1) + 1)) // (weight * slack))

    def deadline(weight: int, j: int) -> int:
        return period * (slack * j - 1) // (weight * slack) + 1

    waiting = [(released(weight, 1), at, 1) for at, weight in enumerate(weights) if weight]
    heapq.heapify(waiting)
    ready: list[tuple[int, int, int]] = []
    for n in range(1, period + 1):
        while waiting and waiting[0][0] <= n:
            _, at, j = heapq.heappop(waiting)
            heapq.heappush(ready, (deadline(weights[at], j), at, j))
        _, at, j = heapq.heappop(ready)
        pattern.append(at)
        ranks.append(j - 1)
        heapq.heappush(waiting, (released(weights[at], j + 1), at, j + 1))
    return np.array(pattern, np.int32), np.array(ranks, np.int64)


def _consumed_at(state: MixtureState, known: Mapping[str, SourceState]) -> dict[str, SourceState]:
    """The sources with what the state's own weights took of them before its position."""
    names = sorted(state.weights)
    weights = [state.weights[name] for name in names]
    if not weights or any(one < 1 for one in weights) or sum(weights) > MAX_PERIOD + MAX_SOURCES:
        raise UsageError(f"mixture state has weights {weights}; it is damaged: restore the checkpoint from a copy")
    pattern, _ = _layout(weights)
    periods, place = divmod(state.position - state.since, len(pattern))
    within = np.bincount(pattern[:place], minlength=len(weights)).tolist()
    taken = {name: periods * weight + more for name, weight, more in zip(names, weights, within, strict=True)}
    return {
        name: msgspec.structs.replace(one, consumed=one.consumed + taken.get(name, 0)) for name, one in known.items()
    }


def _seed_of(seed: int, name: str) -> int:
    digest = hashlib.blake2b(name.encode("utf-8", "surrogateescape"), digest_size=8, key=seed.to_bytes(8, "little"))
    return int.from_bytes(digest.digest(), "little") >> 1


def _check(sources: Sequence[Source], global_batch: int, seed: int) -> None:
    if not 1 <= len(sources) <= MAX_SOURCES:
        raise UsageError(f"{len(sources)} sources; a mixture has 1 to {MAX_SOURCES}")
    if len({one.name for one in sources}) != len(sources):
        raise UsageError(f"sources {', '.join(one.name for one in sources)}: each needs a name of its own")
    for one in sources:
        if not 1 <= one.size <= MAX_SAMPLES:
            raise UsageError(f"source {one.name!r} has {one.size} samples; 1 to {MAX_SAMPLES} are allowed")
    if sum(one.size for one in sources) > MAX_SAMPLES:
        raise UsageError(f"the sources have more than {MAX_SAMPLES} samples together")
    check_stream(global_batch, seed)
