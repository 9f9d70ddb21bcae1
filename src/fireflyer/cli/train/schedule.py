"""`ff train schedule`: time, bubble and memory of pipeline schedules, and a picture of one."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, NamedTuple, TypedDict

import click

from fireflyer.base.errors import UsageError
from fireflyer.cli.completion import complete_file
from fireflyer.cli.numbers import WholeNumber

if TYPE_CHECKING:
    from rich.table import Table

    from fireflyer.codesign.schedule.balance import Balance
    from fireflyer.codesign.schedule.contention import Choice
    from fireflyer.codesign.schedule.costs import Costs
    from fireflyer.codesign.schedule.program import Program
    from fireflyer.codesign.schedule.timing import Timeline

__all__ = ["Asked", "Row", "Times", "row", "schedule_command", "to_json"]

MAX_LAYERS: Final = 4096
MAX_STAGES: Final = 1024
MAX_SHARED_ACTIONS: Final = 1 << 18
"""Passes of all pipelines that share NICs: some seconds of one processor for the three layouts."""
_LAYERS = re.compile(r"(?:([1-9][0-9]{0,3})x)?([0-9]+(?:\.[0-9]*)?|\.[0-9]+)")
_TIME: Final = click.FloatRange(min=0, max=1e6)


def _complete_name(_ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[str]:
    from fireflyer.codesign.schedule.catalog import SCHEDULES

    return [name for name in SCHEDULES if name.startswith(incomplete)]


class Times(TypedDict):
    """Times of `uniform_costs`."""

    forward: float
    backward: float
    weights: float
    pair: float | None
    send: float


class Asked(NamedTuple):
    """What the command line asks for; the same for all schedules."""

    stages: int
    micro_batches: int
    stages_per_rank: int
    times: Times
    layers: tuple[float, ...]
    replicas: int


class Row(NamedTuple):
    """A schedule of the table: its timeline, or why it cannot be built."""

    name: str
    fault: str = ""
    timeline: Timeline | None = None
    activations: tuple[float, ...] = ()
    parameters: int = 0
    balance: Balance | None = None
    choice: Choice | None = None


@click.command(
    "schedule",
    short_help="Compare pipeline schedules: time, bubble, activations; draw one.",
    epilog="""\b
