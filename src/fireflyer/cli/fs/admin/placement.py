"""`ff fs admin placement`: a chain table, and how evenly it spreads the load of a dead node."""

from __future__ import annotations

import time
from collections import Counter
from typing import TYPE_CHECKING, Annotated, Final

import click
import msgspec

from fireflyer.base.errors import UsageError
from fireflyer.cli.numbers import WholeNumber
from fireflyer.cli.toml_files import read_toml

if TYPE_CHECKING:
    from fireflyer.fs.core.placement import Cluster, Placement, Quality

__all__ = ["Domains", "placement_command", "to_json"]

MAX_NODES: Final = 1000
MAX_TARGETS_PER_NODE: Final = 4096
CHAINS_SHOWN: Final = 12
LOADS_SHOWN: Final = 16
NS_PER_MS: Final = 1_000_000


class Domains(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The file that `--domains` names: TOML."""

    domains: tuple[Annotated[str, msgspec.Meta(min_length=1, max_length=64)], ...]
    """Of each node in order, its rack or zone."""
    targets: tuple[Annotated[int, msgspec.Meta(ge=0, le=MAX_TARGETS_PER_NODE)], ...] = ()
    """Of each node in order, how many targets it has, where they differ."""


@click.command(
    "placement",
    short_help="Compute a chain table and its worst peer-load ratio.",
    epilog="Example: ff fs admin placement --nodes 12 --replicas 3 --targets-per-node 16",
)
@click.option(
    "--nodes", metavar="N", type=WholeNumber(min=1, max=MAX_NODES), required=True, help="Number of storage nodes."
)
@click.option(
    "--replicas",
    metavar="K",
    type=WholeNumber(min=1, max=8),
    default=3,
    show_default=True,
    help="Number of targets of each chain, all on different nodes.",
)
@click.option(
    "--targets-per-node",
    metavar="N",
    type=WholeNumber(min=1, max=MAX_TARGETS_PER_NODE),
    default=16,
    show_default=True,
    help="Number of targets of each node: disks times targets per disk.",
)
@click.option(
    "--disks-per-node",
    metavar="N",
    type=WholeNumber(min=1, max=256),
    default=1,
    show_default=True,
    help="Number of disks of each node; its targets are spread over them.",
)
@click.option(
    "--domains",
    "domains_file",
    metavar="FILE",
    help="TOML file with domains = [...], the rack or zone of each node: a chain has at most one target in each.  "
    "[default: none]",
)
@click.option(
    "--seed",
    metavar="N",
    type=int,
    default=0,
    show_default=True,
    help="Seed of the search; the same seed gives the same table.",
)
@click.option("--all", "show_all", is_flag=True, help=f"Print all chains.  [default: the first {CHAINS_SHOWN}]")
@click.option("--json", "as_json", is_flag=True, help="Print table and quality as one JSON object.")
def placement_command(
    *,
    nodes: int,
    replicas: int,
    targets_per_node: int,
    disks_per_node: int,
    domains_file: str | None,
    seed: int,
    show_all: bool,
    as_json: bool,
) -> int:
    """Compute a chain table without a cluster, and print which nodes hold the replicas of each chain, head first.

    When a node dies, the other nodes of its chains take over its reads and are read from to restore its replicas. The
    worst peer-load ratio is the load of the busiest of them relative to an even share (1), for the worst node to lose.
    Its bound is a value below which no table can be.
    """
    from fireflyer.fs.core.placement import StorageNode, place, uniform_cluster

    domains = Domains(()) if domains_file is None else _read_domains(domains_file, nodes)
    cluster = uniform_cluster(nodes, targets_per_node, disks=disks_per_node, domains=domains.domains)
    if domains.targets:
        cluster = tuple(
            StorageNode(node.id, _spread(count, disks_per_node), node.domain)
            for node, count in zip(cluster, domains.targets, strict=True)
        )
    began_ns = time.monotonic_ns()
    placement = place(cluster, replicas, seed=seed)
    took_ns = time.monotonic_ns() - began_ns
    if as_json:
        click.echo(to_json(cluster, placement, replicas, seed, took_ns).decode())
    else:
        _print(cluster, placement, replicas, took_ns, show_all=show_all)
    return 0


def to_json(cluster: Cluster, placement: Placement, replicas: int, seed: int, took_ns: int) -> bytes:
    """Of `ff fs placement --json`."""
    return msgspec.json.encode(
        {
            "nodes": cluster,
            "replicas": replicas,
            "seed": seed,
            "chains": placement.table.chains,
            "quality": placement.quality,
            "ms": took_ns // NS_PER_MS,
        }
    )


def _spread(targets: int, disks: int) -> tuple[int, ...]:
    return tuple((targets + disk) // disks for disk in reversed(range(disks)))


def _read_domains(path: str, nodes: int) -> Domains:
    """Raises `UsageError`: one line that names the file and what is wrong in it."""
    found = read_toml(path, Domains, name="--domains", advice="give a TOML file with domains = [...]")
    for name, count in (("domains", len(found.domains)), ("targets", len(found.targets))):
        if count != nodes and (count or name == "domains"):
            raise UsageError(f"--domains {path!r}: {name} has {count} entries, and --nodes is {nodes}")
    return found


def _print(cluster: Cluster, placement: Placement, replicas: int, took_ns: int, *, show_all: bool) -> None:
    from rich.text import Text

    from fireflyer.base.units import format_duration
    from fireflyer.cli.output import stdout_console

    console = stdout_console()
    chains, quality = placement.table.chains, placement.quality
    shown = chains if show_all else chains[:CHAINS_SHOWN]
    with_disks = any(len(node.slots) > 1 for node in cluster)
    names = "node.disk" if with_disks else "node"
    lines = [f"{len(chains)} chains of {replicas} on {len(cluster)} nodes, in {format_duration(took_ns)}", ""]
    lines.append(f"chain  {names} of each replica, head first")
    for index, chain in enumerate(shown):
        cells = (f"{place.node}.{place.disk}" if with_disks else f"{place.node}" for place in chain)
        lines.append(f"{index:>5}  {'  '.join(f'{cell:>5}' for cell in cells)}")
    if len(shown) < len(chains):
        lines.append(f"  ...  {len(chains) - len(shown)} more; --all or --json prints them")
    lines += ["", *_loads(cluster, placement, replicas), *_qualities(quality)]
    for line in lines:
        console.print(Text(line), soft_wrap=True)


def _loads(cluster: Cluster, placement: Placement, replicas: int) -> list[str]:
    chains = placement.table.chains
    held = Counter(place.node for chain in chains for place in chain)
    kinds = sorted(Counter(held[node.id] for node in cluster).items(), reverse=True)
    shown = ", ".join(f"{nodes} with {targets}" for targets, nodes in kinds[:LOADS_SHOWN])
    lines = [f"targets of nodes: {shown}{', ...' if len(kinds) > LOADS_SHOWN else ''}"]
    spare = sum(sum(node.slots) for node in cluster) - len(chains) * replicas
    if spare:
        lines.append(f"unused targets: {spare}; there are not {replicas} nodes with room for a further chain")
    return lines


def _qualities(quality: Quality) -> list[str]:
    if quality.reads_ratio is None:
        return ["1 replica: when a node is lost, its data are lost"]
    evenly = f"equally often, +-{quality.position_spread}" if quality.position_spread else "equally often"
    return [
        f"positions in a chain, head to tail: each node has each position {evenly}",
        f"two nodes share {quality.shared_min} to {quality.shared_max} chains",
        "worst peer-load ratio (1 is an even share):",
        f"  reads of a dead node      {_beside_bound(quality.reads_ratio, quality.reads_bound)}",
        f"  recovery of a dead node   {_beside_bound(quality.recovery_ratio, quality.recovery_bound)}",
        f"heads that one peer takes over from a dead node: at most {quality.heads_max} (bound {quality.heads_bound})",
    ]


def _beside_bound(ratio: float | None, bound: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.3f}" + ("" if bound is None else f"   no table is below {bound:.3f}")
