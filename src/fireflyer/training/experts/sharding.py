"""Divides the experts of a model over the expert groups of a plan, and what a training step then has to do.

>>> model = DeepseekModel(config, experts=own_experts(mesh, 64), dispatcher=NotSplit())
>>> with shard_experts(model, mesh) as split:
...     for tokens, targets in micro_batches:
...         (model(tokens, targets) / step_tokens).backward()
...     split.add_gradients()
...     if math.isfinite(split.clip_gradients(1.0)):
...         optimizer.step()
...     optimizer.zero_grad()
...     model.move_biases(split.expert_counts())

Each rank has different tokens: losses are shares of that of the whole batch. A gradient of an expert has the tokens of
all ranks of its expert group, and is added over the ranks that have the same expert; all others are added over all
ranks of the stage.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn

from fireflyer.base.errors import UsageError
from fireflyer.codesign.parallel.plan import WireFormat
from fireflyer.collectives.dispatch import ExpertPlacement
from fireflyer.collectives.tokens import TokenCodec
from fireflyer.training.experts.exchange import ExpertDispatch
from fireflyer.training.experts.layers import NotSplit, RankDispatch, layers_of, own_experts
from fireflyer.training.experts.state import load_state, tensors_of
from fireflyer.training.gradient_norm import clip_over_ranks, counted_here
from fireflyer.training.group_sums import add_over_group
from fireflyer.training.mesh import PlanMesh
from fireflyer.training.process_groups import communicator_beside

__all__ = ["SplitExperts", "shard_experts"]


class SplitExperts:
    """Result of `shard_experts`. Leaving the `with` block by an error aborts what is under way, on all ranks."""

    def __init__(self, model: nn.Module, mesh: PlanMesh, exchanges: Sequence[ExpertDispatch]) -> None:
        self.model = model
        self.mesh = mesh
        self._exchanges = exchanges

    def expert_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Names and parameters of routed experts: each rank has those of its own."""
        for name, layer in layers_of(self.model):
            for own, parameter in layer.experts.named_parameters():
                yield ".".join(filter(None, (name, "experts", own))), parameter

    def add_gradients(self, *, average: bool = False) -> None:
        """Adds gradients over ranks, in place, after the last backward pass of a step. Collective.

        `average`: of losses that are means over the tokens of each rank, the gradient of their mean over all ranks. A
        parameter that got no gradient on this rank counts as zeros, as others may have one.
        """
        mesh = self.mesh
        divisor = mesh.group("data").size() if average else 1
        of_experts = [one for _, one in self.expert_parameters() if one.requires_grad]
        known = set(map(id, of_experts))
        others = [one for one in self.model.parameters() if one.requires_grad and id(one) not in known]
        add_over_group(map(_gradient, of_experts), mesh.group("expert_data"), divisor=divisor)
        add_over_group(map(_gradient, others), mesh.group("data"), divisor=divisor)

    def clip_gradients(self, max_norm: float) -> float:
        """Scales gradients, between `add_gradients` and the optimizer's step, so that the norm of those of the whole
        model is at most `max_norm`. Returns the norm before, the same bits on all ranks; where it is not finite nothing
        is scaled, and the step must not be taken. Collective.

        `torch.nn.utils.clip_grad_norm_` would find another norm on each rank, and their copies of shared parameters
        would not stay the same. Raises `UsageError` for pipelines: each rank has one stage of the model.
        """
        if self.mesh.plan.pipeline > 1:
            raise UsageError(
                f"pipeline = {self.mesh.plan.pipeline}: gradients of other stages are on other ranks; use pipeline = 1"
            )
        if not max_norm > 0:
            raise UsageError(f"max_norm is {max_norm}; allowed: above 0")
        parameters = list(self.model.parameters())
        experts = [one for _, one in self.expert_parameters()]
        return clip_over_ranks(parameters, counted_here(parameters, experts, self.mesh), max_norm)

    def expert_counts(self) -> Tensor:
        """Tokens that each expert got since the biases were moved, `[layers, E]` int64: of all micro-batches and all
        ranks of the stage. For `move_biases` of the model. Collective."""
        counts = [layer.gate.counts for _, layer in layers_of(self.model)]
        if not counts:
            raise UsageError("this model has no experts, so it has no counts of them")
        summed = torch.stack(counts)
        add_over_group([summed], self.mesh.group("data"))
        return summed

    def state(self, optimizer: torch.optim.Optimizer | None = None) -> dict[str, Any]:
        """State for `torch.distributed.checkpoint`, with any number of ranks in an expert group when it is loaded:
        `model`, and `optimizer` where one is passed. Stacked tensors of experts are DTensors over the expert group,
        which share the memory of the parameters."""
        return tensors_of(self.model, optimizer, self.mesh, dict(self.expert_parameters()))

    def load(self, state: dict[str, Any], optimizer: torch.optim.Optimizer | None = None) -> None:
        """Takes over a `state` that `torch.distributed.checkpoint.load` has filled."""
        load_state(self.model, optimizer, state)

    def abort(self, reason: str) -> None:
        """Makes pending and later exchanges fail with `Aborted` on every rank of this expert group."""
        for exchange in self._exchanges[:1]:  # they have one communicator
            exchange.abort(reason)

    def close(self) -> None:
        """Waits for what was started. Idempotent."""
        for exchange in self._exchanges:
            exchange.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if error is not None:
            self.abort(f"{type(error).__name__}: {error}")
        self.close()


