"""What some steps are measured for beside their loss: what FP8 has lost, a pipeline beside its simulation, and the part
of the exchanges between experts that was hidden."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn

from fireflyer.base.units import SECOND
from fireflyer.codesign.schedule import Schedule
from fireflyer.recipes.trainer.core.figures import ExchangeLine, PipelineLine, QuantizationLine, QuantizedOperand
from fireflyer.training.experts.transfers import COMBINE, DISPATCH
from fireflyer.training.fp8 import OPERANDS, report, reset_counts
from fireflyer.training.pipeline import Span, StepRecord, compare, measured_overlap
from fireflyer.training.pipeline.records import MAX_PHASE_EVENTS

__all__ = ["compare_pipeline", "count_quantization", "measure_exchanges"]


def count_quantization(module: nn.Module, step: int) -> QuantizationLine:
    """Sums of the counts of all FP8 layers of all ranks, which begin anew. Collective over all ranks."""
    sums = torch.zeros(len(OPERANDS), 4, dtype=torch.int64)
    for row in report(module):
        place = [one == row.operand for one in OPERANDS].index(True)
        sums[place] += torch.tensor([row.elements, row.underflowed, row.saturated, row.nonfinite])
    reset_counts(module)
    dist.all_reduce(sums)
    counted = zip(OPERANDS, sums.tolist(), strict=True)
    return QuantizationLine(
        step=step,
        operands=tuple(
            QuantizedOperand(
                operand=operand, elements=elements, underflowed=underflowed, saturated=saturated, nonfinite=nonfinite
            )
            for operand, (elements, underflowed, saturated, nonfinite) in counted
            if elements
        ),
    )


def compare_pipeline(schedule: Schedule, record: StepRecord, group: dist.ProcessGroup, step: int) -> PipelineLine:
    """The last step of a pipeline on one machine, whose ranks are `group`: their clocks are compared. Collective over
    the group."""
    found = compare(schedule, _records_of_all(schedule, record, group))
    return PipelineLine(
        step=step,
        measured_s=found.measured_s,
        predicted_s=found.predicted_s,
        measured_bubble_s=found.measured_bubble_s,
        predicted_bubble_s=found.predicted_bubble_s,
    )


def measure_exchanges(record: StepRecord, step: int) -> ExchangeLine | None:
    """Of the last step of a pipeline that records phases; None where a rank had too many phases to record. Collective
    over all ranks."""
    sums = torch.zeros(3, dtype=torch.float64)
    if len(record.phases) < MAX_PHASE_EVENTS:
        (own,) = measured_overlap([record], {DISPATCH, COMBINE})
        sums = torch.tensor([own.communication_ns, own.hidden_ns, 1], dtype=torch.float64)
    dist.all_reduce(sums)
    exchange_ns, hidden_ns, ranks = sums.tolist()
    if ranks < dist.get_world_size():
        return None
    return ExchangeLine(step=step, exchange_s=exchange_ns / ranks / SECOND, hidden_s=hidden_ns / ranks / SECOND)


def _records_of_all(schedule: Schedule, record: StepRecord, group: dist.ProcessGroup) -> Sequence[StepRecord]:
    mine = torch.zeros(max(map(len, schedule.rows)), 2, dtype=torch.int64)
    mine[: len(record.spans)] = torch.tensor(record.spans, dtype=torch.int64)
    spans = [torch.empty_like(mine) for _ in schedule.rows]
    dist.all_gather(spans, mine, group=group)
    return [
        StepRecord(
            rank=rank,
            begin_ns=int(found[0, 0]),
            end_ns=int(found[len(row) - 1, 1]),
            spans=tuple(Span(begin, end) for begin, end in found[: len(row)].tolist()),
            waited_ns=0,
            phases=(),
        )
        for rank, (row, found) in enumerate(zip(schedule.rows, spans, strict=True))
    ]
