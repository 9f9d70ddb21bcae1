"""`ff plan network`: a fabric in numbers, and what it costs."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final

import click

from fireflyer.base.errors import UsageError
from fireflyer.cli.completion import complete_file
from fireflyer.cli.numbers import NumberOrRange, WholeNumber
from fireflyer.cli.plan.traffic import TrafficOptions, show_traffic

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fireflyer.netsim import LatencyName, Routing
    from fireflyer.planning import (
        Amount,
        CableBill,
        NetworkCosts,
        NetworkFile,
        NetworkStructure,
        PricedLine,
        PriceList,
        TrafficPattern,
    )
    from fireflyer.topology.fabrics import Fabric

__all__ = ["cable_rows", "complete_network", "network_command", "read_network", "read_prices"]

MANUAL: Final = "docs/how-to/plan-network.md"
MOST_CABLES: Final = 8
"""That are named."""
_PAIR: Final = re.compile(r"(\D.*?[0-9]{1,9})-(\D.*?[0-9]{1,9})")


def complete_network(_ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[str]:
    from fireflyer.planning import network_names

    return [name for name in network_names() if name.startswith(incomplete)]


@click.command(
    "network",
    short_help="Count a network's switches and links; what it costs.",
    epilog="""\b
Examples:
  ff plan network v3-multi-plane
  ff plan network network.toml --prices prices.toml --nodes
  ff plan network network.toml --cut gpu0-gpu9                           # which links may not fail
  ff plan network network.toml --traffic permutation --fail-link leaf0-spine3
  ff plan network network.toml --prices prices.toml --nodes --rent 1.10  # of a GPU hour: when owning is cheaper""",
)
@click.argument("network", metavar="NETWORK", shell_complete=complete_network)
@click.option("--prices", metavar="FILE", shell_complete=complete_file, help="TOML file with prices: also print costs.")
@click.option("--nodes", "with_nodes", is_flag=True, help="Count the price and power of nodes, too.")
@click.option(
    "--rent",
    metavar="PRICE[-PRICE]",
    type=NumberOrRange(),
    help="Of a GPU hour, or a range: also print when owning becomes cheaper.  [default: the one of the prices, with "
    "--nodes]",
)
@click.option(
    "--traffic",
    metavar="PATTERN",
    type=click.Choice(["ring", "shuffled-ring", "permutation", "incast", "storage-reads", "storage-writes"]),
    help="Print the rates that nodes get which all send at once: each to the next, so in a random order, each to "
    "another one, or all to the first; or when all have read or written a file on the storage nodes.",
)
@click.option(
    "--routing",
    type=click.Choice(["static", "ecmp", "adaptive"]),
    default="ecmp",
    show_default=True,
    help="How switches choose: by destination, by a hash of the flow, or all links evenly.",
)
@click.option(
    "--queue-pairs",
    metavar="N",
    type=WholeNumber(min=1, max=256),
    default=1,
    show_default=True,
    help="Of a transfer: as many flows with ecmp.",
)
@click.option("--seed", metavar="N", type=WholeNumber(min=0), default=0, show_default=True, help="Of hash and order.")
@click.option(
    "--size",
    metavar="SIZE",
    default="64MiB",
    show_default=True,
    help="Of a transfer, where transfers are simulated to their end; of the file of a node.",
)
@click.option(
    "--replicas",
    metavar="N",
    type=WholeNumber(min=1, max=8),
    default=3,
    show_default=True,
    help="Of a chunk, for --traffic storage-reads and storage-writes.",
)
@click.option(
    "--fail-link",
    "fail_links",
    metavar="A-B[@S[-S]]",
    multiple=True,
    help="Simulate transfers to their end; the links of A and B fail, and are repaired, at these seconds: "
    "leaf0-spine3@0.001-0.5, or from the beginning. May be repeated.",
)
@click.option(
    "--fail-plane",
    "fail_planes",
    metavar="N[@S[-S]]",
    multiple=True,
    help="As --fail-link, all links of nodes to plane N of a multi-plane network, from 0.",
)
@click.option(
    "--latency",
    type=click.Choice(["infiniband", "roce"]),
    help="Simulate to the end; messages and switches take the time that they had in table 5 of arXiv:2505.09343.",
)
@click.option(
    "--proxy",
    "proxy_us",
    metavar="US",
    type=click.FloatRange(min=0, max=1e6),
    default=0.0,
    help="Simulate to the end; a CPU proxy adds so many microseconds to each message.  [default: 0, GPUs start them]",
)
@click.option(
    "--nvlink",
    "nvlink_gb_per_s",
    metavar="GB/S",
    type=click.FloatRange(min=0, min_open=True, max=1e6),
    help="GPUs send, each over a NIC of its own, and over NVLink of so many GB/s between planes or rails.  [default: "
    "nodes send, over any of their ports]",
)
@click.option(
    "--lanes",
    metavar="W:W",
    help="Simulate to the end; nodes also read from storage, on a lane of its own. Weights of both: training:storage.",
)
@click.option(
    "--level-lanes",
    metavar="L:L",
    help="With --lanes: the lane of training and that of storage; 0:0 has both on one.  [default: 0:1]",
)
@click.option(
    "--back-pressure",
    is_flag=True,
    help="Simulate packets in finite buffers to their end, up to 512 nodes: shows head-of-line blocking.",
)
@click.option(
    "--window",
    metavar="N",
    type=WholeNumber(min=0, max=512),
    default=0,
    help="With --back-pressure: a node grants N transfers to it at a time.  [default: all]",
)
@click.option(
    "--cut",
    "cuts",
    metavar="A-B",
    multiple=True,
    help="Print the fewest links whose failure cuts A off from B, as in gpu0-gpu9 or leaf0-leaf3. May be repeated.",
)
@click.option("--json", "as_json", is_flag=True, help="Print everything as JSON.")
def network_command(
    *,
    network: str,
    prices: str | None,
    with_nodes: bool,
    rent: tuple[float, float] | None,
    traffic: TrafficPattern | None,
    routing: Routing,
    queue_pairs: int,
    seed: int,
    size: str,
    replicas: int,
    fail_links: tuple[str, ...],
    fail_planes: tuple[str, ...],
    latency: LatencyName | None,
    proxy_us: float,
    nvlink_gb_per_s: float | None,
    lanes: str | None,
    level_lanes: str | None,
    back_pressure: bool,
    window: int,
    cuts: tuple[str, ...],
    as_json: bool,
) -> int:
    """Print what the network NETWORK has: switches, links, unused ports, distances, and how many links may fail before
    two nodes are cut off from each other. NETWORK is a TOML file, or the name of one that is shipped."""
    from fireflyer.planning import amount_of, network_costs, network_structure

    if (with_nodes or rent is not None) and prices is None:
        raise UsageError("--nodes and --rent need --prices FILE")
    of_traffic = {
        "--fail-link": fail_links,
        "--fail-plane": fail_planes,
        "--latency": latency,
        "--proxy": proxy_us,
        "--nvlink": nvlink_gb_per_s,
        "--lanes": lanes,
        "--level-lanes": level_lanes,
        "--back-pressure": back_pressure,
        "--window": window,
    }
    if traffic is None and any(of_traffic.values()):
        *most, last = of_traffic
        raise UsageError(f"{', '.join(most)} and {last} need --traffic PATTERN")
    given = read_network(network)
    fabric = given.build()
    shown: dict[str, Any] = {"name": given.name, **_structure(network_structure(fabric))}
    if cuts:
        shown["cuts"] = {text: _cut(fabric, text) for text in cuts}
    if prices is not None:
        rented = None if rent is None else amount_of(rent, "--rent")
        costs = network_costs(given, fabric, read_prices(prices), with_nodes=with_nodes, rent_per_gpu_hour=rented)
        shown["cost"] = _costs(costs)
    if traffic is not None:
        given_traffic = TrafficOptions(
            pattern=traffic,
            routing=routing,
            queue_pairs=queue_pairs,
            seed=seed,
            size=size,
            fail_links=fail_links,
            fail_planes=fail_planes,
            lanes=lanes,
            level_lanes=level_lanes,
            back_pressure=back_pressure,
            window=window,
            replicas=replicas,
            latency=latency,
            proxy_us=proxy_us,
            nvlink_gb_per_s=nvlink_gb_per_s,
        )
        shown["traffic"] = show_traffic(fabric, given_traffic)
    _print(shown, as_json=as_json)
    return 0