def shard_experts(
    model: nn.Module,
    mesh: PlanMesh,
    *,
    max_tokens: int | None = None,
    dispatch_codec: str | TokenCodec | None = None,
    combine_codec: str | TokenCodec | None = None,
) -> SplitExperts:
    """Divides the layers with experts of `model`, in place, over the expert groups of `mesh`: each rank keeps the
    experts `own_experts` and gets a dispatcher that reaches those of the others. Before an optimizer is made.

    A layer has all experts, of which the others are dropped here, or was made with `experts=own_experts(...)` and
    `dispatcher=NotSplit()`, which never needs their memory. `max_tokens`: of one forward on one rank; None: a
    micro-batch of the plan. Codecs are those of `fireflyer.collectives.tokens`, of the direction in which rows travel,
    also backward; None: what `precision` of the plan says, and where it says nothing, tokens travel as they are.

    Collective. Raises `UsageError` for experts that do not divide, parameters of several dtypes or devices, and
    plans with tensor parallelism, whose ranks have the same tokens.
    """
    plan = mesh.plan
    if plan.tensor > 1:
        raise UsageError(
            f"tensor = {plan.tensor}: tensor ranks have the same tokens, which would be sent to experts several times; "
            "use expert parallelism with tensor = 1"
        )
    layers = list(layers_of(model))
    owned = {name: own_experts(mesh, layer.gate.sizes.routed) for name, layer in layers}
    dtypes = {name: _dtype_of(name, layer) for name, layer in layers}
    for name, layer in layers:
        _check(name, layer, owned[name])
    if plan.expert == 1 and not any(isinstance(layer.dispatcher, NotSplit) for _, layer in layers):
        return SplitExperts(model, mesh, [])  # the model's own dispatcher serves
    comm = communicator_beside(mesh.group("expert"))
    exchanges = []
    for name, layer in layers:
        _keep(layer.experts, owned[name])
        value = _NAMES[dtypes[name]]
        exchanges.append(
            ExpertDispatch(
                comm,
                ExpertPlacement.even(layer.gate.sizes.routed, comm.plan.node_of_rank),
                width=layer.gate.weight.shape[1],
                per_token=layer.gate.sizes.per_token,
                max_tokens=plan.micro_batch_tokens if max_tokens is None else max_tokens,
                dtype=dtypes[name],
                dispatch_codec=dispatch_codec or _codec_of(plan.precision.dispatch) or value,
                combine_codec=combine_codec or _codec_of(plan.precision.combine) or value,
            )
        )
        layer.dispatcher = RankDispatch(exchanges[-1])
    return SplitExperts(model, mesh, exchanges)


_NAMES = {torch.bfloat16: "bf16", torch.float32: "f32", torch.float64: "f64"}


def _codec_of(form: WireFormat | None) -> str | None:
    return "f32" if form == "fp32" else form


def _gradient(parameter: nn.Parameter) -> Tensor:
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return parameter.grad


def _dtype_of(name: str, layer: Any) -> torch.dtype:
    parameters: list[nn.Parameter] = list(layer.experts.parameters())
    found = {(one.dtype, one.device.type) for one in parameters}
    dtype, _ = next(iter(found))
    if len(found) > 1 or dtype not in _NAMES:
        kinds = ", ".join(sorted(f"{dtype} on {device}" for dtype, device in found))
        raise UsageError(
            f"experts of {name} are {kinds}; tokens are dispatched in one of {', '.join(map(str, _NAMES))}, to experts "
            "that are all on one device"
        )
    return dtype


def _check(name: str, layer: Any, owned: range) -> None:
    routed, numbers = layer.gate.sizes.routed, layer.experts.numbers
    if numbers not in (range(routed), owned):
        raise UsageError(
            f"{name} has experts {numbers.start} to {numbers.stop - 1} of {routed}, but the plan gives this rank "
            f"{owned.start} to {owned.stop - 1}; make the model with experts=own_experts(mesh, {routed})"
        )


def _keep(experts: nn.Module, owned: range) -> None:
    """Drops the parameters of other experts."""
    if experts.numbers == owned:
        return
    for name, parameter in list(experts.named_parameters()):
        path, _, own = name.rpartition(".")
        kept = parameter.detach()[owned.start : owned.stop].clone()
        setattr(experts.get_submodule(path), own, nn.Parameter(kept, requires_grad=parameter.requires_grad))
    experts.numbers = owned  # type: ignore[assignment]
