"""`ff train run`: train as a recipe says, as one of the ranks that `ff run` or torchrun started, or alone."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

import click

from fireflyer.base.errors import NotFound
from fireflyer.base.units import format_bytes
from fireflyer.cli.completion import complete_file
from fireflyer.cli.train.recipe_files import read_recipe

if TYPE_CHECKING:
    from fireflyer.codesign.model import ModelShape
    from fireflyer.recipes.trainer.core.recipe import Recipe

__all__ = ["run_command"]


@click.command(
    "run",
    short_help="Train as a recipe says: one rank of the job, or all of it with --check.",
    epilog="""\b
Examples:
  ff train run recipe.toml --check  # plan, bytes, steps; nothing is started
  ff train run recipe.toml          # a plan of one rank, or as a program of `ff run`""",
)
@click.argument("file", metavar="FILE", shell_complete=complete_file)
@click.option("--check", is_flag=True, help="Print what would run, or why it cannot; start nothing.")
def run_command(*, file: str, check: bool) -> None:
    """Train the model of the recipe FILE on its data, from the newest checkpoint of its directory on if there is one.

    Killed at any moment and started again it goes on with the same losses. `ff run` starts the ranks; FILE must be the
    same for all of them. What a recipe has: docs/how-to/train.md.
    """
    recipe, identity = read_recipe(file)
    base = os.path.dirname(os.path.abspath(file))
    from fireflyer.recipes.trainer.core.recipe import resolved

    if check:
        for line in _checked(resolved(recipe, base)):
            click.echo(line)
        return
    logging.basicConfig(level=logging.WARNING, format="%(name)s: %(message)s")
    from fireflyer.recipes.trainer.run import run_recipe

    run_recipe(resolved(recipe, base), identity)


def _checked(recipe: Recipe) -> Iterator[str]:
    """What would run, in lines. Raises `UsageError` for what cannot."""
    from fireflyer.recipes.trainer.preconditions import check_checkpoints, checked_shape

    shape = checked_shape(recipe)
    check_checkpoints(recipe)
    yield from _plan_lines(recipe, shape)
    yield from _data_lines(recipe, shape)
    yield from _time_lines(recipe)


def _plan_lines(recipe: Recipe, shape: ModelShape) -> Iterator[str]:
    from fireflyer.codesign.model import count_parameters, training_flops
    from fireflyer.codesign.parallel import peak_memory
    from fireflyer.codesign.parallel.recompute_fit import recompute_text
    from fireflyer.recipes.trainer.preconditions import kernels_here

    plan, kernels = recipe.plan, kernels_here()
    count = count_parameters(shape)
    memory = peak_memory(plan, shape, kernels)
    yield (
        f"model: {recipe.model.__struct_config__.tag}, {count.total + count.mtp:,} parameters; "
        f"{training_flops(shape, plan.sequence_tokens):.3g} FLOPs per token (causal), "
        f"{training_flops(shape, plan.sequence_tokens, causal=False):.3g} (non-causal)"
    )
    stages = f"pipeline {plan.pipeline} ({plan.schedule}) x " if plan.pipeline > 1 else ""
    experts = f", expert {plan.expert}" if plan.expert > 1 else ""
    yield (
        f"plan: {plan.world_size} ranks: {stages}replicate {plan.replicate} x shard {plan.shard} (ZeRO {plan.zero}) x "
        f"tensor {plan.tensor}{experts}; {plan.micro_batches} micro-batches of {plan.micro_batch}, "
        f"recompute {recompute_text(plan)}"
    )
    yield (
        f"memory: {format_bytes(memory.total)} on a rank: parameters {format_bytes(memory.parameters)}, gradients "
        f"{format_bytes(memory.gradients)}, states {format_bytes(memory.states)}, activations "
        f"{format_bytes(memory.activations + memory.working)} "
        f"({'fused kernels of GPUs' if kernels == 'fused' else 'operators of PyTorch on the CPU'})"
    )


def _data_lines(recipe: Recipe, shape: ModelShape) -> Iterator[str]:
    from fireflyer.recipes.trainer.sources import open_held_out, open_training_data

    plan = recipe.plan
    data = open_training_data(
        recipe.data,
        sequence_tokens=plan.sequence_tokens,
        batch_sequences=plan.batch_sequences,
        vocabulary=shape.vocabulary,
    )
    for source, weight in zip(data.sampler.sources, data.sampler.weights, strict=True):
        yield f"data: {source.name}, {source.size:,} sequences, {weight} of {data.sampler.period} samples"
    for one in open_held_out(
        recipe.data, recipe.evaluation, sequence_tokens=plan.sequence_tokens, vocabulary=shape.vocabulary
    ):
        yield f"evaluation: {one.name}, {one.sequences:,} of {len(one.windows):,} sequences"


def _time_lines(recipe: Recipe) -> Iterator[str]:
    from fireflyer.checkpoint.core.schedule import periods_of

    steps, tokens = recipe.optimizer.steps, recipe.plan.step_tokens
    yield f"steps: {steps:,} of {tokens:,} tokens, {steps * tokens:,} in all"
    table = recipe.checkpoint
    periods = periods_of(table.period_steps, table.period, table.mttf)
    yield f"checkpoints: {table.directory}, {periods}; {_newest(table.directory)}"


def _newest(directory: str) -> str:
    from fireflyer.checkpoint import describe

    try:
        valid = [one for one in describe(directory) if one.problem is None]
    except NotFound:
        valid = []
    return f"the newest is {valid[0].name}" if valid else "none yet"
