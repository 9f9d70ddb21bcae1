"""What limits a user, and how much of it is used."""

from __future__ import annotations

from collections.abc import Iterator

from fireflyer.cluster.core.platform.store.ledger import Ledger
from fireflyer.cluster.core.platform.submissions import highest_priority
from fireflyer.cluster.core.platform.views import LimitUse, QuotaView
from fireflyer.cluster.core.scheduler.limits import Limits
from fireflyer.cluster.core.scheduler.model import LimitKind, Request
from fireflyer.cluster.schema.tasks import FINISHED

__all__ = ["limits_in_use", "quota_of"]


def quota_of(ledger: Ledger, usage: dict[str, float], user: str, group: str) -> QuotaView:
    config, limits = ledger.config, _taken(ledger)
    tasks = ledger.tasks.committed
    return QuotaView(
        user=user,
        group=group,
        nodes=sum(tasks[place.task].user == user for place in ledger.places.committed.values()),
        unfinished=sum(row.user == user and row.state is not FINISHED for row in tasks.values()),
        node_seconds=usage.get(user, 0.0),
        share=config.shares.get(user, 0.0),
        highest_priority=highest_priority(config, user),
        limits=tuple(
            LimitUse(limit=limits.limits[key[0]], user=key[1], used=limits.used(key)) for key in limits.of(user, group)
        ),
    )


def limits_in_use(ledger: Ledger) -> Iterator[LimitUse]:
    """All limits; that of each user once for each user who has nodes that it counts."""
    limits = _taken(ledger)
    for number, limit in enumerate(limits.limits):
        if limit.kind is not LimitKind.EACH:
            yield LimitUse(limit=limit, user="", used=limits.used((number, "")))
            continue
        found = sorted(limits.users_of(number))
        for key in found or [(number, "")]:
            yield LimitUse(limit=limit, user=key[1], used=limits.used(key))


def _taken(ledger: Ledger) -> Limits:
    """By the runs that have nodes now, as the scheduler counts them."""
    nodes: dict[int, int] = {}
    for place in ledger.places.committed.values():
        nodes[place.task] = nodes.get(place.task, 0) + 1
    limits = Limits(ledger.config.limits)
    for task, count in nodes.items():
        row = ledger.tasks.committed[task]
        node_group = ledger.submissions.committed[row.submission].spec.node_group
        request = Request(user=row.user, user_group=row.group, priority=row.priority, node_group=node_group)
        limits.take(request, count)
    return limits
