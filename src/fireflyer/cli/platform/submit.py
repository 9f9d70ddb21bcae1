"""`ff submit`: hand a task to the platform."""

from __future__ import annotations

import os
import re
import secrets
import time
from typing import TYPE_CHECKING, Any, Final

import click
from click.core import ParameterSource

from fireflyer.base.errors import FireflyerError, UsageError
from fireflyer.base.units import SECOND
from fireflyer.cli.completion import complete_directory
from fireflyer.cli.jobs.run import parse_environment, script_arguments, split_command
from fireflyer.cli.jobs.torchrun import NodeCount, NodeRange
from fireflyer.cli.numbers import Duration, WholeNumber
from fireflyer.cli.platform.connect import connected, plain
from fireflyer.cli.platform.logs import print_logs
from fireflyer.cli.platform.names import checked_name
from fireflyer.cli.platform.snapshots import send_snapshot

if TYPE_CHECKING:
    from fireflyer.cluster.client import Client
    from fireflyer.cluster.schema.tasks import After, TaskSpec
    from fireflyer.cluster.sending import SnapshotOf

__all__ = ["command"]

_OF_SCRIPTS: Final = frozenset(
    (
        "array",
        "follow",
        "grace",
        "watchdog",
        "max_restarts",
        "max_requeues",
        "wrap",
        "python",
        "lock",
        "module",
        "no_python",
    )
)
"""Options that a shell has no use for."""
_AFTER = re.compile(r"([1-9][0-9]{0,14})(:ok)?")


@click.command(
    "submit",
    short_help="Hand a training script to the platform.",
    epilog="""\b
Examples:
  ff submit --nodes 4 --ranks-per-node 8 train.py -- --lr 3e-4  # arguments after -- go to the script
  ff submit --nodes 2:8 --time 12h --priority 20 train.py       # 2 nodes at least, 8 at most
  ff submit --lock requirements.lock train.py                   # its packages are installed on the nodes
  ff submit --after 17:ok eval.py                               # when task 17 has succeeded
  ff submit --array 100 sweep.py                                # 100 tasks; each finds FF_ARRAY_INDEX
  ff submit --follow train.py                                   # print its logs; with its exit code
  ff submit --interactive --nodes 2 --port 8888                 # a shell on the first node, as soon as it runs""",
    context_settings={"allow_interspersed_args": False},
)
@click.option("--nodes", "-n", metavar="N|MIN:MAX", type=NodeRange(), default="1", show_default=True,
              help="Nodes that the task gets, all at once.")  # fmt: skip
@click.option("--ranks-per-node", metavar="N", type=WholeNumber(1, 4096), default=1, show_default=True,
              help="Ranks on each node.")  # fmt: skip
@click.option("--name", metavar="NAME", help="Of the task; one unfinished task of yours at a time has it.  "
              "[default: that of the script, and a random end]")  # fmt: skip
@click.option("--group", "-g", metavar="GROUP", default="default", show_default=True, help="Group of nodes.")
@click.option("--priority", "-p", metavar="N", type=WholeNumber(0, 50), default=10, show_default=True,
              help="0 to 50; the highest comes first.")  # fmt: skip
@click.option("--time", "time_ns", metavar="TIME", type=Duration(),
              help="A run takes no longer, since it is ended then: 90s, 30m or 12h.")  # fmt: skip
@click.option("--nodelist", metavar="NODES", help="Only these nodes: a,b,c.")
@click.option("--exclude", metavar="NODES", help="Not these nodes.")
@click.option("--constraint", metavar="LABELS", help="Only nodes with all of these labels: a100,fast.")
@click.option("--after", metavar="TASK[:ok]", multiple=True,
              help="Not before this task has finished; :ok: has succeeded.")  # fmt: skip
@click.option("--array", metavar="N", type=WholeNumber(1, 10_000), help="So many tasks of the same.")
@click.option("--env", "-e", "environment", metavar="NAME=VALUE", multiple=True, help="Environment variable of ranks.")
@click.option("--grace", metavar="TIME", type=Duration(), default=300 * SECOND,
              help="To save when it is interrupted; then it is killed.  [default: 5m]")  # fmt: skip
