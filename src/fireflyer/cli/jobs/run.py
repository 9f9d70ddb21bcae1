"""`ff run`: start a script on several nodes, watch it, restart it when it breaks, report."""

from __future__ import annotations

import difflib
import glob
import os
import re
import signal
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from shlex import quote, split
from typing import TYPE_CHECKING, Any, Final, Literal

import click

from fireflyer.base.errors import FireflyerError, UsageError
from fireflyer.base.launch import DUMPS_NAME, TRANSPORTS, misspelt_settings
from fireflyer.base.units import SECOND
from fireflyer.cli.completion import complete_directory, complete_file
from fireflyer.cli.help_sections import SectionedCommand
from fireflyer.cli.jobs.network import network_options, read_addresses, read_ports, refuse_link_local
from fireflyer.cli.jobs.torchrun import (
    ONE_NODE,
    NodeCount,
    NodeRange,
    RanksPerNode,
    hidden_lines,
    read_options,
    torchrun_options,
)
from fireflyer.cli.numbers import Duration, WholeNumber
from fireflyer.cli.topology_file import topology_json

if TYPE_CHECKING:
    from fireflyer.cli.jobs.progress import JobProgress
    from fireflyer.cluster.schema.job import Fault, JobResult, JobSpec, RankLine

__all__ = ["command", "parse_environment", "script_arguments", "split_command"]

MAX_PORT = 65535
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def parse_environment(values: tuple[str, ...]) -> dict[str, str]:
    """`("A=1", "B=")` as a mapping. Raises `UsageError`."""
    mapping = {}
    for value in values:
        name, equals, text = value.partition("=")
        if not equals or not _NAME.fullmatch(name):
            raise UsageError(f"--env {value!r} is not understood; write it like --env NAME=value")
        mapping[name] = text
    return mapping


def script_arguments(args: tuple[str, ...]) -> tuple[str, ...]:
    """What the script gets: everything after its name, less one separating `--`."""
    return args[1:] if args[:1] == ("--",) else args


def _check_script(script: str, kind: str) -> None:
    if not script:
        raise UsageError("SCRIPT is empty; give the path of a Python file")
    if kind == "module" and script.endswith(".py") and os.path.isfile(script):
        raise UsageError(f"-m takes the name of a module, and {script!r} is a file; leave -m out")
    if kind != "script" or os.path.isfile(script):
        return
    if os.path.isdir(script):
        raise UsageError(f"script {script!r} is a directory; give a Python file in it")
    if os.path.exists(script):
        raise UsageError(f"script {script!r} is not a regular file, and every rank reads it; give a Python file")
    names = []
    if os.path.isdir(os.path.dirname(script) or "."):
        names = [name for name in os.listdir(os.path.dirname(script) or ".") if name.endswith(".py")]
    near = difflib.get_close_matches(os.path.basename(script), names, n=1)
    hint = (
        f"did you mean {os.path.join(os.path.dirname(script), near[0])!r}?"
        if near
        else ("give the path of a Python file, -m for a module, --no-python for a program")
    )
    raise UsageError(f"script {script!r} does not exist; {hint}")


def _default_run_dir(name: str) -> str:
    from fireflyer.cluster.schema.job import safe_name

    stamp = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
    path = os.path.join("runs", f"{safe_name(name)}-{stamp}")
    number = 1
    while os.path.lexists(path if number == 1 else f"{path}-{number}"):
        number += 1
    return path if number == 1 else f"{path}-{number}"


_SECTIONS: Final = {
    "What runs": ("nodes", "ranks_per_node", "module", "no_python", "environment", "wrap", "devices", "name",
                  "run_dir"),
    "Machines": ("hosts", "via", "spares", "last_call", "ssh", "remote_python", "workdir", "standalone",
                 "rdzv_endpoint", "node_rank", "secret_file"),
    "Failures": ("max_restarts", "on_failure", "on_failure_timeout", "watchdog", "lease_s", "inject", "suspend_grace",
                 "suspend_after", "shutdown_timeout"),
    "Network": ("interface", "subnet", "port_range", "control_port", "control_address", "master_port", "transport",
                "topology", "tune"),
    "Output": ("log_dir", "redirects", "tee", "local_ranks_filter", "quiet"),
}  # fmt: skip


