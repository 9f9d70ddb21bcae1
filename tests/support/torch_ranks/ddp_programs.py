"""Programs for `DistributedDataParallel`, torch's or ours: each takes the class, and returns the tensors that count.

A program is what a user might write; nothing in it knows which class it has. Ranks see different data.
"""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Iterator
from typing import Any, Final

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import debugging_hooks, default_hooks, powerSGD_hook
from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook as local_sgd
from torch.distributed.algorithms.join import Join
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint

__all__ = [
    "BEYOND_TORCH",
    "COMPILED",
    "PROGRAMS",
    "SHARED",
    "Program",
    "compiled_inside",
    "compiled_wrapper",
    "loss_of",
    "wide",
]

Program = Callable[[Any], list[torch.Tensor]]
PROGRAMS: Final[dict[str, Program]] = {}
BEYOND_TORCH: Final[dict[str, Program]] = {}
"""What torch's class refuses on the CPU."""
SHARED: Final = " with parameters in shared memory"
"""After the name of a program: ours moves them there."""
SMALL_BUCKET_MIB: Final = 0.0005


def program(function: Program) -> Program:
    PROGRAMS[function.__name__] = function
    return function


def beyond_torch(function: Program) -> Program:
    BEYOND_TORCH[function.__name__] = function
    return function


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(6, 8)
        self.left, self.right, self.never = nn.Linear(8, 2), nn.Linear(8, 2), nn.Linear(8, 2)

    def forward(self, x: torch.Tensor, heads: str) -> Any:
        x = self.body(x).tanh()
        return sum(getattr(self, head)(x).square().mean() for head in heads.split())


def mlp(**kwargs: Any) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(6, 16, **kwargs), nn.Tanh(), nn.Linear(16, 16, **kwargs), nn.Tanh(), nn.Linear(16, 3, **kwargs)
    )


def normed() -> nn.Sequential:
    # No bias before the norm: its gradient is rounding alone, which AdamW would make large.
    return nn.Sequential(nn.Linear(6, 8, bias=False), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))


def data(step: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
    return torch.randn(4, 6, generator=generator).to(dtype)


def loss_of(model: nn.Module, step: int) -> Any:
    return model(data(step)).square().mean()


def grads(model: nn.Module) -> list[torch.Tensor]:
    """NaN stands for a gradient that is None."""
    return [torch.tensor(torch.nan) if p.grad is None else p.grad.clone() for p in model.parameters()]


def state(model: nn.Module) -> list[torch.Tensor]:
    return [value.clone() for value in model.state_dict().values()]


def train(model: nn.Module, steps: int = 3, loss: Callable[[nn.Module, int], Any] = loss_of) -> list[torch.Tensor]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        value = loss(model, step)
        value.backward()
        optimizer.step()
        losses.append(value.detach())
    return [*losses, *state(model)]


@program
def a_script_of_torchrun(ddp: Any) -> list[torch.Tensor]:
    return train(ddp(mlp()))


@program
def arguments_by_position(ddp: Any) -> list[torch.Tensor]:
    return train(ddp(normed(), None, None, 0, True, True, dist.group.WORLD, SMALL_BUCKET_MIB))


@program
def arguments_that_change_no_result(ddp: Any) -> list[torch.Tensor]:
    return train(ddp(mlp(), device_ids=[], bucket_cap_mb=1, batched_grad_copy=True, gradient_as_bucket_view=True))


@program
def another_group(ddp: Any) -> list[torch.Tensor]:
    return train(ddp(mlp(), process_group=dist.new_group()))


@program
def a_device_mesh(ddp: Any) -> list[torch.Tensor]:
    return train(ddp(mlp(), device_mesh=DeviceMesh("cpu", range(dist.get_world_size()))))


@program
def values_come_from_rank_0(ddp: Any) -> list[torch.Tensor]:
    torch.manual_seed(dist.get_rank())
    return state(ddp(normed()))


@program
def values_of_their_own(ddp: Any) -> list[torch.Tensor]:
    torch.manual_seed(dist.get_rank())
    return state(ddp(normed(), init_sync=False))


@program
def buffers_in_evaluation(ddp: Any) -> list[torch.Tensor]:
    model = ddp(normed())
    results = train(model)
    model.eval()
    with torch.no_grad():
        results += [model(data(8)), model(data(9))]
    return results + state(model)


@program
def buffers_of_their_own(ddp: Any) -> list[torch.Tensor]:
    return train(ddp(normed(), forward_sync_buffers=False))


@program
def buffers_that_are_never_copied(ddp: Any) -> list[torch.Tensor]:
    model = normed()
    mean = model.get_buffer("1.running_mean")
    mean.fill_(dist.get_rank())
    return train(ddp(model, broadcast_buffers=False))


@program
def accumulation(ddp: Any) -> list[torch.Tensor]:
    model = ddp(normed())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        with model.no_sync():
            loss_of(model, 10 * step).backward()
            loss_of(model, 10 * step + 1).backward()
        loss_of(model, 10 * step + 2).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=step == 0)
    return state(model)


