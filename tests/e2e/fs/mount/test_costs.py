"""What programs on a mount cost the meta service: counted by what the kernel asks, so that no clock is in it."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from tests.support.fs.mounts.counted_mount import Counts, counted_mount
from tests.support.fs.mounts.mounting import Mount, needs_fuse

pytestmark = [needs_fuse, pytest.mark.slow, pytest.mark.processes]
FILES = 50


def costs(place: Path, program: Callable[[Mount], None]) -> Counts:
    with counted_mount(place) as mount:
        program(mount)
        mount.unmount()
        return msgspec.json.decode(mount.end().splitlines()[-1], type=Counts)


def test_a_new_file_is_two_commits_since_nobody_waits_for_its_close(tmp_path: Path) -> None:
    def program(mount: Mount) -> None:
        for number in range(FILES):
            Path(mount.path, f"file-{number}").write_bytes(b"x" * 100)

    counts = costs(tmp_path / "place", program)
    assert counts.changes == {"Open": FILES, "Report": FILES, "Close": FILES}
    assert counts.updates == FILES
    assert counts.transactions <= 2 * FILES


def test_times_that_are_set_before_the_close_cost_nothing_more_than_the_length(tmp_path: Path) -> None:
    """As `tar -x` and `rsync` do."""

    def program(mount: Mount) -> None:
        for number in range(FILES):
            with open(os.path.join(mount.path, f"file-{number}"), "wb", buffering=0) as file:
                file.write(b"x" * 100)
                os.utime(file.fileno(), ns=(1, 2))

    counts = costs(tmp_path / "place", program)
    assert counts.changes == {"Open": FILES, "SetAttributes": FILES, "Close": FILES}
    assert counts.transactions <= 2 * FILES
