"""The command group, and the one place where an error becomes a line on stderr and an exit code.

Exit codes: 0 success; 2 the command line is wrong; 1 anything else of ours; what the job ended with, when it ran (128 +
n where signal n stopped it). `ff health` and `ff validate` have those of Nagios: 3 for an error of theirs. Commands are
imported when they are called: `ff version` does not load the launcher.
"""

from __future__ import annotations

import difflib
import importlib
import io
import os
import sys
import traceback
from collections.abc import Sequence

import click

from fireflyer.base.errors import FireflyerError, JobFailed, UsageError
from fireflyer.cli.help_sections import write_examples, write_sections
from fireflyer.cli.nagios import EXIT_UNKNOWN, UnknownResult
from fireflyer.cli.other_words import OTHER_WORDS
from fireflyer.runtime.processes.standard_streams import open_standard_streams

__all__ = ["EXIT_FAILURE", "EXIT_INTERRUPTED", "EXIT_USAGE", "ff", "hai", "main"]

EXIT_FAILURE = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130

_COMMANDS = {
    "run": "fireflyer.cli.jobs.run",
    "submit": "fireflyer.cli.platform.submit",
    "ps": "fireflyer.cli.platform.tasks:ps_command",
    "show": "fireflyer.cli.platform.tasks:show_command",
    "logs": "fireflyer.cli.platform.logs",
    "history": "fireflyer.cli.platform.history:history_command",
    "exec": "fireflyer.cli.platform.execs:exec_command",
    "shell": "fireflyer.cli.platform.shells:shell_command",
    "stop": "fireflyer.cli.platform.tasks:stop_command",
    "suspend": "fireflyer.cli.platform.tasks:suspend_command",
    "resume": "fireflyer.cli.platform.tasks:resume_command",
    "priority": "fireflyer.cli.platform.tasks:priority_command",
    "top": "fireflyer.cli.platform.top",
    "quota": "fireflyer.cli.platform.quota",
    "login": "fireflyer.cli.platform.login",
    "whoami": "fireflyer.cli.platform.users:whoami_command",
    "webhook": "fireflyer.cli.platform.webhooks:webhook_command",
    "report": "fireflyer.cli.jobs.report",
    "ckpt": "fireflyer.cli.checkpoints.command",
    "agent": "fireflyer.cli.jobs.agent",
    "sim": "fireflyer.cli.sim.command",
    "train": "fireflyer.cli.train.command",
    "plan": "fireflyer.cli.plan.command",
    "collectives": "fireflyer.cli.collectives.command",
    "data": "fireflyer.cli.data.command",
    "demo": "fireflyer.cli.jobs.demo",
    "soak": "fireflyer.cli.jobs.soak",
    "up": "fireflyer.cli.platform.up",
    "down": "fireflyer.cli.platform.down",
    "status": "fireflyer.cli.platform.status",
    "nodes": "fireflyer.cli.platform.nodes:nodes_command",
    "node": "fireflyer.cli.platform.nodes:node_command",
    "reservation": "fireflyer.cli.platform.reservations",
    "time-sharing": "fireflyer.cli.platform.time_sharing",
    "reliability": "fireflyer.cli.reliability.command",
    "user": "fireflyer.cli.platform.users:user_command",
    "usage": "fireflyer.cli.platform.history:usage_command",
    "audit": "fireflyer.cli.platform.history:audit_command",
    "manager": "fireflyer.cli.platform.managers:manager_command",
    "host": "fireflyer.cli.hosts.command",
    "health": "fireflyer.cli.health.command",
    "validate": "fireflyer.cli.health.validate",
    "fs": "fireflyer.cli.fs.command",
    "hai": "fireflyer.cli.platform.hai",
    "version": "fireflyer.cli.version",
    "completion": "fireflyer.cli.completion",
}
_SECTIONS = {
    "For researchers": ("run", "data", "report", "ckpt", "collectives", "train", "demo"),
    "Tasks of the platform": (
        "submit",
        "ps",
        "show",
        "logs",
        "history",
        "exec",
        "shell",
        "stop",
        "suspend",
        "resume",
        "priority",
        "top",
        "quota",
        "login",
        "whoami",
        "webhook",
        "hai",
    ),
    "For operators": (
        "up",
        "down",
        "status",
        "nodes",
        "node",
        "reservation",
        "time-sharing",
        "user",
        "usage",
        "audit",
        "agent",
        "health",
        "validate",
        "fs",
        "soak",
        "reliability",
    ),
    "For planners": ("plan", "sim"),
    "Processes of a cluster, for systemd or Kubernetes": ("host", "manager", "fs manager", "fs meta", "fs storage"),
    "This installation": ("version", "completion"),
}
_EXAMPLES = (
    ("ff run --nodes 2 --ranks-per-node 2 train.py -- --steps 500", "4 ranks, restarted when one dies"),
    ("ff report runs/train-20260101-120000", "what the run did, and where the time went"),
    ("ff collectives explain runs/train-20260101-120000/flight", "which rank hung"),
    ("ff up --nodes 4 -d", "the platform and a file system on this machine"),
    ("ff submit --nodes 2 train.py", "a task for it"),
    ("ff status", "the platform and its file system on one screen"),
    ("ff fs up --nodes 3 --replicas 2 --dir fs -d", "a file system alone on this machine"),
)