@program
def no_sync_around_the_forward_pass_alone(ddp: Any) -> list[torch.Tensor]:
    model = ddp(mlp())
    loss_of(model, 0).backward()
    with model.no_sync():
        loss = loss_of(model, 1)
    loss.backward()
    return grads(model)


@program
def no_sync_around_the_backward_pass_alone(ddp: Any) -> list[torch.Tensor]:
    model = ddp(mlp())
    loss = loss_of(model, 1)
    with model.no_sync():
        loss.backward()
    return grads(model)


@program
def gradients_with_memory_of_their_own(ddp: Any) -> list[torch.Tensor]:
    model = ddp(mlp(), gradient_as_bucket_view=False)
    loss_of(model, 0).backward()
    kept = [p.grad for p in model.parameters()]
    model.zero_grad()
    loss_of(model, 1).backward()
    model.zero_grad(set_to_none=False)
    loss_of(model, 2).backward()
    return [*kept, *grads(model)]


def two_heads(ddp: Any, heads: Callable[[int], str], **options: Any) -> list[torch.Tensor]:
    model = ddp(TwoHeads(), **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    results = []
    for step in range(4):
        optimizer.zero_grad()
        model(data(step), heads(step)).backward()
        results += grads(model)
        optimizer.step()
    return results + state(model)


@program
def unused_parameters(ddp: Any) -> list[torch.Tensor]:
    rank = dist.get_rank()
    plan = ["left", "left right", ["left", "right"][rank % 2], ["right", "left right"][rank % 2]]
    return two_heads(ddp, lambda step: plan[step], find_unused_parameters=True)


@program
def unused_parameters_in_accumulation(ddp: Any) -> list[torch.Tensor]:
    model = ddp(TwoHeads(), find_unused_parameters=True)
    with model.no_sync():
        model(data(0), "right").backward()
    model(data(1), "left").backward()
    return grads(model)


@program
def a_static_graph(ddp: Any) -> list[torch.Tensor]:
    return two_heads(ddp, lambda step: "left right", static_graph=True)


class Tied(nn.Module):
    """Uses one layer three times, and one weight in two layers; one layer is frozen."""

    def __init__(self, segments: bool | None = None) -> None:
        super().__init__()
        self.encode, self.decode = nn.Linear(6, 6), nn.Linear(6, 6, bias=False)
        self.decode.weight = self.encode.weight
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.segments = segments

    def forward(self, x: torch.Tensor) -> Any:
        for layer in (self.encode, self.frozen, self.encode, self.decode, self.encode):
            if self.segments is None:
                x = layer(x).tanh()
            else:
                x = checkpoint(lambda y, layer=layer: layer(y).tanh(), x, use_reentrant=self.segments)
        return x


def with_gradient(model: nn.Module, step: int) -> Any:
    return model(data(step).requires_grad_()).square().mean()


@program
def parameters_used_several_times(ddp: Any) -> list[torch.Tensor]:
    return train(ddp(Tied()))


@program
def checkpointing(ddp: Any) -> list[torch.Tensor]:
    return train(ddp(Tied(segments=False), bucket_cap_mb=SMALL_BUCKET_MIB))


@program
def reentrant_checkpointing_of_shared_layers(ddp: Any) -> list[torch.Tensor]:
    return train(ddp(Tied(segments=True), static_graph=True), loss=with_gradient)


class Halves(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp()

    def forward(self, x: torch.Tensor) -> Any:
        x = checkpoint(self.inner[:2], x, use_reentrant=True)
        return checkpoint(self.inner[2:], x, use_reentrant=True)


@program
def reentrant_checkpointing(ddp: Any) -> list[torch.Tensor]:
    return train(ddp(Halves(), bucket_cap_mb=SMALL_BUCKET_MIB), loss=with_gradient)


@program
def two_forward_passes(ddp: Any) -> list[torch.Tensor]:
    model = ddp(mlp())
    (loss_of(model, 0) + loss_of(model, 1)).backward()
    return grads(model)


@program
def two_forward_passes_with_buffers(ddp: Any) -> list[torch.Tensor]:
    model = ddp(normed())
    (loss_of(model, 0) + loss_of(model, 1)).backward()
    return grads(model)


@program
def a_gradient_penalty(ddp: Any) -> list[torch.Tensor]:
    def loss(model: nn.Module, step: int) -> Any:
        x = data(step).requires_grad_()
        value = model(x).square().mean()
        (slope,) = torch.autograd.grad(value, x, create_graph=True)
        return value + slope.square().sum()

    return train(ddp(mlp()), loss=loss)


def in_dtypes(ddp: Any, *dtypes: torch.dtype) -> list[torch.Tensor]:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleList(mlp(dtype=dtype) for dtype in dtypes)

        def forward(self, x: torch.Tensor) -> Any:
            return sum(
                part(x.to(dtype)).abs().square().mean().double() for part, dtype in zip(self.parts, dtypes, strict=True)
            )

    model = ddp(Mixed(), bucket_cap_mb=SMALL_BUCKET_MIB)
    results: list[torch.Tensor] = []
    for step in range(2):
        model.zero_grad()
        model(data(step)).backward()
        results += grads(model)
    return results


@program
def float64(ddp: Any) -> list[torch.Tensor]:
    return in_dtypes(ddp, torch.float64)


@program
def float16(ddp: Any) -> list[torch.Tensor]:
    return in_dtypes(ddp, torch.float16)


@program
def bfloat16(ddp: Any) -> list[torch.Tensor]:
    return in_dtypes(ddp, torch.bfloat16)


@program
def complex64(ddp: Any) -> list[torch.Tensor]:
    return in_dtypes(ddp, torch.complex64)


@program
def complex128(ddp: Any) -> list[torch.Tensor]:
    return in_dtypes(ddp, torch.complex128)


@program
def mixed_dtypes(ddp: Any) -> list[torch.Tensor]:
    return in_dtypes(ddp, torch.float32, torch.bfloat16, torch.complex64, torch.float64, torch.float16)


@program
def ignored_parameters(ddp: Any) -> list[torch.Tensor]:
    torch.manual_seed(dist.get_rank())
    model = normed()
    ignore: Any = torch.nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model
    ignore(model, ["3.weight", "1.running_mean"])
    return train(ddp(model))


@program
def copies_of_the_wrapper(ddp: Any) -> list[torch.Tensor]:
    model = ddp(mlp())
    results = train(model, steps=1)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for each in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        results += train(each, steps=2)
    return results + train(model, steps=1)


# --- uneven inputs ---


def inputs() -> Iterator[int]:
    """Rank 0 has three, each other rank two more than the one before."""
    yield from range(3 + 2 * dist.get_rank())


def uneven(model: Any, optimizer: Any, context: Any) -> list[torch.Tensor]:
    losses = []
    with context:
        for step in inputs():
            optimizer.zero_grad()
            loss = loss_of(model, step)
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
    return [*losses, *state(model)]


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


@program
def uneven_inputs(ddp: Any) -> list[torch.Tensor]:
    model = ddp(normed(), bucket_cap_mb=SMALL_BUCKET_MIB)
    return uneven(model, sgd(model), model.join())


@program
def uneven_inputs_divided_by_the_ranks_that_have_some(ddp: Any) -> list[torch.Tensor]:
    model = ddp(normed())
    return uneven(model, sgd(model), model.join(divide_by_initial_world_size=False))


@program
def even_inputs_in_a_join_that_is_off(ddp: Any) -> list[torch.Tensor]:
    model = ddp(mlp())
    with model.join(enable=False):
        return train(model)


@program
def uneven_inputs_with_accumulation(ddp: Any) -> list[torch.Tensor]:
    model = ddp(normed())
    optimizer = sgd(model)
    with model.join():
        for step in inputs():
            if step % 2:
                with model.no_sync():
                    loss_of(model, step).backward()
            else:
                loss_of(model, step).backward()
                optimizer.step()
                optimizer.zero_grad()
    return state(model)


@program
def uneven_inputs_with_unused_parameters(ddp: Any) -> list[torch.Tensor]:
    model = ddp(TwoHeads(), find_unused_parameters=True)
    with model.join():
        for step in inputs():
            model.zero_grad()
            model(data(step), "left" if step % 2 else "left right").backward()
    return state(model) + (grads(model) if dist.get_rank() == dist.get_world_size() - 1 else [])


@program
def uneven_inputs_with_another_joinable(ddp: Any) -> list[torch.Tensor]:
    from torch.distributed.optim import ZeroRedundancyOptimizer  # warns when it is imported

    model = ddp(mlp())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    return uneven(model, optimizer, Join([model, optimizer]))


@program
def early_termination(ddp: Any) -> list[torch.Tensor]:
    model = ddp(mlp())
    with pytest.raises(RuntimeError, match="exhausted"):
        uneven(model, sgd(model), model.join(throw_on_early_termination=True))
    return state(model)


@program
def uneven_inputs_with_a_hook(ddp: Any) -> list[torch.Tensor]:
    model = ddp(mlp())
    model.register_comm_hook(None, default_hooks.allreduce_hook)
    return uneven(model, sgd(model), model.join())


# --- communication hooks ---


def hooked(
    ddp: Any, hook: Callable[..., Any], state: object = None, *, module: nn.Module | None = None
) -> list[torch.Tensor]:
    model = ddp(mlp() if module is None else module, bucket_cap_mb=SMALL_BUCKET_MIB)
    model.register_comm_hook(state, hook)
    return train(model, steps=4)


@program
def allreduce_hook(ddp: Any) -> list[torch.Tensor]:
    return hooked(ddp, default_hooks.allreduce_hook)


@program
def fp16_hook(ddp: Any) -> list[torch.Tensor]:
    return hooked(ddp, default_hooks.fp16_compress_hook)


@beyond_torch
def bf16_hook(ddp: Any) -> list[torch.Tensor]:
    return hooked(ddp, default_hooks.bf16_compress_hook)


@program
def wrapped_hook(ddp: Any) -> list[torch.Tensor]:
    return hooked(ddp, default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook))


@beyond_torch
def wrapped_bf16_hook(ddp: Any) -> list[torch.Tensor]:
    return hooked(ddp, default_hooks.bf16_compress_wrapper(default_hooks.allreduce_hook))


@program
def noop_hook(ddp: Any) -> list[torch.Tensor]:
    return hooked(ddp, debugging_hooks.noop_hook)


def one_matrix() -> nn.Module:
    """Of one parameter: where it depends on what shares a bucket, results would differ for good reasons."""
    return nn.Sequential(nn.Linear(6, 40, bias=False), nn.Tanh())


@program
def power_sgd_hook(ddp: Any) -> list[torch.Tensor]:
    options = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2)
    return hooked(ddp, powerSGD_hook.powerSGD_hook, options, module=one_matrix())