@click.command(
    "run",
    cls=SectionedCommand,
    sections=_SECTIONS,
    short_help="Run a training script on several ranks; restart it when a rank or node dies.",
    epilog="""\b
Examples:
  ff run --nodes 2 --ranks-per-node 4 train.py -- --lr 3e-4    # arguments after -- go to the script
  ff run --ranks-per-node 2 -m my_package.train                # a module, as python -m
  ff run --nodes 2 --inject kill-node=1@20s train.py           # try a failure out, 20 s after the start
  ff run --hosts a,b,c --spares 1 --ranks-per-node 8 train.py  # two machines over ssh, and one in reserve
  ff run --hosts a,b --via agent train.py                      # by agents that are resident there
  ff run --nodes 2 --rdzv-endpoint a:29400 train.py            # the same on each machine, as torchrun""",
    context_settings={
        "allow_interspersed_args": False,
        "token_normalize_func": lambda name: name.replace("_", "-"),  # torchrun takes both
    },
)
@click.option(
    "--nodes",
    "--nnodes",
    metavar="N|MIN:MAX",
    type=NodeRange(),
    help="Nodes of the job, on this machine; with --hosts as many as hosts, less the spares. 2:4: after a failure the "
    "job goes on with the machines that are left, if there are two.  [default: 1, or as many as hosts]",
)
@click.option(
    "--hosts",
    metavar="HOSTS",
    help="Machines of the job, reached by ssh: a:8,b:4,[fd00::1]; after a colon the number of ranks, else that of "
    "--ranks-per-node. "
    "slurm: those of the allocation.  [default: slurm in an allocation of several nodes without --nodes, else this "
    "machine alone]",
)
@click.option(
    "--via",
    type=click.Choice(["ssh", "agent"]),
    default="ssh",
    show_default=True,
    help="What starts ranks on the hosts; agent: `ff agent run`, which is resident there.",
)
@click.option(
    "--spares",
    metavar="N",
    type=WholeNumber(min=0),
    default=0,
    show_default=True,
    help="How many of the hosts, the last ones, take the place of others that fail.",
)
@click.option(
    "--last-call",
    metavar="TIME",
    type=Duration(),
    default=30 * SECOND,
    help="With --nodes 2:4: once two machines are there, each attempt waits so long for the others.  [default: 30s]",
)
@click.option(
    "--ssh",
    metavar="COMMAND",
    help="What reaches a host; it is given the name of the host and a command.  [default: ssh with BatchMode]",
)
@click.option(
    "--rdzv-endpoint",
    metavar="HOST:PORT",
    help="Start the same command on each of --nodes machines, with this address of machine 0; they meet there.  "
    "[default: they do not]",
)
@click.option(
    "--node-rank",
    metavar="N",
    type=WholeNumber(min=0),
    help="Number of this machine, with --rdzv-endpoint.  [default: 0 where HOST is this machine, else any]",
)
@click.option(
    "--secret-file",
    metavar="FILE",
    envvar="FF_SECRET_FILE",
    shell_complete=complete_file,
    help="32 bytes that all machines of --rdzv-endpoint have, in a file of mode 0600.  [default: FF_SECRET_FILE]",
)
@click.option("--remote-python", metavar="PATH", help="Python of the hosts.  [default: the path of this one]")
@click.option("--workdir", metavar="DIR", help="Working directory on the hosts.  [default: this one]")
@click.option(
    "--lease",
    "lease_s",
    metavar="SECONDS",
    type=WholeNumber(2, 3600),
    default=10,
    show_default=True,
    help="Ranks on a host that the launcher cannot reach end themselves after so long; others take their place then.",
)
@click.option(
    "--control-port",
    metavar="PORT",
    type=WholeNumber(0, MAX_PORT),
    default=0,
    help="Port at which hosts reach the launcher, for firewalls; 0: any free one.  [default: 0]",
)
@click.option(
    "--control-address",
    metavar="ADDRESS",
    help="Address of this machine for the hosts.  [default: that from which ssh reaches them]",
)
@click.option(
    "--ranks-per-node",
    "--nproc-per-node",
    metavar="N",
    type=RanksPerNode(),
    help="Ranks (processes of the script) on each node, or with --rdzv-endpoint on this machine; gpu: one for each "
    "GPU, cpu: one for each processor, auto: gpu where the machine has GPUs, else cpu.  [default: what --hosts says, "
    "else 1]",
)
@click.option(
    "--max-restarts",
    metavar="N",
    type=WholeNumber(min=0),
    default=0,
    show_default=True,
    help="How often all ranks are started again after a rank or node died. The same error twice without a newer step "
    "or checkpoint ends the job: docs/how-to/restarts.md.",
)
@click.option(
    "--name",
    "--rdzv-id",
    metavar="NAME",
    help="Name of the job; ranks have it as TORCHELASTIC_RUN_ID.  [default: name of the script]",
)
@click.option(
    "--run-dir",
    metavar="DIR",
    shell_complete=complete_directory,
    help="New directory for the event log, the logs of the ranks and the report.  [default: runs/NAME-DATE-TIME]",
)
@click.option(
    "--master-port",
    metavar="PORT",
    type=WholeNumber(0, MAX_PORT),
    default=0,
    help="MASTER_PORT of the ranks; 0: a free one for each attempt.  [default: 0]",
)
@click.option(
    "--devices",
    type=click.Choice(["auto", "cpu", "gpu"]),
    default="auto",
    show_default=True,
    help="What each rank needs; at most one rank per GPU is started. auto: gpu where the machine has GPUs, else cpu.",
)
@click.option(
    "--env",
    "environment",
    metavar="NAME=VALUE",
    multiple=True,
    help="Set an environment variable of every rank; may be repeated.",
)
@click.option("--wrap", metavar="COMMAND", default="", help="Put before the command of each rank, such as `apptainer "
              "exec x.sif`.  [default: none]")  # fmt: skip
