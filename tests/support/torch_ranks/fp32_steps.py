"""Steps of the trainer in FP32, each from the state of one process.

`python -m tests.support.torch_ranks.fp32_steps JSON`. `cases` are tables of recipes by name, as `raw_recipe` takes
them. Before each step a rank takes over parameters, moments and biases of a reference that has the whole model and the
whole batch, and in the step the experts that its gates chose. The result has for each case the largest differences from
the reference's step, over all steps: of a gradient tensor and of a parameter after the step over its norm, of the norm
of all gradients and of the loss; and whether biases are equal.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, Final, cast

import torch
import torch.distributed as dist
from tests.support.trainer.recipes import raw_recipe
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from fireflyer.codesign.schedule import build_schedule
from fireflyer.recipes.deepseek import DeepseekModel, recorded_routing, replayed_routing
from fireflyer.recipes.deepseek.gate import Gate
from fireflyer.recipes.trainer.arrangements import Arrangement, adamw
from fireflyer.recipes.trainer.building import arrange
from fireflyer.recipes.trainer.core.parsing import recipe_of
from fireflyer.recipes.trainer.core.recipe import Recipe
from fireflyer.recipes.trainer.models import BuiltModel, build_model
from fireflyer.recipes.trainer.pipelines import Pipelined
from fireflyer.recipes.trainer.preconditions import checked_shape
from fireflyer.training.fsdp import StepInBackward
from fireflyer.training.mesh import PlanMesh

LIMIT: Final = timedelta(seconds=120)
MOMENTS: Final = ("exp_avg", "exp_avg_sq")


class Reference:
    """One process: the whole model, and its optimizer."""

    def __init__(self, built: BuiltModel, recipe: Recipe) -> None:
        self.built, self.recipe = built, recipe
        self.optimizer = adamw(built.module, recipe.optimizer)
        self.parameters = dict(built.module.named_parameters())

    def backward(self, inputs: Tensor, targets: Tensor) -> float:
        loss = self.built.loss(inputs, targets)
        (loss / self.recipe.plan.step_tokens).backward()
        return float(loss.detach())

    def commit(self) -> float:
        norm = float(torch.nn.utils.clip_grad_norm_(self.parameters.values(), self.recipe.optimizer.max_norm))
        self.optimizer.step()
        self.optimizer.zero_grad()
        if isinstance(self.built.module, DeepseekModel) and list(self.built.module.gates()):
            self.built.module.move_biases()
        return norm

    def of(self, name: str) -> tuple[nn.Parameter, slice]:
        """The parameter that has `name` in a divided model, of which it may be a part of the rows."""
        before, parts, behind = name.partition(".parts.")
        if not parts:
            return self.parameters[name], slice(None)
        number, _, own = behind.partition(".")
        whole = self.parameters[f"{before}.{own}"]
        rows = len(whole) // 3  # of queries, keys, values
        return whole, slice(int(number) * rows, (int(number) + 1) * rows)


def local_part(whole: Tensor, stored: Tensor) -> Tensor:
    """Of `whole`, what this rank has in `stored`."""
    if not isinstance(stored, DTensor):
        return whole
    shape, offset = compute_local_shape_and_global_offset(stored.shape, stored.device_mesh, stored.placements)
    return whole[tuple(slice(first, first + count) for first, count in zip(offset, shape, strict=True))]


def local(stored: Tensor) -> Tensor:
    return stored.to_local() if isinstance(stored, DTensor) else stored


@torch.no_grad()
def take_over(arrangement: Arrangement, reference: Reference) -> None:
    """Parameters, moments and biases of the reference."""
    for name, stored in arrangement.module.named_parameters():
        whole, rows = reference.of(name)
        local(stored).copy_(local_part(whole[rows], stored))
        states, wanted = arrangement.optimizer.state.get(stored, {}), reference.optimizer.state.get(whole, {})
        assert states.keys() >= wanted.keys() or not states
        for key in MOMENTS if states else ():
            local(states[key]).copy_(local_part(wanted[key][rows], stored))
    biases = dict(reference.built.module.named_buffers())
    for name, own in arrangement.module.named_buffers():
        own.copy_(biases[name])


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


def gradients_of(arrangement: Arrangement) -> Iterator[tuple[str, Tensor]]:
    """Names of the parameters of this rank and their whole gradients."""
    optimizer = arrangement.optimizer
    for name, stored in arrangement.module.named_parameters():
        found = optimizer.gradient_of(stored) if isinstance(optimizer, StepInBackward) else stored.grad
        assert found is not None, name
        yield name, (found.full_tensor() if isinstance(found, DTensor) else found)


def difference(found: Tensor, wanted: Tensor) -> float:
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())


def batches(recipe: Recipe, steps: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Of real text: bytes of Python's sources are the tokens."""
    plan = recipe.plan
    text = torch.frombuffer(bytearray(Path(argparse.__file__).read_bytes()), dtype=torch.uint8).long()
    size = plan.batch_sequences * plan.sequence_tokens
    for step in range(steps):
        first = step * size
        rows = (plan.batch_sequences, plan.sequence_tokens)
        yield text[first : first + size].view(rows), text[first + 1 : first + 1 + size].view(rows)


