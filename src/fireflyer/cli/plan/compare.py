"""`ff plan compare`: networks beside each other."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from fireflyer.cli.completion import complete_file
from fireflyer.cli.plan.network import complete_network, read_network, read_prices

if TYPE_CHECKING:
    from fireflyer.planning import NetworkFile, PriceList

__all__ = ["compare_command"]


@click.command(
    "compare",
    short_help="Compare networks: size, cuts, and cost of an endpoint.",
    epilog="""\b
Examples:
  ff plan compare v3-two-layer v3-multi-plane v3-three-layer
  ff plan compare one.toml two.toml --prices prices.toml""",
)
@click.argument("networks", metavar="NETWORK...", nargs=-1, required=True, shell_complete=complete_network)
@click.option(
    "--prices", metavar="FILE", shell_complete=complete_file, help="TOML file with prices: also compare costs."
)
@click.option("--json", "as_json", is_flag=True, help="Print as JSON.")
def compare_command(*, networks: tuple[str, ...], prices: str | None, as_json: bool) -> int:
    """Print the networks beside each other: TOML files, or names of networks that are shipped."""
    given = [read_network(name) for name in networks]  # all of them before any is built
    priced = None if prices is None else read_prices(prices)
    rows = [_row(name, one, priced) for name, one in zip(networks, given, strict=True)]
    if as_json:
        import msgspec

        click.echo(msgspec.json.format(msgspec.json.encode(rows), indent=2))
    else:
        _print(rows)
    return 0


def _row(name: str, given: NetworkFile, prices: PriceList | None) -> dict[str, Any]:
    """Of one network; each value by its name."""
    from fireflyer.planning import bill_of, price_bill
    from fireflyer.topology.fabrics import bisection

    fabric = given.build()
    cut = bisection(fabric)
    row: dict[str, Any] = {
        "network": name,
        "endpoints": fabric.endpoints,
        "switches": fabric.switches,
        "links": fabric.links,
        "endpoints of a switch": round(fabric.endpoints / fabric.switches, 2),
        "unused ports": fabric.unused_ports,
        "bisection links": cut.links,
        "bisection is exact": cut.exact,
        "terabytes per second across": round(cut.links * fabric.link_bytes_per_s / 1e12, 3),
    }
    if prices is not None:
        kinds = [group.kind for group in fabric.groups]
        bill = price_bill(bill_of(fabric, frame_switch=given.frame_switch), prices, kinds)
        row[f"price, {prices.currency}"] = bill.price()
        row[f"price of an endpoint, {prices.currency}"] = bill.price().over(fabric.endpoints)
        row["kilowatts"] = bill.watts().times(0.001)
    return row


def _print(rows: list[dict[str, Any]]) -> None:
    from rich.markup import escape
    from rich.table import Table

    from fireflyer.cli.output import stdout_console

    names = list(rows[0])
    table = Table(names[0], *(escape(row[names[0]]) for row in rows))
    for name in names[1:]:
        table.add_row(name, *(_words(row[name]) for row in rows))
    for column in table.columns[1:]:
        column.justify = "right"
    stdout_console().print(table)


def _words(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no, a bound"
    return f"{value:,}" if isinstance(value, int | float) else str(value)
