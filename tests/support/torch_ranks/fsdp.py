"""What a rank does in the tests of our FSDP: `python -m tests.support.torch_ranks.fsdp JSON`."""

from __future__ import annotations

import copy
import itertools
import json
import math
import os
import signal
import sys
from datetime import timedelta
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import FSDPModule

from fireflyer.base.errors import FireflyerError
from fireflyer.training.fsdp import ShardedModel, StepInBackward, shard

VOCABULARY, WIDTH, BATCH = 13, 6, 8
MAKERS: dict[str, Any] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.02, weight_decay=0.1),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01),
}
NEVER, ALWAYS = 1e6, 1e-2
MAX_NORMS = [*[NEVER] * 3, *[ALWAYS] * 3, NEVER, ALWAYS, NEVER, ALWAYS]
"""Of each step: never clipped, always, alternately."""
OVERFLOW, SCHEDULED, RELOADED, DECAYED = 1, 4, 5, 8
"""Steps with a gradient that overflows, with a learning rate that changes after the backward pass, after which the
state is loaded, and with a weight decay that changes."""


class Tied(nn.Module):
    """The embedding is the head, too, and the first block runs twice."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, 9), nn.Tanh(), nn.Linear(9, WIDTH)) for _ in "12")

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.embedding(tokens)
        for block in (self.blocks[0], *self.blocks):
            hidden = hidden + block(hidden)
        return hidden @ self.embedding.weight.T


def make(dtype: torch.dtype = torch.float32) -> Tied:
    torch.manual_seed(7)
    return Tied().to(dtype)


def tokens_of(step: int, length: int = 5) -> torch.Tensor:
    return torch.randint(VOCABULARY, (BATCH, length + 1), generator=torch.Generator().manual_seed(step))


def loss_of(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    logits = model(tokens[:, :-1])
    return nn.functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())


def own(tokens: torch.Tensor) -> torch.Tensor:
    return tokens.chunk(dist.get_world_size())[dist.get_rank()]


def locals_of(tensors: Any) -> list[torch.Tensor]:
    return [(t.to_local() if hasattr(t, "to_local") else t).detach().clone() for t in tensors]


def backward(sharded: ShardedModel, tokens: torch.Tensor, parts: int, scale: float = 1.0) -> None:
    for part in sharded.micro_batches(tokens.chunk(parts)):
        loss_of(sharded.model, part).mul(scale).div(parts).backward()  # type: ignore[no-untyped-call]


# --- bitwise equal to torch ---


class Torch:
    """FSDP2 with the same reduction, then `clip_grad_norm_` and torch's optimizer."""

    def __init__(self, sharded: ShardedModel, optimizer: torch.optim.Optimizer) -> None:
        self.sharded, self.optimizer = sharded, optimizer

    def finish(self, max_norm: float) -> float:
        norm: Any = torch.nn.utils.clip_grad_norm_(self.sharded.model.parameters(), max_norm)
        value = float(norm.full_tensor())
        if math.isfinite(value):
            self.optimizer.step()
        self.optimizer.zero_grad()
        return value


class Ours(Torch):
    optimizer: StepInBackward

    def finish(self, max_norm: float) -> float:
        self.optimizer.max_norm = max_norm
        self.optimizer.step()
        self.optimizer.zero_grad()
        assert self.optimizer.outcome is not None
        return self.optimizer.outcome.norm


def same_bits(a: Torch, b: Torch) -> bool:
    def tensors(way: Torch) -> list[torch.Tensor]:
        parameters = list(way.sharded.model.parameters())
        states = [way.optimizer.state.get(p, {}) for p in parameters]
        return locals_of([*parameters, *(state[name] for state in states for name in sorted(state))])

    ours, theirs = tensors(a), tensors(b)
    return len(ours) == len(theirs) and all(torch.equal(x, y) for x, y in zip(ours, theirs, strict=True))


