"""A group whose help lists its commands under headings, and then examples. A verb that it does not have is refused with
the one that was probably meant."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import Any

import click

from fireflyer.cli.help_sections import write_examples, write_sections

__all__ = ["SectionedGroup"]


class SectionedGroup(click.Group):
    """`sections`: heading, and the commands under it in their order. `examples`: command lines, and what each does."""

    def __init__(
        self,
        name: str,
        *,
        sections: Mapping[str, Sequence[click.Command]],
        examples: Sequence[tuple[str, str]],
        **settings: Any,
    ) -> None:
        super().__init__(name, **settings)
        self.sections = sections
        self.examples = examples
        for commands in sections.values():
            for command in commands:
                self.add_command(command)

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002
        return [command.name for commands in self.sections.values() for command in commands if command.name]

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if name not in self.commands and not name.startswith("-") and not ctx.resilient_parsing:
            hint = self._meant(ctx, name)
            raise click.UsageError(f"no command {name!r}" + (f"; did you mean '{hint}'?" if hint else ""), ctx)
        return super().resolve_command(ctx, args)

    def _meant(self, ctx: click.Context, name: str) -> str:
        """Also one of a group in this one, or of the group around it. Empty if nothing is near."""
        for inner in self.commands.values():
            if isinstance(inner, click.Group) and name in inner.commands:
                return f"{ctx.command_path} {inner.name} {name}"
        outer = ctx.parent
        if outer is not None and isinstance(outer.command, SectionedGroup) and name in outer.command.commands:
            return f"{outer.command_path} {name}"
        near = difflib.get_close_matches(name, self.commands, n=1)
        return f"{ctx.command_path} {near[0]}" if near else ""

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        named = {heading: [(one.name or "", one) for one in commands] for heading, commands in self.sections.items()}
        write_sections(formatter, named)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        write_examples(formatter, self.examples)
