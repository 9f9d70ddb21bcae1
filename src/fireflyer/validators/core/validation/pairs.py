"""Which nodes test a link with each other, and when."""

from __future__ import annotations

__all__ = ["rounds_of_pairs"]


def rounds_of_pairs(nodes: int) -> list[list[tuple[int, int]]]:
    """All pairs of `nodes` nodes, each once, in as few rounds as there can be: `nodes - 1` for an even number, `nodes`
    for an odd one, in which one node rests. No node is in two pairs of a round, so that all pairs of a round measure
    beside each other. Each pair has the smaller number first.

    The circle method of round-robin tournaments: one place is fixed, the others move on by one in each round.
    """
    if nodes < 2:
        return []
    places: list[int | None] = [*range(nodes), *([] if nodes % 2 == 0 else [None])]
    half = len(places) // 2
    rounds = []
    for _ in range(len(places) - 1):
        met = zip(places[:half], reversed(places[half:]), strict=True)
        rounds.append([(min(a, b), max(a, b)) for a, b in met if a is not None and b is not None])
        places = [places[0], places[-1], *places[1:-1]]
    return rounds
