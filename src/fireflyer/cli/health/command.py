"""`ff health`: one round of health checks of this machine, or one after the other."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import click
import msgspec
from click.core import ParameterSource

from fireflyer.base.units import SECOND
from fireflyer.cli.completion import complete_directory, complete_file
from fireflyer.cli.health.shipped import dashboard_command, rules_command
from fireflyer.cli.health.slurm import slurm_command
from fireflyer.cli.jobs.hosts import columns
from fireflyer.cli.nagios import NagiosGroup
from fireflyer.cli.numbers import Duration

if TYPE_CHECKING:
    from fireflyer.base.health_event import HealthEvent
    from fireflyer.cli.health.policy_file import PolicyFile
    from fireflyer.validators.checks.rounds import HealthRounds
    from fireflyer.validators.core.checks.policy import HealthPolicy

__all__ = ["command", "print_events", "refuse_options"]

_STYLES: Final = {"ok": "green", "warn": "yellow", "low": "red", "high": "red", "not run": "bright_black"}


@click.group(
    "health",
    cls=NagiosGroup,
    invoke_without_command=True,
    short_help="Check this machine.",
    epilog="""\b
Examples:
  ff health                                     # a line for each check, and for each fault
  ff health --check gpu_xid --check infiniband  # two of them
  ff health --policy /etc/fireflyer/gpu.toml    # with the thresholds and the inventory of a group
  ff health --list                              # what each check reads, and its thresholds
  ff health --follow --every 5m                 # a JSON object for each event, until it is stopped
  ff health --follow --no-rounds                # only what the kernel logs
  ff health slurm check                         # as HealthCheckProgram of Slurm
