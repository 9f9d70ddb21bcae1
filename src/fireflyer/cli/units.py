"""Units of systemd that run commands of `ff`: what `--unit` and `ff agent unit` print."""

from __future__ import annotations

import getpass
import os
import shlex
import sys
from typing import Final

import click

from fireflyer.base.errors import UsageError

__all__ = ["exec_line", "print_unit", "print_unit_of", "unit_option"]

_UNIT: Final = """\
# {title}.
{install}
[Unit]
Description=Fire-Flyer: {what}
{ordering}StartLimitIntervalSec=0

[Service]
{account}Type=notify
ExecStart={command}
Restart=always
RestartSec=1
LimitNOFILE=65536
{settings}
[Install]
WantedBy={target}
"""
_NETWORK: Final = "Wants=network-online.target\nAfter=network-online.target\n"
_SETTINGS: Final = "NoNewPrivileges=yes\n"


def unit_option(function: click.decorators.FC) -> click.decorators.FC:
    """Add `--unit`, which arrives as `unit`: "system", "user" or None."""
    return click.option(
        "--unit",
        type=click.Choice(["system", "user"]),
        help="Print a unit by which systemd, of the machine or of this user, runs it, and end.  [default: run it]",
    )(function)


def print_unit(
    kind: str,
    *,
    name: str,
    what: str,
    words: tuple[str, ...],
    config: str,
    log_file: str | None = None,
    settings: str = _SETTINGS,
) -> int:
    """Print the unit of `ff WORDS CONFIG` with its installation in the first lines. `name`: of the unit, without
    `.service`. A unit of the machine runs it as the user who asks. `settings`: more lines of its [Service]. Raises
    `UsageError` where CONFIG is not there."""
    path = os.path.abspath(config)
    if not os.path.isfile(path):
        raise UsageError(f"{config} is no file; a unit needs the configuration of the process that it runs")
    if log_file is not None:
        words = (*words, "--log", os.path.abspath(log_file))
    return print_unit_of(
        kind, (*words, path), asked=("ff", *words, "--unit", kind, path), name=name, what=what,
        title=f"{what}, configured by {path}", settings=settings,
    )  # fmt: skip


def print_unit_of(
    kind: str,
    words: tuple[str, ...],
    *,
    asked: tuple[str, ...],
    name: str,
    what: str,
    title: str,
    settings: str = _SETTINGS,
    ordering: str = "",
) -> int:
    """As `print_unit`, of `ff WORDS`. `asked`: the command that prints it; `title`: its first line; `ordering`: more
    lines of the [Unit] of the machine."""
    again, user = shlex.join(asked), getpass.getuser()
    if kind == "system":
        install = (
            f"#   {again} > /etc/systemd/system/{name}.service     (write it as root)\n"
            f"#   systemctl daemon-reload && systemctl enable --now {name}"
        )
        account = "" if user == "root" else f"User={user}\n"
        ordering, target = _NETWORK + ordering, "multi-user.target"
    else:
        install = (
            f"#   {again} > ~/.config/systemd/user/{name}.service\n"
            f"#   systemctl --user daemon-reload && systemctl --user enable --now {name}\n"
            f"#   loginctl enable-linger {user}     (it runs while nobody is logged in)"
        )
        account, ordering, target = "", "", "default.target"
    unit = _UNIT.format(
        title=title, what=what, install=install, ordering=ordering, account=account, command=exec_line(*words),
        settings=settings, target=target,
    )  # fmt: skip
    click.echo(unit, nl=False)
    return 0


def exec_line(*words: str) -> str:
    """Value of `ExecStart` that runs `ff WORDS` by this interpreter."""
    return " ".join(_quoted(word) for word in (sys.executable, "-P", "-m", "fireflyer", *words))


def _quoted(word: str) -> str:
    """As systemd.service(5) takes it: `%` and `$` are not to be replaced."""
    word = word.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%").replace("$", "$$")
    return f'"{word}"' if any(char in word for char in " '\"\\") else word
