"""Shell completion: `ff completion SHELL` prints the script, and what arguments complete to.

The script asks `ff` itself at each TAB, by the variable `COMPLETE_VARIABLE` in its environment; click answers.
"""

from __future__ import annotations

from typing import Final

import click
from click.shell_completion import CompletionItem, get_completion_class

__all__ = ["COMPLETE_VARIABLE", "command", "complete_directory", "complete_file"]

SHELLS: Final = ("bash", "zsh", "fish")
PROGRAM: Final = "ff"
COMPLETE_VARIABLE: Final = "_FF_COMPLETE"


def complete_file(_ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """For `shell_complete=`: the shell completes paths of files."""
    return [CompletionItem(incomplete, type="file")]


def complete_directory(_ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """For `shell_complete=`: the shell completes paths of directories."""
    return [CompletionItem(incomplete, type="dir")]


@click.command(
    "completion",
    short_help="Print the shell completion script.",
    epilog="""\b
Examples, for the start file of the shell:
  bash, ~/.bashrc:                   eval "$(ff completion bash)"
  zsh, ~/.zshrc, after compinit:     eval "$(ff completion zsh)"
  fish, ~/.config/fish/config.fish:  ff completion fish | source""",
)
@click.argument("shell", metavar="SHELL", type=click.Choice(SHELLS))
@click.pass_context
def command(ctx: click.Context, shell: str) -> None:
    """Print a script that completes commands, options, their values, and paths of `ff`. SHELL is bash, zsh or fish."""
    completion = get_completion_class(shell)
    assert completion is not None  # noqa: S101  # click has all of SHELLS
    click.echo(completion(ctx.find_root().command, {}, PROGRAM, COMPLETE_VARIABLE).source())
