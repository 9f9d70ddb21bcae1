"""What `ff fs --help` shows: all commands under headings, and examples that the parser accepts."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator

import click
import pytest

from fireflyer.cli import main
from fireflyer.cli.fs.command import admin, command

Capture = pytest.CaptureFixture[str]


def commands_of(group: click.Group, path: str) -> Iterator[tuple[str, click.Command]]:
    for name in group.commands:
        found = group.commands[name]
        yield f"{path} {name}", found
        if isinstance(found, click.Group):
            yield from commands_of(found, f"{path} {name}")


COMMANDS = dict(commands_of(command, "ff fs"))
SINGLE = {path: found for path, found in COMMANDS.items() if found not in (admin, command)}


def parse(line: str) -> None:
    """Raises `click.UsageError` for what no command takes. Nothing is run."""
    words = shlex.split(line)
    assert words[:2] == ["ff", "fs"]
    found: click.Command = command
    context = click.Context(command, info_name="ff fs")
    words = words[2:]
    while isinstance(found, click.Group):
        name, inner, words = found.resolve_command(context, words)
        assert inner is not None
        found = inner
        if not isinstance(found, click.Group):
            found.make_context(name, words, parent=context)


@pytest.mark.parametrize("group", [command, admin], ids=["fs", "admin"])
def test_every_command_is_under_one_heading(group: click.Group, capsys: Capture) -> None:
    assert main(["fs", "--help"] if group is command else ["fs", "admin", "--help"]) == 0
    shown = capsys.readouterr().out
    for name, found in group.commands.items():
        summary = re.escape(found.get_short_help_str(120))
        assert len(re.findall(rf"^  {name} +{summary}$", shown, re.MULTILINE)) == 1, (name, shown)
    assert shown.index("Examples:") > shown.index(list(group.commands)[-1])


@pytest.mark.parametrize("line", [line for group in (command, admin) for line, _ in group.examples])
def test_the_examples_of_a_group_are_accepted(line: str) -> None:
    parse(line)


@pytest.mark.parametrize("path", SINGLE)
def test_every_command_has_an_example_of_itself_that_is_accepted(path: str) -> None:
    epilog = SINGLE[path].epilog
    assert epilog is not None
    example = epilog.removeprefix("Example: ")
    assert example.startswith(f"{path} ")
    parse(example)


@pytest.mark.parametrize("path", COMMANDS)
def test_every_option_has_a_help_text(path: str) -> None:
    for option in COMMANDS[path].params:
        if isinstance(option, click.Option) and not option.hidden:
            assert option.help, f"{path} {option.opts[-1]}"


def test_an_example_with_an_unknown_option_is_noticed() -> None:
    with pytest.raises(click.UsageError):
        parse("ff fs ls --nodes 3")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["lss"], "no command 'lss'; did you mean 'ff fs ls'?; see 'ff fs --help'"),
        (["drain", "--node", "2"], "no command 'drain'; did you mean 'ff fs admin drain'?; see 'ff fs --help'"),
        (["admin", "status"], "no command 'status'; did you mean 'ff fs status'?; see 'ff fs admin --help'"),
        (["frobnicate"], "no command 'frobnicate'; see 'ff fs --help'"),
        (["ls", "--nodes", "3"], "No such option '--nodes'"),
        (["cat"], "Missing argument 'PATH...'; see 'ff fs cat --help'"),
        (["up", "--nodes", "two"], "Invalid value for '--nodes': 'two' is not a valid integer; see 'ff fs up --help'"),
    ],
)
def test_a_wrong_verb_or_option_is_one_line_with_the_help_to_read(
    capsys: Capture, arguments: list[str], said: str
) -> None:
    assert main(["fs", *arguments]) == 2
    text = capsys.readouterr().err
    assert text.startswith(f"error: {said}"), text
    assert text.count("\n") == 1
