"""What a rank does in the tests of training over torch.distributed: `python -m tests.support.torch_ranks.training
JSON`.

The world has stock gloo; beside it there is an hfreduce group of the same ranks. Each way of training starts with the
same model and sees the same batches.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from tests.support.collectives.thread_device import ThreadCopies
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel

from fireflyer.base.errors import FireflyerError
from fireflyer.collectives.communicator import Communicator
from fireflyer.collectives.compression import Compression
from fireflyer.collectives.torch.cuda import DEVICES
from fireflyer.collectives.torch_devices import DeviceCommunicator
from fireflyer.collectives.torch_fsdp import all_reduce_hook, use_for_fsdp
from fireflyer.collectives.torch_group import HfreduceGroup
from fireflyer.collectives.torch_hooks import HookState, hfreduce_hook
from fireflyer.collectives.torch_join import communicator_of
from fireflyer.recipes.gpt import GPTConfig, GPTModel
from fireflyer.training import DistributedDataParallel as OurDdp

BATCH = 8
BUCKET_MIB = 0.02
Step = Callable[[nn.Module, int, slice], torch.Tensor]


def vgg() -> nn.Module:
    layers: list[nn.Module] = []
    channels = 3
    for width in (8, 16, 32):
        layers += [nn.Conv2d(channels, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(), nn.MaxPool2d(2)]
        channels = width
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(32 * 4, 64), nn.ReLU(), nn.Linear(64, 10))


def vgg_loss(model: nn.Module, step: int, part: slice) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step)
    images = torch.randn(BATCH, 3, 16, 16, generator=generator)
    labels = torch.randint(10, (BATCH,), generator=generator)
    return nn.functional.cross_entropy(model(images[part]), labels[part])


def gpt() -> nn.Module:
    return GPTModel(GPTConfig(vocab_size=64, context=16, width=32, layers=2, heads=2))


def gpt_loss(model: nn.Module, step: int, part: slice) -> torch.Tensor:
    tokens = torch.randint(64, (BATCH, 17), generator=torch.Generator().manual_seed(step))
    logits = model(tokens[part, :-1])
    return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[part, 1:].flatten())


MODELS: dict[str, tuple[Callable[[], nn.Module], Step]] = {"vgg": (vgg, vgg_loss), "gpt": (gpt, gpt_loss)}


def train(name: str, wrap: Callable[[nn.Module], nn.Module], steps: int) -> list[Any]:
    """The losses of this rank, and a digest of what the model has become."""
    make, loss_of = MODELS[name]
    torch.manual_seed(3)
    model = wrap(make())
    # not Adam, which a sum in the place of a mean would not change
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    rank, size = dist.get_rank(), dist.get_world_size()
    part = slice(rank * BATCH // size, (rank + 1) * BATCH // size)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = loss_of(model, step, part)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(loss.item())
    return [losses, digest(model)]


def digest(model: nn.Module) -> str:
    sha = hashlib.sha256()
    for tensor in model.parameters():
        whole = tensor.full_tensor() if isinstance(tensor, torch.distributed.tensor.DTensor) else tensor
        sha.update(whole.detach().contiguous().numpy().tobytes())
    return sha.hexdigest()


def stock(module: nn.Module, group: Any = None, hook: HookState | None = None) -> nn.Module:
    model = DistributedDataParallel(module, process_group=group, bucket_cap_mb=BUCKET_MIB)
    if hook is not None:
        model.register_comm_hook(hook, hfreduce_hook)
    return model


def sharded(module: nn.Module, mesh: DeviceMesh, prepare: Callable[[FSDPModule], None] | None = None) -> nn.Module:
    for layer in module.modules():
        if isinstance(layer, nn.Linear | nn.Conv2d):
            fully_shard(layer, mesh=mesh)
    model = fully_shard(module, mesh=mesh)
    if prepare is not None:
        prepare(model)
    return cast("nn.Module", model)


def data_parallel(params: dict[str, Any]) -> dict[str, Any]:
    group = dist.new_group(backend="hfreduce")
    ours, bare = communicator_of(), communicator_of()
    ways: dict[str, Callable[[nn.Module], nn.Module]] = {
        "gloo": stock,
        "hfreduce": partial(stock, group=group),
        "hook": partial(stock, hook=HookState(ours)),
        "ours": lambda module: OurDdp(module, bare, bucket_bytes=int(BUCKET_MIB * 2**20)),
        "hook bf16": partial(stock, hook=HookState(ours, compression=Compression("bf16"))),
        "hook fp8": partial(stock, hook=HookState(ours, compression=Compression("fp8", error_feedback=True))),
        "ours bf16": lambda module: OurDdp(module, bare, bucket_bytes=20_000, compression=Compression("bf16")),
        "ours fp8": lambda module: OurDdp(
            module, bare, bucket_bytes=20_000, compression=Compression("fp8", error_feedback=True)
        ),
    }
    results: dict[str, Any] = {
        way: {name: train(name, wrap, params["steps"]) for name in params["models"]} for way, wrap in ways.items()
    }
    results["memory"] = gradients_in_shared_memory(bare)
    ours.close()
    bare.close()
    return results


def gradients_in_shared_memory(comm: Communicator) -> list[bool]:
    """Whether all gradients lie there after passes with either kind of `zero_grad`, and can be read after the end."""
    model = OurDdp(MODELS["gpt"][0](), comm)
    found: list[bool] = []
    gradients: list[torch.Tensor | None] = []
    for set_to_none in (True, False):
        model.zero_grad(set_to_none=set_to_none)
        MODELS["gpt"][1](model, 0, slice(0, 2)).backward()  # type: ignore[no-untyped-call]
        gradients = [parameter.grad for parameter in model.parameters()]
        found.append(all(gradient is not None and comm.registered(gradient) for gradient in gradients))
    comm.close()
    return [*found, all(bool(gradient.isfinite().all()) for gradient in gradients if gradient is not None)]


def on_a_device(params: dict[str, Any]) -> dict[str, Any]:
    """Uncompressed ways only."""
    group = dist.new_group(backend="hfreduce")
    comm = communicator_of()
    own = DeviceMesh.from_group(group, "cpu")
    devices = DeviceCommunicator.of(comm)
    ways: dict[str, Callable[[nn.Module], nn.Module]] = {
        "gloo": stock,
        "hfreduce": partial(stock, group=group),
        "hook": partial(stock, hook=HookState(comm)),
        "ours": lambda module: OurDdp(module, devices, bucket_bytes=20_000),
        "fsdp": lambda module: sharded(module, own),
        "fsdp hooks": lambda module: sharded(module, own, lambda model: use_for_fsdp(model, comm)),
    }
    results = {
        way: {name: train(name, wrap, params["steps"]) for name in params["models"]} for way, wrap in ways.items()
    }
    devices.close()
    return results


def fully_sharded(params: dict[str, Any]) -> dict[str, Any]:
    size = dist.get_world_size()
    gloo = init_device_mesh("cpu", (size,))
    halves = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("replicas", "shards"))
    comm = communicator_of()
    across = communicator_of(halves.get_group("replicas"))
    within = communicator_of(halves.get_group("shards"))
    own = DeviceMesh.from_group(dist.new_group(backend="hfreduce"), "cpu")

    def in_halves(model: FSDPModule) -> None:
        """Shards inside each half, averaged over the halves by the all-reduce hook."""
        use_for_fsdp(model, within)
        for module in model.modules():  # type: ignore[attr-defined]
            if isinstance(module, FSDPModule):
                module.set_all_reduce_hook(all_reduce_hook(across))

    ways: dict[str, Callable[[nn.Module], nn.Module]] = {
        "gloo": lambda module: sharded(module, gloo),
        "hooks": lambda module: sharded(module, gloo, lambda model: use_for_fsdp(model, comm)),
        "hfreduce": lambda module: sharded(module, own),
        "hfreduce memory": lambda module: sharded(
            module, own, lambda model: model.set_allocate_memory_from_process_group_for_comm(True)
        ),
        "replicas": lambda module: sharded(module, halves["shards"], in_halves),
    }
    results = {
        way: {name: train(name, wrap, params["steps"]) for name in params["models"]} for way, wrap in ways.items()
    }
    for each in (comm, across, within):
        each.close()
    return results


def lose_a_rank(params: dict[str, Any]) -> dict[str, Any]:
    """The last rank dies in its second backward pass, after its first sums were started."""
    last = dist.get_rank() == dist.get_world_size() - 1
    way = params["way"]
    torch.manual_seed(3)
    make, loss_of = MODELS["gpt"]
    if way == "ours":
        model: nn.Module = OurDdp(make(), communicator_of(), bucket_bytes=20_000)
    elif way == "hook":
        model = stock(make(), hook=HookState(communicator_of(), compression=None))
    else:
        model = stock(make(), group=dist.new_group(backend="hfreduce"))
    loss_of(model, 0, slice(0, 2)).backward()  # type: ignore[no-untyped-call]
    if last:
        first = next(iter(model.parameters()))
        first.register_hook(lambda _: os.kill(os.getpid(), signal.SIGKILL))  # type: ignore[no-untyped-call]
    try:
        loss_of(model, 1, slice(0, 2)).backward()  # type: ignore[no-untyped-call]
    except (RuntimeError, FireflyerError) as error:
        if params["unhandled"]:
            print(json.dumps({"error": str(error)}), flush=True)
            raise
        return {"error": str(error), "runtime": isinstance(error, RuntimeError)}
    return {"error": None}


SCENARIOS = {
    "data_parallel": data_parallel,
    "fully_sharded": fully_sharded,
    "on_a_device": on_a_device,
    "lose_a_rank": lose_a_rank,
}


def main() -> None:
    arguments: dict[str, Any] = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    if arguments.get("device") == "threads":  # every tensor takes the way of tensors on a device
        DEVICES["cpu"] = ThreadCopies
    dist.init_process_group("gloo", timeout=timedelta(seconds=40))
    assert issubclass(HfreduceGroup, dist.ProcessGroup)
    result = SCENARIOS[arguments["scenario"]](arguments)
    if result.get("error") is None:
        dist.destroy_process_group()
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
