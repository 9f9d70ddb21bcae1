"""Which checkpoints stay."""

from __future__ import annotations

from collections.abc import Sequence

from fireflyer.checkpoint.core.names import Candidate, candidates, is_leftover, is_pinned

__all__ = ["leftovers", "to_remove"]


def to_remove(
    names: list[str], *, committed: str, keep: int, refused: Sequence[str], keep_every: int | None = None
) -> list[str]:
    """Names to remove now that `committed` is durable, oldest first.

    `committed` and the newest others stay, `keep` in all. Those that a restore `refused` do not count among the kept;
    they are removed when something newer has been committed, so that a damaged one can be looked at until then.
    Pinned ones, and those of a step that is a multiple of `keep_every`, stay beside the newest `keep`.
    """
    found = candidates(names)
    position = {candidate.name: index for index, candidate in enumerate(found)}
    if committed not in position:
        return []

    def stays(item: Candidate) -> bool:
        return is_pinned(item.name, names) or (keep_every is not None and item.step % keep_every == 0)

    good = [item.name for item in found if item.name not in refused or item.name == committed]
    kept = [committed, *(name for name in good if name != committed)][:keep]
    kept += [item.name for item in found if stays(item) and item.name in good]
    superseded = [
        name for name in refused if position.get(name, -1) > position[committed] and not is_pinned(name, names)
    ]
    return [
        item.name
        for item in reversed(found)
        if (item.name in good and item.name not in kept) or item.name in superseded
    ]


def leftovers(names: list[str]) -> list[str]:
    """What dead attempts left behind."""
    return [name for name in names if is_leftover(name)]
