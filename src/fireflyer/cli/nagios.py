"""Commands whose exit codes are those of Nagios: what is wrong with the command itself says nothing of the node."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

import click

from fireflyer.cli.help_sections import OrderedGroup

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["EXIT_UNKNOWN", "NagiosGroup", "UnknownResult"]

EXIT_UNKNOWN: Final = 3
"""Not 2, which is a fault of the node: a wrong option or policy must not take a node out."""


class UnknownResult(Exception):
    """The command could not do its work, for the reason of `__cause__`."""


class NagiosGroup(OrderedGroup):
    """A command that ends with 3 by any error of its own; its commands do so with `all_commands`."""

    def __init__(self, *arguments: Any, all_commands: bool = False, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self._all_commands = all_commands

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        with _as_unknown():
            return super().make_context(info_name, args, parent, **extra)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            with _as_unknown():
                return super().invoke(ctx)
        except UnknownResult as error:
            if ctx.invoked_subcommand is None or self._all_commands or error.__cause__ is None:
                raise
            raise error.__cause__ from None


@contextmanager
def _as_unknown() -> Iterator[None]:
    try:
        yield
    except (click.exceptions.Exit, click.Abort, UnknownResult):
        raise
    except Exception as error:
        raise UnknownResult from error
