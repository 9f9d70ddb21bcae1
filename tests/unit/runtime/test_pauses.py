"""Pauses are spread by chance, and the generators of the program that uses us stay as they are."""

from __future__ import annotations

import ast
import random
from pathlib import Path

import fireflyer
from fireflyer.runtime.pauses import spread

_OF_ITS_OWN = ("Random", "SystemRandom")
_STATE = ("getstate", "setstate", "get_state", "set_state")
_PROGRAMS = {Path("recipes/train_gpt.py")}
"""Programs of users, as examples: their generators are their own."""


def test_a_pause_is_spread_over_its_second_half() -> None:
    found = [spread(2.0) for _ in range(200)]
    assert all(1.0 <= pause_s <= 2.0 for pause_s in found)
    assert len(set(found)) > 100
    assert min(found) < 1.4
    assert max(found) > 1.6


def test_a_pause_takes_nothing_from_the_generator_of_the_program() -> None:
    before = random.getstate()
    spread(1.0)
    assert random.getstate() == before


def test_no_module_draws_from_a_generator_of_the_program_or_seeds_it() -> None:
    """A checkpoint keeps their states: a run with a failure would go on from other ones."""
    root = Path(fireflyer.__file__).parent
    found = []
    for path in sorted(root.rglob("*.py")):
        if path.relative_to(root) in _PROGRAMS or "random" not in (text := path.read_text()):
            continue
        for node in ast.walk(ast.parse(text)):
            if not isinstance(node, ast.Call):
                continue
            called = ast.unparse(node.func)
            module, _, name = called.rpartition(".")
            if (module == "random" and name not in (*_OF_ITS_OWN, *_STATE)) or (
                module in ("np.random", "numpy.random") and name[:1].islower() and name not in ("default_rng", *_STATE)
            ):
                found.append(f"{path.relative_to(root)}:{node.lineno}: {called}")
    assert found == []