Examples:
  ff train schedule --stages 8 --micro-batches 32
  ff train schedule dualpipe zbv --stages 8 --micro-batches 32 --overlapped 2.5
  ff train schedule 1f1b --stages 8 --micro-batches 32 --send 0.1 --replicas-per-nic 8
  ff train schedule 1f1b --stages 16 --micro-batches 64 --layers 0.1,61x1,1.2 --svg 1f1b.svg""",
)
@click.argument("names", metavar="[NAME]...", nargs=-1, shell_complete=_complete_name)
@click.option(
    "--stages", metavar="P", type=WholeNumber(min=1, max=MAX_STAGES), required=True, help="Ranks of the pipeline."
)
@click.option(
    "--micro-batches",
    metavar="M",
    type=WholeNumber(min=1, max=1 << 16),
    required=True,
    help="Micro-batches of a step; of both directions together.",
)
@click.option(
    "--stages-per-rank",
    metavar="N",
    type=WholeNumber(min=1, max=64),
    default=2,
    show_default=True,
    help="Stages on each rank, of interleaved and interleaved-zb.",
)
@click.option(
    "--forward",
    metavar="TIME",
    type=_TIME,
    default=1.0,
    show_default=True,
    help="Forward of a micro-batch on the layers of one rank, in any unit; the other times are in the same.",
)
@click.option(
    "--backward", metavar="TIME", type=_TIME, default=2.0, show_default=True, help="Backward, for input and weights."
)
@click.option(
    "--weights",
    metavar="TIME",
    type=_TIME,
    default=1.0,
    show_default=True,
    help="The part of the backward for the weights.",
)
@click.option(
    "--overlapped",
    metavar="TIME",
    type=_TIME,
    help="A forward and a backward that DualPipe runs at once.  [default: their sum]",
)
@click.option(
    "--send",
    metavar="TIME",
    type=_TIME,
    default=0.0,
    show_default=True,
    help="A message between two ranks: its bytes over the bandwidth.",
)
@click.option(
    "--layers",
    metavar="COSTS",
    help="Relative costs of the layers, as 0.1,61x1,1.2; cut into balanced stages.  [default: equal stages]",
)
@click.option(
    "--replicas-per-nic",
    metavar="N",
    type=WholeNumber(min=1, max=64),
    default=1,
    show_default=True,
    help="Pipelines whose ranks share the NIC of a node.",
)
@click.option(
    "--svg",
    "svg_path",
    metavar="FILE",
    shell_complete=complete_file,
    help="Draw the schedule; give one NAME.  [default: none]",
)
@click.option("--json", "as_json", is_flag=True, help="Print the figures as JSON.")
def schedule_command(
    *,
    names: tuple[str, ...],
    stages: int,
    micro_batches: int,
    stages_per_rank: int,
    forward: float,
    backward: float,
    weights: float,
    overlapped: float | None,
    send: float,
    layers: str | None,
    replicas_per_nic: int,
    svg_path: str | None,
    as_json: bool,
) -> None:
    """Print what each schedule NAME (by default every one) takes for a step of M micro-batches on P ranks: the total
    time, its ratio to the ideal, the bubble of the rank that waits longest, the most activations that a rank keeps, and
    how often the parameters are kept.

    Activations are in units of one micro-batch on the layers of one rank. What the schedules are, and how to choose:
    docs/how-to/pipeline-schedules.md.
    """
    from fireflyer.codesign.schedule.catalog import SCHEDULES

    for name in names:
        if name not in SCHEDULES:
            raise UsageError(f"there is no schedule {name!r}; use {', '.join(SCHEDULES)}")
    if svg_path is not None and len(names) != 1:
        raise UsageError("--svg draws one schedule; give one NAME")
    asked = Asked(
        stages=stages,
        micro_batches=micro_batches,
        stages_per_rank=stages_per_rank,
        times={"forward": forward, "backward": backward, "weights": weights, "pair": overlapped, "send": send},
        layers=_parse_layers(layers) if layers is not None else (),
        replicas=replicas_per_nic,
    )
    rows = [row(name, asked) for name in names or SCHEDULES]
    if len(rows) == 1 and rows[0].fault:
        raise UsageError(rows[0].fault)
    if svg_path is not None:
        _draw(rows[0], svg_path, asked)
    if as_json:
        click.echo(to_json(rows).decode())
        return
    _print(rows)
    if svg_path is not None:
        click.echo(f"Picture: {os.path.abspath(svg_path)}")


def to_json(rows: Sequence[Row]) -> bytes:
    """Of `ff train schedule --json`; a schedule that cannot be built has an `error` in place of figures."""
    import msgspec

    found: list[dict[str, object]] = []
    for row in rows:
        if row.timeline is None:
            found.append({"name": row.name, "error": row.fault})
            continue
        one: dict[str, object] = {
            "name": row.name,
            "total": row.timeline.total_s,
            "period": row.timeline.period_s,
            "ideal": row.timeline.ideal_s,
            "bubble": row.timeline.bubble_s,
            "activations": row.activations,
            "parameters": row.parameters,
            "ranks": [row.timeline.parts(rank)._asdict() for rank in range(len(row.activations))],
        }
        if row.balance is not None:
            one["layers"] = row.balance.sizes
            one["imbalance"] = row.balance.imbalance
        if row.choice is not None:
            one["layout"] = row.choice.chosen.layout
            one["slowdowns"] = {each.layout.value: each.slowdown for each in row.choice.all}
        found.append(one)
    return msgspec.json.format(msgspec.json.encode({"schedules": found}), indent=2)


def row(name: str, asked: Asked) -> Row:
    """Builds and times one schedule; of one that cannot be built, the row says why."""
    from fireflyer.codesign.schedule.catalog import SCHEDULES, compiled
    from fireflyer.codesign.schedule.costs import uniform_costs
    from fireflyer.codesign.schedule.lifetimes import peak_activations
    from fireflyer.codesign.schedule.timing import simulate

    try:
        _check_shared(name, asked)
        program = compiled(name, asked.stages, asked.micro_batches, asked.stages_per_rank)
        placement = program.schedule.placement
        cut = _balanced(asked.layers, placement.stages)
    except UsageError as error:
        return Row(name, fault=error.message)
    costs = uniform_costs(placement, **asked.times, shares=cut.costs if cut else ())
    sizes = None if cut is None else [cost * asked.stages / sum(cut.costs) for cost in cut.costs]
    return Row(
        name,
        timeline=simulate(program, costs),
        activations=peak_activations(program.schedule, sizes),
        parameters=SCHEDULES[name].replicas,
        balance=cut,
        choice=_choice(program, costs, asked.replicas) if asked.replicas > 1 else None,
    )


def _parse_layers(text: str) -> tuple[float, ...]:
    costs: list[float] = []
    for part in text.split(","):
        match = _LAYERS.fullmatch(part.strip())
        if match is None:
            raise UsageError(f"--layers {part!r} is no cost; write costs as 1.2, or 61x1 for 61 layers of cost 1")
        costs += [float(match[2])] * int(match[1] or 1)
        if len(costs) > MAX_LAYERS:
            raise UsageError(f"--layers has more than {MAX_LAYERS} layers")
    if not any(costs):
        raise UsageError("--layers has no layer that costs more than 0")
    return tuple(costs)


def _balanced(layers: Sequence[float], stages: int) -> Balance | None:
    from fireflyer.codesign.schedule.balance import balance

    return balance(layers, stages) if layers else None


def _check_shared(name: str, asked: Asked) -> None:
    """Before the schedule is built, which takes seconds where there are millions of passes: each micro-batch has a
    forward and a backward pass at least, on each stage. Raises `UsageError`."""
    from fireflyer.codesign.schedule.catalog import SCHEDULES

    stages = asked.stages * (SCHEDULES[name].stages_per_rank or asked.stages_per_rank)
    passes = 2 * asked.replicas * stages * asked.micro_batches
    if asked.replicas > 1 and passes > MAX_SHARED_ACTIONS:
        raise _too_many(asked.replicas, passes)


def _choice(program: Program, costs: Costs, replicas: int) -> Choice:
    from fireflyer.codesign.schedule.contention import choose_layout

    passes = replicas * program.schedule.actions()
    if passes > MAX_SHARED_ACTIONS:  # a split backward has more
        raise _too_many(replicas, passes)
    return choose_layout(program, costs, replicas)


def _too_many(replicas: int, passes: int) -> UsageError:
    return UsageError(
        f"{replicas} pipelines have {passes} passes, more than {MAX_SHARED_ACTIONS}; use fewer --micro-batches"
    )


def _draw(row: Row, path: str, asked: Asked) -> None:
    from fireflyer.cli.new_file import replaced_file
    from fireflyer.codesign.schedule.picture import draw

    assert row.timeline is not None  # noqa: S101
    title = f"{row.name}: {asked.stages} ranks, {asked.micro_batches} micro-batches, {row.timeline.total_s:g} in all"
    with replaced_file(path) as file:
        file.write(draw(row.timeline, title))


def _print(rows: Sequence[Row]) -> None:
    from rich.text import Text

    from fireflyer.cli.output import stdout_console

    console = stdout_console()
    console.print(_table(rows))
    lines = [f"{row.name}: {row.fault}" for row in rows if row.fault]
    lines += [
        f"{row.name}: layers of the stages {' '.join(map(str, row.balance.sizes))}; the costliest stage has "
        f"{row.balance.imbalance:.3f} of the mean"
        for row in rows
        if row.balance is not None
    ]
    lines += [f"{row.name}: {row.choice.reason}" for row in rows if row.choice is not None]
    if lines:
        console.print()
    for line in lines:
        console.print(Text(line), soft_wrap=True)


def _table(rows: Sequence[Row]) -> Table:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for name in ("schedule", "total", "ideal", "total/ideal", "bubble", "share", "activations", "parameters"):
        table.add_column(name, justify="left" if name == "schedule" else "right", no_wrap=True)
    for row in rows:
        timeline = row.timeline
        if timeline is None:
            table.add_row(row.name, *("-",) * 7)
            continue
        total, ideal, bubble = timeline.total_s, timeline.ideal_s, timeline.bubble_s
        table.add_row(
            row.name,
            f"{total:.6g}",
            f"{ideal:.6g}",
            f"{total / ideal:.3f}" if ideal else "-",
            f"{bubble:.6g}",
            f"{bubble / total:.1%}" if total else "-",
            f"{max(row.activations):.4g}",
            f"{row.parameters}x",
        )
    return table
