"""Steps of the trainer beside those of one process.

`python -m tests.support.torch_ranks.plan_steps JSON`. `cases` are tables of recipes by name, as `raw_recipe` takes
them. Before each step a rank takes over parameters, moments and biases of a reference that has the whole model and the
whole batch, and in the step the experts that its gates chose. The result has for each case the largest differences from
the reference's step, over all steps: of a gradient tensor and of a parameter after the step over its norm, of the norm
of all gradients and of the loss; whether biases are equal; the name of the worst gradient; and the names in the whole
model of those that were compared, and of all; and a digest of the parameters after the last step.

With `wide` all is in FP64, and the state is the reference's before the first step only: from there on parameters,
moments, biases and routing are the rank's own, and parameters are compared after the last step.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import hashlib
import json
import math
import sys
from collections.abc import Iterable, Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, Final, NamedTuple, cast

import torch
import torch.distributed as dist
from tests.support.torch_ranks.trainer_plans import add_in_float64
from tests.support.trainer.recipes import raw_recipe
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from fireflyer.codesign.parallel import ParallelPlan
from fireflyer.codesign.schedule import build_schedule
from fireflyer.recipes.deepseek import DeepseekModel, recorded_routing, replayed_routing
from fireflyer.recipes.deepseek.gate import Gate
from fireflyer.recipes.trainer.arrangements import Arrangement, adamw
from fireflyer.recipes.trainer.building import arrange
from fireflyer.recipes.trainer.core.parsing import recipe_of
from fireflyer.recipes.trainer.core.recipe import ModelTable, OptimizerSettings, Recipe
from fireflyer.recipes.trainer.models import BuiltModel, build_model
from fireflyer.recipes.trainer.pipelines import Pipelined
from fireflyer.recipes.trainer.preconditions import checked_shape
from fireflyer.training.fsdp import StepInBackward
from fireflyer.training.mesh import PlanMesh

LIMIT: Final = timedelta(seconds=120)
MOMENTS: Final = ("exp_avg", "exp_avg_sq")


class State(NamedTuple):
    """Of one process: whole tensors, by names of the model."""

    parameters: dict[str, Tensor]
    moments: dict[str, dict[str, Tensor]]
    """Empty before the first step."""
    buffers: dict[str, Tensor]


class ReferenceStep(NamedTuple):
    before: State
    routing: dict[str, list[Tensor]]
    loss: float
    gradients: dict[str, Tensor]
    """Before clipping."""
    norm: float
    after: State


@functools.cache
def reference_steps(
    model: ModelTable, plan: ParallelPlan, settings: OptimizerSettings, *, wide: bool
) -> list[ReferenceStep]:
    """Of one process with the whole model and the whole batch; `plan` has one rank."""
    built = made(model, plan, wide=wide)
    optimizer = adamw(built.module, settings)
    steps, state = [], state_of(built.module, optimizer)
    for inputs, targets in batches(plan, settings.steps):
        with recorded_routing(built.module) as routing:
            loss = built.loss(inputs, targets)
        (loss / plan.step_tokens).backward()
        gradients = {name: one.grad.clone() for name, one in built.module.named_parameters() if one.grad is not None}
        norm = float(torch.nn.utils.clip_grad_norm_(built.module.parameters(), settings.max_norm))
        optimizer.step()
        optimizer.zero_grad()
        if isinstance(built.module, DeepseekModel) and list(built.module.gates()):
            built.module.move_biases()
        before, state = state, state_of(built.module, optimizer)
        steps.append(ReferenceStep(before, routing, float(loss.detach()), gradients, norm, state))
    return steps


def made(model: ModelTable, plan: ParallelPlan, *, wide: bool) -> BuiltModel:
    built = build_model(model, context=plan.sequence_tokens, device=torch.device("cpu"))
    if wide:
        built.loss.double()
    return built


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> State:
    parameters = dict(model.named_parameters())
    return State(
        {name: one.detach().clone() for name, one in parameters.items()},
        {
            name: {key: optimizer.state[one][key].clone() for key in MOMENTS}
            for name, one in parameters.items()
            if optimizer.state.get(one)
        },
        {name: one.clone() for name, one in model.named_buffers()},
    )


def source_of(name: str, whole: Mapping[str, Tensor]) -> tuple[str, slice]:
    """The parameter of the whole model that has `name` in a divided one, of which it may be a part of the rows."""
    before, parts, behind = name.partition(".parts.")
    if not parts:
        return name, slice(None)
    number, _, own = behind.partition(".")
    rows = len(whole[f"{before}.{own}"]) // 3  # of queries, keys, values
    return f"{before}.{own}", slice(int(number) * rows, (int(number) + 1) * rows)


def local_part(whole: Tensor, stored: Tensor) -> Tensor:
    """Of `whole`, what this rank has in `stored`."""
    if not isinstance(stored, DTensor):
        return whole
    shape, offset = compute_local_shape_and_global_offset(stored.shape, stored.device_mesh, stored.placements)
    return whole[tuple(slice(first, first + count) for first, count in zip(offset, shape, strict=True))]


def local(stored: Tensor) -> Tensor:
    return stored.to_local() if isinstance(stored, DTensor) else stored


@torch.no_grad()
def take_over(arrangement: Arrangement, wanted: State) -> None:
    """Parameters, moments and biases of the reference."""
    for name, stored in arrangement.module.named_parameters():
        source, rows = source_of(name, wanted.parameters)
        local(stored).copy_(local_part(wanted.parameters[source][rows], stored))
        states, moments = arrangement.optimizer.state.get(stored, {}), wanted.moments.get(source, {})
        assert states.keys() >= moments.keys() or not states
        for key in MOMENTS if states else ():
            local(states[key]).copy_(local_part(moments[key][rows], stored))
    for name, own in arrangement.module.named_buffers():
        own.copy_(wanted.buffers[name])


def replayed(
    arrangement: Arrangement, recipe: Recipe, mesh: PlanMesh, recorded: dict[str, list[Tensor]]
) -> contextlib.AbstractContextManager[Any]:
    """Gates choose those of `recorded`."""
    return replayed_routing(arrangement.layers, own_routing(arrangement, recipe, mesh, recorded))


def own_routing(
    arrangement: Arrangement, recipe: Recipe, mesh: PlanMesh, recorded: dict[str, list[Tensor]]
) -> dict[str, list[Tensor]]:
    """Experts of the forward passes of each gate of this rank, of those `recorded` of the whole batch."""
    plan = recipe.plan
    found = {}
    for name, whole_name, direction, directions in gates_of(arrangement, mesh, recipe):
        (indices,) = recorded[whole_name]
        by_sequence = indices.view(plan.batch_sequences, -1, indices.shape[1])
        column = by_sequence.chunk(plan.data)[mesh.group("data").rank()]
        pieces = column.chunk(plan.micro_batches)
        mine = pieces[direction * len(pieces) // directions : (direction + 1) * len(pieces) // directions]
        found[name] = [one.flatten(0, 1) for one in mine]
    return found


def gates_of(arrangement: Arrangement, mesh: PlanMesh, recipe: Recipe) -> Iterator[tuple[str, str, int, int]]:
    """Name of each gate among the layers of this rank, its name in the whole model, its direction, and of how many."""
    plan = recipe.plan
    if not isinstance(arrangement, Pipelined):
        for name, module in arrangement.layers.named_modules():
            if isinstance(module, Gate):
                yield name, name, 0, 1
        return
    placement = build_schedule(plan.schedule, plan.pipeline, plan.micro_batches, plan.chunks).placement
    names = {id(module): name for name, module in arrangement.layers.named_modules()}
    held = placement.stages_of(mesh.coordinates.pipeline)
    for (direction, _), stage in zip(held, cast("nn.ModuleList", arrangement.layers), strict=True):
        for prefix, part in cast("Any", stage).named_parts.items():
            for inner, module in part.named_modules():
                if isinstance(module, Gate):
                    yield names[id(module)], f"{prefix}.{inner}", direction, placement.directions


def parameters_of(arrangement: Arrangement) -> Iterator[tuple[str, Tensor]]:
    """Names of the parameters of this rank, and them whole."""
    for name, stored in arrangement.module.named_parameters():
        found = stored.detach()
        yield name, (found.full_tensor() if isinstance(found, DTensor) else found)


def gradients_of(arrangement: Arrangement) -> Iterator[tuple[str, Tensor]]:
    """Names of the parameters of this rank and their whole gradients."""
    optimizer = arrangement.optimizer
    for name, stored in arrangement.module.named_parameters():
        found = optimizer.gradient_of(stored) if isinstance(optimizer, StepInBackward) else stored.grad
        assert found is not None, name
        yield name, (found.full_tensor() if isinstance(found, DTensor) else found)


def batches(plan: ParallelPlan, steps: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Of real text: bytes of Python's sources are the tokens."""
    text = torch.frombuffer(bytearray(Path(argparse.__file__).read_bytes()), dtype=torch.uint8).long()
    size = plan.batch_sequences * plan.sequence_tokens
    for step in range(steps):
        first = step * size
        rows = (plan.batch_sequences, plan.sequence_tokens)
        yield text[first : first + size].view(rows), text[first + 1 : first + 1 + size].view(rows)


