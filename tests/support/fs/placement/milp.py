"""The placement problem for SciPy's integer programming (HiGHS): how often each set of k nodes is a chain."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from enum import Enum
from fractions import Fraction

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import coo_array

__all__ = ["Answer", "is_there_a_table_below"]


class Answer(Enum):
    YES = "yes"
    NO = "no"
    UNDECIDED = "undecided"


def is_there_a_table_below(ratio: float, quotas: Sequence[int], replicas: int, *, seconds: float) -> Answer:
    """Whether nodes with these quotas have a table whose worst peer-load ratio (reads) is below this one."""
    nodes, total = len(quotas), sum(quotas)
    blocks = list(itertools.combinations(range(nodes), replicas))
    pairs = {pair: i for i, pair in enumerate(itertools.combinations(range(nodes), 2))}
    of_node = [(x, column) for column, block in enumerate(blocks) for x in block]
    of_pair = [
        (pairs[pair], column) for column, block in enumerate(blocks) for pair in itertools.combinations(block, 2)
    ]
    caps = [min(_cap(ratio, x, y, quotas, replicas), _cap(ratio, y, x, quotas, replicas)) for x, y in pairs]
    found = milp(
        np.zeros(len(blocks)),
        integrality=np.ones(len(blocks)),
        bounds=Bounds(0, total // replicas),
        constraints=[
            LinearConstraint(_matrix(of_node, nodes, len(blocks)), quotas, quotas),
            LinearConstraint(_matrix(of_pair, len(pairs), len(blocks)), 0, caps),
        ],
        options={"time_limit": seconds},
    )
    if found.success:
        return Answer.YES
    return Answer.NO if found.status == 2 else Answer.UNDECIDED


def _cap(ratio: float, x: int, y: int, quotas: Sequence[int], replicas: int) -> int:
    """The largest number of chains that x and y may share such that y's load for x stays below the ratio."""
    even = Fraction(quotas[x] * (replicas - 1) * quotas[y], sum(quotas) - quotas[x])
    cap = int(even * Fraction(ratio).limit_denominator(1 << 30))
    return cap - 1 if cap >= even * Fraction(ratio).limit_denominator(1 << 30) - Fraction(1, 1 << 20) else cap


def _matrix(entries: Sequence[tuple[int, int]], rows: int, columns: int) -> coo_array:
    row, column = np.array(entries).T
    return coo_array((np.ones(len(entries)), (row, column)), shape=(rows, columns))
