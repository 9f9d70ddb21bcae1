"""The hfreduce process group gives what gloo gives, call by call, with real processes on one node and on several."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
from tests.support.torch_ranks.calls import SCENARIOS
from tests.support.torch_ranks.processes import run_torch_ranks

LAYOUTS = [(0, 0), (0, 0, 0, 0), (0, 0, 1, 1)]


@cache
def outcomes(backend: str, nodes: Sequence[int]) -> list[dict[str, Any]]:
    """What each rank found, for all scenarios; the processes are started once."""
    ended = run_torch_ranks(
        "tests.support.torch_ranks.conformance", nodes, backend=backend, scenarios=list(SCENARIOS), limit_s=110
    )
    assert [rank.code for rank in ended] == [0] * len(nodes), [rank.errors[-2000:] for rank in ended]
    return [rank.result for rank in ended]


@pytest.mark.processes
@pytest.mark.parametrize("nodes", LAYOUTS, ids=str)
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_results_are_those_of_gloo(scenario: str, nodes: tuple[int, ...]) -> None:
    expected = outcomes("gloo", (0,) * len(nodes))
    found = outcomes("hfreduce", nodes)
    for rank in range(len(nodes)):
        assert found[rank][scenario] == expected[rank][scenario], f"rank {rank}"