@click.option("-m", "--module", is_flag=True, help="SCRIPT is a Python module, as in python -m.")
@click.option("--no-python", is_flag=True, help="SCRIPT is an executable program, not Python.")
@click.option(
    "--topology",
    metavar="FILE",
    shell_complete=complete_file,
    help="TOML file with speeds and zones of the network, used to plan collectives; its keys: "
    "docs/how-to/tune-collectives.md.  [default: none]",
)
@click.option(
    "--tune",
    is_flag=True,
    help="Let the ranks measure the network before the first collective (below 1 s); restarts use the same figures.",
)
@click.option(
    "--transport",
    type=click.Choice(TRANSPORTS),
    help="What carries collectives between nodes; ucx: RDMA, see docs/how-to/ucx.md; auto: ucx if every machine has an "
    "RDMA device.  [default: FF_TRANSPORT, else tcp]",
)
@click.option(
    "--inject",
    metavar="FAULT",
    multiple=True,
    help="Kill a node or rank on purpose: kill-node=1@60 when step 60 is reported, kill-rank=3@20s 20 seconds after "
    "the start; may be repeated.",
)
@click.option(
    "--on-failure",
    metavar="COMMAND",
    default="",
    help="Run this on the node of a rank that failed; its exit code says whose fault it was: 0 the script's, the job "
    "ends; 2 the node's, restart; fireflyer:node-check is ours; docs/how-to/check-nodes.md.  [default: none]",
)
@click.option(
    "--on-failure-timeout",
    metavar="TIME",
    type=Duration(),
    default=60 * SECOND,
    help="Time that the command of --on-failure is given.  [default: 60s]",
)
@click.option(
    "--suspend-grace",
    metavar="TIME",
    type=Duration(),
    default=60 * SECOND,
    help="Ranks that are asked to save and to leave (SIGUSR1) have so long; then they get SIGTERM, and SIGKILL.  "
    "[default: 60s]",
)
@click.option(
    "--suspend-after",
    metavar="TIME",
    type=Duration(),
    default=0,
    help="Suspend the job so long after its ranks were started, to try it out.  [default: never]",
)
@click.option(
    "--watchdog",
    metavar="TIME",
    type=Duration(),
    default=0,
    help="When no rank has printed or reported anything for so long (90s, 30m, 2h), write the stacks of all ranks and "
    "count the attempt as failed.  [default: never]",
)
@network_options
@torchrun_options
@click.option("-q", "--quiet", is_flag=True, help="Print only what the ranks print, and errors.")
@click.argument("script", metavar="SCRIPT", shell_complete=complete_file)
@click.argument("args", metavar="[--] [ARGS]...", nargs=-1, type=click.UNPROCESSED, shell_complete=complete_file)
def command(
    *,
    nodes: NodeCount | None,
    hosts: str | None,
    via: Literal["ssh", "agent"],
    spares: int,
    last_call: int,
    rdzv_endpoint: str | None,
    node_rank: int | None,
    secret_file: str | None,
    ssh: str | None,
    remote_python: str | None,
    workdir: str | None,
    lease_s: int,
    control_port: int,
    control_address: str | None,
    ranks_per_node: int | str | None,
    max_restarts: int,
    name: str | None,
    run_dir: str | None,
    master_port: int,
    devices: Literal["auto", "cpu", "gpu"],
    environment: tuple[str, ...],
    wrap: str,
    module: bool,
    no_python: bool,
    topology: str | None,
    tune: bool,
    transport: Literal["tcp", "ucx", "auto"] | None,
    inject: tuple[str, ...],
    on_failure: str,
    on_failure_timeout: int,
    suspend_grace: int,
    suspend_after: int,
    watchdog: int,
    port_range: str | None,
    interface: str,
    subnet: str,
    quiet: bool,
    script: str,
    args: tuple[str, ...],
    **torchrun: Any,
) -> int:
    """Run SCRIPT on nodes × ranks-per-node processes with the environment variables of torchrun, and print a report.

    Options stand before SCRIPT; everything after it goes to the script. When a rank or a node dies, all ranks are
    started again; the script must load its last checkpoint when it starts. Logs, events and the report are kept in the
    run directory.

    SIGUSR1 suspends the job: the ranks save and leave at the same step (docs/how-to/suspend.md), and the exit code is
    85. The same command goes on from there.

    Exit code: that of the job; 85 if it was suspended; 128 + n if signal n stopped it; 2 for a wrong command line.
    """
    for option, value in (("--name", name), ("--run-dir", run_dir), ("--topology", topology)):
        if value == "":  # what an unset shell variable leaves
            raise UsageError(f"{option} '' is empty; give one, or leave the option out for the default")
    if module and no_python:
        raise UsageError("--module and --no-python exclude each other; give one of them")
    kind: Literal["script", "module", "program"] = "module" if module else "program" if no_python else "script"
    _check_script(script, kind)

    from fireflyer.cli.jobs.hosts import hosts_of, remote_of
    from fireflyer.cli.jobs.rendezvous import join, rendezvous_of
    from fireflyer.cli.jobs.slurm import HOSTS_FROM_SLURM, notice_of_allocation
    from fireflyer.cluster.schema.job import JobSpec, Timeouts, parse_fault
    from fireflyer.runtime.suspension import whole_life_state_of

    count, notice = nodes or ONE_NODE, ""
    if hosts is None and nodes is None and rdzv_endpoint is None and not torchrun["standalone"]:
        notice = notice_of_allocation(os.environ)
        hosts = HOSTS_FROM_SLURM if notice else None
    meeting = rendezvous_of(rdzv_endpoint, node_rank=node_rank, nodes=count, secret_file=secret_file, hosts=hosts)
    refuse_link_local("--control-address", control_address)
    ranks, devices = _ranks_per_node(ranks_per_node, devices)
    addresses = read_addresses(interface, subnet, several=hosts is not None or meeting is not None)
    if meeting is not None and meeting.node_rank != 0:
        return join(meeting, nodes=count, ranks_per_node=ranks or 1, addresses=addresses)
    where = hosts_of(hosts, spares=spares, nodes=nodes, ranks_per_node=ranks, joining=meeting is not None)
    options = read_options(torchrun, ranks_per_node=where.ranks_per_node)
    grace_ns = Timeouts().stop_grace_ns if options.shutdown_s is None else options.shutdown_s * SECOND
    timeouts = Timeouts(lease_ns=lease_s * SECOND, stop_grace_ns=grace_ns, last_call_ns=last_call)
    job = name or (script if module else os.path.splitext(os.path.basename(script))[0])
    spec = JobSpec(
        script=script,
        args=script_arguments(args),
        kind=kind,
        run_dir=run_dir or _default_run_dir(job),
        nodes=where.nodes.most,
        min_nodes=where.nodes.least,
        hosts=where.names,
        rendezvous=None if meeting is None else meeting.rendezvous,
        remote=remote_of(
            ssh,
            via=via,
            hosts=hosts,
            python=remote_python,
            workdir=workdir,
            port=control_port,
            address=control_address,
        ),
        ranks_per_node=where.ranks_per_node,
        host_ranks=where.host_ranks,
        max_restarts=max_restarts,
        name=job,
        role=options.role,
        stream_dir=options.log_dir if any(options.files) else "",
        stream_files=options.files,
        env=parse_environment(environment),
        wrap=split_command(wrap, "--wrap"),
        master_port=master_port,
        ports=read_ports(port_range),
        addresses=addresses,
        devices=devices,
        topology=b"" if topology is None else topology_json(topology, nodes=where.nodes.most),
        tune=tune,
        transport=transport,
        timeouts=timeouts,
        inject=tuple(parse_fault(text) for text in inject),
        on_failure=split_command(on_failure, "--on-failure"),
        on_failure_limit_ns=on_failure_timeout,
        suspend_grace_ns=suspend_grace,
        suspend_after_ns=suspend_after,
        whole_life_state=whole_life_state_of(os.environ),
        watchdog_ns=watchdog,
    )
    for given, meant in misspelt_settings([*os.environ, *spec.env]):
        click.echo(f"warning: {given} is not a setting of Fire-Flyer and is ignored; did you mean {meant}?", err=True)
    hidden = hidden_lines(options)
    return _run(spec, quiet=quiet, own_run_dir=run_dir is not None, hidden=hidden, notice=notice)


