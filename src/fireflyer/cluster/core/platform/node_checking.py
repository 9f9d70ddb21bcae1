"""Which nodes are checked, how, and what becomes of what they report. It changes while managers run."""

from __future__ import annotations

import msgspec

from fireflyer.cluster.core.health.policy import HealthPolicy
from fireflyer.cluster.schema.sync import HealthOrder

__all__ = ["Checks", "NodeChecking"]


class Checks(msgspec.Struct, frozen=True, kw_only=True):
    """As the configuration of managers says it."""

    policy: HealthPolicy = HealthPolicy()
    order: HealthOrder | None = None
    """None: no node is checked, and what former checks have led to does not count."""
    groups: tuple[str, ...] = ()
    """Of nodes that are checked; of others the same is true as where none is. Empty: all."""
    by_group: dict[str, HealthOrder | None] = {}
    """How nodes of these groups are checked, whatever `order` and `groups` say; None: they are not."""

    def any_node(self) -> bool:
        """True if nodes of some group are checked."""
        return any(order is not None for order in (self.order, *self.by_group.values()))


class NodeChecking:
    """What is in force: one for all that a manager decides."""

    def __init__(self, checks: Checks | None = None) -> None:
        self.now = checks or Checks()

    def order_of(self, group: str) -> HealthOrder | None:
        """For nodes of a group; None: they are not checked."""
        if group in self.now.by_group:
            return self.now.by_group[group]
        return self.now.order if not self.now.groups or group in self.now.groups else None
