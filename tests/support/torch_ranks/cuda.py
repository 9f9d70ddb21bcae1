"""What a rank does in the tests that need CUDA. `run_torch_ranks` starts `python -m tests.support.torch_ranks.cuda
JSON`.

All ranks may be on one GPU. Each scenario returns what it found, or raises.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from tests.support.torch_ranks.training import MODELS
from tests.support.torch_ranks.values import NUMBERS, scattered
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from fireflyer.base.errors import FireflyerError
from fireflyer.collectives.devices.pieces import Move
from fireflyer.collectives.torch.cuda import CudaCopyEngine
from fireflyer.collectives.torch_devices import DeviceCommunicator
from fireflyer.collectives.torch_group import HfreduceGroup, HfreduceOptions
from fireflyer.collectives.torch_hooks import HookState, hfreduce_hook
from fireflyer.collectives.torch_join import communicator_of
from fireflyer.training import DistributedDataParallel as OurDdp

SIZES = (0, 1, 1000, 3_000_017)
OPS = {
    "sum": dist.ReduceOp.SUM,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
    "product": dist.ReduceOp.PRODUCT,
    "mean": dist.ReduceOp.AVG,
}
# torch 2.11 has the older names alone
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
BUSY_CYCLES = 500_000_000
"""Some tenths of a second of a GPU."""


def device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


def world() -> HfreduceGroup:
    group = dist.group.WORLD
    assert isinstance(group, HfreduceGroup)
    return group


def values(count: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    return scattered(count, dtype, seed, least=1, most=2)


def reductions(params: dict[str, Any]) -> None:
    """Every type, operation and size, beside the same group in host memory."""
    for dtype in NUMBERS:
        for name, op in OPS.items():
            if name == "mean" and not dtype.is_floating_point:
                continue
            for count in SIZES:
                mine = values(count, dtype, dist.get_rank())
                on_gpu = mine.to(device())
                dist.all_reduce(mine, op=op)
                dist.all_reduce(on_gpu, op=op)
                assert torch.equal(on_gpu.cpu(), mine), (dtype, name, count)


def float8(params: dict[str, Any]) -> None:
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        mine = torch.ones(100_003).to(dtype).to(device())
        dist.all_reduce(mine)
        assert set(mine.cpu().float().tolist()) == {float(dist.get_world_size())}


def others(params: dict[str, Any]) -> None:
    """The operations beside allreduce, in lists and in one piece, with gaps, and with types that only travel."""
    rank, size = dist.get_rank(), dist.get_world_size()
    gpu = device()
    whole = torch.zeros(size * 100_000, device=gpu)
    all_gather_single(whole, torch.full((100_000,), float(rank), device=gpu))
    assert whole.view(size, -1)[:, 0].tolist() == whole.view(size, -1)[:, -1].tolist() == list(range(size))
    part = torch.zeros(100_000, device=gpu)
    reduce_scatter_single(part, torch.arange(size, device=gpu).float().repeat_interleave(100_000))
    assert set(part.tolist()) == {float(rank * size)}
    tensor = torch.full((50_000,), float(rank), device=gpu)
    dist.broadcast(tensor, size - 1)
    assert set(tensor.tolist()) == {float(size - 1)}
    tensor = torch.full((50_000,), float(rank + 1), device=gpu)
    dist.reduce(tensor, 0)
    assert rank or set(tensor.tolist()) == {size * (size + 1) / 2}
    outputs = [torch.zeros(3, 2, device=gpu) for _ in range(size)]
    dist.all_gather(outputs, torch.full((3, 2), float(rank), device=gpu))
    assert [output[2, 1].item() for output in outputs] == list(range(size))
    out = torch.zeros(2 * size, dtype=torch.bool, device=gpu)
    dist.all_to_all_single(out, torch.ones(2 * size, dtype=torch.bool, device=gpu))
    assert bool(out.all())
    gaps = torch.full((64, 32), float(rank), device=gpu).t()
    dist.all_reduce(gaps)
    assert set(gaps.flatten().tolist()) == {size * (size - 1) / 2}
    gathered = [torch.zeros(5, device=gpu) for _ in range(size)] if rank == 0 else None
    dist.gather(torch.full((5,), float(rank), device=gpu), gathered, dst=0)
    assert [each[4].item() for each in gathered or []] == (list(range(size)) if rank == 0 else [])
    mine = torch.zeros(5, device=gpu)
    dist.scatter(mine, gathered, src=0)
    assert mine.tolist() == [float(rank)] * 5
    work = dist.isend(torch.full((7,), rank, device=gpu), (rank + 1) % size)
    got = torch.zeros(7, dtype=torch.int64, device=gpu)
    dist.recv(got, (rank - 1) % size)
    assert work is not None
    work.wait()
    assert got.tolist() == [(rank - 1) % size] * 7
    found: list[Any] = [None] * size
    dist.all_gather_object(found, rank)
    assert found == list(range(size))


def at_once(params: dict[str, Any]) -> None:
    """Short operations for which the caller waits, beside the same ones for which it does not: what is computed late on
    the current stream is summed, and what follows on it sees the sum."""
    size = dist.get_world_size()
    for count in (1, 1000, 900_000, 3_000_000):
        for number in range(3):
            side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            with torch.cuda.stream(side):
                tensor = torch.zeros(count, device=device())
                torch.cuda._sleep(BUSY_CYCLES // 10)  # type: ignore[no-untyped-call]
                tensor.fill_(dist.get_rank() + 1)
                if (dist.get_rank() + number) % 2:
                    dist.all_reduce(tensor)
                else:
                    work = dist.all_reduce(tensor, async_op=True)
                    assert work is not None
                    work.wait()
                result = tensor * 2
                del tensor  # its memory must not be given away while it is copied
                torch.full((count,), -1.0, device=device())
            side.synchronize()
            assert set(result.cpu().tolist()) == {float(size * (size + 1))}, (count, number)


def streams(params: dict[str, Any]) -> None:
    """The input is computed late on the current stream, the result is used on it; a call does not wait for the GPU."""
    size = dist.get_world_size()
    for _ in range(3):
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        with torch.cuda.stream(side):
            tensor = torch.zeros(5_000_000, device=device())
            torch.cuda._sleep(BUSY_CYCLES)  # type: ignore[no-untyped-call]
            tensor.fill_(dist.get_rank() + 1)
            busy = side.record_event()
            work = dist.all_reduce(tensor, async_op=True)
            assert not busy.query(), "starting an allreduce waited for the GPU"
            assert work is not None
            work.wait()
            result = tensor * 2
            del tensor  # its memory must not be given away while it is copied
            torch.full((5_000_000,), -1.0, device=device())
        side.synchronize()
        assert set(result.cpu().tolist()) == {float(size * (size + 1))}
        future = dist.all_reduce(again := torch.ones(1_000_000, device=device()), async_op=True)
        assert future is not None
        doubled = future.get_future().then(lambda done: done.value()[0] * 2)
        assert set(doubled.wait().cpu().tolist()) == {2.0 * size}
        del again


def profile(params: dict[str, Any]) -> dict[str, Any]:
    """What ran on the GPU during an allreduce and copies in both directions, and for how many microseconds both
    directions were copied at once."""
    tensor = torch.ones(16_000_000, device=device())
    copies = CudaCopyEngine(device())
    halves = [copies.pin(world().communicator.empty(tensor.nbytes // 2, "u8")) for _ in range(2)]
    dist.all_reduce(tensor)
    torch.cuda.synchronize()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as found:
            work = dist.all_reduce(tensor, async_op=True)
            assert work is not None
            work.wait()
            torch.cuda.synchronize()
            # sums take longer than copies where the bus is fast, so an allreduce alone may never copy both ways at once
            flat, half = tensor.view(torch.uint8), tensor.nbytes // 2
            copies.device_to_host(flat, halves[0].tensor, [Move(0, 0, half)], [])
            copies.host_to_device(halves[1].tensor, flat, [Move(half, 0, half)], [])
            torch.cuda.synchronize()
    for memory in halves:
        memory.release()
    path = f"{params['directory']}/trace-{dist.get_rank()}.json"
    found.export_chrome_trace(path)
    with open(path, encoding="utf-8") as file:
        events = json.load(file)["traceEvents"]
    on_gpu = [event for event in events if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    spans = {
        way: [(event["ts"], event["ts"] + event["dur"]) for event in on_gpu if way in event["name"]]
        for way in ("DtoH", "HtoD")
    }
    both = sum(max(0.0, min(down[1], up[1]) - max(down[0], up[0])) for down in spans["DtoH"] for up in spans["HtoD"])
    return {"names": sorted({event["name"] for event in on_gpu}), "both_us": both}


def pinned(params: dict[str, Any]) -> None:
    copies = CudaCopyEngine(device())
    array = world().communicator.empty(1 << 20, "u8")
    memory: Any = copies.pin(array)
    assert memory.pinned
    assert memory.tensor.is_pinned()
    memory.release()
    memory.release()
    assert not memory.tensor.is_pinned()


def training(params: dict[str, Any]) -> dict[str, Any]:
    """Losses on the GPU of each way, of stock DDP over gloo (and NCCL, where every rank has a GPU) beside ours."""
    gloo = dist.new_group(backend="gloo")
    comm, bare = communicator_of(), communicator_of()
    mesh = DeviceMesh.from_group(world(), "cuda")

    def stock(module: nn.Module, group: Any = None, state: HookState | None = None) -> nn.Module:
        model = DistributedDataParallel(module, process_group=group, bucket_cap_mb=0.02)
        if state is not None:
            model.register_comm_hook(state, hfreduce_hook)
        return model

    def fsdp(module: nn.Module) -> nn.Module:
        for layer in module.modules():
            if isinstance(layer, nn.Linear | nn.Conv2d):
                fully_shard(layer, mesh=mesh)
        return cast("nn.Module", fully_shard(module, mesh=mesh))

    ways: dict[str, Callable[[nn.Module], nn.Module]] = {
        "gloo": lambda module: stock(module, gloo),
        "hfreduce": stock,
        "hook": lambda module: stock(module, gloo, HookState(comm)),
        "ours": lambda module: OurDdp(module, bare, bucket_bytes=20_000),
        "fsdp": fsdp,
    }
    if torch.cuda.device_count() >= dist.get_world_size() > 1:
        nccl = dist.new_group(backend="nccl")
        ways["nccl"] = lambda module: stock(module, nccl)
    found = {way: {name: losses_of(name, wrap, params["steps"]) for name in MODELS} for way, wrap in ways.items()}
    for each in (comm, bare):
        DeviceCommunicator.of(each).close()
    return found


def losses_of(name: str, wrap: Callable[[nn.Module], nn.Module], steps: int) -> list[float]:
    make, loss_of = MODELS[name]
    torch.manual_seed(3)
    model = wrap(_OnGpu(make()).to(device()))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    rank, size = dist.get_rank(), dist.get_world_size()
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = loss_of(model, step, slice(rank * 8 // size, (rank + 1) * 8 // size))
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(loss.item())
    return losses


class _OnGpu(nn.Module):
    """Takes inputs from the CPU and gives outputs there, so that the losses of other tests can be used."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.inner(inputs.to(device())).cpu()
        return output


