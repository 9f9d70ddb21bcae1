"""What the agent of a run's first node and the launcher that it starts there tell each other, by files and descriptors.

The agent gives `RunnerOrders` in a descriptor that the launcher inherits. In the run directory the launcher leaves
`PROGRESS_NAME` (`RunProgress`) while it runs and `RESULT_NAME` (`sync.EndedRun`) when it has ended; both are replaced
atomically. The directory belongs to the account of the run, so the agent reads them as a stranger's.
"""

from __future__ import annotations

from typing import Annotated, Final

import msgspec

from fireflyer.cluster.schema.job import MAX_NODES
from fireflyer.cluster.schema.sync import LaunchOrder

__all__ = [
    "COPY_MARK",
    "ENVIRONMENT_END",
    "PROGRESS_NAME",
    "RESULT_NAME",
    "TOKEN_NAME",
    "OpenedTicket",
    "RunProgress",
    "RunnerOrders",
]

PROGRESS_NAME: Final = "progress.json"
RESULT_NAME: Final = "result.json"
TOKEN_NAME: Final = "token"  # noqa: S105
"""File with the user's token for this run, mode 0600."""


_Ns = Annotated[int, msgspec.Meta(ge=0, le=1 << 62)]
COPY_MARK: Final = "snapshot:"
"""Before the hash of a snapshot: stands for the copy that a node has for the run, which has another path on each node.
The agents of nodes that are reached by ticket replace it."""
ENVIRONMENT_END: Final = ".environment"
"""After the name of a run's copy: a link beside it, to the environment that the node has built. From the working
directory its path is the same on all nodes."""


class OpenedTicket(msgspec.Struct, frozen=True):
    """Opened: see `cluster.schema.tickets`."""

    identity: str
    key: bytes

    def __repr__(self) -> str:
        return f"OpenedTicket({self.identity})"


class RunnerOrders(msgspec.Struct, frozen=True, kw_only=True):
    run_token: str
    order: LaunchOrder
    """Without what was sealed in it."""
    directory: str
    """Of the run; made by the agent."""
    tickets: Annotated[tuple[OpenedTicket, ...], msgspec.Meta(max_length=MAX_NODES)] = ()
    """One for each node of the order; empty for a run on one node, whose launcher starts the ranks itself."""
    token: str = ""
    """Of the user, for this run."""
    workdir: str = ""
    """The copy of the run's snapshot on this node; empty: the task has none."""
    logs_bytes: Annotated[int, msgspec.Meta(ge=0)] = 0
    """At most so much of what ranks print is kept in `directory`. 0: all."""


class RunProgress(msgspec.Struct, frozen=True, kw_only=True):
    attempt: Annotated[int, msgspec.Meta(ge=0, le=1 << 40)]
    """Whose ranks were started last."""
    step: Annotated[int, msgspec.Meta(ge=0, le=1 << 53)] | None = None
    """Last reported."""
    asks: bool = False
    """Ranks have asked whether they are to leave."""
    saved_at_ns: _Ns | None = None
    """When the state was taken that the last committed checkpoint holds, on the node's clock since its boot."""
    save_ns: _Ns | None = None
    """What that took until it was committed."""
    start_ns: _Ns | None = None
    """From the start of the ranks until the last one had restored its state."""
