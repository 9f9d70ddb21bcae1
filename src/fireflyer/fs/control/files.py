"""The way to the meta service: one RPC method, at a manager's address or at one of its own (`GetMetaServices`)."""

from __future__ import annotations

from typing import Final

from fireflyer.fs.schema.meta import Answers, Calls
from fireflyer.runtime.rpc import Method

__all__ = ["META"]

META: Final[Method[Calls, Answers]] = Method("fs.meta", Calls, Answers)