def read_prices(path: str) -> PriceList:
    """Raises `UsageError`."""
    from fireflyer.cli.toml_files import read_toml
    from fireflyer.planning import PriceList

    return read_toml(path, PriceList, name="--prices", advice=f"give a TOML file, see {MANUAL}", keys=MANUAL)


def read_network(name: str) -> NetworkFile:
    """Of the file, or of the shipped network of that name. Raises `UsageError`."""
    from fireflyer.cli.toml_files import read_toml
    from fireflyer.planning import NetworkFile, load_network, network_names

    known = network_names()
    if name in known:
        return load_network(name)
    return read_toml(name, NetworkFile, name="NETWORK", advice=f"use {', '.join(known)} or a TOML file", keys=MANUAL)


def _structure(found: NetworkStructure) -> dict[str, Any]:
    return {
        "nodes": found.nodes,
        "endpoints": found.endpoints,
        "switches": {"all": found.switches, **found.switches_by_layer},
        "links between switches": found.links,
        "links by layer": found.links_by_layer,
        "unused ports": found.unused_ports,
        "most switches on a shortest path": found.most_switches,
        "paths without a common link, first to last node": found.disjoint_paths,
        "bisection": {
            "links": found.bisection.links,
            "lower bound": found.bisection.lower,
            "gigabytes per second": found.bisection_bytes_per_s / 1e9,
            "exact": found.bisection.exact,
        },
    }