@program
def post_local_sgd_hook(ddp: Any) -> list[torch.Tensor]:
    model = ddp(mlp(), bucket_cap_mb=SMALL_BUCKET_MIB)
    make: Any = local_sgd.PostLocalSGDState
    options = make(None, None, 1, post_local_gradient_allreduce=False)
    model.register_comm_hook(options, local_sgd.post_localSGD_hook)
    from torch.distributed.optim import PostLocalSGDOptimizer  # warns when it is imported

    optimizer: Any = PostLocalSGDOptimizer(sgd(model), PeriodicModelAverager(period=2, warmup_steps=1))
    for step in range(5):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()
    return state(model)


# --- torch.compile ---


def wide() -> nn.Sequential:
    """Layers of 1 MiB, of which dynamo makes a graph each."""
    return nn.Sequential(nn.Linear(6, 512), *(nn.Linear(512, 512) for _ in range(3)), nn.Linear(512, 3))


def compiled_inside(ddp: Any, module: Callable[[], nn.Module] = mlp) -> Any:
    torch._dynamo.reset()
    return ddp(torch.compile(module(), backend="aot_eager"), bucket_cap_mb=1)


def compiled_wrapper(ddp: Any, module: Callable[[], nn.Module] = mlp) -> Any:
    torch._dynamo.reset()
    return torch.compile(ddp(module(), bucket_cap_mb=1), backend="aot_eager")


COMPILED: Final[dict[str, Program]] = {
    "a_compiled_module": lambda ddp: train(compiled_inside(ddp)),
    "a_compiled_wrapper": lambda ddp: train(compiled_wrapper(ddp)),
    "a_compiled_module_in_several_graphs": lambda ddp: train(compiled_inside(ddp, wide)),
    "a_compiled_wrapper_in_several_graphs": lambda ddp: train(compiled_wrapper(ddp, wide)),
}
