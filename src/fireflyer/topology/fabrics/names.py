"""Nodes and switches of a fabric as people name them: a kind or layer, and a number from 0. Pure."""

from __future__ import annotations

from typing import Final

from fireflyer.base.errors import UsageError
from fireflyer.topology.fabrics.graph import Fabric

__all__ = ["vertex_name", "vertex_named"]

MAX_DIGITS: Final = 9


def vertex_name(fabric: Fabric, vertex: int) -> str:
    """Name of a vertex: `gpu9` is the tenth node of the kind `gpu`, `leaf0` the first switch of the layer `leaf`.
    Raises `IndexError` for a vertex that the fabric has not."""
    if vertex >= 0:
        place = vertex
        for kind, count in fabric.places():
            if place < count:
                return f"{kind}{place}"
            place -= count
    raise IndexError(vertex)


def vertex_named(fabric: Fabric, name: str) -> int:
    """Vertex of that name, as `vertex_name` gives it. Raises `UsageError` with the names that there are."""
    first = 0
    for kind, count in fabric.places():
        digits = name.removeprefix(kind)
        is_number = name != digits and len(digits) <= MAX_DIGITS and digits.isascii() and digits.isdecimal()
        if is_number and int(digits) < count:
            return first + int(digits)
        first += count
    known = ", ".join(f"{kind}0 to {kind}{count - 1}" for kind, count in fabric.places() if count)
    raise UsageError(f"there is no {name}; there are {known}")
