"""Which samples the next batch holds: a pure function of the seed and of how many samples were consumed.

The *stream* of a job is endless: epoch 0, epoch 1, … one after another, each a pseudo-random permutation of all samples
(or their natural order with `shuffle=False`). A *position* counts the samples that all ranks together have consumed.
The next global batch is the stream from that position on; rank r of w takes the contiguous slice `slice_of_rank` of it.
So the position alone says what comes next: a job may stop after any step and go on with another number of ranks (or
another batch size), and no sample is repeated or skipped. A batch may span two epochs; nothing is dropped at the end.

The permutation is a generalised Feistel network over the square `side × side ≥ size`, with *cycle walking*: an image
outside the samples is permuted again until it falls inside. That needs constant memory, jumps to any position at once,
and is a bijection by construction, whatever the round function is. (Black and Rogaway, "Ciphers with Arbitrary Finite
Domains", 2002, method 3 with modular addition; round function: the splitmix64 finaliser.)
"""

from __future__ import annotations

import logging
import math

import msgspec
import numpy as np
from numpy.typing import NDArray

from fireflyer.base.errors import UsageError

__all__ = ["MAX_SAMPLES", "ResumableSampler", "SamplerState", "SliceWarning", "check_stream", "describe_uneven"]
__all__ += ["permute", "slice_of_rank"]

MAX_SAMPLES = 1 << 48
"""Keeps every product of the network below 2**63."""

_log = logging.getLogger(__name__)
_MAX_SIZES = 12
"""How many numbers of ranks a warning names."""
_ROUNDS = 6
_GOLDEN = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1


class SamplerState(msgspec.Struct, frozen=True, kw_only=True):
    """State of the sampler that a checkpoint keeps."""

    size: int
    seed: int
    shuffle: bool
    position: int
    """Samples consumed by all ranks together since the job began."""
    version: int = 1


class ResumableSampler:
    """`batch(position, rank, world_size)` is the rank's part of the global batch that starts at `position`.

    >>> sampler = ResumableSampler(1000, global_batch=8, seed=7)
    >>> position = 0
    >>> mine = sampler.batch(position, rank=0, world_size=2)   # four sample indices
    >>> position += sampler.global_batch
    """

    def __init__(self, size: int, *, global_batch: int, seed: int, shuffle: bool = True) -> None:
        if not 1 <= size <= MAX_SAMPLES:
            raise UsageError(f"size={size} samples; the sampler needs 1 to {MAX_SAMPLES}")
        check_stream(global_batch, seed)
        self.size = size
        self.global_batch = global_batch
        self.seed = seed
        self.shuffle = shuffle
        self._warning = SliceWarning()

    def batch(self, position: int, rank: int = 0, world_size: int = 1) -> NDArray[np.int64]:
        """Sample indices of `rank`, int64 `[n]`: n is `global_batch / world_size`, rounded up or down. Rank 0 logs a
        warning where ranks have different numbers of samples."""
        first, end = slice_of_rank(self.global_batch, rank, world_size)
        self._warning.look(self.global_batch, rank, world_size)
        return self.stream(position + first, end - first)

    def stream(self, position: int, count: int) -> NDArray[np.int64]:
        """`count` sample indices of the endless stream from `position` on, int64 `[count]`."""
        if position < 0 or count < 0:
            raise UsageError(f"position={position}, count={count}; neither may be negative")
        parts: list[NDArray[np.int64]] = []
        while count > 0:
            epoch, offset = divmod(position, self.size)
            taken = min(count, self.size - offset)
            natural = np.arange(offset, offset + taken, dtype=np.int64)
            parts.append(permute(natural, self.size, self.seed, epoch) if self.shuffle else natural)
            position += taken
            count -= taken
        return np.concatenate(parts) if parts else np.empty(0, np.int64)

    def state(self, position: int) -> SamplerState:
        return SamplerState(size=self.size, seed=self.seed, shuffle=self.shuffle, position=position)

    def resume(self, state: SamplerState) -> int:
        """The position to go on from. Raises `UsageError` if `state` is of another stream of samples."""
        if state.version != 1:
            raise UsageError(f"sampler state has version {state.version}, this release reads 1; use the newer release")
        for name, ours, theirs in (
            ("size", self.size, state.size),
            ("seed", self.seed, state.seed),
            ("shuffle", self.shuffle, state.shuffle),
        ):
            if ours != theirs:
                raise UsageError(
                    f"the sampler state was saved with {name}={theirs}, this run has {name}={ours}: samples would be "
                    "repeated or skipped; resume with the same data set and seed, or start in a fresh directory"
                )
        if state.position < 0:
            raise UsageError(f"sampler state has position {state.position}, which is negative")
        return state.position


