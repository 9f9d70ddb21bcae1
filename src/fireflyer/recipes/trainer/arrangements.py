"""The interface of the ways in which a plan divides a step over ranks, and those in which each rank runs all layers:
data parallelism with whole models, with sharded ones, and tensor parallelism. `run` chooses among them, `pipelines`
and `split_experts`.

    for number, decision in ...:
        summed = arrangement.backward(inputs, targets)      # of this rank's part of the batch
        norm = arrangement.commit()                         # or arrangement.discard()

All are made of `fireflyer.training`; here is only which of its parts a plan needs.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from types import TracebackType
from typing import Any, Protocol, Self, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from fireflyer.base.errors import UsageError
from fireflyer.codesign.parallel import ParallelPlan
from fireflyer.recipes.trainer.balance import ExpertBalance
from fireflyer.recipes.trainer.core.recipe import OptimizerSettings
from fireflyer.recipes.trainer.models import BuiltModel
from fireflyer.training import DistributedDataParallel
from fireflyer.training.fsdp.sharding import shard
from fireflyer.training.mesh import PlanMesh
from fireflyer.training.pipeline import split_batch
from fireflyer.training.tensor import finish_gradients

__all__ = ["Arrangement", "ArrangementBase", "Replicated", "Sharded", "TensorParallel", "WholeDepth", "adamw"]

_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


class Arrangement(Protocol):
    """A model and its optimizer, divided over ranks. All methods but `discard` are collective over the ranks that have
    a part of the model. A context: left by an error, it aborts what goes on beside the program, on all ranks."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None: ...

    @property
    def module(self) -> nn.Module:
        """What checkpoints hold."""

    @property
    def layers(self) -> nn.Module:
        """What this rank computes with."""

    @property
    def optimizer(self) -> torch.optim.Optimizer: ...

    @property
    def balance(self) -> ExpertBalance:
        """Moves the biases of gates as steps are committed or discarded, and counts tokens of experts."""

    def backward(self, inputs: Tensor, targets: Tensor) -> float:
        """Forward and backward passes of this rank's part of the batch, `[sequences, tokens]`, in micro-batches.
        Returns the loss summed over its tokens. Gradients are those of the mean over all tokens of the whole batch."""

    def commit(self, before: Callable[[], None]) -> float:
        """Calls `before` when gradients are complete, clips them and takes the optimizer's step, unless their norm is
        not finite. Returns the norm."""

    def discard(self) -> None:
        """Forgets the gradients of the step."""

    def evaluate(self, inputs: Tensor, targets: Tensor) -> float:
        """Cross entropy of the next token summed over the tokens, without gradients."""


class ArrangementBase:
    """What all arrangements share: precision of products, balance of experts, and what ends with a run."""

    module: nn.Module
    layers: nn.Module
    optimizer: torch.optim.Optimizer

    def __init__(self, built: BuiltModel, mesh: PlanMesh) -> None:
        self.layers = built.module
        self._mesh, self._plan = mesh, mesh.plan
        # Gradients are averaged over data-parallel ranks: this factor of losses that are sums over tokens makes them
        # those of the mean over all tokens.
        self._factor = mesh.plan.data / mesh.plan.step_tokens
        self.balance = ExpertBalance(built.module)
        self._device_type = next(built.module.parameters()).device.type
        self._resources = contextlib.ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        return self._resources.__exit__(kind, error, trace)

    def commit(self, before: Callable[[], None]) -> float:
        norm = self._step(before)
        self.balance.move(committed=math.isfinite(norm))
        return norm

    def discard(self) -> None:
        self.optimizer.zero_grad()
        self.balance.move(committed=False)

    def _step(self, before: Callable[[], None]) -> float:
        raise NotImplementedError

    def _products(self) -> contextlib.AbstractContextManager[Any]:
        """Precision of matrix products where parameters are FP32."""
        precision = self._plan.precision
        if precision.compute != "bf16" or precision.parameters == "bf16":
            return contextlib.nullcontext()
        return torch.autocast(self._device_type, dtype=torch.bfloat16)


