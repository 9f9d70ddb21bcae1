"""`ff agent`: a process that is resident on a machine and starts the ranks of jobs there, and how machines join."""

from __future__ import annotations

import getpass
import os
import sys
import time
from collections.abc import Callable
from typing import Final

import click
import msgspec

from fireflyer.base.errors import UsageError
from fireflyer.base.units import MIB, SECOND, format_duration
from fireflyer.cli.completion import complete_directory, complete_file
from fireflyer.cli.help_sections import OrderedGroup
from fireflyer.cli.numbers import Duration, WholeNumber
from fireflyer.cli.units import exec_line

__all__ = ["command"]

DEFAULT_PORT: Final = 29440
JOIN_PORT: Final = 29441
_MAX_PORT: Final = 65535
_MAX_TOKEN_BYTES: Final = 256

_UNIT: Final = """\
# Agent of Fire-Flyer: starts ranks of jobs on this machine, as the user {user}.
#   ff agent unit > ~/.config/systemd/user/fireflyer-agent.service
#   systemctl --user daemon-reload && systemctl --user enable --now fireflyer-agent
#   loginctl enable-linger {user}     (the agent runs while nobody is logged in)
[Unit]
Description=Fire-Flyer agent
StartLimitIntervalSec=0

[Service]
Type=notify
ExecStart={command}
Restart=always
RestartSec=1
# A restart of the agent is none of its jobs: their guards stay, and the next agent adopts them.
KillMode=process
OOMPolicy=continue
Delegate=yes
TasksMax=infinity

[Install]
WantedBy=default.target
"""


@click.group(
    "agent",
    cls=OrderedGroup,
    short_help="Run the agent of a machine; let machines join.",
    epilog="""\b
Examples:
  ff agent token gpu-1 | ssh gpu-1 ff agent join head:29441  # let the machine gpu-1 join
  ff agent run                                               # on gpu-1, or by systemd: ff agent unit
  ff run --hosts gpu-1,gpu-2 --via agent train.py            # run a job there""",
)
def command() -> None:
    """The agent is resident on a machine and starts ranks of `ff run --via agent`, as the user who runs it.

    On your machine `ff agent token` makes a join token; on the other machine `ff agent join` uses it up and gets a
    credential. The agent may be restarted while jobs run.
    """


