"""Networks whose switches all have nodes: Dragonfly (Kim et al. 2008) and Slim Fly (Besta and Hoefler 2014). Pure.

Papers compare them by formulas, which also give networks that nobody can cable; `Counts` are such a row, and say
whether the network can be built. `dragonfly` and `slim_fly` build those that can.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import combinations
from typing import Final, NamedTuple

from fireflyer.base.errors import UsageError
from fireflyer.topology.fabrics.field import FiniteField, prime_power
from fireflyer.topology.fabrics.graph import Cable, Fabric, Layer, NodeGroup
from fireflyer.topology.fabrics.trees import MAX_ENDPOINTS, rate_of

__all__ = ["Counts", "counts_of", "dragonfly", "dragonfly_counts", "slim_fly", "slim_fly_counts"]

MAX_ORDER: Final = 64
"""Of a Slim Fly that is built: 8,192 switches."""


class Counts(NamedTuple):
    """Size of a network. `links`: between switches."""

    endpoints: int
    switches: int
    links: int
    why_not_built: str = ""
    """Reason why no network has exactly this size; empty where one has."""


def counts_of(fabric: Fabric) -> Counts:
    """Count endpoints, switches and links of a fabric."""
    return Counts(fabric.endpoints, fabric.switches, fabric.links)


def dragonfly_counts(*, nodes_per_switch: int, group_switches: int, global_links: int, groups: int) -> Counts:
    """All ports in use, also where the groups cannot be joined evenly with them. Raises `UsageError`."""
    p, a, h, g = nodes_per_switch, group_switches, global_links, groups
    if min(p, a, h) < 1 or not 2 <= g <= a * h + 1:
        raise UsageError(
            f"a dragonfly of {g} groups with {a} x {h} global links; 2 to {a * h + 1} groups can be joined"
        )
    switches = a * g
    why = (
        "" if a * h % (g - 1) == 0 else f"{a * h} global links of a group are not divisible by the {g - 1} other groups"
    )
    return Counts(switches * p, switches, switches * (a - 1 + h) // 2, why)


def dragonfly(
    *,
    nodes_per_switch: int,
    group_switches: int,
    global_links: int,
    groups: int,
    gbit_per_s: float,
    kind: str = "node",
    name: str = "dragonfly",
) -> Fabric:
    """Groups of `group_switches` switches, all joined to each other; each group is joined to each other group by the
    same number of links. Raises `UsageError` where that is not possible."""
    counts = dragonfly_counts(
        nodes_per_switch=nodes_per_switch, group_switches=group_switches, global_links=global_links, groups=groups
    )
    if counts.why_not_built:
        raise UsageError(f"{name}: {counts.why_not_built}; use {group_switches * global_links + 1} groups")
    _bounded(counts, name)
    links = list(_inside(group_switches, groups))
    each = group_switches * global_links // (groups - 1)
    taken = [0] * groups  # global links of each group that are cabled
    for a, b in combinations(range(groups), 2):
        for _ in range(each):
            ends = [group * group_switches + taken[group] % group_switches for group in (a, b)]
            links.append((ends[0], ends[1]))
            taken[a], taken[b] = taken[a] + 1, taken[b] + 1
    radix = nodes_per_switch + group_switches - 1 + global_links
    return _flat(name, kind, counts, nodes_per_switch, links, radix, gbit_per_s)


def _inside(switches: int, groups: int) -> Iterator[tuple[int, int]]:
    for group in range(groups):
        yield from combinations(range(group * switches, (group + 1) * switches), 2)


def slim_fly_counts(order: int) -> Counts:
    """Counts of the network of `order` q: 2 q^2 switches with (3q - d)/2 links each, q = 4w + d, and half as many
    nodes, rounded up. Raises `UsageError`."""
    ports, _ = _slim_fly_ports(order)
    switches = 2 * order * order
    why = (
        "" if prime_power(order) else f"{order} is no power of a prime, so there is no finite field of {order} elements"
    )
    return Counts(switches * -(-ports // 2), switches, switches * ports // 2, why)


def _slim_fly_ports(order: int) -> tuple[int, int]:
    """Links of a switch to others, and d."""
    delta = {0: 0, 1: 1, 3: -1}.get(order % 4)
    if order < 3 or delta is None:
        raise UsageError(
            f"a Slim Fly has an order q = 4w - 1, 4w or 4w + 1 of 3 or more, not {order}; those that can be built are "
            f"{_orders()}"
        )
    return (3 * order - delta) // 2, delta


def _orders() -> str:
    """That can be built: powers of primes."""
    *most, last = (str(q) for q in range(3, MAX_ORDER + 1) if q % 4 != 2 and prime_power(q))
    return f"{', '.join(most)} or {last}"


def slim_fly(order: int, *, gbit_per_s: float, kind: str = "node", name: str = "Slim Fly") -> Fabric:
    """The McKay-Miller-Siran graph over the field of `order` elements: two switches are at most two links apart. Raises
    `UsageError` where `order` is no power of a prime."""
    counts = slim_fly_counts(order)
    if counts.why_not_built:
        raise UsageError(f"{name}: {counts.why_not_built}; use {_orders()}")
    if order > MAX_ORDER:
        raise UsageError(
            f"{name}: order {order} has {counts.switches} switches; {MAX_ORDER} is the largest that is built: use "
            f"{_orders()}"
        )
    field = FiniteField(order)
    ports, _ = _slim_fly_ports(order)
    links = []
    for side, generators in enumerate(slim_fly_generators(field)):
        for column in range(order):
            base = (side * order + column) * order
            links += [
                (base + a, base + b) for a, b in combinations(range(order), 2) if field.subtract(a, b) in generators
            ]
    for x in range(order):
        for m in range(order):
            for c in range(order):
                y = field.add(field.multiply(m, x), c)
                links.append((x * order + y, (order + m) * order + c))
    per_switch = -(-ports // 2)
    return _flat(name, kind, counts, per_switch, links, ports + per_switch, gbit_per_s)


def slim_fly_generators(field: FiniteField) -> tuple[frozenset[int], frozenset[int]]:
    """Differences of switches of a column that are joined, on either side: both sets have -x with x, and together they
    reach all. Raises `UsageError` as `slim_fly`."""
    _, delta = _slim_fly_ports(field.order)
    powers = field.powers()  # of a primitive element, from 1; exponents are taken modulo their number
    q, w = field.order, (field.order + 1) // 4
    if delta >= 0:
        return _elements(powers, range(0, q - 1, 2)), _elements(powers, range(1, q, 2))
    first = [*range(0, 2 * w - 1, 2), *range(2 * w - 1, 4 * w - 2, 2)]
    second = [*range(1, 2 * w, 2), *range(2 * w, 4 * w - 1, 2)]
    return _elements(powers, first), _elements(powers, second)


def _elements(powers: list[int], exponents: Iterable[int]) -> frozenset[int]:
    return frozenset(powers[exponent % len(powers)] for exponent in exponents)


def _bounded(counts: Counts, name: str) -> None:
    if counts.endpoints > MAX_ENDPOINTS or counts.links > 8 * MAX_ENDPOINTS:
        raise UsageError(f"{name}: {counts.endpoints} endpoints and {counts.links} links are too many to be built here")


def _flat(
    name: str, kind: str, counts: Counts, per_switch: int, links: list[tuple[int, int]], radix: int, gbit_per_s: float
) -> Fabric:
    nodes = counts.endpoints
    cables = [Cable(node, nodes + node // per_switch, 1) for node in range(nodes)]
    parallel: dict[tuple[int, int], int] = {}
    for a, b in links:
        low, high = sorted((a, b))
        parallel[low, high] = parallel.get((low, high), 0) + 1
    cables += [Cable(nodes + a, nodes + b, count) for (a, b), count in parallel.items()]
    return Fabric(
        name=name,
        groups=(NodeGroup(kind=kind, count=nodes),),
        layers=(Layer(name="switch", count=counts.switches, radix=radix),),
        cables=tuple(cables),
        link_bytes_per_s=rate_of(gbit_per_s),
    ).check()
