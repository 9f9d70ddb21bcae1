"""Help: commands of a group, or the many options of a command, under headings; examples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import click

__all__ = ["OrderedGroup", "SectionedCommand", "write_examples", "write_sections"]


class OrderedGroup(click.Group):
    """Help and completion list the commands in the order in which they were added, not by name."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002
        return list(self.commands)


class SectionedCommand(click.Command):
    """A command whose help has its options under headings, all in the same columns."""

    def __init__(self, *args: Any, sections: Mapping[str, Sequence[str]], **kwargs: Any) -> None:
        """`sections`: heading, and the parameters' names of the options under it. Those that it does not name are last,
        under "Other options"."""
        super().__init__(*args, **kwargs)
        self.sections = sections

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        options = [one for one in self.get_params(ctx) if isinstance(one, click.Option)]
        records = {one.name: record for one in options if (record := one.get_help_record(ctx))}
        sections = {
            heading: [records.pop(name) for name in names if name in records]
            for heading, names in self.sections.items()
        }
        width = min(30, max(len(option) for rows in sections.values() for option, _ in rows))
        for heading, rows in {**sections, "Other options": list(records.values())}.items():
            with formatter.section(heading):
                formatter.write_dl([(option.ljust(width), text) for option, text in rows])


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
