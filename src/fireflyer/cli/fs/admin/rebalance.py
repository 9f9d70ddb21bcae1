"""`ff fs admin rebalance`: give each node its share of the chains, while they are used."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

import click

from fireflyer.base.errors import NotFound, Timeout, UsageError
from fireflyer.cli.fs.connect import ClusterTarget, ask_all, ask_one, expect, routing, where_options
from fireflyer.cli.numbers import WholeNumber

if TYPE_CHECKING:
    from fireflyer.fs.core.placement import Plan, Quality
    from fireflyer.fs.schema.manager import NewMove

__all__ = ["rebalance_command"]

MOVES_SHOWN: Final = 20
LOOK_S: Final = 0.5
TABLE: Final = 1


@click.command(
    "rebalance",
    short_help="Move chains to new nodes and away from draining ones.",
    epilog="Example: ff fs admin rebalance --plan",
)
@where_options
@click.option("--plan", "only_plan", is_flag=True, help="Print the moves, and do nothing.")
@click.option(
    "--wait",
    "wait_s",
    metavar="SECONDS",
    type=WholeNumber(1),
    help="Wait until all moves are done; fail after SECONDS.  [default: return at once]",
)
@click.option("--cancel", is_flag=True, help="Cancel the moves that have not begun.")
@click.option(
    "--table", "table_id", metavar="ID", type=WholeNumber(1), default=TABLE, help="Id of the chain table.  [default: 1]"
)
@click.option(
    "--seed",
    metavar="N",
    type=int,
    default=0,
    show_default=True,
    help="Seed of the search; the same seed gives the same plan.",
)
def rebalance_command(
    *, where: ClusterTarget, only_plan: bool, wait_s: int | None, cancel: bool, table_id: int, seed: int
) -> int:
    """Move as few chains as possible such that every node has its share of them and the load of a failed node spreads
    evenly. Draining targets are emptied.

    The manager executes the moves, a few at a time: the new target is synced and serves before the old one leaves the
    chain. `ff fs status` shows the progress."""
    from fireflyer.fs.core.manager.move_plan import plan_moves
    from fireflyer.fs.schema.manager import (
        MAX_PER_REQUEST,
        AddMoves,
        CancelMoves,
        Done,
        GetMoves,
        GetRouting,
        GetStatus,
        MoveList,
        Status,
    )

    if cancel:
        if only_plan or wait_s is not None:
            raise UsageError("--cancel cannot be combined with --plan or --wait; leave them out")
        click.echo(f"{expect(ask_one(where, CancelMoves()), Done).note}.")
        return 0
    if wait_s is not None and not only_plan:
        _wait(where, wait_s)
    answers = ask_all(where, [GetStatus(), GetMoves(), GetRouting()])
    status, under_way = expect(answers[0], Status), expect(answers[1], MoveList).moves
    tables = {table.id: table for table in routing(answers[2]).tables}
    if table_id not in tables:
        raise NotFound(
            f"there is no chain table {table_id}; the cluster has "
            + (f"table {', '.join(map(str, tables))}" if tables else "none: make one with `ff fs admin add-chains`")
        )
    plan, now, moves = plan_moves(status, tables[table_id], under_way, seed=seed)
    _print(plan, now, moves)
    if only_plan or not moves:
        return 0
    batches = [moves[at : at + MAX_PER_REQUEST] for at in range(0, len(moves), MAX_PER_REQUEST)]
    ask_all(where, [AddMoves(batch) for batch in batches])
    click.echo("The moves have begun.")
    if wait_s is not None:
        _wait(where, wait_s)
        click.echo("All moves are done.")
    return 0


def _print(plan: Plan, now: Quality, moves: tuple[NewMove, ...]) -> None:
    if not moves:
        click.echo("No moves are needed: every node has its share.")
        return
    from fireflyer.base.units import counted

    rounds = max(move.round for move in plan.moves) + 1
    click.echo(
        f"{counted(len(moves), 'target')} to move in {counted(rounds, 'round')} (no plan moves fewer than "
        f"{plan.minimum}); worst peer-load ratio {_ratio(now.reads_ratio)} -> {_ratio(plan.quality.reads_ratio)}, "
        f"possible {_ratio(plan.quality.reads_bound)}"
    )
    for move in moves[:MOVES_SHOWN]:
        click.echo(f"  chain {move.chain}: target {move.source} -> node {move.node}")
    if len(moves) > MOVES_SHOWN:
        click.echo(f"  … and {len(moves) - MOVES_SHOWN} more")


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _wait(where: ClusterTarget, wait_s: int) -> None:
    from fireflyer.fs.schema.manager import GetMoves, MoveList

    until_s = time.monotonic() + wait_s
    while left := expect(ask_one(where, GetMoves()), MoveList).moves:
        if time.monotonic() >= until_s:
            raise Timeout(
                f"{len(left)} moves are not done after {wait_s} s; they continue, and `ff fs status` shows them"
            )
        time.sleep(LOOK_S)
