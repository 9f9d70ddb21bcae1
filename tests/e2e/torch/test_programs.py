"""Small programs as users write them give over hfreduce what they give over gloo, to the bit on two ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.support.torch_ranks.processes import run_torch_ranks

pytestmark = pytest.mark.processes

HELPERS = {"models"}
PROGRAMS = sorted(path.stem for path in (Path(__file__).parent / "programs").glob("*.py") if path.stem not in HELPERS)
QUICK = [
    "callbacks_that_wait",
    "ddp_builtin_hooks",
    "ddp_join",
    "ddp_join_that_throws",
    "ddp_power_sgd",
    "ddp_python_hooks",
    "futures_of_later_works",
    "join_of_two",
]
UNORDERED = ["ddp_power_sgd_buckets"]
"""Their callbacks start collectives while the main thread does."""
BEYOND_GLOO = {"deep_callbacks": [3.0, 3.0]}
"""What gloo cannot run, and what it returns."""
SLOW = [name for name in PROGRAMS if name not in (*QUICK, *UNORDERED, *BEYOND_GLOO)]


def outcomes(
    backend: str, programs: list[str], *, inline_callbacks: bool | None = None, limit_s: float = 110
) -> list[dict[str, Any]]:
    """What each rank found, of all programs in the same processes."""
    ended = run_torch_ranks(
        "tests.support.torch_ranks.programs",
        (0, 0),
        backend=backend,
        programs=programs,
        inline_callbacks=inline_callbacks,
        limit_s=limit_s,
    )
    assert [rank.code for rank in ended] == [0, 0], [rank.errors[-3000:] for rank in ended]
    return [rank.result for rank in ended]


def differences(programs: list[str], limit_s: float = 110) -> dict[str, Any]:
    """What each rank has found and should have found, of programs that differ."""
    expected, found = (outcomes(backend, programs, limit_s=limit_s) for backend in ("gloo", "hfreduce"))
    pairs = {
        name: [(ours[name], theirs[name]) for ours, theirs in zip(found, expected, strict=True)] for name in programs
    }
    return {name: ranks for name, ranks in pairs.items() if any(ours != theirs for ours, theirs in ranks)}


def test_programs_give_what_they_give_over_gloo() -> None:
    assert len(QUICK) == 8
    assert differences(QUICK) == {}


def test_a_program_that_gloo_cannot_run_gives_what_is_right() -> None:
    assert outcomes("hfreduce", list(BEYOND_GLOO)) == [BEYOND_GLOO] * 2


@pytest.mark.slow
@pytest.mark.timeout(700)
def test_other_programs_give_what_they_give_over_gloo() -> None:
    assert len(QUICK) + len(SLOW) == 40
    assert differences(SLOW, limit_s=300) == {}


@pytest.mark.slow
@pytest.mark.parametrize("program", UNORDERED)
def test_callbacks_may_start_collectives_while_the_main_thread_does(program: str) -> None:
    expected = outcomes("gloo", [program])
    for inline_callbacks in (None, True):
        assert outcomes("hfreduce", [program], inline_callbacks=inline_callbacks) == expected
    first, second = expected
    assert first[program][1] == second[program][1], "the replicas differ"
    assert first[program][0][-1] < first[program][0][0]