class Differences:
    """The largest ones of a case."""

    def __init__(self) -> None:
        self.worst = {"gradient": 0.0, "parameter": 0.0, "norm": 0.0, "loss": 0.0}
        self.worst_gradient, self.biases = "", True
        self.compared: set[str] = set()

    def of_figure(self, kind: str, found: float, wanted: float) -> None:
        self._note(kind, abs(found / wanted - 1))

    def of_tensors(self, kind: str, found: Iterable[tuple[str, Tensor]], wanted: Mapping[str, Tensor]) -> None:
        for name, tensor in found:
            source, rows = source_of(name, wanted)
            whole = wanted[source][rows].double()
            assert tensor.shape == whole.shape, (name, tensor.shape, whole.shape)
            larger = self._note(kind, float((tensor.double() - whole).norm() / whole.norm()))
            if kind == "gradient":
                self.worst_gradient = name if larger else self.worst_gradient
                self.compared.add(source)

    def of_biases(self, found: Iterable[tuple[str, Tensor]], wanted: Mapping[str, Tensor]) -> None:
        self.biases = self.biases and all(torch.equal(each, wanted[name]) for name, each in found)

    def _note(self, kind: str, error: float) -> bool:
        """Whether it is the largest yet. What is not a number is larger than any."""
        larger = not math.isnan(self.worst[kind]) and not error <= self.worst[kind]
        if larger:
            self.worst[kind] = error
        return larger