@click.option("--watchdog", metavar="TIME", type=Duration(),
              help="End a run that prints and reports nothing for so long.  [default: never]")  # fmt: skip
@click.option("--max-restarts", metavar="N", type=WholeNumber(0, 1000), default=3, show_default=True,
              help="Restarts inside a run.")  # fmt: skip
@click.option("--max-requeues", metavar="N", type=WholeNumber(0, 1000), default=10, show_default=True,
              help="New runs after failures of nodes, links and memory.")  # fmt: skip
@click.option("--wrap", metavar="COMMAND", help="Put before the command of each rank, such as `apptainer exec x.sif`.")
@click.option("--python", metavar="PATH", default="", help="Python of the ranks, a path on the nodes.  [default: that "
              "of the agents]")  # fmt: skip
@click.option("--lock", metavar="FILE", default="", help="Build the Python environment of ranks on each node, once, "
              "from this lock file with hashes in the directory: uv.lock, pylock.toml or requirements.")  # fmt: skip
@click.option("--directory", metavar="DIR", shell_complete=complete_directory, help="Copied to the nodes for each run, "
              "but what its .ffignore names: SCRIPT is in it.  [default: this one]")  # fmt: skip
@click.option("--no-snapshot", is_flag=True, help="Copy nothing: the nodes share the file system.")
@click.option("--workdir", metavar="DIR", help="Working directory, a path that is there on the nodes; nothing is "
              "copied then.")  # fmt: skip
@click.option("--notify", metavar="URL", default="", help="Told of this task, by POST: the URL of a webhook of yours.")
@click.option("-m", "--module", is_flag=True, help="SCRIPT is the name of a module.")
@click.option("--no-python", is_flag=True, help="SCRIPT is a program.")
@click.option(
    "--follow", "-f", is_flag=True, help="Print what it prints until it has finished; exit with its exit code."
)
@click.option("--interactive", "-i", is_flag=True, help="Open a shell on the first node as soon as the task runs, or "
              "run SCRIPT there as a command with its ARGS. The task ends with it.")  # fmt: skip
@click.option("--port", "ports", metavar="[HERE:]PORT", multiple=True, help="With --interactive: a port of this "
              "machine that leads to the same port of the first node, or from HERE to PORT.")  # fmt: skip
@click.option("--idle", metavar="TIME", type=Duration(), help="With --interactive: end it when nothing was typed or "
              "printed for so long, 1d at most.  [default: 1h]")  # fmt: skip
@click.option("--dry-run", is_flag=True, help="Show what would be submitted, as JSON.")
@click.option("--test-only", is_flag=True, help="Say when the task would start, and submit nothing.")
@click.option("--platform", metavar="PATH", help="Directory of `ff up`, or file that `ff login` wrote.")
@click.argument("script", metavar="SCRIPT", required=False)
@click.argument("args", metavar="[ARGS]...", nargs=-1, type=click.UNPROCESSED)
@click.pass_context
def command(
    ctx: click.Context,
    /,
    *,
    follow: bool,
    dry_run: bool,
    test_only: bool,
    platform: str | None,
    interactive: bool,
    ports: tuple[str, ...],
    idle: int | None,
    **options: Any,
) -> int:
    """Submit SCRIPT as a task. The platform runs it when its turn comes, on nodes that it then has for itself, may
    interrupt it for others, and runs it again from its checkpoint. With --interactive the task is a shell on its first
    node, which is never interrupted for others: it ends with the shell, after --time (8 h), and after --idle."""
    if not interactive:
        if options["script"] is None:
            raise click.MissingParameter(ctx=ctx, param_hint="'SCRIPT'", param_type="argument")
        if ports or idle is not None:
            raise UsageError("--port and --idle belong to --interactive; leave them out, or add it")
    shell = _shell(ctx, options) if interactive else ()
    found = _snapshot(options.pop("directory"), options.pop("no_snapshot"), options)
    environment = _environment(options.pop("lock"), found, options)
    kind = "interactive" if interactive else "batch"
    spec = _spec(snapshot="" if found is None else found.snapshot, lock=environment, kind=kind, **options)
    if dry_run:
        import msgspec

        click.echo(msgspec.json.format(msgspec.json.encode(spec), indent=1))
        return 0
    with connected(platform) as client:
        if test_only:
            return _would_start(client, spec)
        if found is not None:
            click.echo(send_snapshot(client, found), err=True)
        if interactive:
            from fireflyer.cli.platform.shells import open_shell

            return open_shell(client, spec, ports, shell, idle=idle)
        tasks = client.submit(spec, key=secrets.token_hex(16))
        if len(tasks) == 1:
            click.echo(f"task {tasks[0]} submitted: ff show {tasks[0]} · ff logs -f {tasks[0]}")
        else:
            click.echo(f"tasks {tasks[0]} to {tasks[-1]} submitted: ff ps")
        if (waits := _why_it_waits(client, tasks[0])) is not None:
            click.echo(waits, err=True)
        return max(print_logs(client, task, follow=True) for task in tasks) if follow else 0


