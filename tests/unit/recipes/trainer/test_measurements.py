"""What a step of a pipeline is measured for."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

from fireflyer.base.units import SECOND
from fireflyer.recipes.trainer.core.figures import ExchangeLine
from fireflyer.recipes.trainer.measurements import measure_exchanges
from fireflyer.training.pipeline import StepRecord
from fireflyer.training.pipeline.records import MAX_PHASE_EVENTS, PhaseEvent


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def record(*phases: PhaseEvent) -> StepRecord:
    return StepRecord(0, 0, 9 * SECOND, (), 0, phases)


@pytest.mark.usefixtures("alone")
def test_the_part_of_an_exchange_in_which_the_rank_computed_is_hidden() -> None:
    found = measure_exchanges(
        record(
            PhaseEvent(1 * SECOND, "B", 0, 3, "dispatch", True),
            PhaseEvent(2 * SECOND, "F", 0, 4, "attention", True),
            PhaseEvent(4 * SECOND, "F", 0, 4, "attention", False),
            PhaseEvent(5 * SECOND, "B", 0, 3, "dispatch", False),
        ),
        10,
    )
    assert found == ExchangeLine(step=10, exchange_s=4.0, hidden_s=2.0)


@pytest.mark.usefixtures("alone")
def test_a_step_with_too_many_phases_to_record_is_not_measured_and_goes_on() -> None:
    many = (PhaseEvent(0, "F", 0, 0, "dispatch", True),) * MAX_PHASE_EVENTS
    assert measure_exchanges(record(*many), 10) is None