def compare(recipe: Recipe, *, wide: bool) -> dict[str, Any]:
    plan, shape = recipe.plan, checked_shape(recipe)
    mesh = PlanMesh(plan, device_type="cpu", node=0)
    steps = reference_steps(recipe.model, alone(plan), recipe.optimizer, wide=wide)
    found = Differences()
    with arrange(made(recipe.model, plan, wide=wide), shape, mesh, recipe) as arrangement:
        for number, (step, (inputs, targets)) in enumerate(zip(steps, batches(plan, len(steps)), strict=True)):
            if number == 0 or not wide:
                take_over(arrangement, step.before)
            column = [each.chunk(plan.data)[mesh.group("data").rank()] for each in (inputs, targets)]
            routing = contextlib.nullcontext() if wide else replayed(arrangement, recipe, mesh, step.routing)
            with routing:
                loss = torch.tensor([arrangement.backward(*column)], dtype=torch.float64)
            dist.all_reduce(loss, group=mesh.group("data"))
            found.of_figure("loss", float(loss), step.loss)

            def look(step: ReferenceStep = step) -> None:
                found.of_tensors("gradient", gradients_of(arrangement), step.gradients)

            norm = arrangement.commit(look)
            found.of_figure("norm", norm, step.norm)
            if number == len(steps) - 1 or not wide:
                found.of_tensors("parameter", parameters_of(arrangement), step.after.parameters)
            found.of_biases(arrangement.module.named_buffers(), step.after.buffers)
        content = hashlib.sha256()
        for _, parameter in parameters_of(arrangement):
            content.update(parameter.numpy().tobytes())
    compared, parameters = sorted(found.compared), sorted(steps[0].gradients)
    return {**found.worst, "biases": found.biases, "worst": found.worst_gradient} | {
        "content": content.hexdigest(),
        "compared": compared,
        "parameters": parameters,
    }


def alone(plan: ParallelPlan) -> ParallelPlan:
    """The same for all plans of equal batches."""
    return ParallelPlan(sequence_tokens=plan.sequence_tokens, batch_sequences=plan.batch_sequences)


def main() -> int:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=LIMIT)
    given = json.loads(sys.argv[1])
    found, wide = {}, given["wide"]
    if wide:
        add_in_float64()
    for name, tables in given["cases"].items():
        found[name] = compare(recipe_of(raw_recipe(**tables)), wide=wide)
        dist.barrier()
    print(json.dumps(found))
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
