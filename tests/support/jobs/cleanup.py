"""What outlives by design who started it, as a cluster of `ff fs up --detach` does, ends with the test process all the
same, however that one went.

A watcher, one for each test process, is told on a pipe what to run. Only the test process has the other end (its forks
as well, while they live), so the kernel tells the watcher when it is gone; then it runs what was not taken back.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Final

__all__ = ["clean_up_at_exit", "cleaned_up_at_exit"]

END_S: Final = 120.0
_numbers: Final = itertools.count(1)
_lock: Final = threading.Lock()
_watchers: Final[dict[int, subprocess.Popen[bytes]]] = {}
"""By the process that started it: a fork has one of its own."""


def clean_up_at_exit(command: Sequence[str]) -> Callable[[], None]:
    """`command` is run when this process is gone, unless what is returned is called before. With absolute paths: it is
    run in the directory that this process is in now."""
    number = next(_numbers)
    _tell(number, command)
    return lambda: _tell(number, ())


@contextlib.contextmanager
def cleaned_up_at_exit(command: Sequence[str]) -> Iterator[None]:
    """The same until the end of the block, which ends by itself what it began."""
    release = clean_up_at_exit(command)
    try:
        yield
    finally:
        release()


def _tell(number: int, command: Sequence[str]) -> None:
    with _lock:
        watcher = _watchers.get(os.getpid())
        if watcher is None:
            watcher = _watchers[os.getpid()] = _start()
        assert watcher.stdin is not None
        watcher.stdin.write(json.dumps([number, *command]).encode() + b"\n")
        watcher.stdin.flush()


def _start() -> subprocess.Popen[bytes]:
    """In a session of its own: what is sent to the group of this process, or to its terminal, is not for the watcher.
    It has none of its files either, or who reads the output of the tests would wait for it."""
    nothing = subprocess.DEVNULL
    command = [sys.executable, "-P", os.path.abspath(__file__)]
    watcher = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=nothing, stderr=nothing, start_new_session=True)

    def end() -> None:
        if _watchers.pop(os.getpid(), None) is watcher:
            watcher.communicate(timeout=END_S)

    atexit.register(end)
    return watcher


def watch() -> None:
    """The watcher."""
    held: dict[int, list[str]] = {}
    for line in sys.stdin.buffer:
        number, *command = json.loads(line)
        if command:
            held[number] = command
        else:
            held.pop(number, None)
    for command in held.values():
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            subprocess.run(command, stdin=subprocess.DEVNULL, timeout=END_S, check=False)


if __name__ == "__main__":
    watch()
