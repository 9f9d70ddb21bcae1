"""Which cluster is meant where nothing names one: that which was started from the working directory.

The order, for commands and for libraries: what an option names; the environment variable FIREFLYER_FS; the first of
these directories that holds a cluster.
"""

from __future__ import annotations

import os
from typing import Final

from fireflyer.base.errors import UsageError
from fireflyer.fs.tools.addresses import SCHEME

__all__ = ["DIRECTORIES", "TARGET_VARIABLE", "default_target", "require_target"]

TARGET_VARIABLE: Final = "FIREFLYER_FS"
DIRECTORIES: Final = ("fs", os.path.join("platform", "storage"))
"""In the working directory: where `ff fs up` and `ff up` make a cluster that was given no other place."""


def require_target(given: str | None = None) -> str:
    """For libraries: what is given, else what the environment names, else the default. Raises `UsageError`."""
    target = given or os.environ.get(TARGET_VARIABLE) or default_target()
    if not target:
        raise UsageError(
            "no cluster is named, and none was started here (`ff fs up -d`); use ff://host:7000/path, the option "
            f"target, or the environment variable {TARGET_VARIABLE}"
        )
    return target


def default_target() -> str | None:
    """`ff:///directory`, or None where there is none of them."""
    for one in DIRECTORIES:
        if os.path.exists(os.path.join(one, "cluster.json")):
            return SCHEME + os.path.abspath(one)
    return None
