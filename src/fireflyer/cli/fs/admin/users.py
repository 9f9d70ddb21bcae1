"""`ff fs admin user`: who may use a cluster, and who they are in its files."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

import click

from fireflyer.base.errors import NotFound, UsageError
from fireflyer.cli.fs.connect import CLUSTER_HELP, directory_of
from fireflyer.cli.numbers import WholeNumber

if TYPE_CHECKING:
    from fireflyer.identity import TokenStore

__all__ = ["user_command"]

MAX_ID = (1 << 32) - 2


@click.group("user", short_help="Users: add, rm, list.")
def user_command() -> None:
    """Users of a cluster: their names, numbers and tokens.

    They are in one file, DIR/tokens.json of a cluster of `ff fs up`. Of a cluster of several machines name it, and copy
    it to all of them when it has changed: running processes notice."""


def _where(function: click.decorators.FC) -> click.decorators.FC:
    file = click.option("--tokens-file", metavar="FILE", help="As the configurations name it, instead of --dir.")
    directory = click.option("--dir", "directory", metavar="DIR", help=CLUSTER_HELP)
    return directory(file(function))


def _store(directory: str | None, tokens_file: str | None) -> TokenStore:
    from fireflyer.fs.service.local.layout import Layout
    from fireflyer.identity import TokenStore

    if tokens_file is not None:
        if directory is not None:
            raise UsageError("--dir and --tokens-file exclude each other; give one of them")
        parent = os.path.dirname(os.path.abspath(tokens_file))
        if not os.path.isdir(parent):
            raise UsageError(f"--tokens-file {tokens_file!r}: there is no directory {parent}; make it first")
        return TokenStore(tokens_file)
    layout = Layout(directory_of(directory))
    layout.load()
    return TokenStore(layout.tokens_file)


@user_command.command("add", short_help="Make a user.")
@_where
@click.option("--uid", metavar="N", type=WholeNumber(0, MAX_ID), help="Whose files are his.  [default: a new one]")
@click.option("--gid", metavar="N", type=WholeNumber(0, MAX_ID), help="Of his files.  [default: as uid]")
@click.option("--group", "groups", metavar="N", multiple=True, type=WholeNumber(0, MAX_ID), help="Another; repeatable.")
@click.option("--token", is_flag=True, help="Print a token for him too: it is shown this once.")
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
    """Make user NAME. On a machine whose mount is trusted, give him the uid that he has there: `id -u NAME`."""
    store, now_s = _store(directory, tokens_file), int(time.time())
    account = store.create_user(name, now_s, uid=uid, gid=gid, groups=groups)
    if token:
        click.echo(store.issue(name, now_s))
    else:
        click.echo(f"User {name} has uid {account.uid} and gid {account.gid}.")
    return 0


@user_command.command("rm", short_help="Remove a user and his tokens.")
@_where
@click.argument("name", metavar="NAME")
def rm_command(*, directory: str | None, tokens_file: str | None, name: str) -> int:
    """Remove user NAME with all tokens. His files stay, and his uid is not given to another one."""
    from fireflyer.fs.service.local.layout import ADMIN

    if name == ADMIN and tokens_file is None:
        raise UsageError(f"user {ADMIN} is needed by the commands of this cluster; remove another one")
    store = _store(directory, tokens_file)
    account = store.account(name)
    if account is None:
        raise NotFound(f"there is no user {name[:80]!r}")
    store.remove_user(name)
    click.echo(f"User {name} is removed; files of uid {account.uid} stay.")
    return 0


@user_command.command("list", short_help="Show the users.")
@_where
@click.option("--json", "as_json", is_flag=True, help="Print them as JSON.")
def list_command(*, directory: str | None, tokens_file: str | None, as_json: bool) -> int:
    """Show name, uid, gid, groups, and how many tokens are good."""
    import msgspec

    store, now_s = _store(directory, tokens_file), int(time.time())
    accounts = [account for name in store.users() if (account := store.account(name)) is not None]
    if as_json:
        click.echo(msgspec.json.encode(accounts).decode())
        return 0
    for one in accounts:
        good = sum(token.expires_s is None or token.expires_s > now_s for token in store.tokens(one.name))
        groups = f" groups {','.join(map(str, one.groups))}" if one.groups else ""
        click.echo(f"{one.name:<20} uid {one.uid:<10} gid {one.gid:<10} tokens {good}{groups}")
    return 0