def bitwise(params: dict[str, Any]) -> dict[str, Any]:
    """For each combination: what differs first from torch (None: nothing), and the cost."""
    found = {}
    dtypes: dict[str, dict[str, Any]] = {
        "fp32": {},
        "bf16": {"dtype": torch.bfloat16},
        "mixed": {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32},
    }
    combinations = [*itertools.product(["adamw"], ["fp32", "bf16"], (1, 4))]
    if params["all"]:
        combinations += [("adamw", "mixed", 1), ("sgd", "fp32", 1)]
    for name, dtype, parts in combinations:
        options = dict(dtypes[dtype])
        element = options.pop("dtype", torch.float32)
        ways: list[Torch] = []
        for kind in (Ours, Torch):
            model = make(element)
            sharded = shard(model, model.blocks, zero=params["zero"], **options)
            stock = MAKERS[name](model.parameters())
            ways.append(kind(sharded, sharded.optimizer(stock) if kind is Ours else stock))
        differs = first_difference(ways, parts)
        assert isinstance(ways[0].optimizer, StepInBackward)
        cost = ways[0].optimizer.cost()
        found[f"{name} {dtype} {parts}"] = {
            "differs": differs,
            "steps": cost.steps,
            "redone": cost.redone,
            "dropped": cost.dropped,
            "elements": cost.elements,
            "shadow bytes": cost.shadow_bytes,
            "gradient bytes": cost.gradient_bytes,
        }
    return found


def first_difference(ways: list[Torch], parts: int) -> str | None:
    for step, max_norm in enumerate(MAX_NORMS):
        norms = [one_step(way, step, parts, max_norm) for way in ways]
        if norms[0] != norms[1] and math.isfinite(norms[1]):
            return f"norms of step {step}: {norms}"
        if not same_bits(*ways):
            return f"parameters or state after step {step}"
    return None


def one_step(way: Torch, step: int, parts: int, max_norm: float) -> float:
    tokens = own(tokens_of(step)).repeat(parts, 1)
    backward(way.sharded, tokens, parts, scale=math.inf if step == OVERFLOW else 1.0)
    for group in way.optimizer.param_groups:
        if step == SCHEDULED:
            group["lr"] *= 0.5
        if step == DECAYED:
            group["weight_decay"] = 0.3
    norm = way.finish(max_norm)
    if step == RELOADED:
        saved = copy.deepcopy(way.optimizer.state_dict())
        for group in saved["param_groups"]:
            group["lr"] = 0.007
        way.optimizer.load_state_dict(saved)
    return norm


# --- equal to one process in fp64 ---


def parity(params: dict[str, Any]) -> dict[str, Any]:
    """For each of `modes` (`zero`, replicas, micro-batches): the largest difference of a gradient over its norm."""
    found = {}
    for zero, replicas, parts in cast("list[tuple[Literal[1, 2, 3], int, int]]", params["modes"]):
        one = make(torch.float64)
        optimizer = MAKERS["adamw"](one.parameters())
        model = make(torch.float64)
        sharded = shard(model, model.blocks, zero=zero, replicas=replicas)
        ours = sharded.optimizer(MAKERS["adamw"](model.parameters()), max_norm=0.5)
        worst = 0.0
        for step in range(20):
            tokens = tokens_of(step)
            backward(sharded, own(tokens), parts)
            loss_of(one, tokens).backward()  # type: ignore[no-untyped-call]
            for mine, theirs in zip(model.parameters(), one.parameters(), strict=True):
                gradient = cast("Any", ours.gradient_of(mine)).full_tensor()
                assert theirs.grad is not None
                worst = max(worst, float((gradient - theirs.grad).norm() / theirs.grad.norm()))
            torch.nn.utils.clip_grad_norm_(one.parameters(), 0.5)
            for each in (optimizer, ours):
                each.step()
                each.zero_grad()
        found[f"zero{zero} replicas{replicas} parts{parts}"] = worst
    return found


# --- memory, checkpoints ---


def memory(params: dict[str, Any]) -> dict[str, Any]:
    model = make()
    sharded = shard(model, model.blocks, zero=params["zero"], replicas=params["replicas"])
    optimizer = sharded.optimizer(MAKERS["adamw"](model.parameters()), max_norm=1.0)
    uses = []
    for step in range(params["steps"]):
        backward(sharded, own(tokens_of(step, length=1 + step * 7 % 23)), 1 + step % 2)
        optimizer.step()
        optimizer.zero_grad()
        uses.append(sharded.buffers())
    return {"after two steps": uses[1], "at the end": uses[-1], "different": len({*uses[1:]})}


