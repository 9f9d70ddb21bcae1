"""Help of a group of commands: the commands under headings, then examples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import click

__all__ = ["OrderedGroup", "write_examples", "write_sections"]


class OrderedGroup(click.Group):
    """Help and completion list the commands in the order in which they were added, not by name."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002
        return list(self.commands)


def write_sections(formatter: click.HelpFormatter, sections: Mapping[str, Sequence[tuple[str, click.Command]]]) -> None:
    """`sections`: heading, and the commands under it with the names to show. All sections have the same columns."""
    width = max(len(name) for commands in sections.values() for name, _ in commands)
    limit = formatter.width - width - 6  # indentation and the gap between the columns
    for heading, commands in sections.items():
        with formatter.section(heading):
            formatter.write_dl([(name.ljust(width), command.get_short_help_str(limit)) for name, command in commands])


def write_examples(formatter: click.HelpFormatter, examples: Sequence[tuple[str, str]]) -> None:
    """`examples`: command lines, and what each does."""
    width = max(len(line) for line, _ in examples)
    with formatter.section("Examples"):
        for line, meaning in examples:
            formatter.write(f"{'':>{formatter.current_indent}}{line:<{width}}  # {meaning}\n")
