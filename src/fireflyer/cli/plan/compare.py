"""`ff plan compare`: networks, or clusters, beside each other."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from fireflyer.base.errors import UsageError
from fireflyer.cli.completion import complete_file
from fireflyer.cli.plan.cluster import plan_of
from fireflyer.cli.plan.network import cable_rows, complete_network, read_network, read_prices

if TYPE_CHECKING:
    from fireflyer.planning import CableBill, ComparedNetwork

__all__ = ["compare_command"]


@click.command(
    "compare",
    short_help="Compare networks, or clusters: size, cuts, time, cost.",
    epilog="""\b
Examples:
  ff plan compare v3-two-layer v3-multi-plane v3-three-layer
  ff plan compare one.toml two.toml --prices prices.toml
  ff plan compare cluster.toml other-cluster.toml  # files of `ff plan cluster`""",
)
@click.argument("networks", metavar="NETWORK...", nargs=-1, required=True, shell_complete=complete_network)
@click.option(
    "--prices", metavar="FILE", shell_complete=complete_file, help="TOML file with prices: also compare costs."
)
@click.option("--json", "as_json", is_flag=True, help="Print as JSON.")
def compare_command(*, networks: tuple[str, ...], prices: str | None, as_json: bool) -> int:
    """Print the networks beside each other: TOML files, or names of networks that are shipped. Or print clusters beside
    each other, files of `ff plan cluster`, without simulations."""
    clusters = [_is_cluster(name) for name in networks]
    if any(clusters):
        if not all(clusters):
            other, cluster = (networks[clusters.index(one)] for one in (False, True))
            read_network(other)  # what is wrong with it comes first
            raise UsageError(f"{other!r} is a network, and {cluster!r} a cluster; compare like things")
        if prices is not None:
            raise UsageError("--prices is for networks; files of clusters name their prices")
        rows = [_cluster_row(name) for name in networks]
    else:
        from fireflyer.planning import compare_networks

        given = [read_network(name) for name in networks]  # all of them before any is built
        compared = compare_networks(given, None if prices is None else read_prices(prices))
        rows = [_row(name, one) for name, one in zip(networks, compared, strict=True)]
    if as_json:
        import msgspec

        click.echo(msgspec.json.format(msgspec.json.encode(rows), indent=2))
    else:
        _print(rows)
    return 0


def _is_cluster(name: str) -> bool:
    """Whether the file is one of `ff plan cluster`. What cannot be read is left to those who read it."""
    import tomllib

    from fireflyer.cli.toml_files import read_text
    from fireflyer.planning import network_names

    if name in network_names():
        return False
    try:
        return "training" in tomllib.loads(read_text(name, name="NETWORK", advice="").decode())
    except (ValueError, RecursionError, UsageError):  # of TOML, and of UTF-8
        return False


def _cluster_row(name: str) -> dict[str, Any]:
    """Of one cluster; each value by its name."""
    given, _, answer = plan_of(name)
    saved, cost = answer.checkpoint, answer.cost
    row: dict[str, Any] = {
        "cluster": f"{given.name} ({name})",
        "GPUs": answer.gpus,
        "nodes of the run": answer.job_nodes,
        "seconds of a step with the whole rate": round(answer.alone.step_s, 3),
        "seconds of a step with the slowest flow": round(answer.contended.step_s, 3),
        "tokens per second with the whole rate": round(answer.alone.tokens_per_s),
        "MFU with the whole rate": round(answer.alone.mfu, 4),
        "ETTR": answer.failures.ettr,
        "days": answer.days,
        "seconds to write a checkpoint": None if saved is None else round(saved.written_s, 2),
        "memory, storage and restarts suffice": answer.suffices,
    }
    if cost is not None:
        row |= {
            f"purchase, {cost.currency}": cost.ownership.purchase,
            f"GPU hour, {cost.currency}": cost.ownership.per_gpu_hour,
            f"the run, {cost.currency}": cost.run,
            f"a million tokens, {cost.currency}": cost.million_tokens,
            "kilowatts of the building": cost.ownership.mean_watts.times(0.001),
        } | _cables(cost.cables, cost.currency)
    return row


def _row(name: str, one: ComparedNetwork) -> dict[str, Any]:
    """Of one network; each value by its name."""
    size, costs = one.size, one.costs
    row: dict[str, Any] = {
        "network": name,
        "endpoints": size.endpoints,
        "switches": size.switches,
        "links": size.links,
        "endpoints of a switch": round(size.endpoints_per_switch, 2),
        "unused ports": size.unused_ports,
        "bisection links": size.bisection.links,
        "bisection links, lower bound": size.bisection.lower,
        "bisection is exact": size.bisection.exact,
        "terabytes per second across": round(size.bisection_bytes_per_s / 1e12, 3),
    }
    if costs is not None:
        row |= {
            f"price, {costs.currency}": costs.network,
            f"price of an endpoint, {costs.currency}": costs.network_per_endpoint,
            "kilowatts": costs.network_watts.times(0.001),
        } | _cables(costs.cables, costs.currency)
    return row


def _cables(cables: CableBill, currency: str) -> dict[str, Any]:
    """Of each class of lengths, and of all."""
    row: dict[str, Any] = {}
    for name, values in cable_rows(cables).items():
        row[f"{name}: links"] = values["links"]
        row[f"{name}: price, {currency}"] = values["price"]
        row[f"{name}: watts"] = values["watts"]
    return row


def _print(rows: list[dict[str, Any]]) -> None:
    from rich.markup import escape
    from rich.table import Table

    from fireflyer.cli.output import stdout_console

    names = list(dict.fromkeys(name for row in rows for name in row))
    table = Table(names[0], *(escape(row[names[0]]) for row in rows))
    for name in names[1:]:
        table.add_row(name, *(_words(name, row.get(name)) for row in rows))
    for column in table.columns[1:]:
        column.justify = "right"
    stdout_console().print(table)


def _words(name: str, value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no, a bound" if name == "bisection is exact" else "no"
    return f"{value:,}" if isinstance(value, int | float) else str(value)
