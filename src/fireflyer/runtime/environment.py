"""The one reader of the process environment; everything else is given a `RankEnvironment`."""

from __future__ import annotations

import os

from fireflyer.base.launch import RankEnvironment

__all__ = ["read_environment"]


def read_environment() -> RankEnvironment:
    """What `ff run` or `torchrun` told this process; rank 0 of 1 when started by hand. Raises `UsageError`."""
    return RankEnvironment.from_mapping(os.environ)
