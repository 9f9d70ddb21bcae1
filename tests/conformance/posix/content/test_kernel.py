"""What the kernel has a part in, on a mount as on a local file system: descriptors, programs, memory, pipes, locks that
wait, and mounts that are read only."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from errno import EDEADLK, errorcode
from pathlib import Path

import pytest
from tests.support.fs.clusters.local_cluster import LocalCluster
from tests.support.patience import allowed_s
from tests.support.posix import kernel_calls
from tests.support.posix.local import LocalPlace
from tests.support.posix.real import mounted_place

pytestmark = [pytest.mark.slow, pytest.mark.processes, pytest.mark.timeout(300)]


@pytest.fixture
def model(local: LocalPlace | str) -> LocalPlace:
    if isinstance(local, str):
        pytest.skip(f"no file system to compare with: {local}")
    return local


@pytest.fixture
def other() -> Iterator[str]:
    """On a file system of its own."""
    with ExitStack() as stack:
        directory = f"/dev/shm/posix-{os.getpid()}"
        os.mkdir(directory)
        stack.callback(subprocess.run, ["rm", "-r", directory], check=True)
        yield directory


def said(what: str, directory: str, other: str, *before: str) -> dict[str, object]:
    command = [*before, sys.executable, "-I", "-S", kernel_calls.__file__, what, directory, other]
    done = subprocess.run(command, capture_output=True, text=True, timeout=allowed_s(120), check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert isinstance(found, dict)
    return found


def compare(model: dict[str, object], found: dict[str, object], *errnos: str) -> None:
    different = {name: (found.get(name), model[name]) for name in model if found.get(name) != model[name]}
    assert different == {}, "(is, should be)"
    assert found.keys() == model.keys()
    assert set(errnos) <= set(map(str, model.values()))


def test_calls_that_the_kernel_has_a_part_in(model: LocalPlace, mount: LocalPlace, other: str) -> None:
    places = [place.below("kernel") for place in (model, mount)]
    errnos = ["EBADF", "EACCES", "ENODEV", "ENXIO", "ESPIPE", "EXDEV", "EFBIG", "EINVAL", "ENOENT"]
    errnos += ["EADDRINUSE", "EAGAIN", "EISDIR", "ENOTDIR", "ENODATA"]
    results = [said("all", place, other) for place in places]
    assert results[0]["a circle of two who wait"] == [errorcode[EDEADLK], "ok"]
    compare(results[0], results[1], *errnos)


def test_nothing_is_changed_through_what_is_mounted_for_reading(
    model: LocalPlace, mount: LocalPlace, cluster: LocalCluster, tmp_path: Path, other: str
) -> None:
    places = [place.below("read-only") for place in (model, mount)]
    for place in places:
        said("to be read", place, other)
    bound = ["unshare", "--mount", "--propagation", "private", "sh", "-c"]
    bound += [f'mount --bind "{places[0]}" "{other}" && mount -o remount,bind,ro "{other}" && exec "$@"', "sh"]
    with mounted_place(cluster, str(tmp_path / "mount"), "--read-only") as reading:
        found = said("read only", reading.there("read-only"), other)
    compare(said("read only", other, other, *bound), found, "EROFS", "EEXIST", "ok")
