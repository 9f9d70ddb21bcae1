"""States of a gang and of its nodes; what leads from one to the next is explained in `gang`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

from fireflyer.cluster.schema.wire import RankEnd

__all__ = ["IN_ATTEMPT", "WATCHED", "Node", "NodeState", "Phase", "quiet"]


class Phase(Enum):
    STARTING = auto()
    PREPARING = auto()
    RUNNING = auto()
    STOPPING = auto()
    PAUSING = auto()
    ENDING = auto()
    FINISHED = auto()


class NodeState(Enum):
    DOWN = auto()
    COMING = auto()
    IDLE = auto()
    BUSY = auto()
    STOPPING = auto()
    KILLING = auto()
    LEAVING = auto()


_QUIET = (NodeState.DOWN, NodeState.COMING, NodeState.IDLE)
"""No rank of any attempt runs on such a node."""
WATCHED = (NodeState.IDLE, NodeState.BUSY, NodeState.STOPPING)
"""Its supervisor must show signs of life."""
ENDED = (NodeState.DOWN, NodeState.KILLING, NodeState.LEAVING)
"""Its supervisor is gone, or is to go: that it is lost is no failure."""
IN_ATTEMPT = (Phase.STARTING, Phase.PREPARING, Phase.RUNNING)


@dataclass(slots=True)
class Node:
    number: int
    state: NodeState = NodeState.DOWN
    incarnation: int = 0
    seen_ns: int = 0
    deadline_ns: int = 0
    """Meaning by state: COMING must be up, STOPPING quiet, KILLING and LEAVING gone by then."""
    host: int = 0
    renewed_ns: int | None = None
    """When the lease of this incarnation was granted last; None: it was given no command yet."""
    ends: dict[int, RankEnd] = field(default_factory=dict)
    """Ranks of the current attempt that have ended."""


def quiet(nodes: Sequence[Node]) -> bool:
    """No rank of any attempt runs."""
    return all(node.state in _QUIET for node in nodes)