def split_command(text: str, option: str) -> tuple[str, ...]:
    """As a shell would. Raises `UsageError`, which names the option."""
    try:
        return tuple(split(text))
    except ValueError as error:
        raise UsageError(f"{option} {text!r} is not understood: {error}") from None


Devices = Literal["auto", "cpu", "gpu"]


def _ranks_per_node(ranks: int | str | None, devices: Devices) -> tuple[int | None, Devices]:
    """How many `auto`, `gpu` or `cpu` are here, and what the ranks then occupy. Raises `UsageError`."""
    if not isinstance(ranks, str):
        return ranks, devices
    from fireflyer.cluster.launcher import find_devices
    from fireflyer.runtime.processes.guarded import child_environment

    found = find_devices(child_environment({}))
    if ranks == "gpu" and not found.gpus:
        raise UsageError("--nproc-per-node gpu: this machine has no GPU; use cpu, or a number")
    if ranks == "cpu" or not found.gpus:
        return found.cores, "cpu"
    return found.gpus, "gpu"


def _run(spec: JobSpec, *, quiet: bool, own_run_dir: bool, hidden: Callable[[RankLine], bool], notice: str) -> int:
    from fireflyer.cli.jobs.hosts import host_table
    from fireflyer.cli.jobs.rendezvous import say_waiting
    from fireflyer.cli.jobs.view import JobView, printer_for
    from fireflyer.cli.output import REPORT_NAME, read_events, show_report, stdout_console
    from fireflyer.cluster import HostsRefused, run_job
    from fireflyer.runtime import run

    console = stdout_console()
    try:
        with JobView(printer_for(console, plain_out=sys.stdout), ranks_only=quiet, hidden=hidden) as view:
            if notice:
                view.say(notice)
            result = run(run_job(spec, on_entry=view.on_entry, on_line=view.on_line, on_waiting=say_waiting))
    except HostsRefused as refused:
        click.echo(host_table(refused.rows), err=True)
        raise
    failed = result.exit_code != 0 and not result.suspended
    try:
        html_path = os.path.join(result.run_dir, REPORT_NAME)
        show_report(
            read_events(result.run_dir),
            html_path=html_path,
            console=None if quiet else console,
            logs_dir=result.logs_dir,
            gap=True,
        )
    except (FireflyerError, OSError) as error:
        if not failed:
            raise
        click.echo(f"error: the report could not be written: {' '.join(str(error).split())}", err=True)
    finally:
        for fault in result.faults_left:
            click.echo(f"warning: --inject {fault} did not happen: {_why_left(fault)}", err=True)
        for hint in (_dumps_hint(result.run_dir), _stacks_hint(result.logs_dir)):
            if hint:
                click.echo(hint, err=True)
        if result.suspended:
            click.echo(_suspended(result, view.progress, own_run_dir=own_run_dir), err=True)
        elif result.signal is not None:
            click.echo(_stopped(result, view.progress, own_run_dir=own_run_dir), err=True)
        elif failed:
            click.echo(f"error: {_explain(result)}", err=True)
    return result.exit_code


