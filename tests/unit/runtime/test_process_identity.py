"""Which process is meant: number, start and boot together."""

from __future__ import annotations

import os
import subprocess
import sys

import msgspec

from fireflyer.runtime.processes.identity import boot_id, identity_of, open_process


def test_a_process_is_found_as_long_as_it_lives() -> None:
    with subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE) as process:
        identity = identity_of(process.pid)
        assert identity is not None
        fd = open_process(identity)
        assert fd is not None
        os.close(fd)
        process.kill()
    assert open_process(identity) is None


def test_another_process_of_the_same_number_is_not_taken_for_it() -> None:
    mine = identity_of(os.getpid())
    assert mine is not None
    assert mine.boot_id == boot_id() != ""
    before = len(os.listdir("/proc/self/fd"))
    assert open_process(msgspec.structs.replace(mine, start_ticks=mine.start_ticks - 1)) is None
    assert open_process(msgspec.structs.replace(mine, boot_id="another")) is None
    assert len(os.listdir("/proc/self/fd")) == before
