"""`ff fs admin user`: the users of a cluster, with their uids, groups, roles and tokens."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

import click

from fireflyer.base.errors import NotFound, UsageError
from fireflyer.base.units import SECOND, format_duration
from fireflyer.cli.fs.connect import ClusterTarget, answered, where_options
from fireflyer.cli.help_sections import OrderedGroup
from fireflyer.cli.numbers import Duration, WholeNumber

if TYPE_CHECKING:
    from fireflyer.accounts.managing import UsersClient
    from fireflyer.identity import TokenInfo, UserInfo

__all__ = ["to_json", "user_command"]

MAX_ID = (1 << 32) - 2
T = TypeVar("T")
_Role = click.Choice(["fs:admin"])


def to_json(users: Sequence[UserInfo]) -> bytes:
    import msgspec

    return msgspec.json.encode([{**msgspec.structs.asdict(user.account), "roles": user.roles} for user in users])


@click.group(
    "user", cls=OrderedGroup, short_help="Add, remove and list users.", epilog="Example: ff fs admin user list --dir fs"
)
def user_command() -> None:
    """Users of a cluster that has no platform: their names, numbers, roles and tokens.

    Its managers keep them in their store, so one of them has to run. Connections of tokens that are revoked or have
    expired, and of users who are removed, are closed within 10 s. The users of a platform: `ff user`."""


def _with_users(where: ClusterTarget, work: Callable[[UsersClient], Awaitable[T]]) -> T:
    from fireflyer.accounts.managing import UsersClient
    from fireflyer.fs.service.local.layout import Layout
    from fireflyer.identity import NodeCredential, UserCredential

    if where.directory and Layout(where.directory).load().accounts:
        raise UsageError(
            f"the users of {where.directory} are those of its platform: ff user add, ff user token (ff user --help)"
        )
    credential = where.credential
    if not isinstance(credential, NodeCredential | UserCredential):
        raise UsageError("users are changed with the token of an administrator or the node secret")

    async def asking(limit_s: float) -> T:
        async with UsersClient(where.managers, credential, timeout_ns=int(limit_s * SECOND)) as users:
            return await work(users)

    return answered(where, asking)


@user_command.command("add", short_help="Add a user.", epilog="Example: ff fs admin user add --uid 1000 --token ann")
@where_options
@click.option("--uid", metavar="N", type=WholeNumber(0, MAX_ID), help="User id.  [default: a new one]")
@click.option("--gid", metavar="N", type=WholeNumber(0, MAX_ID), help="Primary group id.  [default: the uid]")
@click.option(
    "--group", "groups", metavar="N", multiple=True, type=WholeNumber(0, MAX_ID), help="Further group id; repeatable."
)
@click.option("--token", is_flag=True, help="Print a new token for the user; it cannot be shown again.")
@click.argument("name", metavar="NAME")
def add_command(
    *, where: ClusterTarget, uid: int | None, gid: int | None, groups: tuple[int, ...], token: bool, name: str
) -> int:
    """Add user NAME. If they use a trusted mount, give them the uid that they have on that machine: `id -u NAME`."""

    async def add(users: UsersClient) -> str:
        account = await users.create_user(name, uid=uid, gid=gid, groups=groups)
        if token:
            return await users.issue(name)
        return f"User {name} has uid {account.uid} and gid {account.gid}."

    click.echo(_with_users(where, add))
    return 0


@user_command.command("rm", short_help="Remove a user and their tokens.", epilog="Example: ff fs admin user rm ann")
@where_options
@click.argument("name", metavar="NAME")
def rm_command(*, where: ClusterTarget, name: str) -> int:
    """Remove user NAME and all of their tokens. Their files stay, and their uid is not given to another user."""
    from fireflyer.fs.service.local.layout import ADMIN
    from fireflyer.identity.users import no_user

    if name == ADMIN and where.directory:
        raise UsageError(f"user {ADMIN} cannot be removed: the commands of this cluster use it")

    async def remove(users: UsersClient) -> int:
        user = await users.user(name)
        if user is None:
            raise no_user(name)
        await users.remove_user(name)
        return user.account.uid

    click.echo(f"User {name} is removed; the files of uid {_with_users(where, remove)} stay.")
    return 0


@user_command.command("list", short_help="List users.", epilog="Example: ff fs admin user list --dir fs")
@where_options
@click.option("--json", "as_json", is_flag=True, help="Print a JSON array.")
def list_command(*, where: ClusterTarget, as_json: bool) -> int:
    """List the users: name, uid, gid, number of valid tokens, groups and roles."""
    import time

    if as_json:
        click.echo(to_json(_with_users(where, lambda users: users.users())).decode())
        return 0

    async def known(users: UsersClient) -> list[tuple[UserInfo, list[TokenInfo]]]:
        return [(user, await users.tokens(user.account.name)) for user in await users.users()]

    now_s = int(time.time())
    for user, tokens in _with_users(where, known):
        one = user.account
        good = sum(token.expires_s is None or token.expires_s > now_s for token in tokens)
        groups = f" groups {','.join(map(str, one.groups))}" if one.groups else ""
        roles = f" roles {','.join(user.roles)}" if user.roles else ""
        click.echo(f"{one.name:<20} uid {one.uid:<10} gid {one.gid:<10} tokens {good}{groups}{roles}")
    return 0


@user_command.command("grant-role", short_help="Grant a role.",
                      epilog="Example: ff fs admin user grant-role ann fs:admin --dir fs")  # fmt: skip
@where_options
@click.argument("name", metavar="NAME")
@click.argument("role", metavar="ROLE", type=_Role)
def grant_role_command(*, where: ClusterTarget, name: str, role: str) -> int:
    """Grant ROLE to user NAME. fs:admin: they are uid 0 for files, and may change users, nodes and chains."""
    _with_users(where, lambda users: users.grant_role(name, role))
    click.echo(f"User {name} has the role {role}.")
    return 0


@user_command.command("revoke-role", short_help="Revoke a role.",
                      epilog="Example: ff fs admin user revoke-role ann fs:admin --dir fs")  # fmt: skip
@where_options
@click.argument("name", metavar="NAME")
@click.argument("role", metavar="ROLE", type=_Role)
def revoke_role_command(*, where: ClusterTarget, name: str, role: str) -> int:
    """Revoke ROLE of user NAME. Names in `administrators` of a manager's configuration keep theirs."""
    _with_users(where, lambda users: users.revoke_role(name, role))
    click.echo(f"User {name} does not have the role {role}.")
    return 0


