"""Links that fail while transfers run, and are repaired. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from fireflyer.base.errors import UsageError
from fireflyer.netsim.links import Links

__all__ = ["LinkFailure", "Outage", "outages"]


class LinkFailure(msgspec.Struct, frozen=True, kw_only=True):
    """Both directions of a link carry nothing from `at_ns` until `repaired_ns`; None: to the end."""

    link: int
    """Number of the link in one of its directions, as in `Links`."""
    at_ns: int = 0
    repaired_ns: int | None = None


class Outage(msgspec.Struct, frozen=True):
    """From `at_ns` on `failed` carry nothing, and routing avoids `avoided`."""

    at_ns: int
    failed: frozenset[int]
    avoided: frozenset[int]


def outages(failures: Sequence[LinkFailure], links: Links, reroute_ns: int) -> list[Outage]:
    """In order of time. Routing learns of a failure or repair `reroute_ns` later. Raises `UsageError`."""
    for one in failures:
        if not 0 <= one.link < len(links.ends):
            raise UsageError(f"link {one.link} fails; there are {len(links.ends)} directed links")
        if one.at_ns < 0 or (one.repaired_ns is not None and one.repaired_ns <= one.at_ns):
            raise UsageError(
                f"link {one.link} fails at {one.at_ns} ns and is repaired at {one.repaired_ns} ns; a repair comes later"
            )
    if reroute_ns < 0:
        raise UsageError(f"routing reacts after {reroute_ns} ns; use 0 or more")
    times = sorted({moment for one in failures for moment in _moments(one, reroute_ns)})
    return [Outage(at_ns, _down(failures, links, at_ns), _down(failures, links, at_ns - reroute_ns)) for at_ns in times]


def _moments(failure: LinkFailure, reroute_ns: int) -> Iterator[int]:
    for moment in (failure.at_ns, failure.repaired_ns):
        if moment is not None:
            yield moment
            yield moment + reroute_ns


def _down(failures: Sequence[LinkFailure], links: Links, at_ns: int) -> frozenset[int]:
    """Links that are down from that time on."""
    down = [one.link for one in failures if one.at_ns <= at_ns and (one.repaired_ns is None or at_ns < one.repaired_ns)]
    return frozenset(way for link in down for way in (link, links.reverse(link)))
