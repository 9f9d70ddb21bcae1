"""In FP32 each step of a plan, from the state of one process, is that of one process within rounding."""

from __future__ import annotations

from typing import Any, Final

import pytest
from tests.support.torch_ranks.processes import Ended
from tests.support.trainer import plans
from tests.support.trainer.plans import KINDS, SCHEDULES, STARTS, of_each_rank

from fireflyer.codesign.parallel.plan import SCHEDULES as OF_PLANS

pytestmark = [pytest.mark.processes, pytest.mark.timeout(plans.LIMIT_S + 60)]

BOUND: Final = 1e-6
OF_TENSOR_RANKS: Final = 5e-6
"""Sums of products are divided over ranks, too."""
STEPS: Final = 4
QUICK: Final = "ep2"
CASES: Final = [
    name if name == QUICK else pytest.param(name, marks=pytest.mark.slow) for start in STARTS.values() for name in start
]


def test_each_schedule_that_a_plan_may_have_is_among_the_cases() -> None:
    assert set(SCHEDULES) == set(OF_PLANS)


def test_ranks_that_fail_are_started_once(monkeypatch: pytest.MonkeyPatch) -> None:
    starts: list[Any] = []

    def failing(*given: Any, **_: Any) -> list[Ended]:
        starts.append(given)
        raise AssertionError("rank 1 ended with 3")

    monkeypatch.setattr(plans, "run_torch_ranks", failing)
    for _ in range(2):
        with pytest.raises(AssertionError, match="rank 1 ended with 3"):
            of_each_rank("tp2xdp2", steps=1)
    assert len(starts) == 1


@pytest.mark.parametrize("name", CASES)
def test_each_step_from_the_state_of_one_process_is_its_step_within_rounding(name: str) -> None:
    """Gradients before clipping, their norm, the loss, and parameters after the step; experts are those that the gates
    of the one process chose."""
    bound = OF_TENSOR_RANKS if "tp2" in name else BOUND
    for rank, found in enumerate(of_each_rank(name, STEPS)):
        print(name, rank, found)
        for kind in KINDS:
            assert found[kind] <= bound, (rank, kind)