class _Commands(click.Group):
    """Verbs by name; the module of each is imported when it is needed."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        module = _COMMANDS.get(cmd_name)
        if module is None:
            return None
        command = _imported(module)
        assert isinstance(command, click.Command)  # noqa: S101
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if name not in _COMMANDS and not name.startswith("-") and not ctx.resilient_parsing:
            near = [OTHER_WORDS[name]] if name in OTHER_WORDS else difflib.get_close_matches(name, _COMMANDS, n=1)
            hint = f"did you mean 'ff {near[0]}'?" if near else f"commands are {', '.join(_COMMANDS)}"
            if name.endswith(".py") or (not near and os.path.isfile(name)):
                hint = f"to run a script: ff run {name}"
            raise click.UsageError(f"no command {name!r}; {hint}", ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        found = {heading: [(path, self._find(ctx, path)) for path in paths] for heading, paths in _SECTIONS.items()}
        write_sections(formatter, found)

    def _find(self, ctx: click.Context, path: str) -> click.Command:
        found: click.Command = self
        for name in path.split():
            assert isinstance(found, click.Group)  # noqa: S101
            command = found.get_command(ctx, name)
            assert command is not None  # noqa: S101
            found = command
        return found

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        write_examples(formatter, _EXAMPLES)
        formatter.write_paragraph()
        formatter.write_text("`ff COMMAND --help` shows the options and examples of a command.")


def _imported(path: str) -> object:
    """`module:name`, or `module`, whose `command` is meant."""
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name or "command")


def _show_version(ctx: click.Context, _: click.Parameter, asked: bool) -> None:
    if asked:
        command = _imported(_COMMANDS["version"])
        assert isinstance(command, click.Command)  # noqa: S101
        ctx.invoke(command)
        ctx.exit()


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_show_version,
    help="Show what is installed, as `ff version`.",
)
@click.option("--debug", is_flag=True, help="Show the traceback of an error. Stands before the command.")
def ff(debug: bool) -> None:
    """Train large models on an affordable cluster, and keep training when parts of it break."""


def main(argv: Sequence[str] | None = None, *, program: str = "ff") -> int:
    """Runs one command and returns its exit code; `argv` without the program's name, by default the process's."""
    args = list(sys.argv[1:] if argv is None else argv)
    open_standard_streams()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a narrow locale must not end a job
    try:
        code = ff.main(args=args, prog_name=program, standalone_mode=False)
        _flush_stdout()
        return code if isinstance(code, int) else 0
    except Exception as error:
        if _debug_asked(args):
            traceback.print_exc()
        from fireflyer.cli.platform_extra import explained

        if isinstance(error, UnknownResult) and isinstance(error.__cause__, Exception):
            _explain(explained(error.__cause__), program)
            return EXIT_UNKNOWN
        return _explain(explained(error), program)
    except KeyboardInterrupt:
        return _fail("interrupted", EXIT_INTERRUPTED)


def hai() -> int:
    """`hai-cli`."""
    return main(["hai", *sys.argv[1:]], program="hai-cli")


def _flush_stdout() -> None:
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        from fireflyer.cli.output import lost_output

        raise lost_output(error) from error


def _debug_asked(args: Sequence[str]) -> bool:
    """`--debug` stands before the command: what follows it belongs to the command or to a script."""
    return "--debug" in args[: next((i for i, arg in enumerate(args) if not arg.startswith("-")), len(args))]


def _explain(error: Exception, program: str) -> int:
    match error:
        case click.exceptions.NoArgsIsHelpError():
            sys.stderr.write(f"{error.format_message()}\n")
            return EXIT_USAGE
        case click.UsageError():
            message = error.format_message().rstrip(".")
            place = error.ctx.command_path if error.ctx is not None else program
            return _fail(f"{message}; see '{place} --help'", EXIT_USAGE)
        case click.exceptions.Exit():
            return error.exit_code
        case click.Abort():
            return _fail("interrupted", EXIT_INTERRUPTED)
        case click.ClickException():
            return _fail(error.format_message(), EXIT_FAILURE)
        case UsageError():
            return _fail(error.message, EXIT_USAGE)
        case JobFailed():
            return _fail(error.message, error.exit_code or EXIT_FAILURE)
        case FireflyerError():
            name = getattr(error, "filename", None)
            return _fail(f"{os.fsdecode(name)}: {error.message}" if name else error.message, EXIT_FAILURE)
        case BrokenPipeError():
            from fireflyer.cli.output import silence_stdout

            silence_stdout()
            return EXIT_FAILURE
        case FileNotFoundError() if error.filename is None and _adrift():
            return _fail("the working directory does not exist any more; change to one that does", EXIT_USAGE)
        case OSError():
            name = f"{error.filename}: " if error.filename else ""
            return _fail(f"{name}{error.strerror or error}", EXIT_FAILURE)
        case _:
            what = f"internal error: {type(error).__name__}: {error}"
            return _fail(f"{what}; '{program} --debug …' shows where it happened", EXIT_FAILURE)


def _adrift() -> bool:
    try:
        os.getcwd()
    except FileNotFoundError:
        return True
    return False


def _fail(message: str, code: int) -> int:
    sys.stderr.write(f"error: {' '.join(message.split())}\n")
    sys.stderr.flush()
    return code
