"""`ff collectives plan`: algorithms of a group on so many nodes, with reasons, predicted times and memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import click

from fireflyer.base.errors import UsageError
from fireflyer.cli.completion import complete_file
from fireflyer.cli.numbers import WholeNumber

if TYPE_CHECKING:
    from rich.table import Table

    from fireflyer.collectives.planning.declaration import Declaration
    from fireflyer.collectives.planning.plan import Plan

__all__ = ["plan_command"]

MAX_RANKS: Final = 1 << 16
NODES_LOOKED_AT: Final = 128
UNDECLARED: Final = "predicted for nodes on one machine; with --topology FILE the fastest on your network is chosen"


def _complete_operation(_ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[str]:
    from fireflyer.collectives.planning.plan import SUITABLE

    return [kind for kind in SUITABLE if kind != "barrier" and kind.startswith(incomplete)]


@click.command(
    "plan",
    short_help="Show algorithms, predicted times and memory for a number of nodes.",
    epilog="""\b
Examples:
  ff collectives plan --nodes 16 --ranks-per-node 8
  ff collectives plan --nodes 4 --topology network.toml --bytes 25MiB --operation reduce_scatter""",
)
@click.option("--nodes", metavar="N", type=WholeNumber(min=1, max=MAX_RANKS), required=True, help="Nodes of the job.")
@click.option(
    "--ranks-per-node",
    metavar="N",
    type=WholeNumber(min=1, max=64),
    default=1,
    show_default=True,
    help="Ranks on each node.",
)
@click.option(
    "--topology",
    metavar="FILE",
    shell_complete=complete_file,
    help="TOML file with speeds and zones of the network; its keys: docs/how-to/tune-collectives.md.  [default: none]",
)
@click.option(
    "--bytes",
    "size",
    metavar="SIZE",
    default="186MiB",
    show_default=True,
    help="Size of the array whose times are predicted, as 64KiB or 1GB.",
)
@click.option(
    "--operation",
    metavar="KIND",
    default="allreduce",
    show_default=True,
    shell_complete=_complete_operation,
    help="Collective to predict: allreduce, reduce, broadcast, reduce_scatter or allgather.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the plan and the predictions as JSON.")
def plan_command(
    *, nodes: int, ranks_per_node: int, topology: str | None, size: str, operation: str, as_json: bool
) -> int:
    """Print the plan of a group with the reason of each choice, the predicted time of each algorithm, and the memory of
    a node. Nothing is started.

    Without --topology this is the plan that a job has by default, and times are predicted for nodes on one machine. The
    plan that --json prints can be given to Communicator.create(plan=...).
    """
    from fireflyer.base.units import parse_bytes
    from fireflyer.cli.topology_file import read_topology
    from fireflyer.collectives.planning.declaration import Declaration
    from fireflyer.collectives.planning.plan import SUITABLE
    from fireflyer.collectives.planning.routing import default_plan

    if topology == "":
        raise UsageError("--topology '' is empty; give a file, or leave the option out")
    kinds = [kind for kind in SUITABLE if kind != "barrier"]
    if operation not in kinds:
        raise UsageError(f"--operation {operation!r} has no plan; use {', '.join(kinds)}")
    if nodes * ranks_per_node > MAX_RANKS:
        raise UsageError(
            f"{nodes * ranks_per_node} ranks are more than the {MAX_RANKS} that a group can have; "
            "use fewer --nodes or --ranks-per-node"
        )
    nbytes = parse_bytes(size)
    node_of_rank = [node for node in range(nodes) for _ in range(ranks_per_node)]
    declaration = Declaration()
    zones: tuple[int, ...] = ()
    if topology is None:
        plan = default_plan(node_of_rank)
    else:
        declaration = read_topology(topology)
        zones = _zones(topology, declaration, nodes)
        plan = declaration.plan(node_of_rank, zones=zones)
    shown = _Shown(plan, declaration, zones, operation, nbytes, declared=topology is not None)
    if as_json:
        click.echo(shown.to_json().decode())
    else:
        shown.print()
    return 0


def _zones(topology: str, declaration: Declaration, nodes: int) -> tuple[int, ...]:
    """Of hosts that are not known yet: as many nodes of the table, in its order."""
    hosts = list(declaration.zone_of_host)
    if hosts and len(hosts) < nodes:
        raise UsageError(f"--topology {topology!r}: zone_of_host has {len(hosts)} hosts, --nodes is {nodes}")
    zones = declaration.zones_of(hosts[:nodes])
    if zones and len(zones) != nodes:
        raise UsageError(f"--topology {topology!r}: zones has {len(zones)} entries, --nodes is {nodes}")
    return zones


class _Shown:
    """A plan and what is predicted for one operation and size."""

    def __init__(
        self,
        plan: Plan,
        declaration: Declaration,
        zones: tuple[int, ...],
        operation: str,
        nbytes: int,
        *,
        declared: bool,
    ) -> None:
        from fireflyer.collectives.planning.cost import best_chunk_bytes, predict_ns
        from fireflyer.collectives.planning.crossings import crossings
        from fireflyer.collectives.planning.plan import LINE, SUITABLE

        self.plan, self.zones, self.operation, self.nbytes = plan, zones, operation, nbytes
        self.declared = declared
        self.route = plan.route(operation, nbytes)
        layout, speeds = declaration.layout(plan, zones), declaration.speeds
        self.times: list[tuple[str, int, float]] = []
        self.crossings = crossings(plan, zones) if zones else {}
        for algorithm in SUITABLE[operation]:
            if algorithm == LINE != self.route.algorithm and len(set(zones)) < 2:
                continue  # a ring is as good, and better known
            chunk = best_chunk_bytes(speeds, layout, operation, algorithm, nbytes)
            if algorithm == self.route.algorithm:
                chunk = self.route.chunk_bytes
            self.times.append((algorithm, chunk, predict_ns(speeds, layout, operation, algorithm, nbytes, chunk)))
        slots = plan.window * (layout.ranks_per_node + 2) * plan.largest_chunk_bytes
        self.slot_bytes, self.connections = slots, _most_connections(plan)

    def to_json(self) -> bytes:
        """Of `ff collectives plan --json`."""
        import msgspec

        found: dict[str, object] = {
            "plan": self.plan,
            "operation": self.operation,
            "bytes": self.nbytes,
            "predictions": [
                {"algorithm": algorithm, "chunk_bytes": chunk, "ns": round(ns), "chosen": self._chosen(algorithm)}
                for algorithm, chunk, ns in self.times
            ],
            "slot_bytes_of_a_node": self.slot_bytes,
        }
        if self.crossings:
            found["pairs_across_zones"] = self.crossings
        return msgspec.json.format(msgspec.json.encode(found), indent=2)

    def print(self) -> None:
        from rich.text import Text

        from fireflyer.base.units import format_bytes
        from fireflyer.cli.output import stdout_console
        from fireflyer.topology import words_of_pairs

        console = stdout_console()
        for line in self.plan.describe().splitlines():
            console.print(Text(line), soft_wrap=True)
        for algorithm, pairs in self.crossings.items():
            console.print(Text(f"{algorithm}: {words_of_pairs(pairs)}"), soft_wrap=True)
        console.print()
        predicted = "predicted" if self.declared or self.plan.nodes == 1 else UNDECLARED
        console.print(Text(f"{self.operation} of {format_bytes(self.nbytes)}, {predicted}:"), soft_wrap=True)
        console.print(self._table())
        slots = format_bytes(self.slot_bytes)
        console.print()
        console.print(
            Text(
                f"memory: {slots} of slots on each node, shared by its ranks; connections of a node's leader to other "
                f"nodes: up to {self.connections}"
            ),
            soft_wrap=True,
        )

    def _chosen(self, algorithm: str) -> bool:
        return algorithm == self.route.algorithm

    def _mark(self) -> str:
        """Nothing is chosen by predicted times where no speeds were declared: it is the same algorithm for all."""
        return "chosen" if self.declared or self.plan.nodes == 1 else "default"

    def _left_out(self, algorithm: str) -> str:
        """Why it was not looked at, where it was not."""
        from fireflyer.collectives.planning.plan import ACROSS_ZONES

        return "" if len(set(self.zones)) < 2 or algorithm in ACROSS_ZONES else "several pairs across zones"

    def _table(self) -> Table:
        from rich.table import Table

        from fireflyer.base.units import format_bytes, format_duration, format_rate

        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
        for name in ("algorithm", "chunks", "time", "bytes/time", ""):
            table.add_column(name, justify="left" if name in ("algorithm", "") else "right", no_wrap=True)
        for algorithm, chunk, ns in self.times:
            table.add_row(
                algorithm if self.plan.nodes > 1 else "shared memory",
                format_bytes(chunk),
                format_duration(round(ns)),
                format_rate(self.nbytes * 1e9 / ns if ns else 0.0),
                self._mark() if self._chosen(algorithm) else self._left_out(algorithm),
            )
            if self.plan.nodes == 1:
                break
        return table


def _most_connections(plan: Plan) -> int:
    """Of a leader to others; beyond the first nodes they repeat."""
    from fireflyer.collectives.planning.programs import links

    return max(len(links(plan, node)) for node in range(min(plan.nodes, NODES_LOOKED_AT)))
