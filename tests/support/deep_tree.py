"""A directory that is deeper than a path may be long."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["deep_tree"]

LEVELS = 2500


@contextmanager
def deep_tree(path: str) -> Iterator[None]:
    """Makes it below `path`. What is left at the end is removed: pytest could not."""
    fd = os.open(path, os.O_RDONLY)
    try:
        for _ in range(LEVELS):
            os.mkdir("d", dir_fd=fd)
            below = os.open("d", os.O_RDONLY, dir_fd=fd)
            os.close(fd)
            fd = below
    finally:
        os.close(fd)
    try:
        yield
    finally:
        subprocess.run(["rm", "-rf", "--", os.path.join(path, "d")], check=True)
