"""What a rank of a tensor-parallel job finds beside one process: `python -m tests.support.torch_ranks.tensor JSON`.

`cases` are named `MODEL-DIVISION-OPTIONS`; the result has for each the largest difference of a gradient tensor over its
norm, in any step, and that of the norm of the whole gradient.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from contextlib import nullcontext
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import loss_parallel
from torch.nn import functional

from fireflyer.base.errors import UsageError
from fireflyer.codesign.parallel import ParallelPlan, groups
from fireflyer.codesign.parallel.mesh import AXES
from fireflyer.recipes.gpt import GPTConfig, GPTModel
from fireflyer.training.mesh import PlanMesh
from fireflyer.training.recompute import recompute, recompute_each
from fireflyer.training.tensor import clip_gradients, finish_gradients, tensor_parallel, whole_tensors
from fireflyer.training.tensor.layouts import blocks_of, layout_of

LIMIT: Final = timedelta(seconds=60)
STEPS: Final = 3
VOCABULARY, WIDTH, LENGTH, BATCH = 64, 32, 16, 4
MAX_NORM: Final = 0.5
DIVISIONS: Final[dict[str, dict[str, Any]]] = {
    "tp2": {"tensor": 2},
    "tp4": {"tensor": 4},
    "tp2xdp2": {"tensor": 2, "replicate": 2},
    "fsdp2xtp2": {"tensor": 2, "shard": 2, "zero": 3},
}


def gpt() -> nn.Module:
    return GPTModel(GPTConfig(vocab_size=VOCABULARY, layers=2, heads=4, width=WIDTH, context=LENGTH))


def llama(*, tied: bool = False) -> nn.Module:
    """Grouped-query attention. Its own norms compute in fp32 whatever the model's dtype, in which a difference of 1e-16
    can become one of 1e-8; those of torch compute in that of the model."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=LENGTH,
        tie_word_embeddings=tied,
        use_cache=False,
    )
    model: nn.Module = LlamaForCausalLM(config)
    for name in [name for name, _ in model.named_modules()]:
        if name.endswith("norm"):
            model.set_submodule(name, nn.RMSNorm(WIDTH, eps=config.rms_norm_eps))
    return model


MODELS: Final[dict[str, Any]] = {"gpt": gpt, "llama": llama, "tied": lambda: llama(tied=True)}


def loss_of(model: nn.Module, kind: str, tokens: Tensor, targets: Tensor) -> Tensor:
    """Summed over tokens."""
    if kind == "gpt":
        found: Tensor = model(tokens, targets)
        return found
    logits = model(input_ids=tokens).logits
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")


def batch_of(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, VOCABULARY, (BATCH, LENGTH + 1), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def divided(name: str) -> tuple[nn.Module, PlanMesh]:
    kind, division, *options = name.split("-")
    plan = ParallelPlan(sequence_tokens=LENGTH, batch_sequences=BATCH, **DIVISIONS[division])
    mesh = PlanMesh(plan, node=0)
    model = MODELS[kind]().to(torch.float32 if "fp32" in options else torch.float64)
    tensor_parallel(model, mesh.tensor, sequence="sp" in options, loss="lp" in options)
    blocks = blocks_of(model, layout_of(model))
    if "mixed" in options:
        recompute_each(blocks, ("operators", "blocks"))
    for mode in ("blocks", "operators", "full"):
        if mode in options:
            recompute(model, mode, blocks=blocks)
    if plan.zero == 3:
        for block in blocks:
            fully_shard(block, mesh=mesh.data)
        fully_shard(model, mesh=mesh.data)
    return model, mesh


def parity(name: str) -> dict[str, float]:
    """Both train with clipping; the divided model in its own arithmetic from the first step on."""
    kind, _, *options = name.split("-")
    model, mesh = divided(name)
    reference = MODELS[kind]().to(torch.float32 if "fp32" in options else torch.float64)
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.05, momentum=0.9) for one in (model, reference)]
    plan, place = mesh.plan, mesh.coordinates
    mine = BATCH // plan.data
    rank = place.replicate * plan.shard + place.shard
    worst = {"gradient": 0.0, "norm": 0.0, "loss": 0.0}
    for step in range(1 if "fp32" in options else STEPS):
        tokens, targets = batch_of(step)
        expected = loss_of(reference, kind, tokens, targets) / tokens.numel()
        expected.backward()  # type: ignore[no-untyped-call]
        piece = slice(rank * mine, (rank + 1) * mine)
        scale = (plan.shard if plan.zero == 3 else 1) / tokens.numel()  # fully_shard averages
        with loss_parallel() if "lp" in options else nullcontext():
            loss = loss_of(model, kind, tokens[piece], targets[piece]) * scale
            loss.backward()  # type: ignore[no-untyped-call]
        finish_gradients(model, data=None if plan.zero == 3 else mesh.group("data"))
        found = whole_tensors(model, "gradients")
        wanted = {key: one.grad for key, one in reference.named_parameters() if one.grad is not None}
        assert found.keys() == wanted.keys(), found.keys() ^ wanted.keys()
        errors = [float((found[key] - wanted[key]).norm() / wanted[key].norm()) for key in wanted]
        norm = clip_gradients(model, MAX_NORM)
        expected_norm = nn.utils.clip_grad_norm_(reference.parameters(), MAX_NORM)
        assert expected_norm > MAX_NORM  # it does clip
        worst["gradient"] = max(worst["gradient"], *errors)
        worst["norm"] = max(worst["norm"], abs(float(norm / expected_norm) - 1))
        if plan.data == 1:
            full = loss.full_tensor() if hasattr(loss, "full_tensor") else loss
            worst["loss"] = max(worst["loss"], abs(float(full.detach() / expected.detach()) - 1))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return worst