def _shell(ctx: click.Context, options: dict[str, Any]) -> tuple[str, ...]:
    """The command of the shell, none for one to type in. The task of `options` becomes one that waits for it. Raises
    `UsageError`."""
    given = [
        one for one in ctx.command.params if ctx.get_parameter_source(one.name or "") is ParameterSource.COMMANDLINE
    ]
    wrong = [one.opts[0] for one in given if one.name in _OF_SCRIPTS]
    if wrong:
        raise UsageError(f"{wrong[0]} and --interactive contradict each other: a shell runs once, until it is left")
    if options["nodes"].least and options["nodes"].least != options["nodes"].most:
        raise UsageError("a shell has as many nodes from its begin to its end; write --nodes N")
    from fireflyer.cli.platform.shells import SHELL_TIME_NS, SLEEP

    command = () if options["script"] is None else (options["script"], *script_arguments(options["args"]))
    options["name"] = options["name"] or f"shell-{secrets.token_hex(3)}"
    options["time_ns"] = SHELL_TIME_NS if options["time_ns"] is None else options["time_ns"]
    options |= {"script": SLEEP[0], "args": SLEEP[1:], "no_python": True, "max_restarts": 0, "max_requeues": 0}
    return command


def _snapshot(directory: str | None, no_snapshot: bool, options: dict[str, Any]) -> SnapshotOf | None:
    """Of the directory that travels with the task; None: none does. SCRIPT becomes a path in it. Raises `UsageError`,
    and as `snapshot_of` does."""
    if options["workdir"] or no_snapshot:
        if directory is not None:
            other = "--workdir" if options["workdir"] else "--no-snapshot"
            raise UsageError(f"--directory and {other} contradict each other; give one of them")
        return None
    from fireflyer.cluster.sending import default_cache_directory, snapshot_of

    directory = os.path.abspath(directory or os.getcwd())
    if not os.path.isdir(directory):
        raise UsageError(f"--directory {directory} is no directory; give the one that SCRIPT is in")
    if not options["module"] and not options["no_python"]:
        script = os.path.join(directory, options["script"])
        inside = os.path.relpath(os.path.realpath(script), os.path.realpath(directory))
        if inside.startswith("../"):
            raise UsageError(
                f"{options['script']} is not in {directory}, which is copied to the nodes; name the directory that it "
                "is in with --directory, or give --no-snapshot where the nodes share the file system"
            )
        if not os.path.isfile(script):
            raise UsageError(f"there is no {options['script']} in {directory}; name its directory with --directory")
        options["script"] = inside
    return snapshot_of(directory, cache_directory=default_cache_directory())


def _environment(lock: str, found: SnapshotOf | None, options: dict[str, Any]) -> str:
    """The name of the lock file's contents in the snapshot; empty: there is none. Raises `UsageError`, `NotFound`."""
    if not lock:
        return ""
    if found is None:
        raise UsageError("--lock travels with the task's directory; leave out --no-snapshot and --workdir")
    if options["python"] or options["no_python"]:
        other = "--python" if options["python"] else "--no-python"
        raise UsageError(f"--lock and {other} contradict each other; give one of them")
    from fireflyer.cluster.core.objects.manifest import FileEntry
    from fireflyer.cluster.objects import LockFile

    path = os.path.join(found.directory, lock)
    LockFile.read(path).check_hashes()
    inside = os.path.relpath(os.path.realpath(path), os.path.realpath(found.directory))
    for entry in found.manifest.entries:
        if isinstance(entry, FileEntry) and entry.path == inside:
            return entry.blob
    raise UsageError(
        f"--lock {lock} is not among the files of {found.directory} that are copied to the nodes; put it there, and "
        "name it in no .ffignore"
    )


