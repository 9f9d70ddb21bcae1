"""Slurm's notation of node names, `gpu[001-004,7],login1`, as names."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import product

from fireflyer.analytics.reliability.rows import MAX_NODES_OF_A_JOB
from fireflyer.base.errors import UsageError

__all__ = ["expand_node_list"]

_WORD = re.compile(r"(?:[^\[\],\s]|\[[0-9,\-]*\])+")
_PART = re.compile(r"\[([0-9,\-]*)\]")
_RANGE = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9}))?")


def expand_node_list(text: str, *, limit: int = MAX_NODES_OF_A_JOB) -> tuple[str, ...]:
    """Names in their order; none for what Slurm writes where a job had no node. Raises `UsageError` for more than
    `limit` names, and for what is no list of nodes."""
    if text in ("", "None assigned", "(null)", "None"):
        return ()
    if "[" not in text and "," not in text and " " not in text:
        return (text,)
    names: list[str] = []
    at = 0
    while at < len(text):
        match = _WORD.match(text, at)
        if match is None or (match.end() < len(text) and text[match.end()] != ","):
            raise UsageError(f"{text[:80]!r} is no list of nodes as gpu[001-004,7]")
        for name in _expanded(match[0], limit):
            names.append(name)
            if len(names) > limit:
                raise UsageError(f"a list of nodes has more than {limit} names: {text[:80]!r}")
        at = match.end() + 1
    return tuple(names)


def _expanded(word: str, limit: int) -> Iterator[str]:
    pieces = _PART.split(word)  # text, range, text, range, …, text
    choices: list[list[str]] = []
    total = 1
    for number, piece in enumerate(pieces):
        choices.append(_numbers(piece, limit) if number % 2 else [piece])
        total *= len(choices[-1])
        if total > limit:
            raise UsageError(f"a list of nodes has more than {limit} names: {word[:80]!r}")
    return map("".join, product(*choices))


def _numbers(text: str, limit: int) -> list[str]:
    found: list[str] = []
    for one in text.split(","):
        match = _RANGE.fullmatch(one)
        if match is None:
            raise UsageError(f"[{text[:80]}] is no range of nodes as [001-004,7]")
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first or last - first >= limit:
            raise UsageError(f"[{text[:80]}] is no range of at most {limit} nodes")
        found += [str(number).zfill(len(match[1])) for number in range(first, last + 1)]
    return found
