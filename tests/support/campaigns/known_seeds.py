"""Where the simulations found each mutant: the seed is tried first, so that finding it again takes one history.

A change of the code may change what a seed leads to. Then the search goes on from the first seed, as far as the mutant
allows, and finds it later. `FF_ACCEPT=1 pytest -k mutant tests/sim` records what was found so; seeds that still find
their mutants stay.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final, NamedTuple

__all__ = ["Found", "search"]

RECORD: Final = Path(__file__).parents[2] / "golden" / "mutants.json"
"""World -> mutant -> seed."""


class Found(NamedTuple):
    seed: int
    what: str
    """The check that failed."""


def search(world: str, mutant: str, within: int, attempt: Callable[[int], str | None]) -> Found:
    """The first seed, the recorded one before all others, for which `attempt` says what is wrong.

    AssertionError: no seed below `within` finds the mutant.
    """
    known = _read().get(world, {}).get(mutant)
    first = [] if known is None or known >= within else [known]
    for seed in (*first, *range(within)):
        what = attempt(seed)
        if what is not None:
            if os.environ.get("FF_ACCEPT") and seed != known:
                _record(world, mutant, seed)
            return Found(seed, what)
    raise AssertionError(f"{mutant}: no seed below {within} finds it")


def _read() -> dict[str, dict[str, int]]:
    found: dict[str, dict[str, int]] = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    return found


@contextlib.contextmanager
def _locked() -> Iterator[None]:
    """Several workers may record at the same time."""
    with open(f"{RECORD}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _record(world: str, mutant: str, seed: int) -> None:
    with _locked():
        seeds = _read()
        seeds.setdefault(world, {})[mutant] = seed
        RECORD.write_text(json.dumps(seeds, indent=1, sort_keys=True) + "\n")
