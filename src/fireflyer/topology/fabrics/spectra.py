"""Bounds from below of the bisection of networks whose switches all have as many nodes, by eigenvalues. Pure.

Let x be the sides of N switches, 1 or -1, t their sum, and L the Laplacian of the links between switches, with
eigenvalues 0, then `least` and so on to `most`. x^T L x / 4 links between switches cross. Without its mean, x has the
square N - t^2/N, so that at least `least` (N - t^2/N) / 4 cross (Fiedler). Of p nodes at each switch p |t| / 2 are on
the other side than their switch, and add a link each. The sum is concave in |t|: the smallest and the largest |t| have
the lowest one.

For t = 0 more is known. All entries of L x are even, so that those of (L - least) x are not nearer to 0 than `least` is
to an even number, d. With the parts x_i of x by eigenvalues e_i, sum (e_i - least)^2 |x_i|^2 >= N d^2, and no e_i is
above `most`: at least N (least + d^2 / (most - least)) / 4 links cross.

**Slim Fly** of order q. Its switches are q columns on each of two sides; each column of one side has q links to each of
the other. Half of the columns of each side, of an odd q one more of the first side and one fewer of the second, have
q^3/2 or (q^3 + q)/2 links to the others. The bound from below is as high, with `least` = q and `most` = 2 q: this is
the bisection.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from typing import Final, NamedTuple

import numpy as np

from fireflyer.topology.fabrics.field import FiniteField, prime_power
from fireflyer.topology.fabrics.flat import MAX_ORDER, slim_fly, slim_fly_counts, slim_fly_generators
from fireflyer.topology.fabrics.graph import Fabric

__all__ = ["Spectrum", "fewest_across", "slim_fly_bisection", "slim_fly_spectrum", "spectral_bound"]

MAX_SWITCHES: Final = 1024
"""Whose eigenvalues are computed: a second. A balanced Dragonfly of 12 switches a group has 876."""
ROUNDING: Final = 1e-6
"""Links by which computed eigenvalues may be too high."""


class Spectrum(NamedTuple):
    """Eigenvalues of the Laplacian of the links between switches: the second lowest, and the highest."""

    least: float
    most: float


def fewest_across(spectrum: Spectrum, switches: int, nodes_per_switch: int) -> int:
    """Fewest links between two halves of the nodes that these eigenvalues allow."""
    least, most = spectrum
    odd_nodes = switches * nodes_per_switch % 2

    def links(away: int) -> float:
        nodes = max(0, nodes_per_switch * away - odd_nodes) / 2
        return least * (switches - away * away / switches) / 4 + nodes

    bounds = [links(switches % 2 or 2), links(switches)]
    if switches % 2 == 0:
        off = abs(least - 2 * round(least / 2))
        bounds.append(switches * (least + (off * off / (most - least) if most - least > ROUNDING else 0.0)) / 4)
    return max(0, math.ceil(min(bounds) - ROUNDING))


def spectral_bound(fabric: Fabric, ends: Mapping[int, Counter[int]]) -> int:
    """Fewest links between two halves of the nodes that eigenvalues allow; 0 where none are computed: of networks with
    switches without nodes, with more ports at one switch than at another, or with more than 1,024 switches.
    `ends`: links of each node to switches."""
    at = Counter(min(one) for one in ends.values())
    alike = len(at) == fabric.switches and len(set(at.values())) == 1
    if not alike or not 2 <= fabric.switches <= MAX_SWITCHES or any(one.total() != 1 for one in ends.values()):
        return 0
    laplacian = np.zeros((fabric.switches, fabric.switches))
    for cable in fabric.cables:
        if cable.a >= fabric.nodes:
            a, b = cable.a - fabric.nodes, cable.b - fabric.nodes
            laplacian[[a, b], [b, a]] -= cable.links
            laplacian[[a, b], [a, b]] += cable.links
    found = np.linalg.eigvalsh(laplacian)
    return fewest_across(Spectrum(float(found[1]), float(found[-1])), fabric.switches, at.most_common(1)[0][1])


def slim_fly_spectrum(order: int) -> Spectrum:
    """Of the McKay-Miller-Siran graph of this order, whose columns are Cayley graphs of the field with its addition.
    For each character but 1 of that group the sums a and b over the differences of both sides, and the matrix between
    columns, of which all singular values are sqrt(q), give the eigenvalues of ((a, sqrt(q)), (sqrt(q), b)); the
    character 1 gives those of columns as a whole. Raises `UsageError` as `slim_fly`."""
    prime, degree = prime_power(order) or (0, 0)
    sums = []
    for differences in slim_fly_generators(FiniteField(order)):
        indicator = np.zeros(order)
        indicator[list(differences)] = 1
        sums.append(np.fft.fftn(indicator.reshape((prime,) * degree)).real.ravel()[1:])
    of_column = len(differences)
    middle, apart = (sums[0] + sums[1]) / 2, np.sqrt((sums[0] - sums[1]) ** 2 / 4 + order)
    highest = max(float((middle + apart).max()), of_column)
    lowest = min(float((middle - apart).min()), of_column - order)
    return Spectrum(of_column + order - highest, of_column + order - lowest)


def slim_fly_bisection(fabric: Fabric, ends: Mapping[int, Counter[int]]) -> int | None:
    """Fewest links between two halves of the nodes; None where the network is no Slim Fly as it is built here."""
    order = math.isqrt(fabric.switches // 2)
    if not 3 <= order <= MAX_ORDER or order % 4 == 2 or prime_power(order) is None or len(fabric.layers) != 1:
        return None
    counts = slim_fly_counts(order)
    if (len(ends), fabric.switches, fabric.links) != counts[:3]:
        return None
    if fabric.cables != slim_fly(order, gbit_per_s=1.0).cables:
        return None
    links = order * (order * order + order % 2) // 2
    lower = fewest_across(slim_fly_spectrum(order), fabric.switches, fabric.nodes // fabric.switches)
    return links if lower == links else None
