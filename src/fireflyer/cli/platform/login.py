"""`ff login`: how this user reaches a platform."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Final

import click

from fireflyer.base.errors import UsageError
from fireflyer.cli.completion import complete_file
from fireflyer.cli.platform.connect import connection_path

if TYPE_CHECKING:
    from fireflyer.cluster.client import ManagerAddress

__all__ = ["command"]

_MAX_TOKEN_BYTES: Final = 256


@click.command("login", short_help="Remember where the platform is, and your token.",
               epilog="Example: ff login https://head:9440 --fingerprint 3f1c…")  # fmt: skip
@click.option("--fingerprint", "fingerprints", metavar="SHA256", multiple=True, help="Of the manager's certificate, as "
              "its log says it; repeat it for each URL, in their order. Not needed where certificates are signed for "
              "the managers' names.")  # fmt: skip
@click.option("--token-file", metavar="FILE", default="-", shell_complete=complete_file,
              help="File with your token; -: standard input.  [default: -]")  # fmt: skip
@click.argument("urls", metavar="URL...", nargs=-1, required=True)
def command(*, urls: tuple[str, ...], fingerprints: tuple[str, ...], token_file: str) -> int:
    """Ask the platform at URL who you are, and keep URL and token for the other commands, in a file that only you may
    read. Where several managers share a platform, give the URL of each: commands then find the one that leads."""
    import sys

    import msgspec

    from fireflyer.cluster.client import Client, Connection
    from fireflyer.identity.private_files import read_private_file, write_private_file

    first, *others = _managers(urls, fingerprints)
    if token_file == "-":  # noqa: S105
        if sys.stdin.isatty():
            click.echo("token: ", nl=False, err=True)
        token = sys.stdin.readline(_MAX_TOKEN_BYTES + 1).strip()
    else:
        token = read_private_file(token_file, _MAX_TOKEN_BYTES).decode(errors="replace").strip()
    connection = Connection(url=first.url, token=token, fingerprint=first.fingerprint, others=tuple(others))
    with Client(connection) as client:
        who = client.whoami()
    path = connection_path()
    os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
    write_private_file(path, msgspec.json.encode(connection) + b"\n")
    click.echo(f"logged in as {who.user}; kept in {path}")
    return 0


def _managers(urls: tuple[str, ...], fingerprints: tuple[str, ...]) -> list[ManagerAddress]:
    """Raises `UsageError`."""
    from fireflyer.cluster.client import MAX_MANAGERS, ManagerAddress

    if len(urls) > MAX_MANAGERS:
        raise UsageError(f"{len(urls)} managers are more than {MAX_MANAGERS}; name fewer of them")
    if fingerprints and len(fingerprints) != len(urls):
        raise UsageError(
            f"{len(fingerprints)} fingerprints for {len(urls)} managers; give --fingerprint once for each URL, or never"
        )
    return [
        ManagerAddress(url=url.rstrip("/"), fingerprint=fingerprint.replace(":", "").lower())
        for url, fingerprint in zip(urls, fingerprints or [""] * len(urls), strict=True)
    ]