def compare(recipe: Recipe, steps: int) -> dict[str, Any]:
    plan, shape = recipe.plan, checked_shape(recipe)
    mesh = PlanMesh(plan, device_type="cpu", node=0)
    torch.manual_seed(0)
    one, built = (build_model(recipe.model, context=plan.sequence_tokens, device=torch.device("cpu")) for _ in "12")
    reference = Reference(one, recipe)
    worst = {"gradient": 0.0, "parameter": 0.0, "norm": 0.0, "loss": 0.0}
    biases, named = True, ""

    def look(kind: str, name: str, found: Tensor, wanted: Tensor) -> None:
        nonlocal named
        error = difference(found, wanted)
        if error > worst[kind]:
            worst[kind] = error
            named = name if kind == "gradient" else named

    with arrange(built, shape, mesh, recipe) as arrangement:
        for inputs, targets in batches(recipe, steps):
            take_over(arrangement, reference)
            with recorded_routing(one.module) as recorded:
                wanted_loss = reference.backward(inputs, targets)
            routing = own_routing(arrangement, recipe, mesh, recorded)
            column = [each.chunk(plan.data)[mesh.group("data").rank()] for each in (inputs, targets)]
            with replayed_routing(arrangement.layers, routing):
                loss = torch.tensor([arrangement.backward(*column)], dtype=torch.float64)
            dist.all_reduce(loss, group=mesh.group("data"))

            def gradients(arrangement: Arrangement = arrangement) -> None:
                for name, gradient in gradients_of(arrangement):
                    whole, rows = reference.of(name)
                    assert whole.grad is not None
                    look("gradient", name, gradient, whole.grad[rows])

            norm = arrangement.commit(gradients)
            wanted_norm = reference.commit()
            worst["norm"] = max(worst["norm"], abs(norm / wanted_norm - 1))
            worst["loss"] = max(worst["loss"], abs(float(loss) / wanted_loss - 1))
            for name, stored in arrangement.module.named_parameters():
                whole, rows = reference.of(name)
                found = stored.detach()
                look("parameter", name, found.full_tensor() if isinstance(found, DTensor) else found, whole[rows])
            own = dict(one.module.named_buffers())
            biases = biases and all(torch.equal(each, own[name]) for name, each in arrangement.module.named_buffers())
    return {**worst, "biases": biases, "worst": named}


def main() -> int:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=LIMIT)
    given = json.loads(sys.argv[1])
    found = {}
    for name, tables in given["cases"].items():
        found[name] = compare(recipe_of(raw_recipe(**tables)), given["steps"])
        dist.barrier()
    print(json.dumps(found))
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
