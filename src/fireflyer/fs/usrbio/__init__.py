"""The user-space interface of 3FS, over ours: programs that read and write through it run unchanged.

    import fireflyer.fs.usrbio as usrbio
    usrbio.register()                       # before the program imports hf3fs_fuse.io or hf3fs_py_usrbio

A program opens files in a mount as usual, registers their descriptors, and reads and writes through rings, past the
mount, between the storage nodes and its own memory. Names and behaviour are those of `hf3fs_fuse.io`:
`make_iovec`, `make_ioring`, `register_fd`, `deregister_fd`, `extract_mount_point`, `force_fsync`, `read_file`, and of a
ring `prepare`, `submit` and `wait`. Which cluster a mount point belongs to is what the mount says of itself, or
`attach(mount_point, files)`.

Two things are different on purpose. A ring with `io_depth` below 0 and a timeout does send what it has when the time is
up; and nothing is left behind in shared memory or in the mount by a ring or a vector that goes away.
"""

from __future__ import annotations

import sys
import types
from typing import Final

from fireflyer.fs.usrbio.mounts import attach, deregister_fd, detach, extract_mount_point, force_fsync, register_fd
from fireflyer.fs.usrbio.rings import IorPriority, Result, ioring, iovec, make_ioring, make_iovec, read_file

__all__ = ["PACKAGES", "IorPriority", "Result", "attach", "deregister_fd", "detach", "extract_mount_point"]
__all__ += ["force_fsync", "ioring", "iovec", "make_ioring", "make_iovec", "read_file", "register", "register_fd"]

PACKAGES: Final = ("hf3fs_fuse", "hf3fs_fuse.io", "hf3fs_py_usrbio")


def register() -> None:
    """Makes `import hf3fs_fuse.io` and `import hf3fs_py_usrbio` give this module, in this process. One that is really
    installed and imported already stays: then nothing is changed, and `ImportError` says so."""
    here = sys.modules[__name__]
    for name in PACKAGES:
        there = sys.modules.get(name, here)
        if here not in (there, getattr(there, "io", None)):
            raise ImportError(f"another {name} is imported already; call register() before it is imported")
    package = types.ModuleType(PACKAGES[0], "fireflyer.fs.usrbio under the name that its users know.")
    package.__path__ = []
    package.io = here  # type: ignore[attr-defined]
    sys.modules[PACKAGES[0]] = package
    for name in PACKAGES[1:]:
        sys.modules[name] = here
