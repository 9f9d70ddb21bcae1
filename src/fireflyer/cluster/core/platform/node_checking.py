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


class NodeChecking:
    """What is in force: one for all that a manager decides."""

    def __init__(self, checks: Checks | None = None) -> None:
        self.now = checks or Checks()

    def order_of(self, group: str) -> HealthOrder | None:
        """For nodes of a group; None: they are not checked."""
        return self.now.order if not self.now.groups or group in self.now.groups else None
