"""How commands find the platform: `ff up` and `ff login` write a file with its URL, fingerprint and a token."""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable
from shlex import quote
from typing import TYPE_CHECKING, Final

import click

from fireflyer.base.errors import NotFound, PermissionDenied, UsageError
from fireflyer.base.units import SECOND

if TYPE_CHECKING:
    from fireflyer.cluster.client import Client, Connection

__all__ = [
    "DEFAULT_DIRECTORY",
    "PLATFORM_HELP",
    "PLATFORM_VARIABLE",
    "clock",
    "connected",
    "connection_path",
    "of_another",
    "plain",
    "platform_option",
]

DEFAULT_DIRECTORY: Final = "platform"
PLATFORM_VARIABLE: Final = "FIREFLYER_PLATFORM"
_MAX_TOKEN_BYTES: Final = 1024
PLATFORM_HELP: Final = (
    f"Directory of `ff up`, or file that `ff login` wrote.  [default: what ${PLATFORM_VARIABLE} names, or the platform "
    "of the task in which the command runs, or ./platform, or that of the last `ff login`]"
)


def platform_option(function: Callable[..., object]) -> Callable[..., object]:
    """`--platform`; the command gets a connected `client`."""

    @functools.wraps(function)
    @click.option("--platform", metavar="PATH", help=PLATFORM_HELP)
    def call(*args: object, platform: str | None, **options: object) -> object:
        with connected(platform) as client:
            return function(*args, client=client, **options)

    return call


def connected(platform: str | None) -> Client:
    """Raises `NotFound` where there is no platform."""
    from fireflyer.cluster.client import Client, read_connection

    if not platform and not os.environ.get(PLATFORM_VARIABLE) and os.environ.get("FF_TOKEN_FILE"):
        return Client(
            _of_task(os.environ["FF_TOKEN_FILE"], os.environ.get("FF_MANAGERS", "")), if_unreachable="try again later"
        )
    path = _found(platform)
    try:
        return Client(read_connection(path), if_unreachable=_to_start_it(path))
    except NotFound:
        raise NotFound(
            f"no platform is known: {path} does not exist; start one here with `ff up -d`, or log in: ff login URL"
        ) from None
    except PermissionDenied as error:
        raise of_another(error, os.path.dirname(path)) from None


def of_another(error: PermissionDenied, directory: str) -> PermissionDenied:
    """What to do where a file of the platform in `directory` cannot be read: it is another user's, as a rule."""
    try:
        mine = os.stat(directory).st_uid == os.geteuid()
    except OSError:
        mine = False
    if mine:
        return error
    return PermissionDenied(
        f"the platform in {directory} was started by another user; log in to it: ff login URL, with a token that its "
        "operator gives you"
    )


def _to_start_it(path: str) -> str:
    """What to do where nothing answers at the address in the connection file `path`."""
    from fireflyer.cluster.local.layout import CONNECTION_NAME, PlatformLayout

    layout = PlatformLayout(os.path.dirname(path))
    if os.path.basename(path) == CONNECTION_NAME and layout.exists():
        at_default = layout.directory == os.path.abspath(DEFAULT_DIRECTORY)
        start = "ff up -d" if at_default else f"ff up -d --dir {quote(os.path.relpath(layout.directory))}"
        return f"if it does not run, start it again: {start} (or ff up -d FILE, with the file that it was made with)"
    return (
        f"{path} names it: if it has moved, log in again (ff login URL), or name another platform with --platform PATH"
    )


def _of_task(token_file: str, managers: str) -> Connection:
    """What a task was given. Raises `UsageError`, `NotFound`, `PermissionDenied`."""
    from fireflyer.cluster.client import Connection, ManagerAddress
    from fireflyer.identity.private_files import read_private_file

    token = read_private_file(token_file, _MAX_TOKEN_BYTES).decode("ascii", "replace").strip()
    found = [url.partition("#") for url in managers.split(",") if url]
    if not found:
        raise UsageError("FF_TOKEN_FILE is set and FF_MANAGERS is not; name the platform with --platform")
    first, *others = (ManagerAddress(url=url, fingerprint=fingerprint) for url, _, fingerprint in found)
    return Connection(url=first.url, fingerprint=first.fingerprint, token=token, others=tuple(others[:31]))


def _found(platform: str | None) -> str:
    from fireflyer.cluster.local.layout import CONNECTION_NAME

    if platform:
        return _file_of(platform, "--platform")
    if named := os.environ.get(PLATFORM_VARIABLE):
        return _file_of(named, f"the environment variable {PLATFORM_VARIABLE} is")
    here = os.path.join(DEFAULT_DIRECTORY, CONNECTION_NAME)
    return here if os.path.exists(here) else connection_path()


def _file_of(path: str, who: str) -> str:
    """`who` named it, for messages. Raises `UsageError`."""
    from fireflyer.cluster.local.layout import CONNECTION_NAME

    if not os.path.exists(path):
        raise UsageError(
            f"{who} {path!r}: there is no such file or directory; give the directory of `ff up` or a file of `ff login`"
        )
    return os.path.join(path, CONNECTION_NAME) if os.path.isdir(path) else path


def connection_path() -> str:
    """What `ff login` writes: below XDG_CONFIG_HOME, by default ~/.config."""
    base = os.environ.get("XDG_CONFIG_HOME") or os.path.join(os.path.expanduser("~"), ".config")
    return os.path.join(base, "fireflyer", "platform.json")


def clock(at_ns: int) -> str:
    """A time as a line of a table shows it, in the local time zone."""
    return time.strftime("%m-%d %H:%M", time.localtime(at_ns / SECOND))


def plain(text: str, limit: int = 500) -> str:
    """What users wrote, as a terminal may get it: no control characters, one line."""
    return "".join(char if char.isprintable() else "?" for char in " ".join(text.split()))[:limit]
