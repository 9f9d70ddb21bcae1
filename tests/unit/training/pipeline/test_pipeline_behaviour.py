"""What a pipeline promises beside parity: unequal shapes, shared parameters, replicas, overlap, errors."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from tests.support.collectives.thread_world import ThreadCommunicator, ThreadWorld
from tests.support.live_memory import LiveMemory
from tests.support.pipeline.mailboxes import MailboxCommunicator, MailboxWorld, run_pipeline
from tests.support.pipeline.models import (
    alone,
    batch_of,
    gradients_of,
    layers_for,
    loss_of,
    pipeline_of,
    schedule_of,
    worst_error,
)
from torch import nn

from fireflyer.base.errors import Aborted, PeerFailed, UsageError
from fireflyer.codesign.schedule import Action, Kind, Pair, Placement, Schedule, build_schedule
from fireflyer.codesign.schedule.actions import looped
from fireflyer.training.pipeline import Compute, Pipeline, Transfer, compare, measured_costs, split_batch
from fireflyer.training.pipeline import shared as shared_parameters
from fireflyer.training.pipeline.shared import SharedGradients

MICRO_BATCHES = 4


def ended(outcomes: Sequence[Any]) -> list[Any]:
    errors = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
    for error in sorted(errors, key=lambda one: isinstance(one, PeerFailed | Aborted)):
        raise error
    return list(outcomes)


def merged(parts: Sequence[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {name: tensor for part in parts for name, tensor in part.items()}


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_gpipe_and_1f1b_give_the_bits_of_accumulation_in_one_process_and_twice_the_same(name: str) -> None:
    schedule = schedule_of(name, 2, MICRO_BATCHES)
    inputs, targets = batch_of(3, MICRO_BATCHES, unequal=True)

    def body(comm: MailboxCommunicator) -> dict[str, torch.Tensor]:
        pipeline = pipeline_of(schedule, comm, dtype=torch.float32)
        runs = []
        for _ in range(2):
            for module in pipeline.modules.values():
                module.zero_grad()
            pipeline.step(inputs, targets)
            runs.append(gradients_of(pipeline))
        assert all(torch.equal(runs[0][name], runs[1][name]) for name in runs[0])
        return runs[0]

    gradients = merged(ended(run_pipeline(2, body)))
    _, expected = alone(schedule, inputs, targets, dtype=torch.float32)
    assert all(torch.equal(gradients[f"{name}/0"], gradient) for name, gradient in expected.items())


@pytest.mark.parametrize("blocking", [True, False])
def test_shapes_may_differ_between_micro_batches_and_grow_between_steps(blocking: bool) -> None:
    schedule = schedule_of("zbv", 2, MICRO_BATCHES)
    small, large = batch_of(0, MICRO_BATCHES, unequal=True), batch_of(1, MICRO_BATCHES, unequal=True)
    large = ([torch.cat([one] * 40, 1) for one in large[0]], [torch.cat([one] * 40, 1) for one in large[1]])
    shares = [0.1, 0.2, 0.3, 0.4]

    def body(comm: MailboxCommunicator) -> tuple[list[dict[str, torch.Tensor]], list[int]]:
        pipeline = pipeline_of(schedule, comm)
        found, messages = [], [comm.messages]
        for inputs, targets in (small, large, large):
            for module in pipeline.modules.values():
                module.zero_grad()
            pipeline.step(inputs, targets, shares=shares)
            found.append(gradients_of(pipeline))
            messages.append(comm.messages)
        return found, [after - before for before, after in itertools.pairwise(messages)]

    outcomes = ended(run_pipeline(2, body, blocking=blocking))
    for step, (inputs, targets) in enumerate((small, large, large)):
        _, expected = alone(schedule, inputs, targets, shares=shares)
        assert worst_error(merged([outcome[0][step] for outcome in outcomes]), expected) <= 1e-10
    per_step = [outcome[1] for outcome in outcomes]
    assert all(sent[2] == sent[0] for sent in per_step), "one message each where shapes repeat"
    assert any(sent[1] > sent[0] for sent in per_step), "the rest of a longer message follows"


@pytest.mark.parametrize(("name", "ranks"), [("1f1b", 2), ("zbv", 2), ("dualpipe", 2)])
def test_a_shared_embedding_and_head_get_the_sum_of_their_gradients(name: str, ranks: int) -> None:
    schedule = schedule_of(name, ranks, MICRO_BATCHES)
    inputs, targets = batch_of(0, MICRO_BATCHES)
    last = schedule.placement.stages - 1
    tie = [(0, "0.weight"), (last, "0.weight")]

    def body(comm: MailboxCommunicator) -> dict[str, torch.Tensor]:
        pipeline = pipeline_of(schedule, comm, shared=[tie])
        pipeline.step(inputs, targets)
        return gradients_of(pipeline)

    gradients = merged(ended(run_pipeline(ranks, body)))
    _, expected = alone(schedule, inputs, targets, tied=True)
    assert len(gradients) == len(expected) * schedule.placement.directions
    assert worst_error(gradients, expected) <= 1e-10
    ends = [tensor for key, tensor in gradients.items() if key.startswith(("0.", f"{last + 2}."))]
    assert all(torch.equal(ends[0], other) for other in ends), "all copies have the same bits"


@pytest.mark.parametrize("name", ["1f1b", "dualpipe"])
def test_gradients_of_two_steps_add_up_in_copies_as_elsewhere(name: str) -> None:
    schedule = schedule_of(name, 2, MICRO_BATCHES)
    last = schedule.placement.stages - 1
    tie = [(0, "0.weight"), (last, "0.weight")]

    def body(comm: MailboxCommunicator) -> dict[str, torch.Tensor]:
        pipeline = pipeline_of(schedule, comm, shared=[tie])
        for step in range(2):
            pipeline.step(*batch_of(step, MICRO_BATCHES))
        return gradients_of(pipeline)

    first, second = (alone(schedule, *batch_of(step, MICRO_BATCHES), tied=True)[1] for step in range(2))
    expected = {key: first[key] + second[key] for key in first}
    assert worst_error(merged(ended(run_pipeline(2, body))), expected) <= 1e-10


@pytest.mark.parametrize("name", ["1f1b", "dualpipe"])
def test_frozen_copies_have_no_gradient_that_an_optimizer_would_step_by(name: str) -> None:
    schedule = schedule_of(name, 2, MICRO_BATCHES)
    last = schedule.placement.stages - 1
    tie = [(0, "0.weight"), (last, "0.weight")]

    def body(comm: MailboxCommunicator) -> list[tuple[bool, bool]]:
        modules = pipeline_of(schedule, comm).modules
        for (_, stage), module in modules.items():
            if stage in (0, last):
                module.get_parameter("0.weight").requires_grad_(False)
        pipeline = Pipeline(schedule, modules, comm, loss=loss_of, shared=[tie])
        pipeline.step(*batch_of(0, MICRO_BATCHES))
        return [
            (parameter.requires_grad, parameter.grad is None)
            for module in pipeline.modules.values()
            for parameter in module.parameters()
        ]

    for trained, without in itertools.chain.from_iterable(ended(run_pipeline(2, body))):
        assert trained != without


def test_a_frozen_parameter_that_is_tied_to_a_trained_one_is_refused() -> None:
    def body(comm: MailboxCommunicator) -> None:
        stage = nn.Linear(2, 2)
        stage.weight.requires_grad_(comm.rank == 0)
        SharedGradients(comm, looped(2), {(0, comm.rank): stage}, [[(0, "weight"), (1, "weight")]], 0)

    for found in run_pipeline(2, body):
        assert isinstance(found, UsageError)
        assert "or frozen" in str(found)


def test_the_sum_of_shared_gradients_takes_little_memory_and_adds_in_the_order_of_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Three ranks with copies of two parameters, of which one is several messages long; one rank has no gradient of
    one, and one a gradient that is not contiguous."""
    monkeypatch.setattr(shared_parameters, "SUM_BYTES", 4096)
    placement = looped(3)
    shared = [[(stage, name) for stage in range(3)] for name in ("weight", "bias")]
    torch.manual_seed(0)
    weights, biases = torch.randn(3, 300, 40) * 1000, torch.randn(3, 300) * 1000

    def body(comm: MailboxCommunicator) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], int]:
        stage = nn.Linear(40, 300)
        if comm.rank == 2:
            stage.weight.data = stage.weight.data.t().contiguous().t()
        gradients = SharedGradients(comm, placement, {(0, comm.rank): stage}, shared, 0)
        values = {name: one.detach().clone() for name, one in stage.named_parameters()}
        given = weights[comm.rank].clone()
        stage.weight.grad = given.t().contiguous().t() if comm.rank == 1 else given
        stage.bias.grad = None if comm.rank == 1 else biases[comm.rank].clone()
        with LiveMemory() as memory:
            gradients.sum()
        more = sum(one.nbytes for one in (given, biases[0]) if comm.rank == 1)  # gradients that it made
        found = {name: one.grad for name, one in stage.named_parameters() if one.grad is not None}
        return values, found, memory.peak_bytes - more

    outcomes = ended(run_pipeline(3, body))
    expected = {"weight": weights[0] + weights[1] + weights[2], "bias": biases[0] + 0 + biases[2]}
    for values, found, peak_bytes in outcomes:
        assert all(torch.equal(values[name], one) for name, one in outcomes[0][0].items())
        assert all(torch.equal(found[name], one) for name, one in expected.items())
        assert peak_bytes <= 3 * 4096


