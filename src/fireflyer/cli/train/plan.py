"""`ff train plan`: check a plan of parallel training, and search for faster ones, without a GPU."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Final

import click

from fireflyer.base.errors import UsageError
from fireflyer.cli.completion import complete_file
from fireflyer.cli.numbers import WholeNumber

if TYPE_CHECKING:
    from fireflyer.codesign.model import ModelShape
    from fireflyer.codesign.parallel import NodeModel, PlanFile

__all__ = ["complete_node", "plan_command", "read_node", "read_plan"]

MANUAL: Final = "docs/how-to/plan-training.md"
MAX_NODES: Final = 1 << 14
EXIT_DOES_NOT_FIT: Final = 1


def complete_node(_ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[str]:
    from fireflyer.codesign.parallel import node_names

    return [name for name in node_names() if name.startswith(incomplete)]


@click.command(
    "plan",
    short_help="Check a plan of parallel training: memory, traffic, time per step, MFU.",
    epilog="""\b
Examples:
  ff train plan plan.toml --nodes 8 --node pcie-a100
  ff train plan v3.toml --nodes 256 --node h800 --search --keep 5  # rank plans, and this one among them""",
)
@click.argument("file", metavar="FILE", shell_complete=complete_file)
@click.option("--nodes", metavar="N", type=WholeNumber(min=1, max=MAX_NODES), required=True, help="Nodes of the job.")
@click.option(
    "--node",
    "node_name",
    metavar="NAME",
    required=True,
    shell_complete=complete_node,
    help="pcie-a100, h800, or a TOML file with the figures of a node.",
)
@click.option("--search", is_flag=True, help="Rank the plans that fit, for the same batch and precision.")
@click.option(
    "--keep",
    metavar="N",
    type=WholeNumber(min=1, max=1000),
    default=10,
    show_default=True,
    help="Search: plans to show.",
)
@click.option("--json", "as_json", is_flag=True, help="Print everything as JSON.")
def plan_command(*, file: str, nodes: int, node_name: str, search: bool, keep: int, as_json: bool) -> int:
    """Check the plan in the TOML file FILE: divisibility, bytes of memory on each rank, bytes over each link, bubble,
    time per step, MFU, and what limits it. Nothing is started, and no GPU is needed.

    Exit code 1: the plan cannot be run, or does not fit into the memory of a GPU.
    """
    import msgspec

    from fireflyer.cli.train.plan_view import PlanView
    from fireflyer.codesign.parallel import SearchSpace, estimate_step, plan_memory, refusals, search_plans
    from fireflyer.codesign.parallel.recompute_fit import fit_recompute

    node = read_node(node_name)
    given, shape = read_plan(file)
    plan = given.plan
    chosen = plan.recompute == "budget"
    if refused := refusals(msgspec.structs.replace(plan, recompute="none") if chosen else plan, shape, node, nodes):
        raise click.ClickException(f"{file!r} cannot be run: {'; '.join(refused)}")
    if chosen:
        plan = fit_recompute(plan, shape, node)
        given = msgspec.structs.replace(given, plan=plan)
    view = PlanView(given, shape, node, nodes, plan_memory(plan, shape), estimate_step(plan, shape, node))
    found = None
    if search:
        space = SearchSpace(
            sequence_tokens=plan.sequence_tokens, batch_sequences=plan.batch_sequences, precision=plan.precision
        )
        found = search_plans(space, shape, node, nodes, keep=keep, compare=view.estimate)
    if as_json:
        click.echo(view.to_json(found).decode())
    else:
        view.print(found)
    return 0 if view.estimate.fits else EXIT_DOES_NOT_FIT


def read_node(name: str, *, argument: str = "--node") -> NodeModel:
    """The node of that name, or of the file of that name. Raises `UsageError`, which names the `argument`."""
    from fireflyer.cli.toml_files import read_toml
    from fireflyer.codesign.parallel import NodeModel, load_node, node_names

    known = node_names()
    if name in known:
        return load_node(name)
    node = read_toml(name, NodeModel, name=argument, advice=f"use {', '.join(known)} or a TOML file", keys=MANUAL)
    try:
        node.check()
    except UsageError as error:
        raise UsageError(f"{argument} {name!r}: {error}") from error
    return node


def read_plan(path: str) -> tuple[PlanFile, ModelShape]:
    """The plan, and the shape of its model. Raises `UsageError`."""
    from fireflyer.cli.model_config import read_shape
    from fireflyer.cli.toml_files import read_toml
    from fireflyer.codesign.parallel import PlanFile

    given = read_toml(path, PlanFile, name="FILE", advice=f"give a TOML file, see {MANUAL}", keys=MANUAL)
    return given, read_shape(os.path.join(os.path.dirname(path), given.model), named_in=path)
