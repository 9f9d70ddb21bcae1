"""Which cluster is meant where nothing names one: that which was started from the working directory.

The order, for commands and for libraries: what an option names; the environment variable FIREFLYER_FS; the first of
these directories that holds a cluster.

And who asks, where no option says it: in a task of the platform the run, by the token whose file FF_TOKEN_FILE names.
"""

from __future__ import annotations

import os
from typing import Final

from fireflyer.fs.tools.addresses import SCHEME

__all__ = ["DIRECTORIES", "default_target", "default_token_file"]

DIRECTORIES: Final = ("fs", os.path.join("platform", "storage"))
"""In the working directory: where `ff fs up` and `ff up` make a cluster that was given no other place."""


def default_target() -> str | None:
    """`ff:///directory`, or None where there is none of them."""
    for one in DIRECTORIES:
        if os.path.exists(os.path.join(one, "cluster.json")):
            return SCHEME + os.path.abspath(one)
    return None


def default_token_file() -> str | None:
    """For a cluster that is named by its managers; None outside of tasks."""
    return os.environ.get("FF_TOKEN_FILE") or None