def peaks(params: dict[str, Any]) -> dict[str, Any]:
    """The most units that still have whole gradients when the backward pass of a layer begins: 0 where the layer's own
    are all that there are at one time."""
    found = {}
    modes: list[Literal[1, 2, 3]] = [1, 2, 3]
    for zero, parts in itertools.product(modes, (1, 2)):
        model = make()
        sharded = shard(model, model.blocks, zero=zero)
        sharded.optimizer(MAKERS["adamw"](model.parameters()))
        most = 0

        def look(*_: Any, model: nn.Module = model) -> None:
            nonlocal most
            most = max(most, sum(has_whole_gradients(unit) for unit in model.modules() if isinstance(unit, FSDPModule)))

        for unit in model.blocks:
            unit.register_full_backward_pre_hook(look)
        backward(sharded, own(tokens_of(0)), parts)
        found[f"zero{zero} parts{parts}"] = most
    return found


def has_whole_gradients(unit: FSDPModule) -> bool:
    return any(
        whole is not None
        for group in unit._get_fsdp_state()._fsdp_param_groups
        for p in group.fsdp_params
        for whole in (
            getattr(getattr(p, "_unsharded_param", None), "grad", None),
            getattr(p, "unsharded_accumulated_grad", None),
        )
    )


def checkpoints(params: dict[str, Any]) -> dict[str, Any]:
    """Whether a run that goes on from a checkpoint of torch.distributed.checkpoint has the bits of one that did not
    stop."""

    def begin() -> tuple[ShardedModel, StepInBackward]:
        model = make()
        sharded = shard(model, model.blocks)
        return sharded, sharded.optimizer(MAKERS["adamw"](model.parameters()), max_norm=0.5)

    def run(sharded: ShardedModel, optimizer: StepInBackward, steps: range) -> None:
        for step in steps:
            backward(sharded, own(tokens_of(step)), 1)
            optimizer.step()
            optimizer.zero_grad()

    first = begin()
    run(*first, range(3))
    model, optimizer = get_state_dict(first[0].model, first[1])
    state_dict_saver.save({"model": model, "optimizer": optimizer}, checkpoint_id=params["directory"])
    run(*first, range(3, 6))
    second = begin()
    model, optimizer = get_state_dict(second[0].model, second[1])
    state_dict_loader.load({"model": model, "optimizer": optimizer}, checkpoint_id=params["directory"])
    set_state_dict(second[0].model, second[1], model_state_dict=model, optim_state_dict=optimizer)
    differed = not same_bits(Ours(*first), Ours(*second))
    run(*second, range(3, 6))
    return {"differed": differed, "same": same_bits(Ours(*first), Ours(*second))}


def lose_a_rank(params: dict[str, Any]) -> dict[str, Any]:
    """The last rank dies in its second backward pass, before its last reduction."""
    model = make()
    sharded = shard(model, model.blocks)
    optimizer = sharded.optimizer(MAKERS["adamw"](model.parameters()), max_norm=0.5)
    backward(sharded, own(tokens_of(0)), 1)
    optimizer.step()
    shards = [p for group in optimizer.param_groups for p in group["params"]]
    before = locals_of(shards)
    if dist.get_rank() == dist.get_world_size() - 1:
        model.blocks[1].register_full_backward_hook(lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    try:
        backward(sharded, own(tokens_of(1)), 1)
        optimizer.step()
    except (RuntimeError, FireflyerError) as error:
        kept = all(torch.equal(a, b) for a, b in zip(before, locals_of(shards), strict=True))
        return {"error": f"{type(error).__name__}: {error}", "kept": kept}
    return {"error": None}


SCENARIOS = {one.__name__: one for one in (bitwise, parity, memory, peaks, checkpoints, lose_a_rank)}


def main() -> None:
    arguments: dict[str, Any] = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=40))
    results = {name: SCENARIOS[name](given) for name, given in arguments["scenarios"].items()}
    if "lose_a_rank" not in results:
        dist.destroy_process_group()
    print(json.dumps(results), flush=True)


if __name__ == "__main__":
    main()