def _suspended(result: JobResult, progress: JobProgress, *, own_run_dir: bool) -> str:
    """`suspended at step 240; resume with the same command`, as `_stopped`."""
    state = f"FF_WHOLE_LIFE_STATE={result.whole_life_state}" if result.whole_life_state else ""
    if progress.saved_step is None:
        resume = f"; resume with {state}" if state else ""
        return f"{' '.join(result.reason.split())}{resume}; logs are in {result.logs_dir}"
    another = " and another --run-dir" if own_run_dir else ""
    life = f" and {state}" if state else ""
    reason = result.reason.removeprefix("suspended")
    saved = f"suspended, saved step {progress.saved_step}{' '.join(reason.split())}"
    return f"{saved}; resume with the same command{another}{life}"


def _stopped(result: JobResult, progress: JobProgress, *, own_run_dir: bool) -> str:
    """`stopped by Ctrl-C after step 240; resume with the same command`. That it resumes is known of a script only that
    reported a checkpoint."""
    who = "Ctrl-C" if result.signal == signal.SIGINT else signal.Signals(result.signal or 0).name
    after = f" after step {progress.step}" if progress.step else ""
    if progress.saved_step is None:
        return f"stopped by {who}{after}; logs are in {result.logs_dir}"
    saved = f" (saved: step {progress.saved_step})" if progress.saved_step != progress.step else ""
    another = " and another --run-dir" if own_run_dir else ""
    return f"stopped by {who}{after}{saved}; resume with the same command{another}"


