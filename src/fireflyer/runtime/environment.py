"""Reads what the environment tells a rank; libraries are given the `RankEnvironment` that it makes."""

from __future__ import annotations

import os

from fireflyer.base.launch import RankEnvironment

__all__ = ["read_environment"]


def read_environment() -> RankEnvironment:
    """Read what `ff run` or `torchrun` told this process; rank 0 of 1 when started by hand. Raises `UsageError`."""
    return RankEnvironment.from_mapping(os.environ)
