"""Directories that users of a node have filled: how large they are, and their removal, whatever is in them.

`os.walk` and `shutil.rmtree` of Python 3.11 call themselves for each level and raise `RecursionError` at a thousand,
which is no `OSError`: a user could end who removes what they have left.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import subprocess
from typing import Final

__all__ = ["remove_tree", "tree_bytes"]

_log = logging.getLogger(__name__)
_UNMEASURED: Final = 1 << 62


def tree_bytes(path: str) -> int:
    """While others write there, too. What is too deep to be looked at counts as more than there may be."""
    total = 0
    left = [path]
    while left:
        try:
            with os.scandir(left.pop()) as entries:
                for entry in entries:
                    with contextlib.suppress(FileNotFoundError):
                        if entry.is_dir(follow_symlinks=False):
                            left.append(entry.path)
                        else:
                            total += entry.stat(follow_symlinks=False).st_size
        except OSError as error:
            if error.errno == errno.ENAMETOOLONG:
                return _UNMEASURED
    return total


def remove_tree(path: str) -> None:
    """Follows no link. What cannot be removed is in the log."""
    done = subprocess.run(["rm", "-rf", "--", path], stdin=subprocess.DEVNULL, capture_output=True, check=False)
    if done.returncode:
        _log.warning("a directory was not removed path=%s reason=%s", path, done.stderr[:200].decode(errors="replace"))
