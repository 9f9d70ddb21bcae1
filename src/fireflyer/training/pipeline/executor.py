"""Runs the steps of a pipeline: a small interpreter of the programs of `programs`, one on each rank.

An exception in a step ends the group (`abort`), so that the other ranks get an error that names this rank, and none
waits for it. A rank that dies is noticed by the communicator: `PeerFailed` with its number.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch
from torch import nn

from fireflyer.base.errors import UsageError
from fireflyer.base.units import GIB
from fireflyer.codesign.schedule.actions import Action, Kind, Pair, Schedule
from fireflyer.codesign.schedule.execution import Message
from fireflyer.codesign.schedule.validity import check
from fireflyer.training.communication import Communicator
from fireflyer.training.pipeline.channels import Channels, PipelineCommunicator, tags_of
from fireflyer.training.pipeline.gradient_means import GradientMeans
from fireflyer.training.pipeline.micro_batches import MicroBatch, tensors_of
from fireflyer.training.pipeline.phases import Gradients, Tensors, take_turns
from fireflyer.training.pipeline.programs import (
    Instruction,
    Key,
    compile_programs,
    forward_only,
    key_of,
    needs,
)
from fireflyer.training.pipeline.records import Recorder, StepRecord
from fireflyer.training.pipeline.shared import Place, SharedGradients
from fireflyer.training.pipeline.stage_passes import StagePasses, finish, leaf

__all__ = ["MAX_MESSAGE_BYTES", "Pipeline"]

MAX_MESSAGE_BYTES: Final = 4 * GIB
_MAX_TOLD: Final = 500
"""Characters of an exception that the other ranks are told."""


class Pipeline:
    """One rank of a pipeline.

    >>> schedule = build_schedule("1f1b", comm.world_size, micro_batches=8)
    >>> pipeline = Pipeline(schedule, {(0, comm.rank): my_layers}, comm, loss=nn.functional.cross_entropy)
    >>> losses = pipeline.step(split_batch(tokens, 8), split_batch(targets, 8))     # then the optimizer's step

    `grad` of the parameters then holds what a backward of the mean of the losses of all micro-batches gives, added to
    what was there.
    """

    def __init__(
        self,
        schedule: Schedule,
        stages: Mapping[tuple[int, int], nn.Module],
        comm: PipelineCommunicator,
        *,
        loss: Callable[..., torch.Tensor],
        shared: Sequence[Sequence[Place]] = (),
        replicas: Communicator | None = None,
        average: Callable[[], None] | None = None,
        max_message_bytes: int = MAX_MESSAGE_BYTES,
        device: torch.device | None = None,
        record_phases: bool = False,
        now_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        """Collective over `comm`, whose ranks are those of the schedule; it is for this pipeline alone.

        `stages`: the modules of this rank, by (direction, stage) as `Placement.stages_of` has them. `loss(*outputs,
        *targets)` is a scalar. `shared`: lists of (stage, parameter name) that are one parameter; copies in both
        directions of DualPipe are shared without being named. `replicas`: this rank's fellows in other pipelines, over
        which gradients are averaged. `average`: called instead, after the last pass of a step and before copies are
        summed, to average gradients in another way. `device`: where the stages are, if not on the CPU; messages go
        through host memory. `record_phases`: `record.phases` has the order in which phases ran.

        Raises `UsageError` where these do not fit each other, or the ranks were given different schedules.
        """
        check(schedule)
        rank, placement = comm.rank, schedule.placement
        if placement.ranks != comm.world_size:
            raise UsageError(
                f"schedule {schedule.name!r} is for {placement.ranks} ranks, the communicator has {comm.world_size}"
            )
        if sorted(stages) != sorted(placement.stages_of(rank)):
            raise UsageError(
                f"rank {rank} holds the stages {sorted(placement.stages_of(rank))} as (direction, stage); "
                f"stages= has {sorted(stages)}"
            )
        self.schedule = schedule
        self.modules = dict(stages)
        self._comm = comm
        self._loss = loss
        self._last = placement.stages - 1
        self._program = compile_programs(schedule)[rank]
        self._evaluation: tuple[Instruction, ...] | None = None
        self._recorder = Recorder(rank, now_ns, phases=record_phases)
        self._now_ns = now_ns
        self._passes = {
            key: StagePasses(f"stage {key[1]} of rank {rank}", module, self._recorder.phase_hook(key[1]))
            for key, module in stages.items()
        }
        self._channels = Channels(comm, schedule.micro_batches, max_message_bytes, device)
        tags = tags_of(placement.stages, schedule.micro_batches)
        _agree(comm, schedule)
        self._shared = SharedGradients(comm, placement, stages, shared, tags)
        self._average = average
        self._means = None if replicas is None else GradientMeans(replicas, stages, self._shared.parameters)
        self._made: dict[Key, Gradients] = {}
        """Outputs for a stage of this rank, or for a send."""
        self._inputs: Sequence[MicroBatch] | None = None
        self._targets: Sequence[MicroBatch] | None = None
        self._shares: Sequence[float] | None = None
        self._losses: dict[int, torch.Tensor] = {}
        self._loss_gradients: dict[int, torch.Tensor] = {}

    @property
    def record(self) -> StepRecord | None:
        """Record of what the last step did and when."""
        return self._recorder.last

    @property
    def sent_bytes(self) -> int:
        """Bytes sent in messages between stages since construction."""
        return self._channels.sent_bytes

    def step(
        self,
        inputs: Sequence[MicroBatch] | None = None,
        targets: Sequence[MicroBatch] | None = None,
        *,
        shares: Sequence[float] | None = None,
    ) -> torch.Tensor | None:
        """Forward and backward of all micro-batches. Collective. The losses of those whose last stage is on this rank,
        in their order; None on other ranks.

        `inputs` of all micro-batches, a tensor or a tuple of tensors each, where the first stage is; `targets` where
        the last one is; others may leave them out. Micro-batches may differ in shape. `shares`: of each micro-batch in
        the loss of the step; None: equal ones, 1 over their number.

        Raises `UsageError`; `PeerFailed` that names a rank that died; `Aborted` where another rank raised.
        """
        return self._guarded(lambda: self._step(inputs, targets, shares))

    def evaluate(
        self, inputs: Sequence[MicroBatch] | None = None, targets: Sequence[MicroBatch] | None = None
    ) -> torch.Tensor | None:
        """The losses, as `step` gives them, without gradients and backward passes. Collective."""
        return self._guarded(lambda: self._evaluate(inputs, targets))

    # --- inside ---

    def _guarded(self, run: Callable[[], torch.Tensor | None]) -> torch.Tensor | None:
        try:
            return run()
        except BaseException as error:
            for passes in self._passes.values():
                passes.clear()
            self._made.clear()
            what = " ".join(f"{type(error).__name__}: {error}".split())[:_MAX_TOLD]
            self._comm.abort(f"rank {self._comm.rank} of the pipeline raised {what}")
            raise

    def _step(
        self,
        inputs: Sequence[MicroBatch] | None,
        targets: Sequence[MicroBatch] | None,
        shares: Sequence[float] | None,
    ) -> torch.Tensor | None:
        self._take(inputs, targets, shares)
        recorder = self._recorder
        recorder.begin()
        self._shared.begin()
        for instruction in self._program:
            self._run(instruction)
        begin_ns = self._now_ns()
        self._channels.end_step()
        # Replicas first: the bits of a mean over replicas depend on the place in its buffer and on the nodes of these
        # ranks, which copies of a parameter do not share. The sum over copies has one order, and so ends with the same
        # bits in all copies of all replicas.
        if self._means is not None:
            self._means.finish()
        if self._average is not None:
            self._average()
        self._shared.sum()
        recorder.waited_ns += self._now_ns() - begin_ns
        recorder.end()
        return self._result()

    def _evaluate(
        self, inputs: Sequence[MicroBatch] | None, targets: Sequence[MicroBatch] | None
    ) -> torch.Tensor | None:
        if self._evaluation is None:
            self._evaluation = compile_programs(forward_only(self.schedule))[self._comm.rank]
        self._take(inputs, targets, None)
        with torch.no_grad():
            for instruction in self._evaluation:
                self._run(instruction)
        self._channels.end_step()
        return self._result()

    def _take(
        self,
        inputs: Sequence[MicroBatch] | None,
        targets: Sequence[MicroBatch] | None,
        shares: Sequence[float] | None,
    ) -> None:
        held = {stage for _, stage in self.modules}
        for name, given, needed in (("inputs", inputs, 0 in held), ("targets", targets, self._last in held)):
            if given is None and needed:
                what = "first" if name == "inputs" else "last"
                raise UsageError(f"rank {self._comm.rank} holds the {what} stage; pass {name}=")
            self._check_count(name, given)
        self._check_count("shares", shares)
        self._inputs, self._targets, self._shares = inputs, targets, shares
        self._losses, self._loss_gradients = {}, {}

    def _check_count(self, name: str, given: Sequence[Any] | None) -> None:
        if given is not None and len(given) != self.schedule.micro_batches:
            raise UsageError(
                f"{name} has {len(given)} micro-batches, schedule {self.schedule.name!r} has "
                f"{self.schedule.micro_batches}; give that many, or build the schedule for {len(given)}"
            )

    def _result(self) -> torch.Tensor | None:
        losses = [self._losses[index] for index in sorted(self._losses)]
        return torch.stack(losses) if losses else None

    def _run(self, instruction: Instruction) -> None:
        if isinstance(instruction, Action):
            self._run_pass(instruction)
        elif isinstance(instruction, Message):
            if instruction.send:
                self._channels.send(instruction, self._made.pop(key_of(instruction)))
            else:
                self._channels.post(instruction)
        elif isinstance(instruction, Pair):
            self._run_pair(instruction)
        elif self._means is not None:
            self._means.start(instruction.direction, instruction.stage)

    def _run_pass(self, action: Action) -> None:
        kind, _, micro_batch = action
        passes = self._passes_of(action)
        given = self._given(action)
        begin_ns = self._now_ns()
        if kind is Kind.FORWARD:
            self._keep_outputs(action, finish(passes.forward(micro_batch, *self._forward_of(action, given))))
        elif kind is Kind.BACKWARD:
            self._keep_gradients(action, finish(passes.backward(micro_batch, given)))
        elif kind is Kind.INPUT:
            self._keep_gradients(action, finish(passes.backward_input(micro_batch, given)))
        else:
            passes.backward_weights(micro_batch)
        self._recorder.span(begin_ns, self._now_ns())

    def _run_pair(self, pair: Pair) -> None:
        forward, backward = pair
        given_forward, given_backward = self._given(forward), self._given(backward)
        begin_ns = self._now_ns()
        gradients, outputs = take_turns(
            self._passes_of(backward).backward(backward.micro_batch, given_backward),
            self._passes_of(forward).forward(forward.micro_batch, *self._forward_of(forward, given_forward)),
        )
        self._keep_gradients(backward, gradients)
        self._keep_outputs(forward, outputs)
        self._recorder.span(begin_ns, self._now_ns())

    def _passes_of(self, action: Action) -> StagePasses:
        return self._passes[self.schedule.direction(action.micro_batch), action.stage]

    def _given(self, action: Action) -> Gradients:
        """What comes from another stage, or (F of the first stage) from the caller. Waits for it."""
        key = needs(action, self._last + 1)
        if key is None:
            if action.kind is not Kind.FORWARD:
                return (self._loss_gradients.pop(action.micro_batch),) if action.kind is not Kind.WEIGHT else ()
            assert self._inputs is not None  # noqa: S101 - checked as the step began
            return tensors_of(self._inputs[action.micro_batch], "inputs")
        if not self._channels.has(key):
            return self._made.pop(key)
        begin_ns = self._now_ns()
        self._channels.wait(key)
        self._recorder.waited_ns += self._now_ns() - begin_ns
        return self._channels.take(key)

    def _forward_of(self, action: Action, given: Gradients) -> tuple[Tensors, Callable[..., torch.Tensor] | None]:
        """Arguments of the forward pass after the micro-batch."""
        present = tuple(tensor for tensor in given if tensor is not None)
        return present, None if action.stage != self._last else lambda *outputs: self._loss_of(action, outputs)

    def _loss_of(self, action: Action, outputs: Tensors) -> torch.Tensor:
        assert self._targets is not None  # noqa: S101 - checked as the step began
        index = action.micro_batch
        loss = self._loss(*outputs, *tensors_of(self._targets[index], "targets"))
        if loss.ndim != 0:
            raise UsageError(f"the loss of micro-batch {index} has shape {tuple(loss.shape)}; it must be a scalar")
        self._losses[index] = loss.detach()
        scaled = loss / self.schedule.micro_batches if self._shares is None else loss * self._shares[index]
        self._loss_gradients[index] = torch.ones_like(scaled)
        return scaled

    def _keep_outputs(self, action: Action, outputs: Tensors) -> None:
        if action.stage == self._last:
            return
        key = (False, action.stage, action.micro_batch)
        here = self.schedule.rank_of(action.stage + 1, action.micro_batch) == self._comm.rank
        self._made[key] = tuple(map(leaf, outputs)) if here else outputs

    def _keep_gradients(self, action: Action, gradients: Gradients) -> None:
        if action.stage > 0:
            self._made[True, action.stage - 1, action.micro_batch] = gradients


def _agree(comm: PipelineCommunicator, schedule: Schedule) -> None:
    """Raises `UsageError` on every rank unless all were given the same schedule: they would wait for each other."""
    said = repr((schedule.placement, schedule.micro_batches, [[str(item) for item in row] for row in schedule.rows]))
    mine = torch.frombuffer(bytearray(hashlib.sha256(said.encode()).digest()), dtype=torch.uint8)
    verdict = torch.zeros(comm.world_size, dtype=torch.uint8)
    # The tag of messages about the schedule depends on no schedule.
    if comm.rank == 0:
        for rank in range(1, comm.world_size):
            theirs = torch.empty_like(mine)
            comm.recv(theirs, source=rank, tag=0, async_op=True).wait()
            verdict[rank] = not torch.equal(theirs, mine)
        works = [comm.send(verdict, to=rank, tag=0, async_op=True) for rank in range(1, comm.world_size)]
    else:
        works = [comm.send(mine, to=0, tag=0, async_op=True), comm.recv(verdict, source=0, tag=0, async_op=True)]
    for work in works:
        work.wait()
    others = verdict.nonzero().flatten().tolist()
    if others:
        raise UsageError(f"ranks {others} were given another schedule than rank 0; build the same one on all ranks")
