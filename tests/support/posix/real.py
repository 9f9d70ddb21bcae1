"""Mounts of a cluster as places."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from tests.support.fs_local import LocalCluster
from tests.support.mounting import missing, mounted
from tests.support.posix.local import LocalPlace

__all__ = ["mounted_place"]


@contextmanager
def mounted_place(cluster: LocalCluster, directory: str) -> Iterator[LocalPlace]:
    """Trusted, and open to all. Skips the test where there are no mounts."""
    if missing():
        pytest.skip(missing())
    os.makedirs(directory, exist_ok=True)
    ff = [sys.executable, "-P", "-m", "fireflyer", "fs", "mount", directory]
    with mounted([*ff, "--dir", str(cluster.directory), "--allow-other"], directory) as found:
        place = LocalPlace(found.path, "mount")
        try:
            yield place
        finally:
            place.close()
