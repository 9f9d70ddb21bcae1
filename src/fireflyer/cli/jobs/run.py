"""`ff run`: start a script on several nodes, watch it, restart it when it breaks, report."""

from __future__ import annotations

import difflib
import os
import re
import sys
from datetime import UTC, datetime
from shlex import quote
from typing import TYPE_CHECKING, Literal

import click

from fireflyer.base.errors import FireflyerError, UsageError
from fireflyer.base.launch import DUMPS_NAME, TRANSPORTS, misspelt_settings
from fireflyer.cli.completion import complete_directory, complete_file
from fireflyer.cli.numbers import WholeNumber
from fireflyer.cli.topology_file import topology_json

if TYPE_CHECKING:
    from fireflyer.cluster.schema.job import Fault, JobResult, JobSpec

__all__ = ["command", "parse_environment", "script_arguments"]

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
    stamp = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
    safe = re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-.") or "job"
    path = os.path.join("runs", f"{safe[:60]}-{stamp}")
    number = 1
    while os.path.lexists(path if number == 1 else f"{path}-{number}"):
        number += 1
    return path if number == 1 else f"{path}-{number}"


@click.command(
    "run",
    short_help="Run a training script on several ranks; restart it when a rank or node dies.",
    epilog="""\b
Examples:
  ff run --nodes 2 --ranks-per-node 4 train.py -- --lr 3e-4      arguments after -- go to the script
  ff run --ranks-per-node 2 -m my_package.train                  a module, as python -m
  ff run --nodes 2 --inject kill-node=1@20s train.py             try a failure out, 20 s after the start""",
    context_settings={"allow_interspersed_args": False},
)
@click.option(
    "--nodes",
    metavar="N",
    type=WholeNumber(min=1),
    default=1,
    show_default=True,
    help="Nodes of the job. Today all of them are on this machine.",
)
@click.option(
    "--ranks-per-node",
    metavar="N",
    type=WholeNumber(min=1),
    default=1,
    show_default=True,
    help="Ranks (processes of the script) on each node.",
)
@click.option(
    "--max-restarts",
    metavar="N",
    type=WholeNumber(min=0),
    default=3,
    show_default=True,
    help="How often all ranks are started again after a rank or node died; 0: never.",
)
@click.option(
    "--name",
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
@click.option("-q", "--quiet", is_flag=True, help="Print only what the ranks print, and errors.")
@click.argument("script", metavar="SCRIPT", shell_complete=complete_file)
@click.argument("args", metavar="[--] [ARGS]...", nargs=-1, type=click.UNPROCESSED, shell_complete=complete_file)
def command(
    *,
    nodes: int,
    ranks_per_node: int,
    max_restarts: int,
    name: str | None,
    run_dir: str | None,
    master_port: int,
    devices: Literal["auto", "cpu", "gpu"],
    environment: tuple[str, ...],
    module: bool,
    no_python: bool,
    topology: str | None,
    tune: bool,
    transport: Literal["tcp", "ucx", "auto"] | None,
    inject: tuple[str, ...],
    quiet: bool,
    script: str,
    args: tuple[str, ...],
) -> int:
    """Run SCRIPT on nodes × ranks-per-node processes with the environment variables of torchrun, and print a report.

    Options stand before SCRIPT; everything after it goes to the script. When a rank or a node dies, all ranks are
    started again; the script must load its last checkpoint when it starts. Logs, events and the report are kept in the
    run directory.

    Exit code: that of the job; 128 + n if signal n stopped it; 2 for a wrong command line.
    """
    for option, value in (("--name", name), ("--run-dir", run_dir), ("--topology", topology)):
        if value == "":  # what an unset shell variable leaves
            raise UsageError(f"{option} '' is empty; give one, or leave the option out for the default")
    if module and no_python:
        raise UsageError("--module and --no-python exclude each other; give one of them")
    kind: Literal["script", "module", "program"] = "module" if module else "program" if no_python else "script"
    _check_script(script, kind)

    from fireflyer.cluster.schema.job import JobSpec, parse_fault

    job = name or (script if module else os.path.splitext(os.path.basename(script))[0])
    spec = JobSpec(
        script=script,
        args=script_arguments(args),
        kind=kind,
        run_dir=run_dir or _default_run_dir(job),
        nodes=nodes,
        ranks_per_node=ranks_per_node,
        max_restarts=max_restarts,
        name=job,
        env=parse_environment(environment),
        master_port=master_port,
        devices=devices,
        topology=b"" if topology is None else topology_json(topology, nodes=nodes),
        tune=tune,
        transport=transport,
        inject=tuple(parse_fault(text) for text in inject),
    )
    for given, meant in misspelt_settings([*os.environ, *spec.env]):
        click.echo(f"warning: {given} is not a setting of Fire-Flyer and is ignored; did you mean {meant}?", err=True)
    return _run(spec, quiet=quiet)


def _run(spec: JobSpec, *, quiet: bool) -> int:
    from fireflyer.cli.jobs.view import JobView, printer_for
    from fireflyer.cli.output import REPORT_NAME, read_events, show_report, stdout_console
    from fireflyer.cluster import run_job
    from fireflyer.runtime import run

    console = stdout_console()
    with JobView(printer_for(console, plain_out=sys.stdout), ranks_only=quiet) as view:
        result = run(run_job(spec, on_entry=view.on_entry, on_line=view.on_line))
    failed = result.exit_code != 0
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
        if hint := _dumps_hint(result.run_dir):
            click.echo(hint, err=True)
        if failed:
            click.echo(f"error: {_explain(result)}", err=True)
    return result.exit_code


def _dumps_hint(run_dir: str) -> str:
    """What to do with the dumps that ranks left when their collectives failed; empty where there are none."""
    directory = os.path.join(run_dir, DUMPS_NAME)
    if not os.path.isdir(directory):
        return ""
    shown = os.path.relpath(directory) if directory.startswith(os.getcwd() + os.sep) else directory
    command = f"ff collectives explain {quote(shown)}"
    return f"note: ranks wrote flight recorder dumps; to see which rank held up the others: {command}"


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