def refused(make: Any) -> str:
    try:
        make()
    except UsageError as error:
        return str(error)
    return "nothing was refused"


def meshes() -> dict[str, Any]:
    """Of 4 ranks: groups of each plan beside the pure ones, and what is refused."""
    given: dict[str, Any] = {"sequence_tokens": 8, "batch_sequences": 8}
    rank = dist.get_rank()
    wrong: list[Any] = []
    for degrees in (
        {"pipeline": 2, "tensor": 2},
        {"replicate": 2, "shard": 2, "zero": 1},
        {"pipeline": 2, "shard": 2, "zero": 1},
        {"shard": 2, "tensor": 2, "expert": 2, "zero": 1},
        {"shard": 4, "expert": 4, "zero": 1},
    ):
        plan = ParallelPlan(**given | degrees)
        mesh = PlanMesh(plan, node=0)
        for axis in AXES:
            expected = next(ranks for ranks in groups(plan, axis) if rank in ranks)
            total = torch.tensor([rank])
            dist.all_reduce(total, group=mesh.group(axis))
            if mesh.ranks(axis) != expected or int(total) != sum(expected):
                wrong.append((degrees, axis, mesh.ranks(axis), expected, int(total)))
        sizes = dict(zip(mesh.device_mesh.mesh_dim_names or (), mesh.device_mesh.shape, strict=True))
        if mesh.data.size() != plan.data or mesh.tensor.size() != sizes["tensor"]:
            wrong.append((degrees, "submeshes"))
    uneven = ParallelPlan(**given, tensor=2, replicate=2, micro_batch=2 if rank == 2 else 1)
    return {
        "wrong": wrong,
        "plans differ": refused(lambda: PlanMesh(uneven)),
        "does not fit": refused(lambda: PlanMesh(ParallelPlan(**given, tensor=2, replicate=3))),
        "some say their node": refused(lambda: PlanMesh(ParallelPlan(**given, tensor=4), node=0 if rank else None)),
        "pairs across nodes": refused(lambda: PlanMesh(ParallelPlan(**given, tensor=2, replicate=2), node=rank % 2)),
    }


def lose_a_rank() -> str:
    """The last rank dies as its backward pass begins; what the others are told."""
    model, _ = divided(f"gpt-tp{dist.get_world_size()}-sp")
    tokens, targets = batch_of(0)
    loss = loss_of(model, "gpt", tokens, targets)
    if dist.get_rank() == dist.get_world_size() - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        loss.backward()  # type: ignore[no-untyped-call]
        finish_gradients(model)
    except RuntimeError as error:
        return str(error)
    return "no error"


def main() -> None:
    params = json.loads(sys.argv[1])
    dist.init_process_group("gloo", timeout=LIMIT)
    result: dict[str, Any] = {name: parity(name) for name in params["cases"]}
    if params.get("meshes"):
        result["meshes"] = meshes()
    print(json.dumps(result), flush=True)
    if params.get("lose_a_rank"):
        print(json.dumps(result | {"error": lose_a_rank()}), flush=True)
        os._exit(0)  # the group has no peer any more with which it could end
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
