"""What autograd keeps on a rank of the trainer: `python -m tests.support.torch_ranks.activations JSON`.

`cases` are tables of recipes by name, as `raw_recipe` takes them. The result has for each, in bytes of one step:
`saved`, the most that saved tensors held at one time; `kept`, the most that was there as a backward pass began; `peak`,
the most that was there at all. The last two also know what only Python holds, but nothing of the memory that FSDP
gathers into, and are null with FSDP. Parameters, their gradients, the batch, and messages on their way are in none of
them.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Final

import numpy as np
import torch
import torch.distributed as dist
from tests.support.live_memory import LiveMemory
from tests.support.saved_memory import SavedMemory, local_of
from tests.support.trainer.recipes import raw_recipe
from torch import Tensor

from fireflyer.base.units import MIB
from fireflyer.recipes.trainer.building import arrange
from fireflyer.recipes.trainer.core.parsing import recipe_of
from fireflyer.recipes.trainer.core.recipe import Recipe
from fireflyer.recipes.trainer.models import build_model
from fireflyer.recipes.trainer.preconditions import checked_shape
from fireflyer.training.mesh import PlanMesh
from fireflyer.training.pipeline import channels, shared, stage_passes
from fireflyer.training.pipeline.phases import Gradients

LIMIT: Final = timedelta(seconds=120)


def measure(recipe: Recipe) -> dict[str, int | None]:
    """Of the second step on this rank."""
    plan, shape = recipe.plan, checked_shape(recipe)
    limits: Any = shared
    limits.SUM_BYTES = MIB  # the sum of shared gradients takes no more than that, which models of a plan exceed
    mesh = PlanMesh(plan, device_type="cpu", node=0)
    torch.manual_seed(0)
    built = build_model(recipe.model, context=plan.sequence_tokens, device=torch.device("cpu"))
    buffers = list(built.module.buffers())
    with arrange(built, shape, mesh, recipe) as arrangement:
        generator = torch.Generator().manual_seed(mesh.group("data").rank())
        size = (plan.batch_sequences // plan.data, plan.sequence_tokens)
        inputs, targets = torch.randint(0, shape.vocabulary, (2, *size), generator=generator)
        module = arrangement.module

        def fixed() -> set[int]:
            return {_place(one) for one in (*module.parameters(), *buffers, inputs, targets)}

        arrangement.backward(inputs, targets)  # gradients have their memory now, messages their size
        if plan.zero:
            arrangement.discard()
        return _measured(lambda: arrangement.backward(inputs, targets), fixed, live=not plan.zero)


def _measured(step: Callable[[], float], fixed: Callable[[], set[int]], *, live: bool) -> dict[str, int | None]:
    """`fixed`: where what is not counted is now."""
    if not live:
        with SavedMemory(fixed) as saved:
            step()
        return {"saved": saved.peak_bytes, "kept": None, "peak": None}
    kept = 0
    backward = torch.autograd.backward

    def begin(*args: Any, **more: Any) -> None:
        nonlocal kept
        kept = max(kept, there.live_bytes)
        backward(*args, **more)

    # What a stage receives is counted when it is saved, and a gradient when the pass for weights will need it.
    messages: Any = channels
    memory, messages.empty_bytes = messages.empty_bytes, lambda size_bytes: np.empty(size_bytes, np.uint8)
    parts: Any = stage_passes
    for_inputs = parts.backward_for_inputs

    def begin_inputs(outputs: Any, gradients: Gradients, inputs: Any) -> Any:
        for one in gradients:
            if one is not None:
                there.count(one)
        return for_inputs(outputs, gradients, inputs)

    with LiveMemory() as there, SavedMemory(fixed, there.count) as saved:
        torch.autograd.backward, parts.backward_for_inputs = begin, begin_inputs
        try:
            step()
        finally:
            torch.autograd.backward, parts.backward_for_inputs = backward, for_inputs
            messages.empty_bytes = memory
    return {"saved": saved.peak_bytes, "kept": kept, "peak": there.peak_bytes}


def _place(tensor: Tensor) -> int:
    return local_of(tensor).untyped_storage().data_ptr()


def main() -> int:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=LIMIT)
    found = {}
    for name, tables in json.loads(sys.argv[1])["cases"].items():
        found[name] = measure(recipe_of(raw_recipe(**tables)))
        dist.barrier()
    print(json.dumps(found))
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