def _dumps_hint(run_dir: str) -> str:
    """What to do with the dumps that ranks left when their collectives failed; empty where there are none."""
    directory = os.path.join(run_dir, DUMPS_NAME)
    if not os.path.isdir(directory):
        return ""
    shown = os.path.relpath(directory) if directory.startswith(os.getcwd() + os.sep) else directory
    command = f"ff collectives explain {quote(shown)}"
    return f"note: ranks wrote flight recorder dumps; to see which rank held up the others: {command}"


def _stacks_hint(logs_dir: str) -> str:
    """Where the stacks of ranks are that were ended because they hung; empty where there are none."""
    found = sorted(glob.glob(os.path.join(glob.escape(logs_dir), "attempt-*", "rank-*.stacks")))
    if not found:
        return ""
    more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
    return f"note: where a rank hung is in {found[-1]}{more}"


def _why_left(fault: Fault) -> str:
    if fault.after_s is not None:
        return f"the first attempt ended before {fault.after_s} s"
    return (
        f"no rank reported step {fault.step} in the first attempt; a script that does not use "
        f"fireflyer.cluster.Reporter needs a time instead: {fault.kind}={fault.target}@20s"
    )


def _explain(result: JobResult) -> str:
    reason = " ".join(result.reason.split())
    culprit = result.culprit
    if culprit is None or culprit.rank is None:
        return f"{reason}; logs are in {result.logs_dir}"
    path = os.path.join(result.logs_dir, f"attempt-{culprit.attempt}", f"rank-{culprit.rank}.log")
    return f"{reason}; its log is {path}" if os.path.isfile(path) else f"{reason}; logs are in {result.logs_dir}"
