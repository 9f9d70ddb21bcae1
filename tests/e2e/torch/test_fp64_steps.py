"""In FP64 plans of two ranks compute the gradients of one process, step after step."""

from __future__ import annotations

import pytest
from tests.support.trainer.plans import LIMIT_S, STARTS, check_wide_steps

pytestmark = [pytest.mark.processes, pytest.mark.slow, pytest.mark.timeout(LIMIT_S + 60)]


@pytest.mark.parametrize("name", [name for start in ("experts on two ranks", "two ranks") for name in STARTS[start]])
def test_each_gradient_of_twenty_steps_is_that_of_one_process(name: str) -> None:
    check_wide_steps(name)
