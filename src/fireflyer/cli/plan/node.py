"""`ff plan node`: what limits an allreduce and the traffic of experts inside a node."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final

import click

from fireflyer.base.errors import UsageError
from fireflyer.cli.numbers import PositiveNumber, WholeNumber, bytes_with_unit
from fireflyer.cli.train.plan import complete_node, read_node

if TYPE_CHECKING:
    from fireflyer.codesign.parallel import Buffers, NodeModel

__all__ = ["node_command"]

RING_RANKS: Final = (16, 1440)
PLACES: Final = ("near", "interleaved", "far")
PARTS: Final = {
    "host_memory": "host memory",
    "nic": "NICs",
    "bridge": "host bridges",
    "switch": "PCIe switches",
    "between_sockets": "links between sockets",
}


@click.command(
    "node",
    short_help="Limits inside a node: allreduce, experts beside a KV cache.",
    epilog="""\b
Examples:
  ff plan node pcie-a100
  ff plan node pcie-a100 --relaxed-ordering                           # GPUs and NICs write to each other at full rate
  ff plan node pcie-a100 --gpu-buffers far --between-sockets 50
  ff plan node h800 --switch-gpus 1 --switch-uplink 25 --switch-nics  # NICs write to GPUs below the uplink
  ff plan node node.toml --experts 20MiB --cache 200MiB               # both over the PCIe link of a GPU""",
)
@click.argument("node", metavar="NODE", shell_complete=complete_node)
@click.option("--sockets", metavar="N", type=WholeNumber(min=1, max=64),
              help="That divide GPUs, NICs and memory.  [default: sockets of the node]")  # fmt: skip
@click.option("--between-sockets", metavar="GB/S", type=PositiveNumber(),
              help="Of the link between two sockets, in each direction.  [default: that of the node, or no "
              "limit]")  # fmt: skip
@click.option("--gpu-buffers", type=click.Choice(PLACES),
              help="Host memory that a GPU copies to: of its socket, of all, of the others.  [default: gpu_buffers of "
              "the node]")  # fmt: skip
@click.option("--network-buffers", type=click.Choice(PLACES),
              help="The same for sums and what NICs send and receive.  [default: network_buffers of the "
              "node]")  # fmt: skip
@click.option("--peer", metavar="GB/S", type=PositiveNumber(),
              help="Between a GPU and a NIC or another GPU through a socket that keeps the order of writes.  [default: "
              "ordered_peer_bytes_per_s of the node]")  # fmt: skip
@click.option("--relaxed-ordering/--ordered", default=None,
              help="Such writes may overtake each other, and reach the rate of PCIe.  [default: relaxed_ordering of "
              "the node]")  # fmt: skip
@click.option("--switch-gpus", metavar="N", type=WholeNumber(min=0, max=64),
              help="Behind each PCIe switch; 0: no switches.  [default: switch_gpus of the node]")  # fmt: skip
@click.option("--switch-uplink", metavar="GB/S", type=PositiveNumber(),
              help="Of a switch, in each direction.  [default: switch_bytes_per_s of the node]")  # fmt: skip
@click.option("--switch-nics/--root-nics", default=None,
              help="NICs are behind switches, too, or above them.  [default: switch_nics of the node]")  # fmt: skip
@click.option("--experts", metavar="SIZE", help="That each GPU gets from the network, with --cache.")
@click.option("--cache", metavar="SIZE", help="That each GPU gets from host memory at the same time.")
@click.option("--expert-weight", metavar="W", type=PositiveNumber(), default=15.0,
              show_default=True, help="Of a traffic class for experts; that of the cache is 1.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print as JSON.")