def test_what_averages_in_another_way_may_give_copies_other_bits_since_they_are_summed_after_it() -> None:
    schedule = schedule_of("dualpipe", 2, MICRO_BATCHES)
    inputs, targets = batch_of(0, MICRO_BATCHES)

    def body(comm: MailboxCommunicator) -> dict[str, torch.Tensor]:
        def average() -> None:
            for (direction, _), module in pipeline.modules.items():
                for parameter in module.parameters():
                    assert parameter.grad is not None
                    parameter.grad *= 1 + 1e-12 * (1 + direction + 2 * comm.rank)

        pipeline = pipeline_of(schedule, comm, average=average)
        pipeline.step(inputs, targets)
        return gradients_of(pipeline)

    gradients = merged(ended(run_pipeline(2, body)))
    assert worst_error(gradients, alone(schedule, inputs, targets)[1]) <= 1e-10
    for key, gradient in gradients.items():
        assert torch.equal(gradient, gradients[f"{key.split('/')[0]}/0"]), key


@pytest.mark.parametrize("name", ["interleaved", "dualpipe"])
def test_replicas_average_the_gradients_of_their_stages(name: str) -> None:
    """Three pipelines of two ranks; each has a third of the batch. Sums over replicas have another order on each rank
    of a pipeline; copies of a parameter have the same bits nevertheless."""
    schedule = schedule_of(name, 2, MICRO_BATCHES)
    fellows = [ThreadWorld(3, first=rank) for rank in range(2)]
    shared = [[(0, "0.weight"), (schedule.placement.stages - 1, "0.weight")]]

    def replica(number: int) -> Callable[[MailboxCommunicator], dict[str, torch.Tensor]]:
        def body(comm: MailboxCommunicator) -> dict[str, torch.Tensor]:
            means = ThreadCommunicator(fellows[comm.rank], number)
            pipeline = pipeline_of(schedule, comm, replicas=means, shared=shared)
            for _ in range(2):  # the second step finds gradients in the buckets
                for module in pipeline.modules.values():
                    module.zero_grad()
                pipeline.step(*batch_of(number, MICRO_BATCHES))
            return gradients_of(pipeline)

        return body

    worlds = [MailboxWorld(2) for _ in range(3)]
    bodies = [replica(number) for number in range(3)]

    def of_six(comm: MailboxCommunicator) -> dict[str, torch.Tensor]:
        number, rank = divmod(comm.rank, 2)
        return bodies[number](MailboxCommunicator(worlds[number], rank))

    outcomes = ended(run_pipeline(6, of_six))
    parts = [alone(schedule, *batch_of(number, MICRO_BATCHES), tied=True)[1] for number in range(3)]
    expected = {name: (parts[0][name] + parts[1][name] + parts[2][name]) / 3 for name in parts[0]}
    copies: dict[str, list[torch.Tensor]] = {}
    last = layers_for(schedule) - 1
    for number in range(3):
        found = merged(outcomes[2 * number : 2 * number + 2])
        assert worst_error(found, expected) <= 1e-10
        for key, gradient in found.items():
            one = key.split("/")[0]
            copies.setdefault("tied" if one in ("0.weight", f"{last}.weight") else one, []).append(gradient)
    for key, same in copies.items():
        assert all(torch.equal(same[0], other) for other in same), key


