"""How health events are acted on: what the site sets."""

from __future__ import annotations

from typing import Annotated

import msgspec

from fireflyer.base.errors import UsageError
from fireflyer.base.units import SECOND

__all__ = ["CheckNames", "HealthPolicy"]

_Ns = Annotated[int, msgspec.Meta(ge=0, le=1 << 62)]
_Count = Annotated[int, msgspec.Meta(ge=1, le=1000)]
_Check = Annotated[str, msgspec.Meta(pattern=r"^[a-z][a-z0-9_]{0,63}$")]
CheckNames = Annotated[tuple[_Check, ...], msgspec.Meta(max_length=64)]


class HealthPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """The same for all managers of a cluster. Raises `UsageError`."""

    version: Annotated[int, msgspec.Meta(ge=0, le=1 << 53)] = 0
    """The site counts it up with each change; nodes and operators are shown it."""
    breaker_share: Annotated[float, msgspec.Meta(ge=0.0, le=1.0)] = 0.05
    """The machine drains no more than this share of all nodes, but one in any case."""
    probes: _Count = 3
    """That must all fail before a fault is acted on which is not certain at once (`HealthEvent.at_once`)."""
    probe_spacing_ns: _Ns = 4 * SECOND
    """From the answer to one probe to the next probe: three of a fast check are within 10 s."""
    probe_limit_ns: _Ns = 120 * SECOND
    """A probe that was not answered for so long came to no result; a node waits so long at most for its checks after a
    run failed on it."""
    flaps: _Count = 5
    """So many faults of one part, each of which was over when it was probed, within `flap_window_ns`, are a fault."""
    flap_window_ns: _Ns = 3600 * SECOND
    leaf_links: _Count = 3
    """Nodes of one leaf that lost their links within `leaf_window_ns`: then the leaf is suspect, not the nodes."""
    leaf_window_ns: _Ns = 600 * SECOND
    link_checks: CheckNames = ("infiniband", "ethernet")
    required: CheckNames = ()
    """Checks that must pass before a node returns, beside the one that failed."""
    group_required: Annotated[dict[str, CheckNames], msgspec.Meta(max_length=64)] = {}
    """Instead of `required`, for nodes of these groups."""
    test_every_ns: _Ns = 30 * SECOND
    """The checks of a node that is tested are repeated so often, until they have passed."""
    repeat_window_ns: _Ns = 28 * 86_400 * SECOND
    """Faults of one part within this time count as repeated: the next remedy of its cause is due."""
    back_off_ns: _Ns = 600 * SECOND
    """How long a node is tested at least whose part failed a second time; doubles with each further fault."""
    back_off_most_ns: _Ns = 86_400 * SECOND
    probation_ns: _Ns = 3600 * SECOND
    """After its return: only then its ticket counts as settled, and a fault before is one of the same repair."""

    def required_of(self, group: str) -> tuple[str, ...]:
        """Checks that must pass before a node of the group returns, beside the one that failed."""
        return self.group_required.get(group, self.required)

    def __post_init__(self) -> None:
        for name in ("probe_limit_ns", "test_every_ns", "repeat_window_ns"):
            if getattr(self, name) <= 0:
                raise UsageError(f"health: {name} must be above 0")
