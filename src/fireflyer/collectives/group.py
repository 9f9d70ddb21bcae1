"""What measuring a group and keeping its plan need of a communicator: `Communicator` has it, and a test may stand in.

`communicator` makes groups with the plans that `job` keeps, and `job` has `tuning` measure a group that exists. Both
take a `Group`, so that neither imports `communicator`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from fireflyer.collectives.planning.plan import Plan
from fireflyer.collectives.work import Work

__all__ = ["Group"]


class Group(Protocol):
    """The methods are those of `Communicator`, and say there what they raise."""

    @property
    def rank(self) -> int: ...

    @property
    def world_size(self) -> int: ...

    @property
    def nodes(self) -> int: ...

    @property
    def plan(self) -> Plan: ...

    @property
    def hosts(self) -> Sequence[str]:
        """Of each rank."""

    def allreduce(self, array: Any) -> Work: ...

    def broadcast(self, array: Any, *, root: int = 0) -> Work: ...

    def send(self, array: Any, *, to: int, tag: int = 0, async_op: bool = False) -> Work: ...

    def recv(self, array: Any, *, source: int, tag: int = 0, async_op: bool = False) -> Work: ...

    def barrier(self) -> object: ...

    def close(self) -> None: ...
