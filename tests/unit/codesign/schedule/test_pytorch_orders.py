"""The rows are those of PyTorch's schedules of the same names, where it has them."""

from __future__ import annotations

import importlib
import types
from typing import Any

import pytest

from fireflyer.codesign.schedule import build_schedule

schedules: Any = importlib.import_module("torch.distributed.pipelining.schedules")

LETTERS = {"FORWARD": "F", "FULL_BACKWARD": "B", "BACKWARD_INPUT": "I", "BACKWARD_WEIGHT": "W"}


def text(action: Any) -> str:
    if action.sub_actions:
        return "&".join(map(text, action.sub_actions))
    return f"{action.stage_index}{LETTERS[action.computation_type.name]}{action.microbatch_index}"


def texts(row: Any) -> list[str]:
    """Passes only: a row of theirs also has gaps, and sums of gradients."""
    return [text(one) for one in row if one is not None and one.computation_type.name != "REDUCE_GRAD"]


def stage(index: int, stages: int, ranks: int) -> Any:
    return types.SimpleNamespace(
        stage_index=index,
        num_stages=stages,
        group_size=ranks,
        group_rank=0,
        is_first=index == 0,
        is_last=index == stages - 1,
        has_backward=False,
        submod=None,
    )


def orders(name: str, ranks: int, stages_per_rank: int, micro_batches: int) -> list[list[str]]:
    made = getattr(schedules, name)(
        [stage(ranks * index, ranks * stages_per_rank, ranks) for index in range(stages_per_rank)],
        micro_batches,
        loss_fn=lambda _output, _target: 0,
    )
    return [texts(made.pipeline_order[rank]) for rank in range(ranks)]


@pytest.mark.parametrize(("ranks", "micro_batches"), [(2, 4), (4, 8), (4, 16), (8, 32), (4, 10)])
@pytest.mark.parametrize(
    ("name", "theirs", "stages_per_rank"),
    [
        ("interleaved", "ScheduleInterleaved1F1B", 2),
        ("interleaved", "ScheduleInterleaved1F1B", 3),
        ("interleaved-zb", "ScheduleInterleavedZeroBubble", 2),
        ("zb-h1", "ScheduleInterleavedZeroBubble", 1),
        ("zbv", "ScheduleZBVZeroBubble", 2),
        ("dualpipev", "ScheduleDualPipeV", 2),
    ],
)
def test_rows_are_in_the_order_of_pytorch(
    name: str, theirs: str, stages_per_rank: int, ranks: int, micro_batches: int
) -> None:
    ours = build_schedule(name, ranks, micro_batches, stages_per_rank)
    assert [[str(item) for item in row] for row in ours.rows] == orders(theirs, ranks, stages_per_rank, micro_batches)


@pytest.mark.parametrize(("ranks", "micro_batches"), [(4, 6), (4, 16), (2, 3)])
def test_1f1b_is_that_of_pytorch_but_for_the_last_rank_which_it_exports_wrongly(ranks: int, micro_batches: int) -> None:
    made = schedules.Schedule1F1B(stage(0, ranks, ranks), micro_batches, loss_fn=lambda _output, _target: 0)
    exported = made._get_pipeline_order()
    ours = build_schedule("1f1b", ranks, micro_batches)
    for rank in range(ranks - 1):
        assert [str(item) for item in ours.rows[rank]] == texts(exported[rank])
    # Their execution is right. Once this fails, compare all ranks.
    assert texts(exported[ranks - 1]) != [str(item) for item in ours.rows[-1]]


def test_gpipe_is_that_of_pytorch() -> None:
    made = schedules.ScheduleGPipe(stage(0, 3, 3), 4, loss_fn=lambda _output, _target: 0)
    exported = made._get_pipeline_order()
    ours = build_schedule("gpipe", 3, 4)
    for rank in range(3):
        assert [str(item) for item in ours.rows[rank]] == texts(exported[rank])