def test_evaluation_gives_losses_and_no_gradients() -> None:
    schedule = schedule_of("dualpipev", 2, MICRO_BATCHES)
    inputs, targets = batch_of(0, MICRO_BATCHES)

    def body(comm: MailboxCommunicator) -> list[float]:
        pipeline = pipeline_of(schedule, comm)
        losses = pipeline.evaluate(inputs, targets)
        assert all(parameter.grad is None for one in pipeline.modules.values() for parameter in one.parameters())
        return [] if losses is None else losses.tolist()

    found = ended(run_pipeline(2, body))
    assert found[0] == pytest.approx(alone(schedule, inputs, targets)[0], rel=1e-13)
    assert found[1] == []


# --- overlap ---


class Started:
    def __init__(self, log: list[str], name: str, outputs: tuple[torch.Tensor, ...]) -> None:
        self._log, self._name, self._outputs = log, name, outputs

    def wait(self) -> tuple[torch.Tensor, ...]:
        self._log.append(f"wait {self._name}")
        return self._outputs


class ExpertBlock(nn.Module):
    """Doubles on dispatch, and halves on combine: what other ranks would do to tokens."""

    def __init__(self, log: list[str]) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4).double(), nn.Linear(4, 4).double()
        self._log = log

    def phases(self) -> list[Compute | Transfer]:
        return [
            Compute("attention", lambda x: self._noted("attention", (x, torch.tanh(self.first(x))))),
            Transfer("dispatch", *self._transfer("dispatch", 2.0)),
            Compute("experts", lambda x, y: self._noted("experts", (x, torch.tanh(self.second(y))))),
            Transfer("combine", *self._transfer("combine", 0.5)),
            Compute("sum", lambda x, y: self._noted("sum", (x + y,))),
        ]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 0.5 * torch.tanh(self.second(2 * torch.tanh(self.first(x))))

    def _noted(self, name: str, outputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        self._log.append(f"F {name}")
        return outputs

    def _transfer(self, name: str, factor: float) -> tuple[Any, Any]:
        def start(x: torch.Tensor, y: torch.Tensor) -> tuple[Started, float]:
            self._log.append(f"start F {name}")
            return Started(self._log, f"F {name}", (x.clone(), factor * y)), factor

        def start_backward(saved: float, gradients: Sequence[torch.Tensor]) -> Started:
            self._log.append(f"start B {name}")
            return Started(self._log, f"B {name}", (gradients[0], saved * gradients[1]))

        return start, start_backward


PAIRED = Schedule(
    "one pair",
    Placement(((0,),)),
    2,
    (
        (
            Action(Kind.FORWARD, 0, 0),
            Pair(Action(Kind.FORWARD, 0, 1), Action(Kind.BACKWARD, 0, 0)),
            Action(Kind.INPUT, 0, 1),
            Action(Kind.WEIGHT, 0, 1),
        ),
    ),
)


def square(x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (x - target).square().sum()


def test_in_a_pair_each_micro_batch_computes_while_the_other_transfers() -> None:
    log: list[str] = []
    torch.manual_seed(0)
    block = ExpertBlock(log)
    data = list(torch.randn(2, 3, 4, dtype=torch.float64))
    pipeline = Pipeline(
        PAIRED, {(0, 0): block}, MailboxCommunicator(MailboxWorld(1), 0), loss=square, record_phases=True
    )
    pipeline.step(data, data[::-1])
    found = {name: parameter.grad for name, parameter in block.named_parameters()}
    block.zero_grad()
    for one, target in zip(data, reversed(data), strict=True):
        (square(block(one), target) / 2).backward()  # type: ignore[no-untyped-call]
    for name, parameter in block.named_parameters():
        assert found[name] is not None
        torch.testing.assert_close(found[name], parameter.grad, rtol=1e-12, atol=1e-12)

    assert pipeline.record is not None
    events = [
        f"{event.kind}{event.micro_batch} {event.phase} {'begins' if event.begins else 'ends'}"
        for event in pipeline.record.phases
    ]
    begin = events.index("B0 loss begins")
    assert events[begin : begin + 24] == [
        "B0 loss begins",
        "B0 loss ends",
        "B0 sum begins",
        "B0 sum ends",
        "B0 combine begins",
        "F1 attention begins",
        "F1 attention ends",
        "F1 dispatch begins",
        "B0 combine ends",
        "B0 experts begins",
        "B0 experts ends",
        "B0 dispatch begins",
        "F1 dispatch ends",
        "F1 experts begins",
        "F1 experts ends",
        "F1 combine begins",
        "B0 dispatch ends",
        "B0 attention begins",
        "B0 attention ends",
        "F1 combine ends",
        "F1 sum begins",
        "F1 sum ends",
        "F1 loss begins",
        "F1 loss ends",
    ]
    assert log.index("start B combine") < log.index("F attention", 5) < log.index("wait B combine")


# --- errors ---


def run_step(name: str, change: Callable[[int, Pipeline], None] | None = None, **options: Any) -> list[Any]:
    schedule = schedule_of(name, 2, MICRO_BATCHES)
    inputs, targets = batch_of(0, MICRO_BATCHES)

    def body(comm: MailboxCommunicator) -> None:
        pipeline = pipeline_of(schedule, comm, **options)
        if change is not None:
            change(comm.rank, pipeline)
        pipeline.step(inputs, targets)

    return run_pipeline(2, body)


def test_a_batch_that_does_not_divide_is_refused() -> None:
    with pytest.raises(UsageError, match="a batch of 10 samples does not divide into 4 micro-batches"):
        split_batch(torch.zeros(10, 2), 4)
    assert [len(part) for part in split_batch(torch.zeros(12, 2), 4)] == [3, 3, 3, 3]


def test_a_wrong_number_of_micro_batches_ends_the_step_on_all_ranks() -> None:
    schedule = schedule_of("1f1b", 2, MICRO_BATCHES)
    inputs, targets = batch_of(0, 3)
    first, second = run_pipeline(2, lambda comm: pipeline_of(schedule, comm).step(inputs, targets))
    for error in (first, second):
        assert isinstance(error, UsageError | Aborted)
        assert "inputs has 3 micro-batches, schedule '1f1b' has 4" in str(error)


def test_a_rank_that_raises_is_named_on_the_others() -> None:
    def fail(rank: int, pipeline: Pipeline) -> None:
        if rank == 1:
            pipeline.modules[0, 1].register_forward_hook(lambda *_: 1 / 0)

    first, second = run_step("1f1b", fail)
    assert isinstance(second, ZeroDivisionError)
    assert isinstance(first, Aborted)
    assert "rank 1 of the pipeline raised ZeroDivisionError" in str(first)


def test_a_rank_that_is_gone_is_named_with_the_message_that_is_missing() -> None:
    schedule = schedule_of("1f1b", 2, MICRO_BATCHES)
    inputs, targets = batch_of(0, MICRO_BATCHES)

    def body(comm: MailboxCommunicator) -> None:
        pipeline = pipeline_of(schedule, comm)
        if comm.rank == 1:
            raise PeerFailed("dead", rank=1)
        pipeline.step(inputs, targets)

    first, _ = run_pipeline(2, body)
    assert isinstance(first, PeerFailed)
    assert first.rank == 1
    assert re.search(r"of stage 0, micro-batch \d (from|to) 1 did not complete: rank 1 is gone", str(first))


def test_a_message_above_the_limit_is_refused_by_its_sender() -> None:
    first, _ = run_step("1f1b", max_message_bytes=1600)
    assert isinstance(first, UsageError)
    assert "rank 0, send activation of stage 0, micro-batch 0 to 1 has" in str(first)
    assert "more than max_message_bytes=1600" in str(first)


def test_different_schedules_are_refused_as_the_pipeline_is_made() -> None:
    def body(comm: MailboxCommunicator) -> None:
        pipeline_of(schedule_of(["gpipe", "1f1b"][comm.rank], 2, MICRO_BATCHES), comm)

    for error in run_pipeline(2, body):
        assert isinstance(error, UsageError)
        assert "ranks [1] were given another schedule than rank 0" in str(error)


def test_shared_parameters_of_different_shapes_are_refused() -> None:
    schedule = build_schedule("1f1b", 2, 2)

    def body(comm: MailboxCommunicator) -> None:
        stage = nn.Linear(4, 4 + comm.rank)
        Pipeline(schedule, {(0, comm.rank): stage}, comm, loss=square, shared=[[(0, "weight"), (1, "weight")]])

    for error in run_pipeline(2, body):
        assert isinstance(error, UsageError)
        assert "holds 1 shared parameters (shared[0]) of" in str(error)


@pytest.mark.parametrize(
    ("shared", "message"),
    [
        ([[(0, "weight"), (7, "weight")]], "shared= names stage 7; there are stages 0 to 0"),
        ([[(0, "scale")]], "has no parameter 'scale'"),
        ([[(0, "weight")], [(0, "weight")]], "names parameter 'weight' of stage 0 twice"),
        ([[(0, "weight"), (0, "bias")]], "ties parameters of different shapes"),
    ],
)
def test_what_is_shared_must_be_there(shared: list[list[tuple[int, str]]], message: str) -> None:
    comm = MailboxCommunicator(MailboxWorld(1), 0)
    with pytest.raises(UsageError) as caught:
        Pipeline(build_schedule("1f1b", 1, 1), {(0, 0): nn.Linear(2, 2)}, comm, loss=square, shared=shared)
    assert message in str(caught.value)


def test_one_parameter_in_two_ties_is_refused() -> None:
    stage = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    stage[1].weight = stage[0].weight
    shared = [[(0, "0.weight")], [(0, "1.weight")]]
    comm = MailboxCommunicator(MailboxWorld(1), 0)
    with pytest.raises(UsageError, match=r"shared\[1\] and shared\[0\] name the same parameter"):
        Pipeline(build_schedule("1f1b", 1, 1), {(0, 0): stage}, comm, loss=square, shared=shared)


def test_stages_and_ranks_must_be_those_of_the_schedule() -> None:
    comm = MailboxCommunicator(MailboxWorld(1), 0)
    with pytest.raises(UsageError, match="is for 2 ranks, the communicator has 1"):
        Pipeline(build_schedule("1f1b", 2, 2), {}, comm, loss=square)
    with pytest.raises(UsageError, match="rank 0 holds the stages"):
        Pipeline(build_schedule("zbv", 1, 2), {(0, 0): nn.Linear(2, 2)}, comm, loss=square)


# --- records ---


def test_a_step_is_recorded_and_put_beside_the_simulator() -> None:
    """With a clock that only passes and waits move: what is measured is what was simulated."""
    schedule = schedule_of("zb-h1", 2, MICRO_BATCHES)
    inputs, targets = batch_of(0, MICRO_BATCHES)

    def body(comm: MailboxCommunicator) -> Any:
        pipeline = pipeline_of(schedule, comm)
        pipeline.step(inputs, targets)
        return pipeline.record

    records = ended(run_pipeline(2, body))
    for record, row in zip(records, schedule.rows, strict=True):
        assert len(record.spans) == len(row)
        assert all(span.begin_ns <= span.end_ns for span in record.spans)
        assert record.passes_ns + record.waited_ns <= record.end_ns - record.begin_ns
        assert record.overhead_ns > 0
    costs = measured_costs(schedule, records)
    assert min(costs.forward_s + costs.input_s + costs.weights_s) > 0
    found = compare(schedule, records)
    assert min(found.predicted_s, found.measured_s) > 0
    assert "measured" in str(found)


def test_loss_must_be_a_scalar() -> None:
    comm = MailboxCommunicator(MailboxWorld(1), 0)
    pipeline = Pipeline(build_schedule("1f1b", 1, 1), {(0, 0): nn.Linear(2, 2)}, comm, loss=lambda x, y: x - y)
    with pytest.raises(UsageError, match="must be a scalar"):
        pipeline.step([torch.zeros(1, 2)], [torch.zeros(1, 2)])
