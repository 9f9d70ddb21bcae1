"""`ff quota`: what limits users, and what they use."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click
import msgspec

from fireflyer.base.errors import FireflyerError, UsageError
from fireflyer.cli.help_sections import OrderedGroup
from fireflyer.cli.jobs.hosts import columns
from fireflyer.cli.numbers import WholeNumber
from fireflyer.cli.platform.connect import PLATFORM_HELP, plain, platform_option

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from fireflyer.cluster.client import Client
    from fireflyer.cluster.core.platform.views import LimitUse
    from fireflyer.cluster.core.scheduler.model import Limit

__all__ = ["command"]

NODE_SECONDS_PER_NODE_HOUR = 3600


@click.group("quota", cls=OrderedGroup, short_help="What limits you and what you use; set limits.",
             invoke_without_command=True, epilog="""\b
Examples:
  ff quota                             # what limits you, and what you use
  ff quota --all                       # all limits
  ff quota set --user ann 8            # at most 8 nodes at a time
  ff quota set --each --priority 30 2  # 2 nodes of priority 30 for each user
  ff quota set --user-group vision 64  # 64 nodes for a group of users together
  ff quota remove --user ann""")  # fmt: skip
@click.option("--all", "all_limits", is_flag=True, help="All limits, and what is used of each.")
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
@click.option("--platform", metavar="PATH", help=PLATFORM_HELP)
@click.pass_context
def command(context: click.Context, /, *, all_limits: bool, as_json: bool, platform: str | None) -> int:
    """Show what limits your tasks, and what you use. Operators set limits: how many nodes of a group of nodes the tasks
    of a user, of each user, or of a group of users may have at a time, of one priority or of all."""
    if context.invoked_subcommand is not None:
        if all_limits or as_json or platform is not None:
            raise UsageError(f"give options of `ff quota {context.invoked_subcommand}` after that word")
        return 0
    from fireflyer.cli.platform.connect import connected

    with connected(platform) as client:
        _show_all(client, as_json) if all_limits else _show_own(client, as_json)
    return 0


def _show_own(client: Client, as_json: bool) -> None:
    view = client.quota()
    if as_json:
        click.echo(msgspec.json.encode(view))
        return
    share = f"share {view.share:g} nodes" if view.share else "no share of your own"
    facts = [
        ("user", view.user + (f" (group {plain(view.group)})" if view.group else "")),
        ("nodes", f"{view.nodes} now; {view.unfinished} unfinished tasks"),
        ("used", f"{view.node_seconds / NODE_SECONDS_PER_NODE_HOUR:.1f} node-hours lately; {share}"),
        ("highest", f"priority {view.highest_priority}"),
    ]
    click.echo("\n".join(f"{name:<8} {text}" for name, text in facts))
    if view.limits:
        click.echo(_table(view.limits))
    else:
        click.echo("no limit on nodes")


def _show_all(client: Client, as_json: bool) -> None:
    found = client.limits()
    if as_json:
        for one in found:
            click.echo(msgspec.json.encode(one))
    elif found:
        click.echo(_table(found))
    else:
        click.echo("there are no limits; operators set them: ff quota set --help")


def _table(found: Iterable[LimitUse]) -> str:
    rows = [("WHO", "NODES OF", "PRIO", "USED", "LIMIT")]
    for one in found:
        limit = one.limit
        who = f"{limit.kind.value} {plain(limit.name)}".strip() + (f": {plain(one.user)}" if one.user else "")
        priority = "any" if limit.priority is None else str(limit.priority)
        rows.append((who, plain(limit.node_group), priority, str(one.used), str(limit.nodes)))
    return columns(rows)


def _whom(function: Callable[..., object]) -> Callable[..., object]:
    """Options that name a limit."""
    for option in (
        click.option("--priority", "-p", metavar="N", type=WholeNumber(0, 50),
                     help="Only of tasks of this priority.  [default: of all together]"),
        click.option("--group", "-g", "node_group", metavar="GROUP", default="default", show_default=True,
                     help="Group of nodes."),
        click.option("--each", is_flag=True, help="Each user who has no limit of their own."),
        click.option("--user-group", metavar="NAME", help="All users of this group together.  [default: none]"),
        click.option("--user", metavar="NAME", help="The tasks of this user.  [default: none]"),
    ):  # fmt: skip
        function = option(function)
    return function


def _limit(nodes: int, *, user: str | None, user_group: str | None, each: bool, **where: Any) -> Limit:
    """Raises `UsageError`."""
    from fireflyer.cluster.core.scheduler.model import Limit, LimitKind

    if (user is not None) + (user_group is not None) + each != 1:
        raise UsageError("say whose nodes are limited: one of --user NAME, --user-group NAME and --each")
    kind = LimitKind.EACH if each else LimitKind.USER if user is not None else LimitKind.GROUP
    name = user or user_group or ""
    if not each and not name:
        raise UsageError("the name of a user or a group is not empty")
    return Limit(kind=kind, name=name, nodes=nodes, **where)


@command.command("set", short_help="Set a limit, in the place of the one before.",
                 epilog="Example: ff quota set --user ann 8")  # fmt: skip
@_whom
@click.argument("nodes", metavar="NODES", type=WholeNumber(0, 1 << 30))
@platform_option
def set_command(*, client: Client, nodes: int, **whom: Any) -> int:
    """Let the tasks of users have at most NODES nodes at a time. Runs that have more already go on."""
    limit = _limit(nodes, **whom)
    click.echo(plain(client.set_limit(limit)))
    if limit.kind.value == "user" and not _may_be_known(client, limit.name):
        name = plain(limit.name)
        click.echo(f"the platform has no user {name} yet: the limit holds once `ff user add {name}` has made one; a "
                   f"misspelt name is taken back with `ff quota remove --user {name}`", err=True)  # fmt: skip
    return 0


def _may_be_known(client: Client, name: str) -> bool:
    """False: there is no such user. Who may not list users is not told."""
    after = ""
    try:
        while page := client.known_users(after=after):
            if any(user.name == name for user in page):
                return True
            after = page[-1].name
    except FireflyerError:
        return True
    return False


@command.command("remove", short_help="Remove a limit.", epilog="Example: ff quota remove --user ann --group a100")
@_whom
@platform_option
def remove_command(*, client: Client, **whom: Any) -> int:
    """Remove a limit; name it as when it was set."""
    click.echo(plain(client.remove_limit(_limit(0, **whom))))
    return 0


@command.command("share", short_help="Set how many nodes a user may expect.",
                 epilog="Example: ff quota share ann 16")  # fmt: skip
@click.argument("user", metavar="USER")
@click.argument("nodes", metavar="NODES", type=click.FloatRange(0, 1e9, max_open=True))
@platform_option
def share_command(*, client: Client, user: str, nodes: float) -> int:
    """Set the share of USER to NODES nodes, 0 for none. Of tasks of equal priority, those of the user who has used less
    of their share come first. For administrators."""
    click.echo(plain(client.set_share(user, nodes or None)))
    return 0
