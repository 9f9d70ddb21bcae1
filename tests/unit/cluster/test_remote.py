"""What a launcher runs on another machine: the directory of a job there."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from fireflyer.base.errors import FireflyerError
from fireflyer.cluster.supervisor.remote import make_private


def test_jobs_that_begin_at_once_on_a_machine_remove_nothing_of_each_other(tmp_path: Path) -> None:
    """Each removes what dead jobs have left; one that has no lock yet is not dead."""
    parent = tmp_path / "fireflyer-0"
    for number in range(40):
        names = [str(parent / f"{number}-{job}") for job in range(8)]
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(make_private, names))
        assert sorted(os.listdir(parent)) == sorted(os.path.basename(name) for name in names)
        release(parent)


def test_what_a_dead_job_has_left_is_removed_and_the_directory_of_a_living_one_is_refused(tmp_path: Path) -> None:
    parent = tmp_path / "fireflyer-0"
    make_private(str(parent / "dead"))
    release(parent)
    make_private(str(parent / "new"))
    assert os.listdir(parent) == ["new"]
    with pytest.raises(FireflyerError):
        make_private(str(parent / "new"))
    release(parent)


def release(parent: Path) -> None:
    """As when a job dies: its guard held the lock open."""
    for name in os.listdir("/proc/self/fd"):
        try:
            if os.readlink(f"/proc/self/fd/{name}").startswith(f"{parent}{os.sep}"):
                os.close(int(name))
        except OSError:
            continue
