"""Which cluster is meant where nothing names one: that which was started from the working directory.

The order, for commands and for libraries: what an option names; the environment variable FIREFLYER_FS; the first of
these directories that holds a cluster.

And who asks, where no option says it and the cluster is named by its managers: whose token is in the file that
FIREFLYER_FS_TOKEN_FILE names; else, in a task of the platform, its run (FF_TOKEN_FILE).
"""

from __future__ import annotations

import os
from typing import Final

from fireflyer.base.errors import UsageError
from fireflyer.fs.tools.addresses import SCHEME

__all__ = ["DIRECTORIES", "TARGET_VARIABLE", "TOKEN_FILE_VARIABLE", "default_target", "default_token_file"]
__all__ += ["require_target"]

TARGET_VARIABLE: Final = "FIREFLYER_FS"
TOKEN_FILE_VARIABLE: Final = "FIREFLYER_FS_TOKEN_FILE"  # noqa: S105 - its name
DIRECTORIES: Final = ("fs", os.path.join("platform", "storage"))
"""In the working directory: where `ff fs up` and `ff up` make a cluster that was given no other place."""


def require_target(given: str | None = None) -> str:
    """For libraries: what is given, else what the environment names, else the default. Raises `UsageError`."""
    target = given or os.environ.get(TARGET_VARIABLE) or default_target()
    if not target:
        raise UsageError(
            "no cluster is named, and none was started here (`ff fs up -d`): name one in the path, as "
            f"ff://host:7000/path, or in the environment variable {TARGET_VARIABLE} (in Python also by target)"
        )
    return target


def default_target() -> str | None:
    """`ff:///directory`, or None where there is none of them."""
    for one in DIRECTORIES:
        if os.path.exists(os.path.join(one, "cluster.json")):
            return SCHEME + os.path.abspath(one)
    return None


def default_token_file() -> str | None:
    """For a cluster that is named by its managers; None where nothing names one."""
    return os.environ.get(TOKEN_FILE_VARIABLE) or os.environ.get("FF_TOKEN_FILE") or None
