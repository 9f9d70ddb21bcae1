"""What each case is to reach, and whether it did."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from bench.report import Bound, Figure

__all__ = ["Target", "all_met", "best_of", "judged"]


class Target(NamedTuple):
    """`ours <= factor * of` (`<` at a factor of 1), where `of` is a peer, "best openmpi" or "bound"."""

    of: str
    factor: float
    words: str

    @classmethod
    def times_faster(cls, peer: str, times: float) -> Target:
        return cls(peer, 1 / times, f"{times:g}x faster than {peer}" if times != 1 else f"faster than {peer}")

    @classmethod
    def within(cls, factor: float, words: str = "the bound") -> Target:
        return cls("bound", factor, f"at most {factor:g} x {words}")


def best_of(peers: Mapping[str, Figure | str], prefix: str) -> Figure | None:
    """The figure of the smallest median among the peers whose names begin so."""
    found = [peer for name, peer in peers.items() if name.startswith(prefix) and isinstance(peer, Figure)]
    return min(found, key=lambda peer: peer.median, default=None)


def judged(
    targets: tuple[Target, ...], ours: Figure, peers: Mapping[str, Figure | str], bound: Bound | None
) -> dict[str, bool | None]:
    """By the words of each target: reached, missed, or None where what it is compared with is missing."""
    verdicts: dict[str, bool | None] = {}
    for target in targets:
        if target.of == "bound":
            reference = None if bound is None else bound.value
        else:
            peer = best_of(peers, "openmpi") if target.of == "best openmpi" else peers.get(target.of)
            reference = peer.median if isinstance(peer, Figure) else None
        verdicts[target.words] = None if reference is None else ours.median <= target.factor * reference
    return verdicts


def all_met(verdicts: Mapping[str, bool | None]) -> bool | None:
    """None where there is no target, or nothing is missed but something is not decided."""
    found = list(verdicts.values())
    if not found or (None in found and False not in found):
        return None
    return all(found)
