"""`ff webhook`: URLs that are told what happens to tasks and nodes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import click
import msgspec

from fireflyer.base.units import format_duration
from fireflyer.cli.help_sections import OrderedGroup
from fireflyer.cli.jobs.hosts import columns
from fireflyer.cli.numbers import WholeNumber
from fireflyer.cli.platform.connect import plain, platform_option

if TYPE_CHECKING:
    from fireflyer.cluster.client import Client

__all__ = ["webhook_command"]

_EVENTS: Final = ("task.started", "task.suspended", "task.resumed", "task.ended", "node.lost")
_NUMBER: Final = WholeNumber(1, 1 << 53)


@click.group("webhook", cls=OrderedGroup, short_help="URLs that are told of events.", epilog="Example: ff webhook list")
def webhook_command() -> None:
    """URLs that are told, by POST, what happens to your tasks: that one has started, is suspended, has resumed or has
    ended. Operators are told of lost nodes, too. What is sent is signed with a secret of the webhook."""


@webhook_command.command("add", short_help="Register a URL.",
                         epilog="Example: ff webhook add https://hooks.example.com/fireflyer")  # fmt: skip
@click.option("--event", "events", multiple=True, type=click.Choice(_EVENTS),
              help="Told of this alone; repeatable.  [default: all of tasks]")  # fmt: skip
@click.option("--named", is_flag=True, help="Only of tasks that name the URL: ff submit --notify URL.")
@click.argument("url", metavar="URL")
@platform_option
def add_command(*, client: Client, events: tuple[str, ...], named: bool, url: str) -> int:
    """Register URL, and print the secret that signs what is sent to it; it cannot be shown again."""
    made = client.add_webhook(url, events=events or _EVENTS[:4], named=named)  # type: ignore[arg-type]
    click.echo(f"webhook {made.id}\n{plain(made.secret)}")
    return 0


@webhook_command.command("list", short_help="List webhooks.", epilog="Example: ff webhook list")
@click.option("--all", "everybody", is_flag=True, help="Of all users; for operators.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object for each webhook.")
@platform_option
def list_command(*, client: Client, everybody: bool, as_json: bool) -> int:
    """List your webhooks: what waits to be sent, what was delivered, what was given up after a day of attempts, what
    was dropped because too much waited, and how the newest attempt went."""
    rows = [("ID", "USER", "URL", "EVENTS", "WAITING", "DELIVERED", "GIVEN UP", "DROPPED", "NEWEST ATTEMPT")]
    for hook in client.webhooks(everybody=everybody):
        if as_json:
            click.echo(msgspec.json.encode(hook))
        again = f"; again in {format_duration(hook.retry_in_ns)}" if hook.retry_in_ns and hook.pending else ""
        events = " ".join(hook.events) + (" (named)" if hook.named else "")
        counts = (str(hook.pending), str(hook.delivered), str(hook.given_up), str(hook.dropped))
        newest = f"{plain(hook.last)}{again}" if hook.last else "none"
        rows.append((str(hook.id), plain(hook.user), plain(hook.url), plain(events), *counts, newest))
    if not as_json:
        click.echo(columns(rows))
    return 0


@webhook_command.command("remove", short_help="Remove a webhook.", epilog="Example: ff webhook remove 3")
@click.argument("number", metavar="ID", type=_NUMBER)
@platform_option
def remove_command(*, client: Client, number: int) -> int:
    """Remove the webhook ID, with what it had not been told."""
    click.echo(plain(client.remove_webhook(number)))
    return 0


@webhook_command.command("test", short_help="Send a test.", epilog="Example: ff webhook test 3")
@click.argument("number", metavar="ID", type=_NUMBER)
@platform_option
def test_command(*, client: Client, number: int) -> int:
    """Send an event of type `test` to the webhook ID."""
    click.echo(plain(client.test_webhook(number)))
    return 0
