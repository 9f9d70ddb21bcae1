"""Lengths of time."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["covered"]


def covered(spans: Sequence[Sequence[float]]) -> float:
    """Length of the union of (begun, ended); one that ends before it begins is empty."""
    total, reached = 0.0, float("-inf")
    for begun, ended in sorted(map(tuple, spans)):
        if ended > max(begun, reached):
            total += ended - max(begun, reached)
            reached = ended
    return total
