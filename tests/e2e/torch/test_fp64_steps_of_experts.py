"""In FP64 plans of four ranks with experts on several compute the gradients of one process, step after step."""

from __future__ import annotations

import pytest
from tests.support.trainer.plans import LIMIT_S, STARTS, WIDE_STEPS, check_wide_steps, of_each_rank

pytestmark = [pytest.mark.processes, pytest.mark.slow, pytest.mark.timeout(LIMIT_S + 60)]


@pytest.mark.parametrize("name", [*STARTS["experts on four ranks"], *STARTS["experts with zero 1"]])
def test_each_gradient_of_twenty_steps_is_that_of_one_process(name: str) -> None:
    check_wide_steps(name)


@pytest.mark.parametrize(("name", "without"), [("ep2 with zero 1", "ep2xdp2"), ("ep4 with zero 1", "ep4")])
def test_with_zero_1_parameters_have_the_bits_that_they_have_without(name: str, without: str) -> None:
    found, expected = (
        {rank["content"] for rank in of_each_rank(one, WIDE_STEPS, wide=True)} for one in (name, without)
    )
    assert len(found) == 1
    assert found == expected
