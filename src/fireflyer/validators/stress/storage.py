"""Storage under load: a file is written past the page cache, synced, read back and compared."""

from __future__ import annotations

import mmap
import os
import tempfile
import time
from typing import Final

import numpy as np

from fireflyer.base.units import MIB, format_bytes
from fireflyer.validators.core.checks.evidence import Finding
from fireflyer.validators.core.validation.records import Found

__all__ = ["stress_storage"]

_BLOCK_BYTES: Final = 4 * MIB


def stress_storage(directory: str, limit_s: float, file_bytes: int = 512 * MIB) -> Found:
    """Writes and reads at most `file_bytes` for `limit_s`. An error of the disk is a fault."""
    buffer = mmap.mmap(-1, _BLOCK_BYTES)  # aligned, as O_DIRECT needs it
    try:
        with tempfile.NamedTemporaryFile(prefix=".fireflyer-validate-", dir=directory) as file:
            fd = _direct(file.name)
            try:
                return _measured(fd, buffer, directory, limit_s, file_bytes)
            finally:
                os.close(fd)
    except OSError as error:
        reason = f"{directory}: {(error.strerror or str(error)).lower()}"
        return Found(validator="storage", could_not_run=reason)


def _direct(path: str) -> int:
    try:
        return os.open(path, os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC)
    except OSError:  # a file system without it, as tmpfs
        return os.open(path, os.O_RDWR | os.O_CLOEXEC)


def _measured(fd: int, buffer: mmap.mmap, directory: str, limit_s: float, file_bytes: int) -> Found:
    view = np.frombuffer(buffer, np.uint64)
    blocks = max(file_bytes // _BLOCK_BYTES, 1)
    began_s = time.monotonic()
    written = 0
    try:
        while written < blocks and (not written or time.monotonic() < began_s + limit_s / 2):
            view[:] = _pattern(written)
            os.pwrite(fd, buffer, written * _BLOCK_BYTES)
            written += 1
        os.fsync(fd)
        write_s = time.monotonic() - began_s
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        began_s = time.monotonic()
        wrong = 0
        for block in range(written):
            if os.preadv(fd, [buffer], block * _BLOCK_BYTES) != _BLOCK_BYTES:
                wrong += 1
                continue
            wrong += not np.array_equal(view, _pattern(block))
        read_s = time.monotonic() - began_s
    except OSError as error:
        words = f"{directory}: {(error.strerror or str(error)).lower()}"
        part = f"mount:{directory}"
        return Found(validator="storage", faults=(Finding(severity="high", part=part, cause="error", words=words),))
    faults: tuple[Finding, ...] = ()
    if wrong:
        words = f"{directory}: {wrong} of {written} blocks were read back other than written"
        faults = (Finding(severity="high", part=f"mount:{directory}", cause="wrong_block", words=words, at_once=True),)
    total = written * _BLOCK_BYTES
    figures = {"storage_write_bytes_per_s": total / write_s, "storage_read_bytes_per_s": total / read_s}
    return Found(
        validator="storage", figures=figures, faults=faults, words=f"{directory}: {format_bytes(total)} read as written"
    )


def _pattern(block: int) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
    words = np.arange(_BLOCK_BYTES // 8, dtype=np.uint64)
    return (words + np.uint64(block * 0x1000003)) * np.uint64(0x9E3779B97F4A7C15)
