"""Transfers of a schedule have the bytes that the executor sends between each two ranks."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from tests.support.pipeline.mailboxes import MailboxCommunicator, MailboxWork, run_pipeline
from tests.support.pipeline.models import EXECUTED, LENGTH, WIDTH, batch_of, pipeline_of, schedule_of

from fireflyer.codesign.schedule import MessageBytes, compile_schedule, pipeline_transfers, uniform_costs
from fireflyer.training.pipeline.channels import FIRST_FRAME_BYTES, tags_of
from fireflyer.training.pipeline.messages import HEADER_BYTES

RANKS = 2
GRANULE_BYTES = 4096
"""To which the executor rounds messages from the second step on."""


class CountingCommunicator(MailboxCommunicator):
    """Counts the bytes that it is given to send between stages, by rank to which. Sums of gradients of both copies of a
    stage have other tags."""

    def __init__(self, comm: MailboxCommunicator, tags: int) -> None:
        super().__init__(comm._world, comm.rank)
        self._tags = tags
        self.sent: Counter[tuple[int, int]] = Counter()

    def send(self, array: Any, *, to: int, tag: int = 0, async_op: bool = False) -> MailboxWork:
        if tag < self._tags:
            self.sent[self.rank, to] += array.nbytes
        return super().send(array, to=to, tag=tag, async_op=async_op)


@pytest.mark.parametrize("name", EXECUTED)
def test_ranks_send_to_each_other_what_the_transfers_have(name: str) -> None:
    micro_batches = 2 * RANKS
    schedule = schedule_of(name, RANKS, micro_batches)

    def body(comm: MailboxCommunicator) -> list[Counter[tuple[int, int]]]:
        counting = CountingCommunicator(comm, tags_of(schedule.placement.stages, micro_batches))
        pipeline = pipeline_of(schedule, counting)
        found = []
        for _ in range(2):
            counting.sent.clear()
            counted = pipeline.sent_bytes
            pipeline.step(*batch_of(0, micro_batches))
            assert sum(counting.sent.values()) == pipeline.sent_bytes - counted
            found.append(Counter(counting.sent))
        return found

    outcomes = run_pipeline(RANKS, body)
    tensor_bytes = batch_of(0, micro_batches)[0][0].shape[0] * LENGTH * WIDTH * 8
    whole = -(-(HEADER_BYTES + tensor_bytes) // GRANULE_BYTES) * GRANULE_BYTES
    for step, message in enumerate((max(FIRST_FRAME_BYTES, HEADER_BYTES + tensor_bytes), whole)):
        sent: Counter[tuple[int, int]] = Counter()
        for outcome in outcomes:
            assert isinstance(outcome, list), outcome
            sent.update(outcome[step])
        program = compile_schedule(schedule)
        sizes = (message,) * (schedule.placement.stages - 1)
        costs = uniform_costs(schedule.placement, forward=1, backward=2, weights=1)
        exported: Counter[tuple[int, int]] = Counter()
        for one in pipeline_transfers(program, costs, MessageBytes(sizes, sizes)):
            exported[one.source, one.target] += one.nbytes
        assert sent == +exported