def check_stream(global_batch: int, seed: int) -> None:
    """Raises `UsageError`."""
    if not 1 <= global_batch <= MAX_SAMPLES:
        raise UsageError(f"global_batch={global_batch}; it must be 1 to {MAX_SAMPLES}")
    if not 0 <= seed < 1 << 63:
        raise UsageError(f"seed={seed}; it must be 0 to 2**63 - 1")


class SliceWarning:
    """Says once for each world size, on rank 0, that a batch does not divide evenly."""

    def __init__(self) -> None:
        self._world_size = 0

    def look(self, global_batch: int, rank: int, world_size: int) -> None:
        if world_size == self._world_size:
            return
        self._world_size = world_size
        uneven = describe_uneven(global_batch, world_size) if rank == 0 else None
        if uneven is not None:
            _log.warning("%s", uneven)


def slice_of_rank(count: int, rank: int, world_size: int) -> tuple[int, int]:
    """`[first, end)` of `count` items for `rank`: contiguous, in rank order, sizes differing by at most one."""
    if world_size < 1 or not 0 <= rank < world_size:
        raise UsageError(f"rank {rank} of {world_size} is out of range; ranks count from 0 to world_size - 1")
    return rank * count // world_size, (rank + 1) * count // world_size


def describe_uneven(global_batch: int, world_size: int) -> str | None:
    """What to know where `global_batch` samples do not divide evenly among the ranks, in one line; else None."""
    if global_batch % world_size == 0:
        return None
    low = global_batch // world_size
    near = [ranks for ranks in range(1, min(global_batch, 4 * world_size) + 1) if global_batch % ranks == 0]
    sizes = near[-_MAX_SIZES:]
    said = " or ".join(filter(None, [", ".join(map(str, sizes[:-1])), str(sizes[-1])]))
    return (
        f"global_batch={global_batch} does not divide evenly among {world_size} ranks: they have {low} or {low + 1} "
        "samples, and a mean over ranks of means is not that over the samples; it divides among "
        f"{said} ranks"
    )


def permute(values: NDArray[np.int64], size: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """Images of `values` (int64 `[n]`, each in `[0, size)`) under the permutation of `[0, size)` of (seed, epoch)."""
    side = math.isqrt(size - 1) + 1
    keys = _round_keys(seed, epoch)
    images = _feistel(values.astype(np.uint64), side, keys)
    outside = np.flatnonzero(images >= size)
    while outside.size:  # ends: the walk follows a cycle that contains the value it began with, which is inside
        images[outside] = _feistel(images[outside], side, keys)
        outside = outside[images[outside] >= size]
    return images.astype(np.int64)


def _feistel(values: NDArray[np.uint64], side: int, keys: list[int]) -> NDArray[np.uint64]:
    width = np.uint64(side)
    left, right = np.divmod(values, width)
    for key in keys:
        left, right = right, (left + _mix(right ^ np.uint64(key)) % width) % width
    return left * width + right


def _mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    mixed = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


def _round_keys(seed: int, epoch: int) -> list[int]:
    """One 64-bit key for each round, different for every (seed, epoch)."""
    state = seed
    keys: list[int] = []
    for salt in (epoch & _MASK, epoch >> 64, *range(1, _ROUNDS + 1)):
        state = _mix_integer((state + _GOLDEN) ^ _mix_integer(salt))
        keys.append(state)
    return keys[2:]


def _mix_integer(value: int) -> int:
    value &= _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)