def _spec(
    *,
    snapshot: str,
    lock: str,
    script: str,
    args: tuple[str, ...],
    nodes: NodeCount,
    ranks_per_node: int,
    name: str | None,
    group: str,
    priority: int,
    time_ns: int | None,
    nodelist: str | None,
    exclude: str | None,
    constraint: str | None,
    after: tuple[str, ...],
    array: int | None,
    environment: tuple[str, ...],
    grace: int,
    watchdog: int | None,
    max_restarts: int,
    max_requeues: int,
    wrap: str | None,
    python: str,
    workdir: str | None,
    notify: str,
    module: bool,
    no_python: bool,
    kind: str,
) -> TaskSpec:
    """Raises `UsageError`."""
    import msgspec

    from fireflyer.base.decoding import convert
    from fireflyer.cluster.schema.tasks import Program, TaskSpec

    if module and no_python:
        raise UsageError("-m and --no-python contradict each other; give one of them")
    program = {
        "script": script,
        "args": script_arguments(args),
        "kind": "module" if module else "program" if no_python else "script",
        "ranks_per_node": ranks_per_node,
        "wrap": split_command(wrap or "", "--wrap"),
        "snapshot": snapshot,
        "workdir": "" if snapshot else os.path.abspath(workdir or os.getcwd()),
        "python": python,
        "environment": lock,
        "env": parse_environment(environment),
    }
    wanted = {
        "name": _name_of(script) if name is None else checked_name(name, "--name"),
        "program": convert(program, Program),
        "kind": kind,
        "least_nodes": nodes.least or nodes.most,
        "most_nodes": nodes.most,
        "node_group": checked_name(group, "--group"),
        "priority": priority,
        "time_ns": time_ns,
        "labels": _names(constraint, "--constraint"),
        "only": _names(nodelist, "--nodelist"),
        "never": _names(exclude, "--exclude"),
        "after": tuple(_after(one) for one in after),
        "array": array,
        "max_restarts": max_restarts,
        "max_requeues": max_requeues,
        "grace_ns": grace,
        "watchdog_ns": watchdog or 0,
        "notify": notify,
    }
    try:
        return convert(wanted, TaskSpec, from_attributes=True)
    except msgspec.ValidationError as error:
        raise UsageError(f"the task cannot be submitted: {str(error).lower()}") from None


def _name_of(script: str) -> str:
    from fireflyer.cluster.schema.job import safe_name

    return f"{safe_name(os.path.splitext(os.path.basename(script))[0])}-{secrets.token_hex(3)}"


def _names(text: str | None, option: str) -> tuple[str, ...]:
    """Raises `UsageError`."""
    return () if text is None else tuple(checked_name(one, option) for one in text.split(","))


def _after(text: str) -> After:
    from fireflyer.cluster.schema.tasks import After

    match = _AFTER.fullmatch(text)
    if match is None:
        raise UsageError(f"--after {text!r} is not understood; write it like --after 17, or --after 17:ok")
    return After(int(match[1]), match[2] is not None)


def _why_it_waits(client: Client, task: int) -> str | None:
    """Of a task that was submitted just now; None: it does not wait, the scheduler has not looked at it yet, or the
    platform does not answer. The task is submitted all the same."""
    try:
        why = client.task(task).why
    except FireflyerError:
        return None
    if why.before is None or why.nodes:
        return None
    return f"task {task} waits: {plain(why.text)}"


def _would_start(client: Client, spec: TaskSpec) -> int:
    why = client.would_start(spec)
    click.echo(plain(why.text))
    if why.nodes:
        click.echo(f"on {plain(' '.join(why.nodes))}")
    elif why.earliest_ns is not None:
        at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(why.earliest_ns / SECOND))
        click.echo(f"at the latest {at}, by the times that others have declared")
    return 0
