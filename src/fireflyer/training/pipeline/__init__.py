"""Pipeline parallelism: executes the schedules of `fireflyer.codesign.schedule` on PyTorch, a process per rank.

`Pipeline` runs steps; `split_batch` and `stages_of_layers` make its arguments. A stage that has `phases` overlaps in
pairs (`phases`). `compare` puts a step that was recorded beside the simulator's prediction, `measured_overlap` says how
much of its transfers a rank has hidden.
"""

from fireflyer.training.pipeline.channels import PipelineCommunicator
from fireflyer.training.pipeline.executor import MAX_MESSAGE_BYTES, Pipeline
from fireflyer.training.pipeline.micro_batches import MicroBatch, split_batch, stages_of_layers
from fireflyer.training.pipeline.phases import Compute, Pending, Phased, Transfer
from fireflyer.training.pipeline.programs import Reduce, compile_programs, forward_only
from fireflyer.training.pipeline.records import (
    Comparison,
    PhaseEvent,
    Span,
    StepRecord,
    compare,
    measured_costs,
    measured_overlap,
)

__all__ = [
    "MAX_MESSAGE_BYTES",
    "Comparison",
    "Compute",
    "MicroBatch",
    "Pending",
    "PhaseEvent",
    "Phased",
    "Pipeline",
    "PipelineCommunicator",
    "Reduce",
    "Span",
    "StepRecord",
    "Transfer",
    "compare",
    "compile_programs",
    "forward_only",
    "measured_costs",
    "measured_overlap",
    "split_batch",
    "stages_of_layers",
]
