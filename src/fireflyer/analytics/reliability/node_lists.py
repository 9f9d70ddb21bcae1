"""Slurm's notation of node names, `gpu[001-004,7],login1`, as names."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import product
from math import prod

from fireflyer.analytics.reliability.rows import MAX_NODES_OF_A_JOB
from fireflyer.base.errors import UsageError

__all__ = ["count_nodes", "expand_node_list", "names_of"]

_NO_NODES = ("", "None assigned", "(null)", "None")
"""What Slurm writes where a job had no node."""
_WORD = re.compile(r"(?:[^\[\],\s]|\[[0-9,\-]*\])+")
_PART = re.compile(r"\[([0-9,\-]*)\]")
_RANGE = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9}))?")


def expand_node_list(text: str, *, limit: int = MAX_NODES_OF_A_JOB) -> tuple[str, ...]:
    """Names in their order; none for what Slurm writes where a job had no node. Raises `UsageError` for more than
    `limit` names, and for what is no list of nodes."""
    if text in _NO_NODES:
        return ()
    if "[" not in text and "," not in text and " " not in text:
        return (text,)
    if count_nodes(text) > limit:
        raise UsageError(f"a list of nodes has more than {limit} names: {text[:80]!r}")
    return tuple(name for word in _words(text) for name in _expanded(word))


def names_of(text: str, *, limit: int = MAX_NODES_OF_A_JOB) -> tuple[str, ...]:
    """As `expand_node_list`; none where the list cannot be read."""
    try:
        return expand_node_list(text, limit=limit)
    except UsageError:
        return ()


def count_nodes(text: str) -> int:
    """How many names `expand_node_list` gives, without making them. Raises `UsageError` for what is no list of
    nodes."""
    if text in _NO_NODES:
        return 0
    if "[" not in text and "," not in text and " " not in text:
        return 1
    return sum(
        prod(sum(last - first + 1 for first, last, _ in _ranges(part)) for part in _PART.findall(word))
        for word in _words(text)
    )


def _words(text: str) -> Iterator[str]:
    at = 0
    while at < len(text):
        match = _WORD.match(text, at)
        if match is None or (match.end() < len(text) and text[match.end()] != ","):
            raise UsageError(f"{text[:80]!r} is no list of nodes as gpu[001-004,7]")
        yield match[0]
        at = match.end() + 1


def _expanded(word: str) -> Iterator[str]:
    pieces = _PART.split(word)  # text, range, text, range, …, text
    choices = [_numbers(piece) if number % 2 else [piece] for number, piece in enumerate(pieces)]
    return map("".join, product(*choices))


def _numbers(text: str) -> list[str]:
    return [str(number).zfill(width) for first, last, width in _ranges(text) for number in range(first, last + 1)]


def _ranges(text: str) -> Iterator[tuple[int, int, int]]:
    """First, last, and digits that both have at least."""
    for one in text.split(","):
        match = _RANGE.fullmatch(one)
        if match is None or int(match[2] or match[1]) < int(match[1]):
            raise UsageError(f"[{text[:80]}] is no range of nodes as [001-004,7]")
        yield int(match[1]), int(match[2] or match[1]), len(match[1])