\b
Exit codes, those of Nagios: 0 ok; 1 warning; 2 a fault; 3 a required check, or one of --check, could not run,
or an option or the policy is wrong.""",
)
@click.option("--check", "names", metavar="NAME", multiple=True, help="Only this check, also one that is disabled.")
@click.option(
    "--policy", "policy_path", metavar="FILE", shell_complete=complete_file,
    help="TOML file with thresholds, severities, required checks and the inventory.  [default: built in]",
)  # fmt: skip
@click.option("--idle", is_flag=True, help="No task runs here: processes on GPUs that are left are told.")
@click.option("--list", "as_list", is_flag=True, help="What each check reads, and its thresholds; check nothing.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object for each event.")
@click.option(
    "--prometheus", metavar="FILE", shell_complete=complete_file,
    help="Write figures of the round for the textfile collector of node_exporter; `-`: print them, and no events.",
)  # fmt: skip
@click.option("--follow", is_flag=True, help="Rounds without end, and what the kernel logs at once; as JSON.")
@click.option("--no-rounds", is_flag=True, help="With --follow: only what the kernel logs; needs root, or to be "
              "in the group systemd-journal.")  # fmt: skip
@click.option("--journal", is_flag=True, help="With --follow: the kernel's records in the journal, although /dev/kmsg "
              "may be read.")  # fmt: skip
@click.option("--every", type=Duration(), default="5m", show_default=True, help="Period of the rounds of --follow.")
@click.option(
    "--state", "state", metavar="DIR", shell_complete=complete_directory,
    help="Where counters are kept from one round to the next.  [default: /var/lib/fireflyer/health for root, "
    "else ~/.local/state/fireflyer/health]",
)  # fmt: skip
@click.pass_context
def command(
    ctx: click.Context, *, names: tuple[str, ...], policy_path: str | None, as_list: bool, as_json: bool, follow: bool,
    no_rounds: bool, journal: bool, every: int, state: str | None, prometheus: str | None,
    idle: bool,
) -> int:  # fmt: skip
    """Check this machine: mounts, disks, memory, processors, services, links, GPUs, and what the kernel logs.

    A check that could not be run is told, and why; without root fewer can."""
    if ctx.invoked_subcommand is not None:
        refuse_options(ctx)
        return 0
    from fireflyer.cli.health.policy_file import PolicyFile
    from fireflyer.validators.checks.rounds import HealthRounds
    from fireflyer.validators.checks.state_file import StateFile, state_directory
    from fireflyer.validators.core.checks.catalogue import chosen_checks
    from fireflyer.validators.core.checks.health_round import nagios_exit_code

    if not follow and (alone := "--no-rounds" if no_rounds else "--journal" if journal else ""):
        raise click.UsageError(f"{alone} goes with --follow; give both", ctx)
    if follow and (names or as_list or prometheus or idle):
        left_out = "--check, --list, --prometheus and --idle"
        raise click.UsageError(f"--follow runs all enabled checks, whatever runs here; leave out {left_out}", ctx)
    file = PolicyFile(policy_path)
    policy, _ = file.current()
    chosen_checks(policy, names)
    if as_list:
        _list(policy, names)
        return 0
    kept = StateFile(state if state is not None else state_directory(), only_log=no_rounds)
    rounds = HealthRounds(kept)
    if rounds.note:
        click.echo(f"warning: counters from before are not used: {rounds.note}", err=True)
    if follow:
        _follow(rounds, file, None if no_rounds else every, journal=journal)
        return 0
    events = rounds.run(policy, names, idle=idle)
    if rounds.unsaved:
        click.echo(f"warning: the next round cannot compare counters: {rounds.unsaved}", err=True)
    if prometheus is not None:
        from fireflyer.cli.health.figures import write_figures

        write_figures(prometheus, events, rounds.evidence)
    if prometheus == "-":
        pass
    elif as_json:
        for event in events:
            click.echo(msgspec.json.encode(event))
    else:
        print_events(events)
    return nagios_exit_code(events, asked=bool(names))


def refuse_options(ctx: click.Context) -> None:
    """Of a command that has commands too. Raises `UsageError` for options that stand in front of one."""
    if any(ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE for name in ctx.params):
        raise click.UsageError(f"give the options of {ctx.invoked_subcommand!r} behind it", ctx)


for one in (slurm_command, rules_command, dashboard_command):
    command.add_command(one)


def print_events(events: Sequence[HealthEvent]) -> None:
    """As a table, and how many of each kind."""
    rows = [("CHECK", "RESULT", "PART", "WHAT WAS FOUND")]
    for event in events:
        result = "not run" if event.could_not_run and event.severity == "ok" else event.severity
        words = f"could not run: {event.words}" if event.could_not_run and event.severity != "ok" else event.words
        rows.append((event.check, result, event.part or "-", words or "-"))
    head, *lines = columns(rows).splitlines()
    click.echo(head)
    for line, row in zip(lines, rows[1:], strict=True):
        click.echo(click.style(line, fg=_STYLES[row[1]]) if row[1] != "ok" else line)
    faults = sum(event.severity in ("low", "high") for event in events)
    warnings = sum(event.severity == "warn" for event in events)
    failed = sum(event.could_not_run for event in events)
    checks = len({event.check for event in events})
    click.echo(f"{checks} checks: {faults} faults, {warnings} warnings, {failed} not run")


def _list(policy: HealthPolicy, names: tuple[str, ...]) -> None:
    """Disabled ones too."""
    from fireflyer.validators.core.checks.catalogue import all_checks, sources_of
    from fireflyer.validators.core.checks.policy import settings_of
    from fireflyer.validators.core.checks.sources import Command, Files, MountPoints

    for check in all_checks(policy):
        if names and check.name not in names:
            continue
        settings = settings_of(policy, check.name)
        unset = "off until the policy gives a threshold" if not settings.is_set else ""
        marks = [
            name
            for name, on in (("disabled", not settings.enabled), (unset, unset), ("required", settings.required))
            if on
        ]
        shown = f" ({', '.join(marks)})" if marks else ""
        click.echo(f"{check.name}{shown}: {check.summary}")
        for source in sources_of([check], policy):
            if isinstance(source, Command):
                click.echo(f"  runs   {' '.join(source.argv)}{' (needs root)' if source.root else ''}")
            elif isinstance(source, Files):
                click.echo("\n".join(f"  reads  /{pattern}" for pattern in source.patterns))
            elif isinstance(source, MountPoints):
                click.echo("  reads  where mount points lead that are links")
            else:
                click.echo("  reads  /dev/kmsg (needs root), or the journal's entries of the kernel")
        for name in settings.__struct_fields__:
            if name not in ("enabled", "required", "severity", "name", "argv"):
                click.echo(f"  {name} = {_shown(getattr(settings, name))}")


def _shown(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else msgspec.json.encode(value).decode()


def _follow(rounds: HealthRounds, file: PolicyFile, every_ns: int | None, *, journal: bool) -> None:
    """None: without rounds."""
    from fireflyer.validators.checks.rounds import Watch

    stop = threading.Event()
    watch = Watch(rounds, lambda event: click.echo(msgspec.json.encode(event)), journal=journal)

    def end(_number: int, _frame: object) -> None:
        stop.set()
        watch.wake()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, end)
    os.setpriority(os.PRIO_PROCESS, 0, max(os.getpriority(os.PRIO_PROCESS, 0), 10))  # ranks come first
    if every_ns is None:
        watch.run_log(file.current, stop)
    else:
        watch.run(file.current, every_ns / SECOND, stop)
