"""`NetworkFile`: a fabric described by a few parameters, as a TOML file gives them. Pure."""

from __future__ import annotations

import math
from typing import Any, Final, Literal

import msgspec

from fireflyer.base.errors import UsageError
from fireflyer.topology.fabrics import (
    Fabric,
    NodeGroup,
    dragonfly,
    multi_plane,
    rail_optimised,
    separated_nodes,
    slim_fly,
    three_layer_tree,
    two_layer_tree,
    vertex_name,
    zones,
)

__all__ = ["NetworkFile"]

Family = Literal["two-layer", "three-layer", "zones", "multi-plane", "rail-optimised", "dragonfly", "slim-fly"]
_KEYS: Final[dict[str, tuple[str, ...]]] = {
    "two-layer": ("radix", "nodes", "uplinks", "spread"),
    "three-layer": ("radix", "nodes", "uplinks", "spine_uplinks", "cores", "spread"),
    "zones": ("radix", "nodes", "shared", "between", "zones", "zone_switches", "spread"),
    "multi-plane": ("radix", "nodes", "planes"),
    "rail-optimised": ("radix", "nodes", "rails"),
    "dragonfly": ("nodes_per_switch", "group_switches", "global_links", "groups"),
    "slim-fly": ("order",),
}
_REQUIRED: Final[dict[str, tuple[str, ...]]] = {
    "two-layer": ("radix", "nodes"),
    "three-layer": ("radix", "nodes"),
    "zones": ("radix", "nodes", "between"),
    "multi-plane": ("radix", "nodes", "planes"),
    "rail-optimised": ("radix", "nodes", "rails"),
    "dragonfly": ("nodes_per_switch", "group_switches", "global_links", "groups"),
    "slim-fly": ("order",),
}


class NetworkFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """File of a network. Each key is described by the function of `topology.fabrics` that builds the family."""

    name: str
    family: Family
    gbit_per_s: float
    """Rate of a link in each direction, Gbit/s."""
    frame_switch: bool = False
    """Leaf and spine switches are modules of a frame, without cables between them."""
    metres: dict[str, float | tuple[float, float]] = {}
    """Length of cables by the layers that they join, named as in a list of prices (`leaf-spine`, `gpu-leaf`,
    `node-leaf`, `link`, `endpoint`); of two numbers, lengths are spread evenly from the first to the second."""
    nodes: tuple[NodeGroup, ...] = ()
    shared: tuple[NodeGroup, ...] = ()
    radix: int | None = None
    uplinks: int | None = None
    spine_uplinks: int | None = None
    spread: bool | None = None
    cores: int | None = None
    between: int | None = None
    zones: int | None = None
    zone_switches: int | None = None
    planes: int | None = None
    rails: int | None = None
    nodes_per_switch: int | None = None
    group_switches: int | None = None
    global_links: int | None = None
    groups: int | None = None
    order: int | None = None

    def __post_init__(self) -> None:
        given = self._given()
        missing = [key for key in _REQUIRED[self.family] if key not in given]
        if missing:
            raise UsageError(f"a network of the family {self.family} needs {', '.join(missing)}")
        foreign = [key for key in given if key not in _KEYS[self.family]]
        if foreign:
            raise UsageError(
                f"a network of the family {self.family} has no {', '.join(foreign)}; its keys are "
                f"{', '.join(_KEYS[self.family])}"
            )

        for name, length in self.metres.items():
            low, high = length if isinstance(length, tuple) else (length, length)
            if not 0 < low <= high < math.inf:
                raise UsageError(f"metres.{name} is {length}; write a length above 0, or [shortest, longest]")

    def _given(self) -> dict[str, Any]:
        own = ("name", "family", "gbit_per_s", "frame_switch", "metres")
        values = {key: getattr(self, key) for key in self.__struct_fields__ if key not in own}
        return {key: value for key, value in values.items() if value is not None and value != ()}

    def build(self) -> Fabric:
        """Raises `UsageError` where no such network can be built, two groups of nodes have the same kind, or some nodes
        cannot reach each other."""
        fabric = self._build()
        pair = separated_nodes(fabric)
        if pair is not None:
            first, other = (vertex_name(fabric, node) for node in pair)
            advice = "give more links between its zones (between)" if self.family == "zones" else "give more switches"
            raise UsageError(f"{self.name}: {first} cannot reach {other}: no links join them; {advice}")
        return fabric

    def _build(self) -> Fabric:
        kinds = [group.kind for group in (*self.nodes, *self.shared)]
        twice = next((kind for kind in kinds if kinds.count(kind) > 1), None)
        if twice is not None:
            raise UsageError(
                f"{self.name}: two groups of nodes have the kind {twice!r}; add their counts, or give each its own kind"
            )
        given = self._given() | {"name": self.name, "gbit_per_s": self.gbit_per_s}
        groups = given.pop("nodes", ())
        match self.family:
            case "two-layer":
                return two_layer_tree(groups, **given)
            case "three-layer":
                return three_layer_tree(groups, **given)
            case "zones":
                if "zones" in given:
                    given["count"] = given.pop("zones")
                return zones(groups, **given)
            case "multi-plane":
                return multi_plane(groups, **given)
            case "rail-optimised":
                return rail_optimised(groups, **given)
            case "dragonfly":
                return dragonfly(**given)
            case "slim-fly":
                return slim_fly(**given)
