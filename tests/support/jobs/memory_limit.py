"""A control group of the real kernel with a limit on memory, for jobs that are killed by it."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.patience import allowed_s

__all__ = ["limited_memory"]

_ROOT = Path("/sys/fs/cgroup")


@contextlib.contextmanager
def limited_memory(limit_bytes: int) -> Iterator[Path]:
    """The file into which a process writes its number to be in the group. Skips the test where none can be made: only
    root can, and where the control groups are mounted so that they can be written."""
    version_1 = (_ROOT / "memory").is_dir()
    group = (_ROOT / "memory" if version_1 else _ROOT) / f"fireflyer-test-{os.getpid()}"
    limit = "memory.limit_in_bytes" if version_1 else "memory.max"
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"no control group can be made here: {error}")
    try:
        try:
            (group / limit).write_text(str(limit_bytes))
        except OSError as error:  # of version 2 where the controller is not on for groups below the root
            pytest.skip(f"control groups have no limit on memory here: {error}")
        with contextlib.suppress(OSError):  # a kernel without swap has no such file
            (group / "memory.swap.max").write_text("0")
        with contextlib.suppress(OSError):
            (group / "memory.memsw.limit_in_bytes").write_text(str(limit_bytes))
        yield group / "cgroup.procs"
    finally:
        _remove(group)


def _remove(group: Path) -> None:
    """When its last process has ended."""
    deadline_s = time.monotonic() + allowed_s(10)
    while True:
        try:
            group.rmdir()
            return
        except OSError:
            if time.monotonic() > deadline_s:
                raise
            time.sleep(0.01)
