"""Nodes and switches of a network as people name them: a kind or layer, and a number from 0."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final

from fireflyer.base.errors import UsageError

if TYPE_CHECKING:
    from fireflyer.topology.fabrics import Fabric

__all__ = ["show_cut", "vertex_name", "vertex_number"]

_PAIR = re.compile(r"(\D.*?)([0-9]{1,9})-(\D.*?)([0-9]{1,9})")
MOST_CABLES: Final = 8
"""That are named."""


def vertex_number(fabric: Fabric, option: str, name: str, number: str) -> int:
    """Of a node or switch by its kind or layer, and its number there. Raises `UsageError`, which names the `option`."""
    first, known = 0, []
    for place, count in fabric.places():
        if place == name and int(number) < count:
            return first + int(number)
        known.append(f"{place}0 to {place}{count - 1}")
        first += count
    raise UsageError(f"{option}: there is no {name}{number}; there are {', '.join(known)}")


def vertex_name(fabric: Fabric, vertex: int) -> str:
    """As `vertex_number` takes it."""
    first = 0
    for kind, count in fabric.places():
        if vertex < first + count:
            return f"{kind}{vertex - first}"
        first += count
    raise AssertionError(f"vertex {vertex} is beyond the network")


def show_cut(fabric: Fabric, text: str) -> dict[str, Any]:
    """Of `A-B`: how many links cut A off from B, and which. Raises `UsageError`."""
    from fireflyer.topology.fabrics import minimum_cut

    match = _PAIR.fullmatch(text)
    if match is None:
        raise UsageError(f"--cut {text}: write two ends, as in gpu0-gpu9")
    first, first_number, other, other_number = match.groups()
    a = vertex_number(fabric, f"--cut {text}", first, first_number)
    b = vertex_number(fabric, f"--cut {text}", other, other_number)
    if a == b:
        raise UsageError(f"--cut {text}: both ends are the same; name two")
    cut = minimum_cut(fabric, a, b)
    named = [_cable(fabric, cable.a, cable.b, cable.links) for cable in cut.cables[:MOST_CABLES]]
    if len(cut.cables) > MOST_CABLES:
        named.append(f"{len(cut.cables) - MOST_CABLES} more pairs")
    return {"links": cut.links, "between": ", ".join(named) or "nothing joins them"}


def _cable(fabric: Fabric, a: int, b: int, links: int) -> str:
    several = f" ({links} links)" if links > 1 else ""
    return f"{vertex_name(fabric, a)}-{vertex_name(fabric, b)}{several}"
