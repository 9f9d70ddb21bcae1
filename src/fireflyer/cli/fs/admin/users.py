"""`ff fs admin user`: the users of a cluster, with their uids, groups and tokens."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from fireflyer.base.errors import NotFound, UsageError
from fireflyer.base.units import SECOND, format_duration
from fireflyer.cli.fs.connect import CLUSTER_HELP, directory_of
from fireflyer.cli.numbers import Duration, WholeNumber

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
    --tokens-file, and copy it to all of them after a change; running processes read it again by themselves, and close
    the connections of tokens that are revoked or have expired."""


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
    if layout.load().accounts:
        raise UsageError(
            f"the users of {layout.directory} are those of its platform: ff user add, ff user token (ff user --help)"
        )
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


@user_command.command("token", short_help="Issue a token.", epilog="Example: ff fs admin user token ann --expires 90d")
@_where
@click.option(
    "--expires", metavar="TIME", type=Duration(), help="How long it is valid.  [default: until it is revoked]"
)
@click.option("--label", metavar="TEXT", default="", help="Where it is used, to tell it from others.  [default: none]")
@click.argument("name", metavar="NAME")
def token_command(*, directory: str | None, tokens_file: str | None, expires: int | None, label: str, name: str) -> int:
    """Print a new token for NAME. It is shown this once."""
    lifetime_s = None if expires is None else max(1, expires // SECOND)
    click.echo(_store(directory, tokens_file).issue(name, int(time.time()), lifetime_s=lifetime_s, label=label))
    return 0


@user_command.command("tokens", short_help="List tokens.", epilog="Example: ff fs admin user tokens ann --dir fs")
@_where
@click.option("--json", "as_json", is_flag=True, help="One JSON object for each token.")
@click.argument("name", metavar="NAME")
def tokens_command(*, directory: str | None, tokens_file: str | None, as_json: bool, name: str) -> int:
    """List the tokens of NAME, by their public numbers."""
    from fireflyer.cli.token_table import print_tokens

    print_tokens(_store(directory, tokens_file).tokens(name), as_json=as_json)
    return 0


@user_command.command("revoke-token", short_help="Revoke a token.",
                      epilog="Example: ff fs admin user revoke-token ann 0f3c21d4a95e88b7 --dir fs")  # fmt: skip
@_where
@click.argument("name", metavar="NAME")
@click.argument("token_id", metavar="TOKEN")
def revoke_token_command(*, directory: str | None, tokens_file: str | None, name: str, token_id: str) -> int:
    """Revoke the token of NAME whose number, as `ff fs admin user tokens NAME` shows it, is TOKEN. Its connections are
    closed within 10 s, on each machine from the moment when it has the file."""
    store = _store(directory, tokens_file)
    _check_token(store, name, token_id, directory, tokens_file)
    store.revoke(token_id)
    click.echo(f"Token {token_id} of {name} is revoked.")
    return 0


@user_command.command("expire-token", short_help="Let a token expire.",
                      epilog="Example: ff fs admin user expire-token ann 0f3c21d4a95e88b7 --after 2h")  # fmt: skip
@_where
@click.option("--after", metavar="TIME", type=Duration(), required=True, help="How long it stays valid.")
@click.argument("name", metavar="NAME")
@click.argument("token_id", metavar="TOKEN")
def expire_token_command(
    *, directory: str | None, tokens_file: str | None, after: int, name: str, token_id: str
) -> int:
    """Let the token TOKEN of NAME expire after a while, so that another one can take its place before. It cannot get a
    longer life than it has."""
    store, now_s = _store(directory, tokens_file), int(time.time())
    _check_token(store, name, token_id, directory, tokens_file)
    store.expire(token_id, now_s + max(1, after // SECOND))
    click.echo(f"Token {token_id} of {name} expires in {format_duration(after)}.")
    return 0


def _check_token(store: TokenStore, name: str, token_id: str, directory: str | None, tokens_file: str | None) -> None:
    """Raises `NotFound`; `UsageError` for the token with which the commands of a cluster prove themselves."""
    from fireflyer.fs.service.local.layout import Layout
    from fireflyer.identity.handshake import token_id_of

    if token_id not in [token.id for token in store.tokens(name)]:
        raise NotFound(f"user {name} has no token {token_id[:80]!r}; `ff fs admin user tokens {name}` shows them")
    if tokens_file is None and token_id == token_id_of(Layout(directory_of(directory)).admin_token()):
        raise UsageError(f"token {token_id} is the one that the commands of this cluster use; it has to stay")
