"""When, where and by whom a checkpoint is saved, for its manifest."""

from __future__ import annotations

import getpass
import importlib.metadata
import platform
import time
from functools import cache

from fireflyer.checkpoint.core.manifest import Saved

__all__ = ["saved_now"]


def saved_now() -> Saved:
    """By this process's user, on this machine, now by its wall clock."""
    return Saved(time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), _user(), platform.node(), _program())


@cache
def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a uid without a name, as in many containers
        return ""


@cache
def _program() -> str:
    try:
        return f"fireflyer {importlib.metadata.version('fireflyer')}"
    except importlib.metadata.PackageNotFoundError:
        return "fireflyer"
