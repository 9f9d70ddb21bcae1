"""What a rank with a part of the experts finds beside one process: `python -m tests.support.torch_ranks.experts JSON`.

`cases` name the ranks of an expert group and options, as `ep2-replayed`; each has its own model and plan.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import sys
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Final, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fireflyer.base.errors import FireflyerError
from fireflyer.checkpoint import dcp
from fireflyer.codesign.parallel import ParallelPlan, Precision
from fireflyer.codesign.parallel.plan import WireFormat
from fireflyer.recipes.deepseek import DeepseekModel, recorded_routing, replayed_routing
from fireflyer.recipes.deepseek.config import PRESETS
from fireflyer.recipes.trainer.stored import StoredModel
from fireflyer.training.experts import NotSplit, SplitExperts, own_experts, shard_experts
from fireflyer.training.experts.layers import layers_of
from fireflyer.training.experts.renumbering import renumber_experts
from fireflyer.training.mesh import PlanMesh

LIMIT: Final = timedelta(seconds=60)
LENGTH, BATCH, PARTS, STEPS = 12, 8, 2, 2
CONFIG: Final = PRESETS["tiny"]
EXPERTS: Final = 8
MAX_NORM: Final = 0.01


def batch_of(step: int) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(
        0, CONFIG.shape.vocabulary, (BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(step)
    )
    return tokens[:, :-1], tokens[:, 1:]


def mesh_of(expert: int) -> PlanMesh:
    plan = ParallelPlan(
        sequence_tokens=LENGTH, batch_sequences=BATCH, shard=dist.get_world_size(), expert=expert,
        micro_batch=BATCH // dist.get_world_size() // PARTS,
    )  # fmt: skip
    return PlanMesh(plan, node=0)


def pieces(tensor: Tensor) -> list[Tensor]:
    """Micro-batches of this rank."""
    own: list[Tensor] = list(tensor.chunk(dist.get_world_size())[dist.get_rank()].chunk(PARTS))
    return own


def step_of(model: nn.Module, tokens: list[Tensor], targets: list[Tensor]) -> None:
    for part, wanted in zip(tokens, targets, strict=True):
        (model(part, wanted) / (BATCH * LENGTH)).backward()


def split_model(mesh: PlanMesh, dtype: torch.dtype, *, whole: bool = False) -> tuple[DeepseekModel, SplitExperts]:
    """`whole`: it draws all experts and drops the others."""
    more: dict[str, Any] = {} if whole else {"experts": own_experts(mesh, EXPERTS), "dispatcher": NotSplit()}
    model = DeepseekModel(CONFIG, **more).to(dtype)
    return model, shard_experts(model, mesh)


def own_part(split: SplitExperts, name: str, tensor: Tensor) -> Tensor:
    """Of a tensor of the one process."""
    if name not in dict(split.expert_parameters()):
        return tensor
    numbers = own_experts(split.mesh, EXPERTS)
    return tensor[numbers.start : numbers.stop]


def sgd(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)


def parity(case: str) -> dict[str, Any]:
    """The largest difference of a gradient tensor over its norm, in any step; what else is to be equal."""
    division, *options = case.split("-")
    dtype = torch.float32 if "replayed" in options else torch.float64
    mesh = mesh_of(int(division.removeprefix("ep")))
    model, split = split_model(mesh, dtype, whole="whole" in options)
    reference = DeepseekModel(CONFIG).to(dtype)
    optimizers = [sgd(model), sgd(reference)]
    names = dict(model.named_parameters())
    drawn = all(
        torch.equal(one, own_part(split, name, dict(reference.named_parameters())[name])) for name, one in names.items()
    )
    worst, counts, biases = 0.0, [], []
    for step in range(STEPS):
        tokens, targets = batch_of(step)
        with recorded_routing(reference) as routing:
            step_of(reference, [tokens], [targets])
        with contextlib.ExitStack() as stack:
            if "replayed" in options:
                own = {name: [piece for one in calls for piece in routed(one)] for name, calls in routing.items()}
                stack.enter_context(replayed_routing(model, own))
            step_of(model, pieces(tokens), pieces(targets))
        split.add_gradients()
        for name, parameter in reference.named_parameters():
            assert parameter.grad is not None
            wanted, found = own_part(split, name, parameter.grad), names[name].grad
            assert found is not None
            worst = max(worst, float((found - wanted).norm() / wanted.norm()))
        summed = split.expert_counts()
        counts.append(torch.equal(summed, reference.expert_counts()))
        model.move_biases(summed)
        reference.move_biases()
        pairs = zip(model.gates(), reference.gates(), strict=True)
        biases.append(
            all(torch.equal(a.e_score_correction_bias, b.e_score_correction_bias) for (_, a), (_, b) in pairs)
        )
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    split.close()
    return {"gradient": worst, "drawn": drawn, "counts": all(counts), "biases": all(biases)}


def routed(indices: Tensor) -> list[Tensor]:
    """Of a forward of the whole batch, `[B·T, K]`: those of this rank's micro-batches. Prediction modules have less
    tokens of each sequence."""
    return [piece.flatten(0, 1) for piece in pieces(indices.view(BATCH, -1, indices.shape[1]))]


def digest(case: str) -> str:
    """Of parameters and biases after the steps."""
    mesh = mesh_of(int(case.removeprefix("ep")))
    model, split = split_model(mesh, torch.float32)
    optimizer = sgd(model)
    with split:
        for step in range(STEPS):
            tokens, targets = batch_of(step)
            step_of(model, pieces(tokens), pieces(targets))
            split.add_gradients()
            model.move_biases(split.expert_counts())
            optimizer.step()
            optimizer.zero_grad()
    found = hashlib.sha256()
    for one in model.state_dict().values():
        found.update(one.numpy().tobytes())
    return found.hexdigest()


def clipped(case: str) -> dict[str, Any]:
    """Norms beside those of one process, and digests of what all ranks have, after steps with clipped gradients."""
    mesh = mesh_of(int(case.removeprefix("ep")))
    model, split = split_model(mesh, torch.float64)
    reference = DeepseekModel(CONFIG).to(torch.float64)
    optimizers = [sgd(model), sgd(reference)]
    experts = {name for name, _ in split.expert_parameters()}
    norms, alone, worst = [], [], 0.0
    with split:
        for step in range(STEPS):
            tokens, targets = batch_of(step)
            step_of(reference, [tokens], [targets])
            step_of(model, pieces(tokens), pieces(targets))
            split.add_gradients()
            alone.append(
                float(torch.nn.utils.get_total_norm([one.grad for one in model.parameters() if one.grad is not None]))
            )
            norms.append(
                [
                    split.clip_gradients(MAX_NORM),
                    float(torch.nn.utils.clip_grad_norm_(reference.parameters(), MAX_NORM)),
                ]
            )
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    digest = hashlib.sha256()
    for name, one in model.named_parameters():
        wanted = own_part(split, name, dict(reference.named_parameters())[name].detach())
        worst = max(worst, float((one.detach() - wanted).norm() / wanted.norm()))
        if name not in experts:
            digest.update(one.detach().numpy().tobytes())
    return {"norms": norms, "alone": alone, "parameter": worst, "shared": digest.hexdigest()}


def beside_one_process(params: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {case: parity(case) for case in params["cases"]}
    same = params["same"]
    found["digests"] = [digest(same) for _ in range(2)]
    found["clipped"] = clipped("ep2")
    return found


def coded(form: WireFormat) -> dict[str, float]:
    """Of a step in fp32 whose rows travel in this format of the plan, there and back, forward and backward: the
    differences from one process in fp64, over its norm, of the loss and of all gradients together."""
    config, ranks = PRESETS["small"], dist.get_world_size()
    plan = ParallelPlan(
        sequence_tokens=LENGTH, batch_sequences=BATCH, shard=ranks, expert=ranks, micro_batch=BATCH // ranks // PARTS,
        precision=Precision(parameters="fp32", compute="fp32", dispatch=form, combine=form),
    )  # fmt: skip
    mesh = PlanMesh(plan, node=0)
    experts = config.shape.experts
    assert experts is not None
    model = DeepseekModel(config, experts=own_experts(mesh, experts.routed), dispatcher=NotSplit())
    reference = DeepseekModel(config).double()
    tokens, targets = batch_of(0)
    with recorded_routing(reference) as routing:
        wanted = reference(tokens, targets) / (BATCH * LENGTH)
        wanted.backward()
    own = {name: [piece for one in calls for piece in routed(one)] for name, calls in routing.items()}
    loss = torch.zeros((), dtype=torch.float64)
    with shard_experts(model, mesh, max_tokens=LENGTH * BATCH) as split, replayed_routing(model, own):
        for part, targets_of_part in zip(pieces(tokens), pieces(targets), strict=True):
            share = model(part, targets_of_part) / (BATCH * LENGTH)
            share.backward()
            loss += share.detach().double()
        split.add_gradients()
    dist.all_reduce(loss)
    squares = torch.zeros(2, dtype=torch.float64)
    for name, parameter in reference.named_parameters():
        assert parameter.grad is not None
        exact, found = own_part(split, name, parameter.grad), model.get_parameter(name).grad
        assert found is not None
        squares += torch.stack([(found.double() - exact).square().sum(), exact.square().sum()])
    wanted = wanted.detach()
    return {"loss": float((loss - wanted).abs() / wanted), "gradients": float((squares[0] / squares[1]).sqrt())}


def renumbered() -> dict[str, Any]:
    """Steps before and after experts were put in the reverse order, half of them on the other rank, beside one process
    that leaves them: the largest difference of a loss over itself, and of a tensor over its norm."""
    mesh = mesh_of(2)
    model, split = split_model(mesh, torch.float64)
    reference = DeepseekModel(CONFIG).double()
    stored = StoredModel([{"": model}], [one for _, one in split.expert_parameters()], mesh)
    optimizer, other = sgd(stored), sgd(reference)
    order, losses, biases = list(reversed(range(EXPERTS))), [], []
    with split:
        for step in range(2 * STEPS):
            tokens, targets = batch_of(step)
            if step == STEPS:
                for name, _ in layers_of(model):
                    renumber_experts(stored.get_submodule(name), order, optimizer, mesh.group("expert"))
            wanted = reference(tokens, targets) / (BATCH * LENGTH)
            wanted.backward()
            loss = torch.zeros((), dtype=torch.float64)
            for part, targets_of_part in zip(pieces(tokens), pieces(targets), strict=True):
                share = model(part, targets_of_part) / (BATCH * LENGTH)
                share.backward()
                loss += share.detach()
            dist.all_reduce(loss)
            losses.append(float((loss - wanted.detach()).abs() / wanted.detach()))
            split.add_gradients()
            stored.take_gradients()
            model.move_biases(split.expert_counts())
            reference.move_biases()
            for one in (optimizer, other):
                one.step()
                one.zero_grad()
            stored.drop_gradients()
    own = own_experts(mesh, EXPERTS)
    names, worst = dict(split.expert_parameters()), 0.0
    for name, parameter in reference.named_parameters():
        exact = parameter.detach()
        if name in names or name.endswith("gate.weight"):
            exact = exact[order]
            exact = exact[own.start : own.stop] if name in names else exact
        worst = max(worst, float((model.get_parameter(name).detach() - exact).norm() / exact.norm()))
    for (_, mine), (_, theirs) in zip(model.gates(), reference.gates(), strict=True):
        biases.append(torch.equal(mine.e_score_correction_bias, theirs.e_score_correction_bias[order]))
    return {"losses": losses, "parameter": worst, "biases": all(biases)}


def codecs(_: dict[str, Any]) -> dict[str, Any]:
    return {"renumbered": renumbered(), "codecs": {form: coded(form) for form in get_args(WireFormat)}}


def checkpoint(params: dict[str, Any]) -> dict[str, Any]:
    """Trains, saves; or restores what another number of ranks has saved, and trains on. Beside one process."""
    mesh = mesh_of(params["expert"])
    model, split = split_model(mesh, torch.float64)
    reference = DeepseekModel(CONFIG).to(torch.float64)
    optimizers = [sgd(model), sgd(reference)]
    with split:
        if params["restore"]:
            for one in (model, reference):  # other values, and states of the optimizers
                step_of(one, pieces(batch_of(9)[0]), pieces(batch_of(9)[1]))
            split.add_gradients()
            optimizers[0].step()
            state = split.state(optimizers[0])
            dcp.load(state, params["directory"])
            split.load(state, optimizers[0])
            reference = DeepseekModel(CONFIG).to(torch.float64)
            optimizers[1] = sgd(reference)
            steps = range(2 * STEPS)
        else:
            steps = range(STEPS)
        for step in steps:
            tokens, targets = batch_of(step)
            step_of(reference, [tokens], [targets])
            if not params["restore"] or step >= STEPS:
                optimizers[0].zero_grad()
                step_of(model, pieces(tokens), pieces(targets))
                split.add_gradients()
                optimizers[0].step()
            optimizers[1].step()
            optimizers[1].zero_grad()
        if not params["restore"]:
            dcp.save(split.state(optimizers[0]), params["directory"])
        worst = 0.0
        for name, parameter in reference.named_parameters():
            wanted = own_part(split, name, parameter.detach())
            worst = max(worst, float((dict(model.named_parameters())[name] - wanted).norm() / wanted.norm()))
    return {"parameter": worst}


def death(_: dict[str, Any]) -> dict[str, Any]:
    """The last rank dies when rows have arrived at its experts, before it sends any back."""
    model, split = split_model(mesh_of(dist.get_world_size()), torch.float32)
    if dist.get_rank() == dist.get_world_size() - 1:
        block: Any = model.layers[-1]
        block.mlp.experts.register_forward_hook(lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    tokens, targets = batch_of(0)
    try:
        step_of(model, pieces(tokens), pieces(targets))
    except FireflyerError as error:
        return {"error": f"{type(error).__name__}: {error}"}
    finally:
        with contextlib.suppress(FireflyerError):
            split.close()
    return {"error": "no error"}


JOBS: Final[dict[str, Callable[[dict[str, Any]], dict[str, Any]]]] = {
    "parity": beside_one_process,
    "checkpoint": checkpoint,
    "codecs": codecs,
    "death": death,
}


def main() -> None:
    params = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=LIMIT)
    found = JOBS[params["job"]](params)
    print(json.dumps(found), flush=True)
    if params["job"] == "death":
        os._exit(0)  # the group cannot be ended with a rank that is gone
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