def _cut(fabric: Fabric, text: str) -> dict[str, Any]:
    """Of `A-B`: how many links cut A off from B, and which. Raises `UsageError`."""
    from fireflyer.planning import network_cut

    match = _PAIR.fullmatch(text)
    if match is None:
        raise UsageError(f"--cut {text}: write two ends, as in gpu0-gpu9")
    try:
        cut = network_cut(fabric, *match.groups())
    except UsageError as error:
        raise UsageError(f"--cut {text}: {error}") from error
    named = []
    for one in cut.between[:MOST_CABLES]:
        several = f" ({one.links} links)" if one.links > 1 else ""
        named.append(f"{one.below}-{one.above}{several}")
    if len(cut.between) > MOST_CABLES:
        named.append(f"{len(cut.between) - MOST_CABLES} more pairs")
    return {"links": cut.links, "between": ", ".join(named) or "nothing joins them"}


def _costs(costs: NetworkCosts) -> dict[str, Any]:
    own, years = costs.ownership, f"{costs.years:g} years"
    by_length = cable_rows(costs.cables)
    shown: dict[str, Any] = {
        "currency": costs.currency,
        "lines": _lines(costs.lines),
        **({"cables by length": by_length} if by_length else {}),
        "network": costs.network,
        "network, of an endpoint": costs.network_per_endpoint,
        "purchase": own.purchase,
        f"energy in {years}": own.energy,
        f"upkeep in {years}": own.upkeep,
        f"total in {years}": own.total,
        "kilowatts of switches and cables": costs.network_watts.times(0.001),
        **({} if costs.node_watts is None else {"kilowatts of nodes at work": costs.node_watts.times(0.001)}),
        "kilowatts of the building": own.mean_watts.times(0.001),
    }
    if own.per_gpu_hour is not None:
        shown["GPU hour"] = own.per_gpu_hour
    if own.per_pflops_hour is not None:
        shown["hour of a PFLOP per second"] = own.per_pflops_hour
    if costs.rent_per_gpu_hour is not None:
        hours = costs.owning_is_cheaper_after_hours
        shown["hours after which owning is cheaper"] = "never" if hours is None else hours
    return shown


def _lines(lines: Sequence[PricedLine]) -> dict[str, Amount]:
    lengths = {one: f", {one.length}" if one.length else "" for one in lines}
    return {f"{one.line.name} {one.line.item}{lengths[one]} x {one.line.pieces}": one.price for one in lines}


def cable_rows(cables: CableBill) -> dict[str, dict[str, Any]]:
    """Cables of each class of lengths, and all of them; empty where none has a class."""
    if not any(row.length for row in cables.by_length):
        return {}
    rows = {
        row.length or "by layers, without a class": {
            "links": row.links,
            "price of one": "several" if row.price_of_one is None else row.price_of_one,
            "price": row.price,
            "watts": row.watts,
        }
        for row in cables.by_length
    }
    return rows | {"all cables": {"links": cables.links, "price": cables.price, "watts": cables.watts}}


def _print(shown: dict[str, Any], *, as_json: bool) -> None:
    import msgspec

    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(shown), indent=2))
    else:
        _print_lines(shown, "")


def _print_lines(shown: dict[str, Any], indent: str) -> None:
    for name, value in shown.items():
        if isinstance(value, dict) and any(isinstance(one, dict) for one in value.values()):
            click.echo(f"{indent}{name}:")
            _print_lines(value, f"{indent}  ")
        else:
            click.echo(f"{indent}{name}: {_words(value)}")


def _words(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {_words(one)}" for name, one in value.items())
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.1f}" if value >= 10 else f"{value:.3g}"
    return "unknown" if value is None else _amount(value)


def _amount(value: Amount | str) -> str:
    return str(value)