class WholeDepth(ArrangementBase):
    """Each rank runs all layers, on micro-batches one after the other."""

    def __init__(self, built: BuiltModel, mesh: PlanMesh) -> None:
        super().__init__(built, mesh)
        self._built, self.module = built, built.module

    def backward(self, inputs: Tensor, targets: Tensor) -> float:
        summed = torch.zeros((), dtype=torch.float64)
        count = self._plan.micro_batches
        parts = list(zip(split_batch(inputs, count), split_batch(targets, count), strict=True))
        for number, (tokens, wanted) in enumerate(parts):
            with self._micro_batch(last=number == len(parts) - 1):
                with self._products():
                    loss = self._forward(tokens, wanted)
                (loss * self._factor).backward()  # type: ignore[no-untyped-call]
            summed += loss.detach().double().cpu()
        return float(summed)

    def evaluate(self, inputs: Tensor, targets: Tensor) -> float:
        self._built.loss.eval()  # gates count the tokens of training only
        try:
            with torch.no_grad(), self._products():
                return float(self._evaluated(inputs, targets).double())
        finally:
            self._built.loss.train()

    def _forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        loss: Tensor = self._built.loss(inputs, targets)
        return loss

    def _evaluated(self, inputs: Tensor, targets: Tensor) -> Tensor:
        return self._forward(inputs, targets)

    def _micro_batch(self, *, last: bool) -> contextlib.AbstractContextManager[None]:  # noqa: ARG002
        return contextlib.nullcontext()

    def _clip_and_step(self, before: Callable[[], None], max_norm: float) -> float:
        before()
        gradients = [one.grad for one in self.module.parameters() if one.grad is not None]
        total = torch.nn.utils.get_total_norm(gradients)
        whole = cast("Any", total).full_tensor() if hasattr(total, "full_tensor") else total
        norm = float(whole)
        if math.isfinite(norm):
            torch.nn.utils.clip_grads_with_norm_(list(self.module.parameters()), max_norm, whole)
            self.optimizer.step()
        self.optimizer.zero_grad()
        return norm


class Replicated(WholeDepth):
    """Each rank has the whole model (ZeRO 0): our DistributedDataParallel."""

    def __init__(self, built: BuiltModel, mesh: PlanMesh, settings: OptimizerSettings) -> None:
        super().__init__(built, mesh)
        self._wrapped = DistributedDataParallel(built.loss, process_group=mesh.group("data"), broadcast_buffers=False)
        self.optimizer = adamw(built.module, settings)
        self._max_norm = settings.max_norm

    def _forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        loss: Tensor = self._wrapped(inputs, targets)
        return loss

    def _evaluated(self, inputs: Tensor, targets: Tensor) -> Tensor:
        loss: Tensor = self._built.loss(inputs, targets)  # the wrapper is for passes that have gradients
        return loss

    def _micro_batch(self, *, last: bool) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if last else self._wrapped.no_sync()

    def _step(self, before: Callable[[], None]) -> float:
        return self._clip_and_step(before, self._max_norm)


class Sharded(WholeDepth):
    """States, gradients, parameters divided over the shard group (ZeRO 1 to 3), and an optimizer that steps in the
    backward pass."""

    def __init__(self, built: BuiltModel, mesh: PlanMesh, settings: OptimizerSettings) -> None:
        super().__init__(built, mesh)
        plan = mesh.plan
        self._sharded = shard(
            built.loss,
            built.blocks,
            zero=_zero_of(plan),
            mesh=mesh.data,
            param_dtype=torch.bfloat16 if plan.precision.parameters == "bf16" else None,
            reduce_dtype=_DTYPES[plan.precision.gradients],
        )
        self._stepping = self._sharded.optimizer(adamw(built.module, settings), max_norm=settings.max_norm)
        self.optimizer = self._stepping

    def evaluate(self, inputs: Tensor, targets: Tensor) -> float:
        summed = super().evaluate(inputs, targets)
        for part in self._built.loss.modules():
            if isinstance(part, FSDPModule):
                part.reshard()  # no backward pass follows that would do it
        return summed

    def _micro_batch(self, *, last: bool) -> contextlib.AbstractContextManager[None]:
        return self._sharded.micro_batch(last=last)

    def _step(self, before: Callable[[], None]) -> float:
        before()
        self._stepping.step()
        outcome = self._stepping.outcome
        self._stepping.zero_grad()
        return math.nan if outcome is None else outcome.norm


class TensorParallel(WholeDepth):
    """Each matrix divided over the tensor group; gradients averaged over replicas after the last micro-batch."""

    def __init__(self, built: BuiltModel, mesh: PlanMesh, settings: OptimizerSettings) -> None:
        super().__init__(built, mesh)
        self.optimizer = adamw(built.module, settings)
        self._max_norm = settings.max_norm

    def _step(self, before: Callable[[], None]) -> float:
        finish_gradients(self.module, data=self._mesh.group("data"), average=True)
        return self._clip_and_step(before, self._max_norm)


def adamw(module: nn.Module, settings: OptimizerSettings) -> torch.optim.AdamW:
    return torch.optim.AdamW(
        module.parameters(),
        lr=settings.learning_rate,
        betas=(settings.beta1, settings.beta2),
        eps=settings.epsilon,
        weight_decay=settings.weight_decay,
        foreach=False,
    )


def _zero_of(plan: ParallelPlan) -> Any:
    if plan.zero not in (1, 2, 3):
        raise UsageError(f"zero is {plan.zero}; use 1, 2 or 3")
    return plan.zero