@command.command(
    "token",
    short_help="Let machines join: print a join token of each, and wait for them.",
    epilog="Example: ff agent token gpu-1 | ssh gpu-1 ff agent join head:29441",
)
@click.option(
    "--port",
    metavar="PORT",
    type=WholeNumber(0, _MAX_PORT),
    default=JOIN_PORT,
    show_default=True,
    help="Where to wait for the machines; 0: any free port.",
)
@click.option(
    "--expires",
    metavar="TIME",
    type=Duration(),
    default=600 * SECOND,
    help="How long to wait; then the tokens are not valid any more.  [default: 10m]",
)
@click.argument("names", metavar="NAME...", nargs=-1, required=True)
def token_command(*, port: int, expires: int, names: tuple[str, ...]) -> int:
    """Print a join token for each machine NAME, on standard output, and wait until all have joined.

    A token is valid once. When the command ends, tokens that were not used are not valid any more. NAME is what
    `--hosts` calls the machine.

    Exit code: 1 when a machine has not joined in time.
    """
    from fireflyer.cluster.agent.join import Issuer
    from fireflyer.cluster.agent.records import state_directory
    from fireflyer.identity.machines import JoinedMachine, MachineStore
    from fireflyer.runtime import run

    if len(set(names)) != len(names):
        raise UsageError("a machine is named twice; name each once")
    store = MachineStore(state_directory("machines"))

    def joined(machine: JoinedMachine) -> None:
        click.echo(f"machine {machine.name} has joined, at {machine.address} port {machine.port}", err=True)

    async def serve() -> list[str]:
        issuer = Issuer(store, names, on_joined=joined)
        address = await issuer.listen(port)
        until_s = int(time.time() + expires / SECOND)
        for name, token in issuer.issue(max(1, expires // SECOND)).items():
            click.echo(token if len(names) == 1 else f"{name} {token}")
        sys.stdout.flush()
        limit = format_duration(expires)
        click.echo(f"waiting at port {address.port} for {', '.join(names)}, for {limit}; Ctrl-C ends it", err=True)
        return await issuer.wait(until_s)

    missing = run(serve())
    if missing:
        click.echo(f"error: {', '.join(missing)} did not join in time; the token is not valid any more", err=True)
    return 1 if missing else 0


@command.command(
    "join",
    short_help="Use up a join token: this machine takes jobs from then on.",
    epilog="Example: ff agent join head:29441 --token-file token",
)
@click.option(
    "--token-file",
    metavar="FILE",
    default="-",
    shell_complete=complete_file,
    help="File with the token; -: standard input.  [default: -]",
)
@click.option(
    "--port",
    metavar="PORT",
    type=WholeNumber(1, _MAX_PORT),
    default=DEFAULT_PORT,
    show_default=True,
    help="Where the agent of this machine is to listen.",
)
@click.option(
    "--address",
    metavar="ADDRESS",
    default="",
    help="Of this machine, for launchers.  [default: that from which it reaches HOST]",
)
@click.argument("issuer", metavar="HOST:PORT")
def join_command(*, token_file: str, port: int, address: str, issuer: str) -> int:
    """Join with a token of `ff agent token`, which waits at HOST:PORT. The credential is kept in the state directory
    (XDG_STATE_HOME, or ~/.local/state), mode 0600; an agent that runs takes it at once."""
    from fireflyer.cluster.agent.join import join
    from fireflyer.cluster.agent.records import AgentDirectory, state_directory
    from fireflyer.identity.handshake import token_id_of
    from fireflyer.runtime import run
    from fireflyer.runtime.address import Address

    token = _read_token(token_file)
    if not token:
        raise UsageError(
            "no token was given: the command that was to print it has failed; make one: ff node token NAME, or ff "
            "agent token NAME"
        )
    token_id_of(token)  # what is no token is refused before anybody is asked
    target = Address.parse(issuer)
    directory = AgentDirectory(state_directory("agent"))
    membership = run(join(directory, token, issuer=str(target), port=port, address=address))
    click.echo(f"joined as {membership.machine}; start the agent: ff agent run")
    return 0


def _read_token(path: str) -> str:
    if path == "-":
        if sys.stdin.isatty():
            click.echo("token: ", nl=False, err=True)
        return sys.stdin.readline(_MAX_TOKEN_BYTES + 1).strip()
    from fireflyer.identity.private_files import read_private_file

    return read_private_file(path, _MAX_TOKEN_BYTES).decode(errors="replace").strip()


@command.command("run", short_help="Run the agent of this machine.", epilog="Example: ff agent run")
@click.option(
    "--dir",
    "path",
    metavar="DIR",
    default="",
    shell_complete=complete_directory,
    help="Directory of the agent, where there are several on a machine.  [default: in the state directory]",
)
@click.option(
    "--accounts",
    metavar="FILE",
    default="",
    shell_complete=complete_file,
    help="TOML file with the account of each user of the platform, for an agent of root.  [default: none]",
)
@click.option(
    "--accounts-dir",
    metavar="DIR",
    default="",
    shell_complete=complete_directory,
    help="Where an agent of root makes run directories of accounts.  [default: /var/lib/fireflyer/runs]",
)
@click.option("--own-user", is_flag=True, help="Start ranks as root, where the agent is root and so are its users.")
@click.option(
    "--run-logs-mib",
    metavar="N",
    type=WholeNumber(1, 1 << 20),
    default=1024,
    show_default=True,
    help="So many MiB of what the ranks of a run print are kept on the node of its launcher; the rest is dropped.",
)
def run_command(*, path: str, accounts: str, accounts_dir: str, own_user: bool, run_logs_mib: int) -> int:
    """Run the agent of this machine in the foreground, until SIGTERM or Ctrl-C. Jobs go on without it, and the next
    agent adopts what runs. It prints `ready :PORT` when it serves; its log is standard error.

    An agent of root starts ranks of the platform as the account of their user: that of the table in --accounts (lines
    `user = "account"` in a section [accounts]), or without a table the one of the same name. It refuses users that the
    table does not name, and accounts with rights of root.
    """
    from fireflyer.cli.fs.processes import run_process
    from fireflyer.cluster.agent.accounts import Accounts
    from fireflyer.cluster.agent.records import AgentDirectory, state_directory
    from fireflyer.cluster.agent.runs import DEFAULT_ACCOUNTS_DIR
    from fireflyer.cluster.agent.service import serve_agent

    if own_user and accounts:
        raise UsageError("--own-user starts all ranks as one user, so there is no table; leave --accounts out")
    table = read_accounts(accounts) if accounts else None
    directory = AgentDirectory(os.path.abspath(path) if path else state_directory("agent"))
    known = Accounts(os.geteuid(), table, own_user=own_user)
    runs_in = accounts_dir or DEFAULT_ACCOUNTS_DIR

    async def serve(on_ready: Callable[[str], None]) -> None:
        await serve_agent(
            directory, on_ready=on_ready, accounts=known, accounts_dir=runs_in, logs_bytes=run_logs_mib * MIB
        )

    return run_process(serve)


class _AccountsFile(msgspec.Struct, forbid_unknown_fields=True):
    accounts: dict[str, str]


def read_accounts(path: str) -> dict[str, str]:
    """The table user → account. Raises `FireflyerError`."""
    from fireflyer.cli.toml_files import read_toml

    advice = 'write a table [accounts] with lines like ada = "adal"'
    return read_toml(path, _AccountsFile, name="--accounts", advice=advice).accounts


@command.command("list", short_help="Show what the agent of this machine runs.", epilog="Example: ff agent list")
def list_command() -> int:
    """Show the nodes of jobs on this machine, those that ended lately too, the newest first."""
    from fireflyer.cli.jobs.hosts import columns
    from fireflyer.cluster.agent.join import local_guards
    from fireflyer.cluster.agent.records import AgentDirectory, state_directory
    from fireflyer.runtime import run

    guards = run(local_guards(AgentDirectory(state_directory("agent"))))
    rows = [("TOKEN", "JOB", "NODE", "STATE", "SINCE")]
    for guard in guards:
        state = f"{guard.state}: {guard.reason}" if guard.reason else guard.state
        rows.append((guard.token, guard.job, str(guard.node), state, format_duration(guard.age_ns)))
    click.echo(columns(rows))
    return 0


@command.command(
    "stop",
    short_help="End the node of a job on this machine.",
    epilog="Example: ff agent stop 0f3a9c5e7b21d4f6a8b0c2d4.1.1",
)
@click.argument("token", metavar="TOKEN")
def stop_command(*, token: str) -> int:
    """Kill the ranks of the node TOKEN, as `ff agent list` calls it, on this machine. Its launcher counts the node as
    lost."""
    from fireflyer.cluster.agent.join import stop_local
    from fireflyer.cluster.agent.records import AgentDirectory, state_directory
    from fireflyer.runtime import run

    run(stop_local(AgentDirectory(state_directory("agent")), token))
    return 0


@command.command("machines", short_help="Show the machines that have joined.", epilog="Example: ff agent machines")
def machines_command() -> int:
    """Show the machines that have joined here, for `ff run --hosts NAMES --via agent`."""
    from fireflyer.cli.jobs.hosts import columns
    from fireflyer.cluster.agent.records import state_directory
    from fireflyer.identity.machines import MachineStore

    machines = MachineStore(state_directory("machines")).machines()
    rows = [("NAME", "ADDRESS", "PORT", "JOINED")]
    for one in machines.values():
        joined = time.strftime("%Y-%m-%d %H:%M", time.localtime(one.joined_s))
        rows.append((one.name, one.address, str(one.port), joined))
    click.echo(columns(rows))
    return 0


@command.command("revoke", short_help="Take the credential of a machine back.", epilog="Example: ff agent revoke gpu-1")
@click.argument("name", metavar="NAME")
def revoke_command(*, name: str) -> int:
    """The machine NAME is not used any more. Its agent is told, stops what it runs, and lets nobody in.

    Exit code: 1 when the agent could not be told: it then lets in whoever has a copy of its credential, until `ff
    agent leave` is run there.
    """
    from fireflyer.cluster.agent.join import revoke
    from fireflyer.cluster.agent.records import state_directory
    from fireflyer.identity.machines import MachineStore
    from fireflyer.runtime import run

    untold = run(revoke(MachineStore(state_directory("machines")), name))
    if untold:
        click.echo(f"error: {name} is not used any more, but its agent was not told ({untold}); run there: "
                   "ff agent leave", err=True)  # fmt: skip
        return 1
    return 0


@command.command("leave", short_help="Drop the credential of this machine.", epilog="Example: ff agent leave")
def leave_command() -> int:
    """Drop the credential of this machine: its agent stops what it runs and lets nobody in until `ff agent join`."""
    from fireflyer.cluster.agent.records import AgentDirectory, state_directory

    if not AgentDirectory(state_directory("agent")).leave():
        raise UsageError("this machine has not joined; there is nothing to leave")
    return 0


@command.command(
    "unit",
    short_help="Print a systemd unit for the agent.",
    epilog="Example: ff agent unit",
)
def unit_command() -> int:
    """Print a unit with which the systemd of this user runs the agent; how to install it is in its first lines."""
    click.echo(_UNIT.format(user=getpass.getuser(), command=exec_line("agent", "run")), nl=False)
    return 0
