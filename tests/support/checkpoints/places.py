"""Where tests put checkpoints: in a directory of this machine, or in a cluster of 3FS on it."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.checkpoints.states import flip
from tests.support.fs.clusters.local_cluster import LocalCluster

from fireflyer.checkpoint import open_storage, storage
from fireflyer.checkpoint.core.manifest import Manifest
from fireflyer.checkpoint.core.names import candidates
from fireflyer.checkpoint.engine.directory import read_manifest

__all__ = ["checkpoint_parent", "disconnected", "flip_stored", "manifest_of"]


@pytest.fixture(scope="module", autouse=True)
def disconnected() -> Iterator[None]:
    """Nothing of this module asks a cluster for anything when that is gone."""
    yield
    disks: Any = storage._disks
    while disks:
        disks.popitem()[1]._files.close()


@pytest.fixture
def checkpoint_parent(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Where nobody has saved yet: a "directory" or "3fs", as the parameter says."""
    if request.param == "directory":
        return str(tmp_path)
    cluster: LocalCluster = request.getfixturevalue("shared_cluster")
    return cluster.url(f"/ckpt-{secrets.token_hex(8)}")


def manifest_of(directory: str, step: int) -> Manifest:
    disk, root, _ = open_storage(directory)
    (candidate,) = candidates([f"step-{step:08d}"])
    return read_manifest(disk, root, candidate)


def flip_stored(path: str, offset: int) -> None:
    """One bit of a file."""
    found: Any = open_storage(path)
    if storage.is_remote(path):
        with found.disk._files.open_file(found.root, os.O_RDWR) as file:
            (byte,) = file.pread(offset, 1)
            file.pwrite(bytes([byte ^ 1]), offset)
    else:
        flip(Path(path), offset)
