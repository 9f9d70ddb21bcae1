"""What a rank of the trainer sends in a step: `python -m tests.support.torch_ranks.link_bytes JSON`.

`cases` are tables of recipes by name, as `raw_recipe` takes them. All process groups are of the backend hfreduce, so
that each collective counts in `stats()` of a communicator. The result has for each case the bytes of the second step,
by axis of the plan and kind: `allreduce`, `reduce_scatter` and `allgather` as `stats()` has them (of the last two the
part of one rank), `message` between stages, `send` of other messages. Losses and a norm, a few bytes, are `scalar`,
`norms` those of all parameters, `counts` the tokens of experts.
`routing` are the experts of each forward pass of each gate, and `dispatched` what the dispatchers say that they sent.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed as dist
from tests.support.trainer.recipes import raw_recipe

import fireflyer.collectives.torch_group  # noqa: F401 - registers the backend
from fireflyer.codesign.parallel.mesh import Axis
from fireflyer.codesign.schedule import build_schedule
from fireflyer.collectives import Communicator
from fireflyer.collectives.arrays import DTYPES
from fireflyer.recipes.deepseek import recorded_routing
from fireflyer.recipes.trainer.building import arrange
from fireflyer.recipes.trainer.core.parsing import recipe_of
from fireflyer.recipes.trainer.core.recipe import Recipe
from fireflyer.recipes.trainer.models import build_model
from fireflyer.recipes.trainer.preconditions import checked_shape
from fireflyer.training.mesh import PlanMesh
from fireflyer.training.pipeline.channels import tags_of
from fireflyer.training.process_groups import communicator_beside

LIMIT: Final = timedelta(seconds=120)
AXES: Final[tuple[Axis, ...]] = ("pipeline", "data", "replicate", "shard", "tensor", "expert", "expert_data")
SCALAR_BYTES: Final = 16


class Sent:
    """Bytes that communicators are given, by communicator and kind, while it counts."""

    def __init__(self, first_tag: int) -> None:
        """`first_tag`: from it on messages of a pipeline are not those between its stages."""
        self._first_tag = first_tag
        self.bytes: defaultdict[int, Counter[str]] = defaultdict(Counter)

    @contextlib.contextmanager
    def counting(self) -> Iterator[None]:
        kind: Any = Communicator
        submit, send = kind._submit, kind.send

        def submitted(comm: Any, name: str, source: Any, target: Any, count: int, **more: Any) -> Any:
            size = count * DTYPES[source.dtype]
            self.bytes[id(comm)]["scalar" if size <= SCALAR_BYTES else name] += size
            return submit(comm, name, source, target, count, **more)

        def sent(comm: Any, array: Any, *, to: int, tag: int = 0, async_op: bool = False) -> Any:
            self.bytes[id(comm)]["message" if tag < self._first_tag else "send"] += array.nbytes
            return send(comm, array, to=to, tag=tag, async_op=async_op)

        kind._submit, kind.send = submitted, sent
        try:
            yield
        finally:
            kind._submit, kind.send = submit, send


def measure(recipe: Recipe) -> dict[str, Any]:
    plan, shape = recipe.plan, checked_shape(recipe)
    mesh = PlanMesh(plan, device_type="cpu", node=0)
    torch.manual_seed(0)
    built = build_model(recipe.model, context=plan.sequence_tokens, device=torch.device("cpu"))
    stages = build_schedule(plan.schedule, plan.pipeline, plan.micro_batches, plan.chunks).placement.stages
    sent = Sent(tags_of(stages, plan.micro_batches))
    with arrange(built, shape, mesh, recipe) as arrangement:
        generator = torch.Generator().manual_seed(mesh.group("data").rank())
        size = (plan.batch_sequences // plan.data, plan.sequence_tokens)
        inputs, targets = torch.randint(0, shape.vocabulary, (2, *size), generator=generator)
        internals: Any = arrangement
        split = getattr(internals, "_split", None)

        def step() -> None:
            arrangement.backward(inputs, targets)
            arrangement.commit(lambda: None)

        step()  # messages of a pipeline have their size now
        comms = {axis: communicator_beside(mesh.group(axis)) for axis in AXES if mesh.group(axis).size() > 1}
        before = {axis: comm.stats().bytes for axis, comm in comms.items()}
        dispatched = _dispatched(split)
        with recorded_routing(arrangement.layers) as routing, sent.counting():
            step()
        for axis, comm in comms.items():
            own = sent.bytes[id(comm)]
            counted = sum(own.values()) - own["message"] - own["send"]
            assert comm.stats().bytes - before[axis] == counted, (axis, own)
        found: dict[int, Axis] = {id(comm): axis for axis, comm in comms.items()}  # one for axes of the same ranks
        norms = 4 * sum(1 for _ in arrangement.layers.parameters())
        for axis in ("shard", "tensor"):
            divided = axis == "tensor" or (plan.zero and not plan.rows_of_whole)
            if axis in comms and divided:  # each parameter is
                own = sent.bytes[id(comms[axis])]
                own["allreduce"] -= norms
                own["norms"] += norms
        balance = internals.balance
        assert dist.group.WORLD is not None
        everybody = sent.bytes[id(communicator_beside(dist.group.WORLD))]
        tokens = 8 * len(balance._gates) * balance._experts
        everybody["allreduce"] -= tokens
        everybody["counts"] += tokens
        return {
            "sent": {axis: dict(sent.bytes[comm]) for comm, axis in found.items()},
            "routing": [[one.tolist() for one in calls] for calls in routing.values()],
            "dispatched": _dispatched(split) - dispatched,
        }


def _dispatched(split: Any) -> int:
    """Bytes that all dispatchers of this rank have sent."""
    exchanges = [] if split is None else split._exchanges
    return sum(int(one.dispatcher.sent_bytes.sum()) for one in exchanges)


def main() -> int:
    torch.set_num_threads(1)
    dist.init_process_group("hfreduce", timeout=LIMIT)
    found = {}
    for name, tables in json.loads(sys.argv[1])["cases"].items():
        found[name] = measure(recipe_of(raw_recipe(**tables)))
        dist.barrier()
    print(json.dumps(found))
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
