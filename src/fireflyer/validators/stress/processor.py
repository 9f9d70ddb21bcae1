"""Processors and memory under load: products with known results, bandwidth, patterns, and sums over all ranks."""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections.abc import Callable
from typing import Final

import numpy as np
from numpy.typing import NDArray

from fireflyer.base.units import MIB, format_bytes
from fireflyer.validators.core.checks.evidence import Finding
from fireflyer.validators.core.validation.records import Found
from fireflyer.validators.memory import write_and_read_memory

__all__ = ["allreduce_in_memory", "memory_bandwidth", "memory_patterns", "multiply", "repeat_computation"]

Floats = NDArray[np.float64]
_SIZE: Final = 512
_SEED: Final = 20241
_DIGEST_WORDS: Final = 1 << 16


def processors() -> int:
    """That this process may use."""
    return len(os.sched_getaffinity(0))


def multiply(limit_s: float, *, threads: int | None = None, disturb: Callable[[Floats], None] | None = None) -> Found:
    """Products of matrices of small integers on all processors. They are exact in float64, whatever the order of the
    sums, so each must have the same bits as the first, and that the sums of a second way. `disturb`: for tests."""
    generator = np.random.default_rng(_SEED)
    left = generator.integers(-8, 8, (_SIZE, _SIZE)).astype(np.float64)
    right = generator.integers(-8, 8, (_SIZE, _SIZE)).astype(np.float64)
    expected = (left.astype(np.int64) @ right.astype(np.int64)).astype(np.float64)
    count = threads if threads is not None else processors()
    done, wrong = [0] * count, [0] * count
    began_s = time.monotonic()

    def work(number: int) -> None:
        while not done[number] or time.monotonic() < began_s + limit_s:
            product = left @ right
            if disturb is not None:
                disturb(product)
            done[number] += 1
            wrong[number] += not np.array_equal(product, expected)

    _in_threads(count, work)
    took_s = time.monotonic() - began_s
    faults: tuple[Finding, ...] = ()
    if sum(wrong):
        words = f"{sum(wrong)} of {sum(done)} products of matrices are wrong"
        faults = (Finding(severity="high", cause="wrong_result", words=words, at_once=True),)
    figures = {"cpu_gemm_flop_per_s": 2.0 * _SIZE**3 * sum(done) / took_s}
    return Found(validator="cpu_stress", figures=figures, faults=faults, words=f"{sum(done)} products are right")


def memory_bandwidth(limit_s: float, *, array_bytes: int = 64 * MIB, threads: int | None = None) -> Found:
    """The triad of STREAM, `a = b + s c`, on arrays that no cache holds."""
    count = threads if threads is not None else processors()
    words = array_bytes // 8
    arrays = [(np.zeros(words), np.full(words, 1.0), np.full(words, 2.0)) for _ in range(count)]
    moved = [0] * count
    began_s = time.monotonic()

    def work(number: int) -> None:
        a, b, c = arrays[number]
        while not moved[number] or time.monotonic() < began_s + limit_s:
            np.multiply(c, 3.0, out=a)
            np.add(a, b, out=a)
            moved[number] += 5 * array_bytes  # a read and a write, then two reads and a write

    _in_threads(count, work)
    took_s = time.monotonic() - began_s
    return Found(
        validator="memory_bandwidth",
        figures={"memory_bytes_per_s": sum(moved) / took_s},
        words=f"{sum(moved) / took_s / 1e9:.1f} GB/s by {count} threads",
    )


def memory_patterns(limit_s: float, share_bytes: int) -> Found:
    """Patterns written to memory and read back."""
    test = write_and_read_memory(share_bytes, limit_s)
    faults: tuple[Finding, ...] = ()
    if test.wrong_words:
        words = f"{test.wrong_words} words were read back other than written, the first {test.first}"
        faults = (Finding(severity="high", cause="wrong_word", words=words, at_once=True),)
    return Found(
        validator="memory", faults=faults, words=f"{format_bytes(test.tested_bytes)} were read back as written"
    )


def allreduce_in_memory(limit_s: float, *, array_bytes: int = 16 * MIB, ranks: int | None = None) -> Found:
    """Sums of an array of each rank (a thread), chunk by chunk, into the arrays of all; as HFReduce adds on a node."""
    count = max(2, ranks if ranks is not None else min(processors(), 8))
    words = array_bytes // 4 // count * count
    sources = [np.arange(words, dtype=np.float32) % 1000 + rank for rank in range(count)]
    expected = np.arange(words, dtype=np.float32) % 1000 * count + sum(range(count))
    results = [np.zeros(words, np.float32) for _ in range(count)]
    chunk = words // count
    rounds = [0] * count
    barrier = threading.Barrier(count)
    wrong = [0] * count
    began_s = time.monotonic()

    def work(rank: int) -> None:
        mine = slice(rank * chunk, (rank + 1) * chunk)
        while True:
            total = sources[0][mine].copy()
            for source in sources[1:]:
                total += source[mine]
            for result in results:
                result[mine] = total
            barrier.wait()
            wrong[rank] += not np.array_equal(results[rank], expected)
            rounds[rank] += 1
            if rank == 0 and time.monotonic() >= began_s + limit_s:
                ended.set()
            barrier.wait()
            if ended.is_set():
                return

    ended = threading.Event()
    _in_threads(count, work)
    took_s = time.monotonic() - began_s
    faults: tuple[Finding, ...] = ()
    if sum(wrong):
        words_told = f"{sum(wrong)} of {sum(rounds)} sums over {count} ranks are wrong"
        faults = (Finding(severity="high", cause="wrong_result", words=words_told, at_once=True),)
    return Found(
        validator="allreduce",
        figures={"allreduce_bytes_per_s": rounds[0] * words * 4 / took_s},
        faults=faults,
        words=f"{rounds[0]} sums over {count} ranks are right",
    )


def repeat_computation(limit_s: float, *, disturb: Callable[[NDArray[np.uint64]], None] | None = None) -> Found:
    """The same computation again and again; its result has the same bits each time, and on each node: integers modulo
    2**64, and single operations of IEEE 754, which round in one way. `disturb`: for tests."""
    first, count, wrong = "", 0, 0
    ends_s = time.monotonic() + limit_s
    while not count or time.monotonic() < ends_s:
        digest = _computed(disturb)
        first = first or digest
        wrong += digest != first
        count += 1
    faults: tuple[Finding, ...] = ()
    if wrong:
        words = f"{wrong} of {count} repetitions of a computation give another result than the first"
        faults = (Finding(severity="high", cause="corruption", words=words, at_once=True),)
    return Found(
        validator="repeated", faults=faults, digests={"repeated_cpu": first}, words=f"{count} repetitions are equal"
    )


def _computed(disturb: Callable[[NDArray[np.uint64]], None] | None) -> str:
    words = np.arange(_DIGEST_WORDS, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    for _ in range(8):
        words ^= words >> np.uint64(29)
        words *= np.uint64(0xBF58476D1CE4E5B9)
        floats = (words >> np.uint64(12)).astype(np.float64) / 4503599627370496.0 + 1.0
        words ^= np.sqrt(floats * floats + floats).view(np.uint64)
        if disturb is not None:
            disturb(words)
    return hashlib.sha256(words.tobytes()).hexdigest()


def _in_threads(count: int, work: Callable[[int], None]) -> None:
    threads = [threading.Thread(target=work, args=(number,), daemon=True) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
