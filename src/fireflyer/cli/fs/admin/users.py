"""`ff fs admin user`: the users of a cluster, with their uids, groups and tokens."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from fireflyer.base.errors import NotFound, UsageError
from fireflyer.cli.fs.connect import CLUSTER_HELP, directory_of
from fireflyer.cli.numbers import WholeNumber

if TYPE_CHECKING:
    from fireflyer.identity import TokenStore, UserInfo

__all__ = ["to_json", "user_command"]

MAX_ID = (1 << 32) - 2


def to_json(users: Sequence[UserInfo]) -> bytes:
    import msgspec

    return msgspec.json.encode([{**msgspec.structs.asdict(user.account), "roles": user.roles} for user in users])


@click.group("user", short_help="Add, remove and list users.", epilog="Example: ff fs admin user list --dir fs")
def user_command() -> None:
    """Users of a cluster: their names, numbers and tokens.

    All are in one file, DIR/tokens.json for a cluster of `ff fs up`. For a cluster of several machines, name it with
    --tokens-file, and copy it to all of them after a change; running processes read it again by themselves."""


def _where(function: click.decorators.FC) -> click.decorators.FC:
    file = click.option("--tokens-file", metavar="FILE", help="File of users and tokens, instead of --dir.")
    directory = click.option("--dir", "directory", metavar="DIR", help=CLUSTER_HELP)
    return directory(file(function))


def _store(directory: str | None, tokens_file: str | None) -> TokenStore:
    from fireflyer.fs.service.local.layout import Layout
    from fireflyer.identity import TokenStore

    if tokens_file is not None:
        if directory is not None:
            raise UsageError("--dir and --tokens-file cannot be combined; give one of them")
        parent = os.path.dirname(os.path.abspath(tokens_file))
        if not os.path.isdir(parent):
            raise UsageError(f"--tokens-file {tokens_file!r}: there is no directory {parent}; create it first")
        return TokenStore(tokens_file)
    layout = Layout(directory_of(directory))
    layout.load()
    return TokenStore(layout.tokens_file)


@user_command.command("add", short_help="Add a user.", epilog="Example: ff fs admin user add --uid 1000 --token ann")
@_where
@click.option("--uid", metavar="N", type=WholeNumber(0, MAX_ID), help="User id.  [default: a new one]")
@click.option("--gid", metavar="N", type=WholeNumber(0, MAX_ID), help="Primary group id.  [default: the uid]")
@click.option(
    "--group", "groups", metavar="N", multiple=True, type=WholeNumber(0, MAX_ID), help="Further group id; repeatable."
)
@click.option("--token", is_flag=True, help="Print a new token for the user; it cannot be shown again.")
@click.argument("name", metavar="NAME")
def add_command(
    *,
    directory: str | None,
    tokens_file: str | None,
    uid: int | None,
    gid: int | None,
    groups: tuple[int, ...],
    token: bool,
    name: str,
) -> int:
    """Add user NAME. If they use a trusted mount, give them the uid that they have on that machine: `id -u NAME`."""
    store, now_s = _store(directory, tokens_file), int(time.time())
    account = store.create_user(name, now_s, uid=uid, gid=gid, groups=groups)
    if token:
        click.echo(store.issue(name, now_s))
    else:
        click.echo(f"User {name} has uid {account.uid} and gid {account.gid}.")
    return 0


@user_command.command("rm", short_help="Remove a user and their tokens.", epilog="Example: ff fs admin user rm ann")
@_where
@click.argument("name", metavar="NAME")
def rm_command(*, directory: str | None, tokens_file: str | None, name: str) -> int:
    """Remove user NAME and all of their tokens. Their files stay, and their uid is not given to another user."""
    from fireflyer.fs.service.local.layout import ADMIN

    if name == ADMIN and tokens_file is None:
        raise UsageError(f"user {ADMIN} cannot be removed: the commands of this cluster use it")
    store = _store(directory, tokens_file)
    account = store.account(name)
    if account is None:
        raise NotFound(f"there is no user {name[:80]!r}; `ff fs admin user list` shows them")
    store.remove_user(name)
    click.echo(f"User {name} is removed; the files of uid {account.uid} stay.")
    return 0


@user_command.command("list", short_help="List users.", epilog="Example: ff fs admin user list --dir fs")
@_where
@click.option("--json", "as_json", is_flag=True, help="Print a JSON array.")
def list_command(*, directory: str | None, tokens_file: str | None, as_json: bool) -> int:
    """List the users: name, uid, gid, number of valid tokens, groups and roles."""
    store, now_s = _store(directory, tokens_file), int(time.time())
    users = [user for name in store.users() if (user := store.user(name)) is not None]
    if as_json:
        click.echo(to_json(users).decode())
        return 0
    for user in users:
        one = user.account
        good = sum(token.expires_s is None or token.expires_s > now_s for token in store.tokens(one.name))
        groups = f" groups {','.join(map(str, one.groups))}" if one.groups else ""
        roles = f" roles {','.join(user.roles)}" if user.roles else ""
        click.echo(f"{one.name:<20} uid {one.uid:<10} gid {one.gid:<10} tokens {good}{groups}{roles}")
    return 0
