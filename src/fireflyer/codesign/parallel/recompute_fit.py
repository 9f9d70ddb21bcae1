"""What each layer computes again in backward so that every rank of a plan fits: the cheapest choice of `budget`.

A layer keeps everything, the results of matrix products and attention (`operators`), or its input (`blocks`). Kept
bytes are those of all micro-batches that a rank has in flight at once, counted for each piece at its own most; so a
choice may use less than there is room for where a rank holds two pieces. What is computed again costs its FLOPs at the
rate of layers, and its bytes, written and read once, at that of GPU memory: norms and activation functions have no
FLOPs here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, get_args

import msgspec

from fireflyer.base.errors import UsageError
from fireflyer.codesign.model import ModelShape
from fireflyer.codesign.parallel.budget import RecomputeChoice, choose_recompute
from fireflyer.codesign.parallel.memory import activation_bytes, plan_memory
from fireflyer.codesign.parallel.node import NodeModel
from fireflyer.codesign.parallel.pipeline import held_at_once
from fireflyer.codesign.parallel.plan import LayerRecompute, ParallelPlan
from fireflyer.codesign.parallel.stages import balance_model, held_share, layer_again_flops, layers_of
from fireflyer.codesign.parallel.step import flops_rates

__all__ = ["fit_recompute", "layer_choices", "recompute_text"]

MODES: Final[tuple[LayerRecompute, ...]] = get_args(LayerRecompute)
MOST_ROUNDS: Final = 8
"""In which a budget is lowered by what a choice needed more than was counted for it."""


def fit_recompute(plan: ParallelPlan, shape: ModelShape, node: NodeModel) -> ParallelPlan:
    """The plan with a mode for each layer, so that each of its ranks fits into the memory of a GPU of `node`; all
    `none` where that fits. The plan passes `refusals` but for its `recompute`, which is not looked at. Raises
    `UsageError` where nothing fits."""
    modes: list[LayerRecompute] = ["none"] * (shape.layers + shape.mtp_layers)
    for held in dict.fromkeys(tuple(sorted(plan.pieces_of(stage))) for stage in range(plan.pipeline)):
        _fit(plan, shape, node, held, modes)
    return _with(plan, modes)


def recompute_text(plan: ParallelPlan) -> str:
    """For people: modes in the order of layers, with how many layers in a row have each."""
    if not isinstance(plan.recompute, tuple):
        return plan.recompute
    runs: list[tuple[str, int]] = []
    for mode in plan.recompute:
        before = runs.pop() if runs and runs[-1][0] == mode else (mode, 0)
        runs.append((mode, before[1] + 1))
    return ", ".join(f"{mode} x{count}" if count > 1 else mode for mode, count in runs)


def _with(plan: ParallelPlan, modes: Sequence[LayerRecompute]) -> ParallelPlan:
    return msgspec.structs.replace(plan, recompute=tuple(modes))


def _fit(
    plan: ParallelPlan, shape: ModelShape, node: NodeModel, held: tuple[int, ...], modes: list[LayerRecompute]
) -> None:
    """Sets the modes of the layers of the pieces `held`, which the same ranks have."""
    ranks = [stage for stage in range(plan.pipeline) if tuple(sorted(plan.pieces_of(stage))) == held]
    numbers, items = [], []
    for number, choices in _items(plan, shape, node, held, ranks):
        numbers.append(number)
        items.append(choices)
    needed = _needed(plan, shape, ranks, modes)
    if not items or needed <= node.usable_bytes:
        return
    # Beside what is chosen for: all else that the fullest of these ranks has.
    budget = node.usable_bytes - needed + sum(choices[0].kept_bytes for choices in items)
    for _ in range(MOST_ROUNDS):
        try:
            names = choose_recompute(items, max(0, budget)).names
        except UsageError as error:
            raise UsageError(f"recompute = 'budget', stage {ranks[0]}: {error}") from error
        for number, name in zip(numbers, names, strict=True):
            modes[number] = next(mode for mode in MODES if mode == name)
        needed = _needed(plan, shape, ranks, modes)
        if needed <= node.usable_bytes:
            return
        budget -= needed - node.usable_bytes
    raise UsageError(
        f"recompute = 'budget', stage {ranks[0]}: no choice was found with which {node.usable_bytes} bytes suffice; "
        "use recompute = 'full', smaller micro-batches, or divide the model further"
    )


def _needed(plan: ParallelPlan, shape: ModelShape, ranks: Sequence[int], modes: Sequence[LayerRecompute]) -> int:
    memory = plan_memory(_with(plan, modes), shape)
    return max(memory[rank].total for rank in ranks)


def _items(
    plan: ParallelPlan, shape: ModelShape, node: NodeModel, held: tuple[int, ...], ranks: Sequence[int]
) -> Iterator[tuple[int, tuple[RecomputeChoice, ...]]]:
    """Numbers of the layers of the pieces, and what each mode of theirs keeps and costs."""
    stages = balance_model(shape, plan.pieces, plan.sequence_tokens)
    at_once = held_at_once(plan.schedule, plan.pipeline, plan.micro_batches, plan.chunks)
    for place, piece in enumerate(held):
        in_flight = max(state.activations[place] for rank in ranks for state in at_once[rank])
        for number in layers_of(shape, stages[piece]):
            yield number, layer_choices(plan, shape, node, number, in_flight)


def layer_choices(
    plan: ParallelPlan, shape: ModelShape, node: NodeModel, number: int, in_flight: int
) -> tuple[RecomputeChoice, ...]:
    """What each mode of layer `number` keeps of `in_flight` micro-batches, and what it costs in a step."""
    layer, tokens = min(number, shape.layers - 1), plan.micro_batch_tokens
    matrix_rate, score_rate = flops_rates(plan, node)
    passes = held_share(plan) * plan.micro_batches
    found = []
    for mode in MODES:
        bytes_ = activation_bytes(shape, shape.has_experts(layer), mode, plan.precision.activations, plan.tensor)
        matrix, scores = layer_again_flops(shape, number, mode, plan.sequence_tokens)
        seconds = (matrix / matrix_rate + scores / score_rate) * tokens / plan.tensor
        seconds += 2 * bytes_.working * tokens / node.hbm_bytes_per_s
        found.append(
            RecomputeChoice(
                name=mode,
                kept_bytes=round(in_flight * bytes_.kept * tokens),
                working_bytes=round(bytes_.working * tokens),
                seconds=passes * seconds,
            )
        )
    return tuple(found)
