"""A pipeline computes the gradients of one process, whatever its schedule. Ranks are threads here."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.support.pipeline.mailboxes import MailboxCommunicator, run_pipeline
from tests.support.pipeline.models import (
    EXECUTED,
    alone,
    batch_of,
    gradients_of,
    pipeline_of,
    schedule_of,
    worst_error,
)

MICRO_BATCHES = 8


def outcome(
    name: str, ranks: int, *, steps: int = 1, unequal: bool = False, blocking: bool = True, **options: Any
) -> tuple[list[float], dict[str, torch.Tensor]]:
    schedule = schedule_of(name, ranks, MICRO_BATCHES)
    inputs, targets = batch_of(0, MICRO_BATCHES, unequal=unequal)

    def body(comm: MailboxCommunicator) -> tuple[list[float], dict[str, torch.Tensor]]:
        pipeline = pipeline_of(schedule, comm, **options)
        losses = None
        for step in range(steps):
            for module in pipeline.modules.values():
                module.zero_grad()
            losses = pipeline.step(inputs, targets)
            assert all(passes.in_flight == 0 for passes in pipeline._passes.values()), step
        return [] if losses is None else losses.tolist(), gradients_of(pipeline)

    all_losses: list[float] = []
    gradients: dict[str, torch.Tensor] = {}
    for found in run_pipeline(ranks, body, blocking=blocking):
        assert not isinstance(found, BaseException), found
        all_losses += found[0]
        gradients |= found[1]
    return all_losses, gradients


@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.slow), 4])
@pytest.mark.parametrize("name", EXECUTED)
def test_every_schedule_gives_the_gradients_of_one_process(name: str, ranks: int) -> None:
    schedule = schedule_of(name, ranks, MICRO_BATCHES)
    expected_losses, expected = alone(schedule, *batch_of(0, MICRO_BATCHES))
    losses, gradients = outcome(name, ranks)
    assert len(gradients) == len(expected) * schedule.placement.directions
    assert sorted(losses) == pytest.approx(sorted(expected_losses), rel=1e-13)
    assert worst_error(gradients, expected) <= 1e-10