def lose_a_rank(params: dict[str, Any]) -> dict[str, Any]:
    """The last rank is killed while large sums are under way; the others get its name and no copy goes on."""
    tensors = [torch.ones(20_000_000, device=device()) for _ in range(4)]
    dist.all_reduce(tensors[0])
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    if dist.get_rank() == dist.get_world_size() - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    errors = []
    for work in works:
        assert work is not None
        try:
            work.wait()
        except (RuntimeError, FireflyerError) as error:
            errors.append(str(error))
    torch.cuda.synchronize()
    return {"error": errors[-1] if errors else None}


SCENARIOS: dict[str, Callable[[dict[str, Any]], Any]] = {
    function.__name__: function
    for function in (reductions, float8, others, at_once, streams, profile, pinned, training, lose_a_rank)
}


def main() -> None:
    arguments: dict[str, Any] = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    pairs = [tuple(pair) for pair in arguments.get("pairs", [])]
    torch.cuda.set_device(0 if pairs else rank % torch.cuda.device_count())  # not all GPUs reach each other
    options = HfreduceOptions(nvlink_pairs=pairs)
    dist.init_process_group("hfreduce", timeout=timedelta(seconds=60), pg_options=options)
    result = SCENARIOS[arguments["scenario"]](arguments)
    if not isinstance(result, dict) or result.get("error") is None:
        dist.destroy_process_group()
    print(json.dumps({"result": result}), flush=True)


if __name__ == "__main__":
    main()
