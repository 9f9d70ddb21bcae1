"""What recorded steps say: how long they are beside the simulator, and how much of their transfers they hide."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from bench.training.sleeping import SLEEP_S, SleepingStage, sleeping_costs
from tests.support.pipeline.mailboxes import MailboxCommunicator, run_pipeline

from fireflyer.base.errors import UsageError
from fireflyer.codesign.schedule import build_schedule, compile_schedule, simulate
from fireflyer.training.pipeline import PhaseEvent, Pipeline, Span, StepRecord, compare, measured_overlap

RANKS, MICRO_BATCHES = 4, 8


def record(*events: tuple[int, str, str, bool], rank: int = 0) -> StepRecord:
    phases = tuple(PhaseEvent(at, kind, 0, 0, phase, begins) for at, kind, phase, begins in events)
    return StepRecord(rank, 0, 100, (Span(0, 100),), 0, phases)


def test_a_transfer_is_hidden_while_another_phase_of_its_rank_computes() -> None:
    paired = record(
        (0, "F", "attention", True),
        (10, "F", "attention", False),
        (10, "F", "dispatch", True),
        (12, "B", "experts", True),
        (20, "B", "experts", False),
        (30, "F", "dispatch", False),
        (30, "F", "experts", True),
        (40, "F", "experts", False),
    )
    alone = record((0, "F", "dispatch", True), (5, "F", "dispatch", False), rank=1)
    hidden, exposed = measured_overlap([paired, alone], {"dispatch", "combine"})
    assert (hidden.communication_ns, hidden.hidden_ns, hidden.computing_ns) == (20, 8, 28)
    assert hidden.hidden_share == 0.4
    assert (exposed.exposed_ns, exposed.hidden_share) == (5, 0.0)


def test_a_record_without_phases_has_no_overlap() -> None:
    with pytest.raises(UsageError, match="rank 0 has recorded no phases; make its pipeline with record_phases=True"):
        measured_overlap([record()], {"dispatch"})


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2", "zbv", "dualpipe", "dualpipev"])
def test_a_step_of_sleeping_stages_takes_what_the_simulator_says(name: str) -> None:
    """Within a tenth. A sleep that is late says how late a waiting thread is: so late is each message, and by so much
    of a pass the bound is wider."""
    schedule = build_schedule(name, RANKS, MICRO_BATCHES, 2)

    def body(comm: MailboxCommunicator) -> Any:
        stages = {key: SleepingStage() for key in schedule.placement.stages_of(comm.rank)}
        pipeline = Pipeline(schedule, stages, comm, loss=lambda output, target: (output - target).sum())
        batch = [torch.zeros(1, 1)] * MICRO_BATCHES
        for _ in range(2):  # the first one loads code
            pipeline.step(batch, batch)
        return pipeline.record

    records: Any = run_pipeline(RANKS, body)
    asked_s = simulate(compile_schedule(schedule), sleeping_costs(schedule.placement.stages)).total_s
    sleeps = 3 * MICRO_BATCHES * schedule.placement.stages
    late_s = sum(one.passes_ns for one in records) / 1e9 / sleeps - SLEEP_S
    assert late_s >= 0, "each pass has slept"
    found = compare(schedule, records, latency_s=late_s, each_pass=True)
    assert found.ratio == pytest.approx(1, abs=0.1 + late_s / SLEEP_S)
    assert asked_s <= found.measured_s
    print(
        f"{name}: {found.ratio:.3f}; {found.measured_s / asked_s:.3f} of what was asked for, late {late_s * 1e3:.2f} ms"
    )
