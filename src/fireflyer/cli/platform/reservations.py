"""`ff reservation`: nodes for some users, or for nobody, from a time until another."""

from __future__ import annotations

import re
import time
from typing import TYPE_CHECKING, Any

import click
import msgspec

from fireflyer.base.errors import UsageError
from fireflyer.base.units import SECOND
from fireflyer.cli.help_sections import OrderedGroup
from fireflyer.cli.jobs.hosts import columns
from fireflyer.cli.platform.connect import clock, plain, platform_option

if TYPE_CHECKING:
    from fireflyer.cluster.client import Client
    from fireflyer.cluster.core.scheduler.model import Reservation

__all__ = ["Moment", "command"]

_AHEAD = re.compile(r"\+?([0-9]{1,6})(s|m|h|d)")
_UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
_FORMATS = ("%Y-%m-%d %H:%M", "%Y-%m-%dT%H:%M", "%Y-%m-%d %H:%M:%S", "%Y-%m-%dT%H:%M:%S")
_LATEST_NS = 1 << 62


class Moment(click.ParamType[Any]):
    """`now`, `+2h` from now, or `2026-11-30 08:00` of the local time zone, as nanoseconds of Unix time."""

    name = "time"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if isinstance(value, int):
            return value
        found = _moment(value)
        if found is None or not 0 <= found <= _LATEST_NS:
            self.fail(f"{value!r} is no time; write it like +2h, +1d, now or '2026-11-30 08:00'", param, ctx)
        return found


def _moment(text: str) -> int | None:
    if text == "now":
        return time.time_ns()
    match = _AHEAD.fullmatch(text)
    if match is not None:
        return time.time_ns() + int(match[1]) * _UNITS_S[match[2]] * SECOND
    for form in _FORMATS:
        try:
            return int(time.mktime(time.strptime(text, form))) * SECOND
        except (ValueError, OverflowError):
            continue
    return None


@click.group("reservation", cls=OrderedGroup, short_help="Reserve nodes, or close them for maintenance.",
             epilog="Example: ff reservation list")  # fmt: skip
def command() -> None:
    """Reservations: nodes that some users alone get for a time, or that nobody gets (maintenance). Tasks that would
    still run when one begins are not started on its nodes, where they declare how long they take (`--time`).
    What runs on nodes when their maintenance is about to begin is asked to save and to leave."""


@command.command("add", short_help="Reserve nodes.", epilog="""\b
Examples:
  ff reservation add swap-fans --nodes gpu-7,gpu-8 --from +1h --until +3h --maintenance
  ff reservation add deadline --nodes gpu-1,gpu-2 --until '2026-12-24 18:00' --user ann""")  # fmt: skip
@click.option("--nodes", metavar="NODES", required=True, help="The nodes: a,b,c.")
@click.option("--from", "begin_ns", metavar="TIME", type=Moment(), default="now", show_default=True,
              help="When it begins: now, +2h, or '2026-11-30 08:00'.")  # fmt: skip
@click.option("--until", "until_ns", metavar="TIME", type=Moment(), required=True, help="When it ends.")
@click.option("--user", "users", metavar="NAME", multiple=True, help="Who gets the nodes; repeatable.")
@click.option("--user-group", "user_groups", metavar="NAME", multiple=True, help="A group of users who get them.")
@click.option("--maintenance", is_flag=True, help="Nobody gets them.")
@click.argument("name", metavar="NAME")
@platform_option
def add_command(*, client: Client, maintenance: bool, nodes: str, **fields: Any) -> int:
    """Reserve nodes under NAME, in the place of a reservation of the same name. A task that runs on a node that is
    reserved for another is interrupted when that one needs it. Before maintenance begins, tasks that would still
    run are asked to save and to leave, in time for their grace period. For operators."""
    from fireflyer.cluster.core.scheduler.model import Reservation

    if maintenance == bool(fields["users"] or fields["user_groups"]):
        raise UsageError("say who gets the nodes: --user NAME or --user-group NAME, or --maintenance for nobody")
    names = tuple(dict.fromkeys(one for one in nodes.split(",") if one))
    click.echo(plain(client.add_reservation(Reservation(nodes=names, **fields))))
    return 0


@command.command("list", short_help="List reservations.", epilog="Example: ff reservation list")
@click.option("--json", "as_json", is_flag=True, help="One JSON object for each reservation.")
@platform_option
def list_command(*, client: Client, as_json: bool) -> int:
    """List the reservations that are not over."""
    now_ns = time.time_ns()
    found = sorted((one for one in client.reservations() if one.until_ns > now_ns), key=lambda one: one.begin_ns)
    if as_json:
        for one in found:
            click.echo(msgspec.json.encode(one))
        return 0
    rows = [("NAME", "FROM", "UNTIL", "STATE", "FOR", "NODES"), *(_row(one, now_ns) for one in found)]
    click.echo(columns(rows) if found else "there are no reservations")
    return 0


def _row(one: Reservation, now_ns: int) -> tuple[str, ...]:
    state = "open" if one.begin_ns <= now_ns else "later"
    groups = [f"group {group}" for group in one.user_groups]
    tasks = [f"task {task}" for task in one.tasks]
    whom = "maintenance" if one.maintenance else " ".join([*one.users, *groups, *tasks])
    nodes = " ".join(one.nodes[:8]) + (f" and {len(one.nodes) - 8} more" if len(one.nodes) > 8 else "")
    return plain(one.name), clock(one.begin_ns), clock(one.until_ns), state, plain(whom), plain(nodes)


@command.command("remove", short_help="Remove a reservation.", epilog="Example: ff reservation remove swap-fans")
@click.argument("name", metavar="NAME")
@platform_option
def remove_command(*, client: Client, name: str) -> int:
    """Give the nodes of the reservation NAME to everybody again. For operators."""
    click.echo(plain(client.remove_reservation(name)))
    return 0
