"""`Fabric`: the switches, nodes and cables of a network, as data. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

import msgspec

from fireflyer.base.errors import UsageError

__all__ = ["Cable", "Fabric", "Layer", "LayerRate", "NodeGroup"]


class NodeGroup(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Nodes of one kind; each has `ports` ports on the network."""

    kind: str
    count: int
    ports: int = 1

    def __post_init__(self) -> None:
        if not self.kind:
            raise UsageError('a group of nodes has no kind; name one, as in kind = "gpu"')
        if self.count < 1 or self.ports < 1:
            raise UsageError(
                f"{self.count} {self.kind!r} nodes with {self.ports} ports are none; write 1 or more of each"
            )


class Layer(msgspec.Struct, frozen=True, kw_only=True):
    """Switches that have the same place in the network."""

    name: str
    count: int
    radix: int
    """Ports of a switch."""


class Cable(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """`links` parallel links between two vertices, `a` below `b`."""

    a: int
    b: int
    links: int


class LayerRate(msgspec.Struct, frozen=True, array_like=True):
    """Rate of each link between two layers, or a kind of node and a layer, in one direction."""

    below: str
    above: str
    bytes_per_s: float


class Fabric(msgspec.Struct, frozen=True, kw_only=True):
    """A network. Vertices are numbered: first the nodes in the order of `groups`, then the switches in the order of
    `layers`."""

    name: str
    groups: tuple[NodeGroup, ...]
    layers: tuple[Layer, ...]
    cables: tuple[Cable, ...]
    link_bytes_per_s: float
    """Bandwidth of one link in one direction."""
    rates: tuple[LayerRate, ...] = ()
    """Rates of links that have another one than `link_bytes_per_s`."""

    @property
    def nodes(self) -> int:
        return sum(group.count for group in self.groups)

    @property
    def endpoints(self) -> int:
        """Ports of nodes that are connected."""
        nodes = self.nodes
        return sum(cable.links for cable in self.cables if cable.a < nodes)

    @property
    def switches(self) -> int:
        return sum(layer.count for layer in self.layers)

    @property
    def links(self) -> int:
        """Links between switches: those of nodes are `endpoints`."""
        return sum(cable.links for cable in self.cables) - self.endpoints

    def first_of(self, name: str) -> int:
        """Number of the first switch of a layer. Raises `KeyError`."""
        first = self.nodes
        for layer in self.layers:
            if layer.name == name:
                return first
            first += layer.count
        raise KeyError(name)

    def layer_of(self, vertex: int) -> str:
        """Name of the layer of a switch, kind of a node."""
        for name, count in self.places():
            if vertex < count:
                return name
            vertex -= count
        raise IndexError(vertex)

    def places(self) -> Iterator[tuple[str, int]]:
        """Kinds of nodes, then layers of switches, in the order of the vertices, with how many there are of each."""
        yield from ((group.kind, group.count) for group in self.groups)
        yield from ((layer.name, layer.count) for layer in self.layers)

    def links_by_layer(self) -> dict[tuple[str, str], int]:
        """Links between each pair of layers, or of a kind of node and a layer, from below to above."""
        names = [name for name, count in self.places() for _ in range(count)]
        found: Counter[tuple[str, str]] = Counter()
        for cable in self.cables:
            found[names[cable.a], names[cable.b]] += cable.links
        return dict(found)

    def cable_rates(self) -> list[float]:
        """Bytes per second of a link of each cable, in one direction."""
        if not self.rates:
            return [self.link_bytes_per_s] * len(self.cables)
        of_pair = {(one.below, one.above): one.bytes_per_s for one in self.rates}
        names = [name for name, count in self.places() for _ in range(count)]
        return [of_pair.get((names[cable.a], names[cable.b]), self.link_bytes_per_s) for cable in self.cables]

    def ports_used(self) -> list[int]:
        """Ports in use of each switch."""
        used = [0] * (self.nodes + self.switches)
        for cable in self.cables:
            used[cable.a] += cable.links
            used[cable.b] += cable.links
        return used[self.nodes :]

    @property
    def unused_ports(self) -> int:
        """Ports of switches without a cable."""
        return sum(layer.count * layer.radix for layer in self.layers) - sum(self.ports_used())

    def check(self) -> Fabric:
        """Itself. Raises `UsageError` where a switch has more cables than ports, or a node has no cable."""
        used = self.ports_used()
        first = 0
        for layer in self.layers:
            most = max(used[first : first + layer.count], default=0)
            if most > layer.radix:
                raise UsageError(f"{self.name}: a {layer.name} switch needs {most} ports and has {layer.radix}")
            first += layer.count
        connected = {cable.a for cable in self.cables}
        missing = next((node for node in range(self.nodes) if node not in connected), None)
        if missing is not None:
            raise UsageError(f"{self.name}: node {missing} ({self.layer_of(missing)}) has no cable")
        return self


def dealt(groups: Sequence[NodeGroup], *, spread: bool) -> list[int]:
    """Numbers of all nodes in the order in which they are cabled to leaf switches: kind after kind, or each kind evenly
    among the others, so that each leaf switch gets its share of each kind."""
    starts = [sum(group.count for group in groups[:place]) for place in range(len(groups))]
    places = [
        ((index + 0.5) / group.count if spread else place, place, start + index)
        for place, (group, start) in enumerate(zip(groups, starts, strict=True))
        for index in range(group.count)
    ]
    return [node for _, _, node in sorted(places)]