def node_command(
    *,
    node: str,
    sockets: int | None,
    between_sockets: float | None,
    gpu_buffers: Buffers | None,
    network_buffers: Buffers | None,
    peer: float | None,
    relaxed_ordering: bool | None,
    switch_gpus: int | None,
    switch_uplink: float | None,
    switch_nics: bool | None,
    experts: str | None,
    cache: str | None,
    expert_weight: float,
    as_json: bool,
) -> int:
    """Print what host memory, NIC, PCIe switch, host bridge and the link between sockets of the node NODE allow an
    allreduce by HFReduce, in closed form and as flows over its links, what a ring over PCIe reaches where NODE says how
    fast devices write to each other, and how long tokens of experts take beside a KV cache. NODE is a TOML file, or the
    name of one that is shipped."""
    import msgspec

    if (experts is None) != (cache is None):
        raise UsageError("--experts and --cache belong together; give both")
    if switch_gpus == 0 and (switch_uplink is not None or switch_nics is not None):
        raise UsageError("--switch-gpus 0 has no switches; leave out --switch-uplink and --switch-nics")
    options = {
        "sockets": sockets,
        "between_sockets_bytes_per_s": None if between_sockets is None else between_sockets * 1e9,
        "gpu_buffers": gpu_buffers,
        "network_buffers": network_buffers,
        "ordered_peer_bytes_per_s": None if peer is None else peer * 1e9,
        "relaxed_ordering": relaxed_ordering,
        "switch_gpus": switch_gpus,
        "switch_bytes_per_s": 0.0 if switch_gpus == 0 else None if switch_uplink is None else switch_uplink * 1e9,
        "switch_nics": False if switch_gpus == 0 else switch_nics,
    }
    given = read_node(node, argument="NODE")
    given = msgspec.structs.replace(given, **{name: value for name, value in options.items() if value is not None})
    given.check()
    shown = _places(given) | _allreduce(given)
    if given.ordered_peer_bytes_per_s:
        shown |= _ring(given)
    if experts is not None and cache is not None:
        shown |= _contention(given, experts, cache, expert_weight)
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(shown), indent=2))
    else:
        for what, value in shown.items():
            click.echo(f"{what}: {value if isinstance(value, str) else f'{value:,.4g}'}")
    return 0


def _places(given: NodeModel) -> dict[str, Any]:
    """Where buffers are, and how devices write to each other."""
    between, peer = given.between_sockets_bytes_per_s, given.ordered_peer_bytes_per_s
    shown: dict[str, Any] = {
        "node": given.name,
        "sockets": given.sockets,
        "GB/s between two sockets": between / 1e9 if between else "no limit",
        "buffers of GPUs": given.gpu_buffers,
        "buffers of the network": given.network_buffers,
    }
    if peer:
        ordered = f"in order, at {peer / 1e9:.4g} GB/s through a socket"
        shown["PCIe writes between devices"] = "relaxed, as fast as PCIe" if given.relaxed_ordering else ordered
    if given.switch_gpus:
        shown["PCIe switches"] = (
            f"{given.gpus // given.switch_gpus} with {given.switch_gpus} GPUs each, "
            f"{given.switch_bytes_per_s / 1e9:.4g} GB/s to the host bridge in each direction"
        )
        shown["NICs"] = "behind PCIe switches" if given.switch_nics else "above PCIe switches"
    return shown


def _allreduce(given: NodeModel) -> dict[str, Any]:
    from fireflyer.planning import hfreduce_bandwidth, hfreduce_limits

    shown: dict[str, Any] = {}
    ways = {"HFReduce": False} | ({"HFReduce with NVLink pairs": True} if given.nvlink_gpus == 2 else {})
    for name, pairs in ways.items():
        limits = hfreduce_limits(given, pairs=pairs)
        rates = {part: rate for part, rate in limits._asdict().items() if rate < math.inf}
        shown |= {f"{name}, limit by {PARTS[part]}, GB/s": rate / 1e9 for part, rate in rates.items()}
        shown[f"{name}, what binds"] = PARTS[limits.binding]
        found = hfreduce_bandwidth(given, pairs=pairs)
        shown[f"{name}, GB/s as flows over all links"] = found.bytes_per_s / 1e9
        shown[f"{name}, link that is full first"] = found.binding
    return shown


def _ring(given: NodeModel) -> dict[str, Any]:
    from fireflyer.planning import ring_bandwidth

    shown: dict[str, Any] = {}
    for ranks in sorted({max(ranks, 2 * given.gpus) for ranks in RING_RANKS}):
        found = ring_bandwidth(given, ranks)
        shown[f"ring of {ranks} GPUs, GB/s as flows"] = found.bytes_per_s / 1e9
        shown[f"ring of {ranks} GPUs, link that is full first"] = found.binding
    return shown


def _contention(given: NodeModel, experts: str, cache: str, expert_weight: float) -> dict[str, Any]:
    from fireflyer.planning import kv_contention

    sizes = bytes_with_unit("--experts", experts), bytes_with_unit("--cache", cache)
    found = kv_contention(given, *sizes, expert_weight=expert_weight)
    shown: dict[str, Any] = {
        f"milliseconds of {name.replace('_', ', ')}": seconds * 1e3 for name, seconds in found._asdict().items()
    }
    return shown | {"times as long for experts with a KV cache beside them": found.slowdown}
