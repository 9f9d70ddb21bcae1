"""What a rank of the trainer holds beside activations: `python -m tests.support.torch_ranks.static_bytes JSON`.

`cases` are tables of recipes by name, as `raw_recipe` takes them. The result has for each the bytes on this rank of
parameters, of gradients as the step is taken, and of optimizer states after it, without counts of steps. Copies of one
parameter that are one tensor count once. Of FSDP what is whole between the first micro-batch and the second counts,
too: parameters beside their shards, and gradients in the place of shards that come later.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterable, Iterator
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed as dist
from tests.support.saved_memory import local_of
from tests.support.trainer.recipes import raw_recipe
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from fireflyer.recipes.trainer.building import arrange
from fireflyer.recipes.trainer.core.parsing import recipe_of
from fireflyer.recipes.trainer.core.recipe import Recipe
from fireflyer.recipes.trainer.models import build_model
from fireflyer.recipes.trainer.preconditions import checked_shape
from fireflyer.training.fsdp import StepInBackward
from fireflyer.training.mesh import PlanMesh

LIMIT: Final = timedelta(seconds=120)


def measure(recipe: Recipe) -> dict[str, int]:
    plan, shape = recipe.plan, checked_shape(recipe)
    mesh = PlanMesh(plan, device_type="cpu", node=0)
    torch.manual_seed(0)
    built = build_model(recipe.model, context=plan.sequence_tokens, device=torch.device("cpu"))
    with arrange(built, shape, mesh, recipe) as arrangement:
        generator = torch.Generator().manual_seed(mesh.group("data").rank())
        size = (plan.batch_sequences // plan.data, plan.sequence_tokens)
        inputs, targets = torch.randint(0, shape.vocabulary, (2, *size), generator=generator)
        parameters = list(arrangement.layers.parameters())
        optimizer: Any = arrangement.optimizer
        found = {"parameters": bytes_of(parameters)}

        def look() -> None:
            if isinstance(optimizer, StepInBackward):
                found["gradients"] = bytes_of(optimizer.gradient_of(one) for one in parameters)
            else:
                found["gradients"] = bytes_of(one.grad for one in parameters)

        whole: dict[str, int] = {}
        if plan.zero and not plan.rows_of_whole:  # of FSDP
            _look_between_micro_batches(arrangement, whole)
        arrangement.backward(inputs, targets)
        arrangement.commit(look)
        found["parameters"] += whole.get("parameters", 0)
        found["gradients"] = max(found["gradients"], whole.get("gradients", 0))
        states = [value for state in optimizer.state.values() for value in state.values()]
        found["states"] = bytes_of(one for one in states if isinstance(one, Tensor) and one.dim() > 0)
    return found


def _look_between_micro_batches(arrangement: Any, found: dict[str, int]) -> None:
    """Fills `found` with bytes of what FSDP has whole when the first micro-batch, which is not the last, is done."""
    around = arrangement._micro_batch

    @contextlib.contextmanager
    def micro_batch(*, last: bool) -> Iterator[None]:
        with around(last=last):
            yield
        if not found and not last:
            parts = [one for one in arrangement.module.modules() if isinstance(one, FSDPModule)]
            roots: list[Any] = [*parts, arrangement._sharded.model]
            groups = {id(group): group for one in roots if (group := one._get_fsdp_state()._fsdp_param_group)}
            held = [one for group in groups.values() for one in group.fsdp_params]
            gathered = [output for one in held for output in one.all_gather_outputs]
            gradients = [one.unsharded_accumulated_grad for one in held]
            gradients += [one._unsharded_param.grad for one in held if hasattr(one, "_unsharded_param")]
            found["parameters"] = sum(one.untyped_storage().nbytes() for one in gathered)
            found["gradients"] = bytes_of(gradients)

    arrangement._micro_batch = micro_batch


def bytes_of(tensors: Iterable[Tensor | None]) -> int:
    """Elements in memory of this rank, each tensor once."""
    own = [local_of(one.detach()) for one in tensors if one is not None]
    return sum({(one.data_ptr(), one.numel()): one.numel() * one.element_size() for one in own}.values())


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
