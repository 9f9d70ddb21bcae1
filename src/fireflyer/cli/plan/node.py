"""`ff plan node`: what limits an allreduce and the traffic of experts inside a node."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import click

from fireflyer.base.errors import UsageError
from fireflyer.cli.numbers import PositiveNumber, WholeNumber
from fireflyer.cli.train.plan import node_names, read_node

if TYPE_CHECKING:
    from fireflyer.codesign.parallel import NodeModel
    from fireflyer.topology.node_fabric import NodeFabric

__all__ = ["node_command"]

RING_RANKS: Final = (16, 1440)


def complete_node(_ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[str]:
    return [name for name in node_names() if name.startswith(incomplete)]


@click.command(
    "node",
    short_help="Limits inside a node: allreduce, experts beside a KV cache.",
    epilog="""\b
Examples:
  ff plan node pcie-a100
  ff plan node pcie-a100 --peer 9.66                          # GB/s from GPU to NIC on Rome processors
  ff plan node node.toml --experts 20MiB --cache 200MiB       # both over the PCIe link of a GPU""",
)
@click.argument("node", metavar="NODE", shell_complete=complete_node)
@click.option("--sockets", metavar="N", type=WholeNumber(min=1, max=64), default=2, show_default=True,
              help="That divide GPUs, NICs and memory.")  # fmt: skip
@click.option("--peer", metavar="GB/S", type=PositiveNumber(),
              help="Between a GPU and a NIC or another GPU through a socket: also print what a ring over PCIe "
              "reaches.")  # fmt: skip
@click.option("--between-sockets", metavar="GB/S", type=PositiveNumber(),
              help="Of the link between two sockets, in each direction.  [default: never limits]")  # fmt: skip
@click.option("--experts", metavar="SIZE", help="That each GPU gets from the network, with --cache.")
@click.option("--cache", metavar="SIZE", help="That each GPU gets from host memory at the same time.")
@click.option("--expert-weight", metavar="W", type=PositiveNumber(), default=15.0,
              show_default=True, help="Of a traffic class for experts; that of the cache is 1.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print as JSON.")
def node_command(
    *,
    node: str,
    sockets: int,
    peer: float | None,
    between_sockets: float | None,
    experts: str | None,
    cache: str | None,
    expert_weight: float,
    as_json: bool,
) -> int:
    """Print what host memory, NIC and host bridge of the node NODE allow an allreduce by HFReduce, in closed form and
    as flows over its links, and how long tokens of experts take beside a KV cache. NODE is a TOML file, or the name of
    one that is shipped."""
    from fireflyer.planning.node_flows import node_fabric

    if (experts is None) != (cache is None):
        raise UsageError("--experts and --cache belong together; give both")
    given = read_node(node, argument="NODE")
    peer_bytes_per_s = None if peer is None else peer * 1e9
    crossing = {} if between_sockets is None else {"between_sockets_bytes_per_s": between_sockets * 1e9}
    fabric = node_fabric(given, sockets=sockets, peer_bytes_per_s=peer_bytes_per_s, **crossing)
    shown = _allreduce(given, fabric)
    if peer is not None:
        shown |= _ring(fabric)
    if experts is not None and cache is not None:
        shown |= _contention(fabric, experts, cache, expert_weight)
    if as_json:
        import msgspec

        click.echo(msgspec.json.format(msgspec.json.encode(shown), indent=2))
    else:
        for what, value in shown.items():
            click.echo(f"{what}: {value if isinstance(value, str) else f'{value:,.4g}'}")
    return 0


def _allreduce(given: NodeModel, fabric: NodeFabric) -> dict[str, Any]:
    from fireflyer.planning import hfreduce_limits
    from fireflyer.planning.node_flows import hfreduce_bandwidth

    shown: dict[str, Any] = {"node": given.name}
    ways = {"HFReduce": False} | ({"HFReduce with NVLink pairs": True} if given.nvlink_gpus == 2 else {})
    for name, pairs in ways.items():
        limits = hfreduce_limits(given, pairs=pairs)
        shown |= {f"{name}, GB/s that {part} allows": rate / 1e9 for part, rate in limits._asdict().items()}
        shown[f"{name}, what binds"] = limits.binding
        shown[f"{name}, GB/s as flows over all links"] = hfreduce_bandwidth(fabric, pairs=pairs) / 1e9
    return shown


def _ring(fabric: NodeFabric) -> dict[str, Any]:
    from fireflyer.planning.node_flows import ring_bandwidth

    return {f"ring of {ranks} GPUs, GB/s as flows": ring_bandwidth(fabric, ranks) / 1e9 for ranks in RING_RANKS}


def _contention(fabric: NodeFabric, experts: str, cache: str, expert_weight: float) -> dict[str, Any]:
    from fireflyer.base.units import parse_bytes
    from fireflyer.planning.node_flows import kv_contention

    found = kv_contention(fabric, parse_bytes(experts), parse_bytes(cache), expert_weight=expert_weight)
    shown: dict[str, Any] = {
        f"milliseconds of {name.replace('_', ', ')}": seconds * 1e3 for name, seconds in found._asdict().items()
    }
    return shown | {"times as long for experts with a KV cache beside them": found.slowdown}
