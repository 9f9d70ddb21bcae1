"""Help: commands in groups, an example for each that the parser takes, a unit and a default for each option."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from itertools import takewhile
from pathlib import Path

import click
import pytest
from click.shell_completion import ShellComplete

from fireflyer.cli import main
from fireflyer.cli.collectives.command import command as collectives_command
from fireflyer.cli.completion import COMPLETE_VARIABLE, SHELLS
from fireflyer.cli.completion import command as completion_command
from fireflyer.cli.data.command import command as data_command
from fireflyer.cli.help_sections import SectionedCommand
from fireflyer.cli.hosts.command import command as host_command
from fireflyer.cli.jobs.agent import command as agent_command
from fireflyer.cli.jobs.demo import command as demo_command
from fireflyer.cli.jobs.report import command as report_command
from fireflyer.cli.jobs.run import command as run_command
from fireflyer.cli.jobs.soak import command as soak_command
from fireflyer.cli.main import ff
from fireflyer.cli.other_words import OTHER_WORDS
from fireflyer.cli.platform.execs import exec_command
from fireflyer.cli.platform.hai import command as hai_command
from fireflyer.cli.platform.history import audit_command, history_command, usage_command
from fireflyer.cli.platform.managers import manager_command
from fireflyer.cli.platform.quota import command as quota_command
from fireflyer.cli.platform.reservations import command as reservation_command
from fireflyer.cli.platform.shells import shell_command
from fireflyer.cli.platform.time_sharing import command as time_sharing_command
from fireflyer.cli.platform.top import command as top_command
from fireflyer.cli.train.command import command as train_command
from fireflyer.cli.version import command as version_command

Capture = pytest.CaptureFixture[str]
COMMANDS: Mapping[str, click.Command] = {
    "run": run_command,
    "report": report_command,
    "demo": demo_command,
    "soak": soak_command,
    "version": version_command,
    "exec": exec_command,
    "shell": shell_command,
    "completion": completion_command,
    **{f"agent {name}": one for name, one in agent_command.commands.items()},
    **{f"manager {name}": one for name, one in manager_command.commands.items()},
    "history": history_command,
    "usage": usage_command,
    "audit": audit_command,
    "hai": hai_command,
    "top": top_command,
    "quota": quota_command,
    **{f"quota {name}": one for name, one in quota_command.commands.items()},
    **{f"reservation {name}": one for name, one in reservation_command.commands.items()},
    "time-sharing": time_sharing_command,
    **{f"host {name}": one for name, one in host_command.commands.items()},
    **{f"data {name}": one for name, one in data_command.commands.items()},
    "collectives explain": collectives_command.commands["explain"],
    "collectives plan": collectives_command.commands["plan"],
    **{f"train {name}": one for name, one in train_command.commands.items()},
}


def examples(text: str) -> Iterator[list[str]]:
    """Command lines of a help text, up to a pipe or a redirection, without the remarks behind `#`."""
    for line in text[text.rfind("\n  Example") + 1 :].splitlines():
        command = line.strip().removeprefix("Example: ")
        if command.startswith("ff "):
            words = shlex.split(command, comments=True)[1:]
            yield list(takewhile(lambda word: word not in ("|", "&&") and not word.startswith(">"), words))


def every_command(group: click.Group, path: str = "") -> Iterator[str]:
    """The path below `ff` of each command, of groups too."""
    context = click.Context(group)
    for name in group.list_commands(context):
        found = group.get_command(context, name)
        yield f"{path}{name}"
        if isinstance(found, click.Group):
            yield from every_command(found, f"{path}{name} ")


EVERY: Sequence[str] = tuple(every_command(ff))


def test_help_lists_every_command_once_under_a_heading_with_examples(capsys: Capture) -> None:
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    headings = ("For researchers:", "For operators:", "Processes of a cluster, for systemd or Kubernetes:", "Examples:")
    assert [heading for heading in headings if f"\n{heading}\n" in text] == list(headings)
    listed = [line.split()[0] for line in text.split("\nExamples:")[0].splitlines() if line.startswith("  ")]
    context = click.Context(ff, info_name="ff")
    assert all(listed.count(name) == (4 if name == "fs" else 1) for name in ff.list_commands(context))
    assert len(list(examples(text))) == 7


def parsed(monkeypatch: pytest.MonkeyPatch, argv: list[str]) -> str:
    """The path of the command that would run with these arguments; the error where they are refused."""
    ran: list[str] = []

    def invoke(_self: click.Command, ctx: click.Context) -> int:
        ran.append(ctx.command_path)
        return 0

    monkeypatch.setattr(click.Command, "invoke", invoke)
    return ran[-1] if main(argv) == 0 and ran else ""


@pytest.mark.parametrize("name", ["", "collectives", *COMMANDS])
def test_examples_are_taken_by_the_parser(name: str, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    assert main([*name.split(), "--help"]) == 0
    found = list(examples(capsys.readouterr().out))
    assert found or name == "completion"
    for argv in found:
        assert parsed(monkeypatch, argv).startswith(f"ff {name}".rstrip()), capsys.readouterr().err


@pytest.mark.parametrize("name", EVERY)
def test_an_example_may_be_pasted_into_a_shell(name: str, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    assert main([*name.split(), "--help"]) == 0
    for argv in examples(capsys.readouterr().out):
        assert parsed(monkeypatch, argv), (argv, capsys.readouterr().err)


@pytest.mark.parametrize("word", OTHER_WORDS)
def test_a_word_of_another_tool_is_answered_with_our_command(word: str, capsys: Capture) -> None:
    assert main([word]) == 2
    assert (
        capsys.readouterr().err
        == f"error: no command '{word}'; did you mean 'ff {OTHER_WORDS[word]}'?; see 'ff --help'\n"
    )
    assert OTHER_WORDS[word] in (*EVERY, "--help")


def test_commands_of_a_group_stand_in_the_order_in_which_they_are_needed(capsys: Capture) -> None:
    assert main(["train", "--help"]) == 0
    listed = re.findall(r"^  (run|compare|plan|schedule) ", capsys.readouterr().out, re.MULTILINE)
    assert listed == ["run", "compare", "plan", "schedule"]


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_says_its_default_and_every_command_has_an_example(name: str) -> None:
    command = COMMANDS[name]
    assert "Example" in (command.epilog or "")
    for option in command.params:
        if isinstance(option, click.Option) and not (
            option.hidden or option.is_flag or option.multiple or option.required
        ):
            assert option.show_default or "[default: " in (option.help or ""), option.name


def completed(*arguments: str) -> list[str]:
    shell = ShellComplete(ff, {}, "ff", COMPLETE_VARIABLE)
    return [f"{item.type}:{item.value}" for item in shell.get_completions(list(arguments[:-1]), arguments[-1])]


def test_commands_options_values_and_paths_complete() -> None:
    assert completed("r") == ["plain:run", "plain:resume", "plain:report", "plain:reservation", "plain:reliability"]
    assert completed("fs", "rm") == ["plain:rm"]
    assert completed("collectives", "") == ["plain:explain", "plain:plan"]
    assert completed("run", "--max") == ["plain:--max-restarts"]
    assert completed("run", "--transport", "") == ["plain:tcp", "plain:ucx", "plain:auto"]
    assert completed("run", "--nodes", "2", "tr") == ["file:tr"]
    assert completed("run", "train.py", "da") == ["file:da"]
    assert completed("run", "--run-dir", "ru") == ["dir:ru"]
    assert completed("report", "ru") == ["dir:ru"]
    assert completed("collectives", "plan", "--operation", "reduce") == ["plain:reduce", "plain:reduce_scatter"]


@pytest.mark.parametrize("line", [("rnu", ""), ("fs", "dorp", "")])
def test_a_command_that_does_not_exist_completes_to_nothing_and_without_an_error(line: tuple[str, ...]) -> None:
    assert [item for item in completed(*line) if not item.startswith("plain:")] == []


@pytest.mark.parametrize("shell", SHELLS)
def test_the_script_of_a_shell_is_printed(shell: str, capsys: Capture) -> None:
    assert main(["completion", shell]) == 0
    assert f"{COMPLETE_VARIABLE}={shell}_complete" in capsys.readouterr().out


def test_an_unknown_shell_is_refused(capsys: Capture) -> None:
    assert main(["completion", "tcsh"]) == 2
    assert "'tcsh' is not one of 'bash', 'zsh', 'fish'" in capsys.readouterr().err


def test_bad_numbers_and_files_are_one_line(tmp_path: Path, capsys: Capture) -> None:
    broken = tmp_path / "network.toml"
    broken.write_text("[speeds]\nlatency_ns = nan\n", encoding="utf-8")
    plan = ["collectives", "plan", "--nodes", "2"]
    for argv in (
        [*plan, "--topology", str(broken)],
        [*plan, "--topology", str(tmp_path)],
        [*plan, "--bytes", "nan"],
        [*plan, "--bytes", "-1"],
        [*plan, "--operation", "sum"],
        ["run", "--inject", "kill-node=1@nan", "train.py"],
        ["run", "--nodes", "nan", "train.py"],
        ["report", str(broken)],
    ):
        assert main(argv) in (1, 2), argv
        shown = capsys.readouterr()
        assert shown.out == ""
        assert shown.err.startswith("error: "), argv
        assert shown.err.count("\n") == 1, argv
        assert "internal error" not in shown.err, argv


def test_the_many_options_of_run_are_under_headings_each_once(capsys: Capture) -> None:
    assert isinstance(run_command, SectionedCommand)
    options = {one.name: one for one in run_command.params if isinstance(one, click.Option) and not one.hidden}
    named = [name for names in run_command.sections.values() for name in names]
    assert len(named) == len(set(named))
    assert set(named) <= set(options)
    assert set(options) - set(named) == {"role"}, "of torchrun, and of no use here"
    assert main(["run", "--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    headings = [line for line in lines if re.fullmatch(r"[A-Z][a-z ]+:", line)]
    assert headings == ["What runs:", "Machines:", "Failures:", "Network:", "Output:", "Other options:"]
    shown = [line.split()[0].rstrip(",") for line in lines if re.match(r" {2}-", line)]
    assert sorted(shown) == sorted([*(min(one.opts, key=len) for one in options.values()), "-h"])
