"""Memory on one NUMA node, which stays there while it is measured.

The kernel places a page where it is touched first, and moves it later to the processors that use it most where
`kernel.numa_balancing` is on: then a path from one node to another would become one within a node. Memory with a policy
of its own is left alone, so `mbind` asks for the node before the first touch; afterwards `move_pages` tells where the
pages lie. The policy prefers the node and does not insist: the kernel kills processes for memory that a node lacks.
"""

from __future__ import annotations

import contextlib
import mmap
from collections import Counter
from collections.abc import Callable
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fireflyer.native import page_nodes, prefer_node

__all__ = ["KERNEL", "Kernel", "memory_on", "misplaced"]

Words = NDArray[np.uint64]
_SAMPLED_PAGES: Final = 1024
_MOST_ELSEWHERE: Final = 0.01
"""Share of the pages: more would show in a figure."""


def _moves_pages() -> bool:
    """`kernel.numa_balancing`; where it cannot be read the kernel has none."""
    try:
        with open("/proc/sys/kernel/numa_balancing", "rb") as file:
            return file.read(16).strip() not in (b"", b"0")
    except OSError:
        return False


class Kernel(NamedTuple):
    """What the kernel is asked; other answers in tests."""

    prefer: Callable[[Words, int], str] = prefer_node
    nodes_of: Callable[[Words, int], tuple[list[int], str]] = page_nodes
    moves: Callable[[], bool] = _moves_pages


KERNEL: Final = Kernel()


def memory_on(node: int | None, words: int, kernel: Kernel = KERNEL) -> tuple[Words, str]:
    """Memory that nobody has touched, and which goes to `node` when a thread there touches it first; and why it may be
    moved away meanwhile, or nothing. `node` None: anywhere. Raises `OSError` where there is no memory."""
    pages = mmap.mmap(-1, words * 8, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):
        pages.madvise(mmap.MADV_HUGEPAGE)  # as NumPy does for its arrays
    memory = np.frombuffer(pages, np.uint64)
    if node is None:
        return memory, ""
    refused = kernel.prefer(memory, node)
    if refused and kernel.moves():
        return memory, (
            f"memory cannot be kept on NUMA node {node}, as kernel.numa_balancing moves it: mbind: {refused.lower()}"
        )
    return memory, ""


def misplaced(node: int | None, memory: Words, kernel: Kernel = KERNEL) -> str:
    """Where memory of `memory_on` that has been touched lies on other nodes: on which; else nothing."""
    if node is None:
        return ""
    nodes, _refused = kernel.nodes_of(memory, _SAMPLED_PAGES)
    elsewhere = Counter(one for one in nodes if one != node and one >= 0)
    if elsewhere.total() <= _MOST_ELSEWHERE * len(nodes):
        return ""
    named = ", ".join(str(one) for one in sorted(elsewhere))
    return (
        f"memory of NUMA node {node} cannot be had: {elsewhere.total()} of {len(nodes)} pages lie on node {named}; "
        "is the node full?"
    )