@user_command.command("token", short_help="Issue a token.", epilog="Example: ff fs admin user token ann --expires 90d")
@where_options
@click.option(
    "--expires", metavar="TIME", type=Duration(), help="How long it is valid.  [default: until it is revoked]"
)
@click.option("--label", metavar="TEXT", default="", help="Where it is used, to tell it from others.  [default: none]")
@click.argument("name", metavar="NAME")
def token_command(*, where: ClusterTarget, expires: int | None, label: str, name: str) -> int:
    """Print a new token for NAME. It is shown this once."""
    lifetime_s = None if expires is None else max(1, expires // SECOND)
    click.echo(_with_users(where, lambda users: users.issue(name, lifetime_s=lifetime_s, label=label)))
    return 0


@user_command.command("tokens", short_help="List tokens.", epilog="Example: ff fs admin user tokens ann --dir fs")
@where_options
@click.option("--json", "as_json", is_flag=True, help="One JSON object for each token.")
@click.argument("name", metavar="NAME")
def tokens_command(*, where: ClusterTarget, as_json: bool, name: str) -> int:
    """List the tokens of NAME, by their public numbers."""
    from fireflyer.cli.token_table import print_tokens

    print_tokens(_with_users(where, lambda users: users.tokens(name)), as_json=as_json)
    return 0


@user_command.command("revoke-token", short_help="Revoke a token.",
                      epilog="Example: ff fs admin user revoke-token ann 0f3c21d4a95e88b7 --dir fs")  # fmt: skip
@where_options
@click.argument("name", metavar="NAME")
@click.argument("token_id", metavar="TOKEN")
def revoke_token_command(*, where: ClusterTarget, name: str, token_id: str) -> int:
    """Revoke the token of NAME whose number, as `ff fs admin user tokens NAME` shows it, is TOKEN. Its connections are
    closed within 10 s."""

    async def revoke(users: UsersClient) -> None:
        await _check_token(users, where, name, token_id)
        await users.revoke(token_id)

    _with_users(where, revoke)
    click.echo(f"Token {token_id} of {name} is revoked.")
    return 0


@user_command.command("expire-token", short_help="Let a token expire.",
                      epilog="Example: ff fs admin user expire-token ann 0f3c21d4a95e88b7 --after 2h")  # fmt: skip
@where_options
@click.option("--after", metavar="TIME", type=Duration(), required=True, help="How long it stays valid.")
@click.argument("name", metavar="NAME")
@click.argument("token_id", metavar="TOKEN")
def expire_token_command(*, where: ClusterTarget, after: int, name: str, token_id: str) -> int:
    """Let the token TOKEN of NAME expire after a while, so that another one can take its place before. It cannot get a
    longer life than it has."""

    async def expire(users: UsersClient) -> None:
        await _check_token(users, where, name, token_id)
        await users.expire(token_id, max(1, after // SECOND))

    _with_users(where, expire)
    click.echo(f"Token {token_id} of {name} expires in {format_duration(after)}.")
    return 0


async def _check_token(users: UsersClient, where: ClusterTarget, name: str, token_id: str) -> None:
    """Raises `NotFound`; `UsageError` for the token with which the commands of a cluster prove themselves."""
    from fireflyer.fs.service.local.layout import Layout
    from fireflyer.identity.handshake import token_id_of

    if token_id not in [token.id for token in await users.tokens(name)]:
        raise NotFound(f"user {name} has no token {token_id[:80]!r}; `ff fs admin user tokens {name}` shows them")
    if where.directory and token_id == token_id_of(Layout(where.directory).admin_token()):
        raise UsageError(f"token {token_id} is the one that the commands of this cluster use; it has to stay")
