"""`ff user`, `ff whoami`: users of the platform, their roles and tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click
import msgspec

from fireflyer.base.units import SECOND
from fireflyer.cli.help_sections import OrderedGroup
from fireflyer.cli.jobs.hosts import columns
from fireflyer.cli.numbers import Duration, WholeNumber
from fireflyer.cli.platform.connect import plain, platform_option
from fireflyer.cli.token_table import print_tokens, shown_date

if TYPE_CHECKING:
    from fireflyer.cluster.client import Client

__all__ = ["user_command", "whoami_command"]

MAX_ID = (1 << 32) - 2
_Role = click.Choice(["operator", "admin", "fs:admin"])


@click.group("user", cls=OrderedGroup, short_help="Users, roles and tokens.", epilog="Example: ff user list")
def user_command() -> None:
    """Users of the platform. Operators add and remove users and issue tokens for them; administrators grant roles.

    An operator drains nodes, stops tasks of others and sets limits; an administrator also sets shares and policy.
    Everybody lists, issues and revokes their own tokens."""


@user_command.command("add", short_help="Add a user.", epilog="Example: ff user add ann --token")
@click.option("--role", "roles", type=_Role, multiple=True, help="A role; repeatable.")
@click.option("--uid", metavar="N", type=WholeNumber(1, MAX_ID), help="User id of their files.  [default: a new one]")
@click.option("--token", is_flag=True, help="Print a new token for the user; it cannot be shown again.")
@click.argument("name", metavar="NAME")
@platform_option
def add_command(*, client: Client, roles: tuple[str, ...], uid: int | None, token: bool, name: str) -> int:
    """Add the user NAME. They log in with a token: `ff login URL`."""
    from fireflyer.identity.users import check_name

    check_name(name)
    user = client.create_user(name, roles=tuple(map(_whole, dict.fromkeys(roles))), uid=uid)
    if token:
        click.echo(client.issue_token(name).token)
    else:
        click.echo(f"user {user.name} is added; give them a token: ff user token {user.name}")
    return 0


@user_command.command("list", short_help="List users.", epilog="Example: ff user list")
@click.option("--json", "as_json", is_flag=True, help="One JSON object for each user.")
@platform_option
def list_command(*, client: Client, as_json: bool) -> int:
    """List the users with their roles."""
    rows, after = [("USER", "UID", "ROLES", "ADDED")], ""
    while True:
        page = client.known_users(after=after)
        for user in page:
            if as_json:
                click.echo(msgspec.json.encode(user))
            rows.append((user.name, str(user.uid), " ".join(map(plain, user.roles)) or "-", shown_date(user.created_s)))
        if not page:
            break
        after = page[-1].name
    if not as_json:
        click.echo(columns(rows))
    return 0


@user_command.command("remove", short_help="Remove a user and their tokens.", epilog="Example: ff user remove ann")
@click.argument("name", metavar="NAME")
@platform_option
def remove_command(*, client: Client, name: str) -> int:
    """Remove the user NAME with all their tokens. Their tasks stay: stop those that are not wanted."""
    click.echo(plain(client.remove_user(name)))
    return 0


@user_command.command("grant-role", short_help="Grant a role.", epilog="Example: ff user grant-role ann operator")
@click.argument("name", metavar="NAME")
@click.argument("role", metavar="ROLE", type=_Role)
@platform_option
def grant_role_command(*, client: Client, name: str, role: str) -> int:
    """Make NAME an operator or an administrator of the platform, or (fs:admin) of the file systems that have its
    users."""
    click.echo(plain(client.grant_role(name, _whole(role))))
    return 0


@user_command.command("revoke-role", short_help="Take a role back.", epilog="Example: ff user revoke-role ann operator")
@click.argument("name", metavar="NAME")
@click.argument("role", metavar="ROLE", type=_Role)
@platform_option
def revoke_role_command(*, client: Client, name: str, role: str) -> int:
    """Take a role from NAME."""
    click.echo(plain(client.revoke_role(name, _whole(role))))
    return 0


@user_command.command("token", short_help="Issue a token.", epilog="""\b
Examples:
  ff user token                    # a token for yourself
  ff user token ann --expires 90d  # one for ann, for 90 days""")  # fmt: skip
@click.option(
    "--expires", metavar="TIME", type=Duration(), help="How long it is valid.  [default: until it is revoked]"
)
@click.option("--label", metavar="TEXT", default="", help="Where it is used, to tell it from others.  [default: none]")
@click.argument("name", metavar="[NAME]", default="")
@platform_option
def token_command(*, client: Client, expires: int | None, label: str, name: str) -> int:
    """Print a new token for NAME, by default for yourself. It is shown this once."""
    lifetime_s = None if expires is None else max(1, expires // SECOND)
    click.echo(client.issue_token(name or client.whoami().user, lifetime_s=lifetime_s, label=label).token)
    return 0


@user_command.command("tokens", short_help="List tokens.", epilog="Example: ff user tokens ann")
@click.option("--json", "as_json", is_flag=True, help="One JSON object for each token.")
@click.argument("name", metavar="[NAME]", default="")
@platform_option
def tokens_command(*, client: Client, as_json: bool, name: str) -> int:
    """List the tokens of NAME, by default your own, by their public numbers."""
    print_tokens(client.tokens(name or client.whoami().user), as_json=as_json)
    return 0


@user_command.command("revoke-token", short_help="Revoke a token.",
                      epilog="Example: ff user revoke-token ann 0f3c21d4a95e88b7")  # fmt: skip
@click.argument("name", metavar="NAME")
@click.argument("token_id", metavar="TOKEN")
@platform_option
def revoke_token_command(*, client: Client, name: str, token_id: str) -> int:
    """Revoke the token of NAME whose number, as `ff user tokens NAME` shows it, is TOKEN. Sessions of browsers that
    began with it end."""
    click.echo(plain(client.revoke_token(name, token_id)))
    return 0


@click.command("whoami", short_help="Who you are on the platform.", epilog="Example: ff whoami")
@platform_option
def whoami_command(*, client: Client) -> int:
    """Print your name, your roles, and what you use."""
    who = client.whoami()
    as_run = f", as run {who.run} of task {who.task}" if who.task is not None else ""
    click.echo(f"{who.user}{' (' + ', '.join(map(plain, who.roles)) + ')' if who.roles else ''}{as_run}")
    for user in client.users():
        if user.user == who.user:
            share = f", a share of {user.share:g} nodes" if user.share else ""
            click.echo(
                f"{user.nodes} nodes now, {user.unfinished} unfinished tasks, "
                f"{user.node_seconds / 3600:.1f} node-hours in the window{share}"
            )
    return 0


def _whole(role: str) -> str:
    """As stores keep it."""
    return role if ":" in role else f"platform:{role}"
