"""The hfreduce process group gives what gloo gives, call by call, with real processes on one node and on several."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from tests.support.torch_ranks.calls import SCENARIOS
from tests.support.torch_ranks.processes import run_torch_ranks

LAYOUTS = [
    pytest.param([(0, 0), (0, 1)], id="2 ranks"),
    pytest.param([(0, 0, 0, 0), (0, 0, 1, 1)], id="4 ranks", marks=pytest.mark.slow),
]


def outcomes(backend: str, nodes: Sequence[int]) -> list[dict[str, Any]]:
    """What each rank found, for all scenarios in the same processes."""
    ended = run_torch_ranks(
        "tests.support.torch_ranks.conformance", nodes, backend=backend, scenarios=list(SCENARIOS), limit_s=110
    )
    assert [rank.code for rank in ended] == [0] * len(nodes), [rank.errors[-2000:] for rank in ended]
    return [rank.result for rank in ended]


@pytest.mark.processes
@pytest.mark.parametrize("layouts", LAYOUTS)
def test_results_are_those_of_gloo(layouts: list[tuple[int, ...]]) -> None:
    expected = outcomes("gloo", (0,) * len(layouts[0]))
    for nodes in layouts:
        for number, (ours, theirs) in enumerate(zip(outcomes("hfreduce", nodes), expected, strict=True)):
            different = {name: (ours[name], theirs[name]) for name in SCENARIOS if ours[name] != theirs[name]}
            assert not different, f"rank {number} of {nodes}: found, expected"
