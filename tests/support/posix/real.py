"""Mounts of a cluster as places."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import pytest
from tests.support.fs.clusters.local_cluster import LocalCluster
from tests.support.fs.mounts.mounting import missing, mounted
from tests.support.posix.local import LocalPlace
from tests.support.posix.places import Identity

__all__ = ["SeveralMounts", "mounted_place"]

_UNKEPT: Final = """
import sys
from fireflyer.cli import main
from fireflyer.fs.mount.serving import Serving
Serving.__init__.__kwdefaults__["valid_s"] = 0.0
sys.exit(main(["fs", "mount", *sys.argv[1:]]))
"""
"""A mount of which the kernel keeps no names and no attributes for a second: that of others is seen at once."""


class SeveralMounts:
    """One place; each user's process always works through the same one of them."""

    def __init__(self, mounts: Sequence[LocalPlace]) -> None:
        self.name = f"{len(mounts)} mounts"
        self._mounts = mounts

    @property
    def top(self) -> str:
        return self._mounts[0].top

    def renew(self, top: str) -> None:
        first, *others = self._mounts
        first.renew(top)
        for one in others:
            one.enter(top)

    def call(self, who: Identity, name: str, arguments: tuple[Any, ...]) -> object:
        return self._mounts[(who.uid + who.process) % len(self._mounts)].call(who, name, arguments)

    def tick(self) -> None:
        self._mounts[0].tick()


@contextmanager
def mounted_place(cluster: LocalCluster, directory: str, *options: str, kept: bool = True) -> Iterator[LocalPlace]:
    """Trusted, and open to all. Skips the test where there are no mounts."""
    if missing():
        pytest.skip(missing())
    os.makedirs(directory, exist_ok=True)
    how = ["-m", "fireflyer", "fs", "mount"] if kept else ["-c", _UNKEPT]
    with mounted(
        [sys.executable, "-P", *how, directory, "--dir", str(cluster.directory), "--allow-other", *options], directory
    ) as found:
        place = LocalPlace(found.path, "mount")
        try:
            yield place
        finally:
            place.close()
