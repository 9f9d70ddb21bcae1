"""`ff health slurm`: what Slurm calls on a node, as HealthCheckProgram, prolog and epilog."""

from __future__ import annotations

import os
import socket
import time
from typing import TYPE_CHECKING, Final, Literal

import click

from fireflyer.base.errors import FireflyerError, NotFound
from fireflyer.base.units import SECOND, counted
from fireflyer.cli.completion import complete_directory, complete_file
from fireflyer.cli.numbers import Duration, WholeNumber

if TYPE_CHECKING:
    from fireflyer.cli.health.slurm_log import SlurmLog
    from fireflyer.cli.health.slurm_node import NodeOfSlurm
    from fireflyer.cluster.core.slurm.drains import Step
    from fireflyer.cluster.core.slurm.repair import NodeRepair

__all__ = ["EXIT_REFUSED", "slurm_command"]

EXIT_REFUSED: Final = 4
"""Of `prolog`: the job must not start on this node."""
_SLURM_LIMIT_NS: Final = 10 * SECOND
_MAX_WORDS: Final = 400


@click.command(
    "slurm",
    short_help="Drain this node of Slurm, or let it serve again.",
    epilog="""\b
Examples:
  ff health slurm check --policy /etc/fireflyer/gpu.toml     # as HealthCheckProgram
  ff health slurm prolog                                     # exit code 4: the job must not start here
  ff health slurm epilog
  ff health slurm show                                       # what is due, and what was done
  ff health slurm repair reboot "power cycled"
  ff health slurm validate --policy /etc/fireflyer/gpu.toml  # of a timer: validators, then it serves again
  ff validate --time 1m && ff health slurm resume --policy /etc/fireflyer/gpu.toml  # by hand
\b
docs/how-to/health-with-slurm.md has the lines of slurm.conf.""",
)
@click.argument("step", type=click.Choice(["check", "prolog", "epilog", "validate", "resume", "show", "repair"]))
@click.argument("done", metavar="[REMEDY [WORDS]] | [-- PROGRAM ...]", nargs=-1)
@click.option("--policy", "policy_path", metavar="FILE", shell_complete=complete_file, help="As for `ff health`.")
@click.option("--state", metavar="DIR", shell_complete=complete_directory, help="As for `ff health`; used: DIR/slurm.")
@click.option(
    "--prometheus", metavar="FILE", shell_complete=complete_file,
    help="Write figures of the round, and of the node in Slurm, for node_exporter.",
)  # fmt: skip
@click.option(
    "--idle", is_flag=True,
    help="With epilog: nodes are given to one job at a time, so processes that are left on GPUs are told.",
)  # fmt: skip
@click.option("--node", metavar="NAME", help="Of this node in Slurm.  [default: SLURMD_NODENAME, or of the host]")
@click.option(
    "--breaker-share", type=click.FloatRange(0, 1), metavar="SHARE", default=0.05, show_default=True,
    help="Of the nodes of a partition, that may be drained by this at one time; one may be in any case.",
)  # fmt: skip
@click.option(
    "--requeues", type=WholeNumber(min=0, max=1000), metavar="N", default=3, show_default=True,
    help="A job that was started again so often is not requeued once more.",
)  # fmt: skip
@click.option(
    "--probes", type=WholeNumber(min=1, max=10), metavar="N", default=3, show_default=True,
    help="How often a fault that is not certain at once must be found.",
)  # fmt: skip
@click.option("--spacing", type=Duration(), default="4s", show_default=True, help="Between probes.")
@click.option(
    "--limit", type=Duration(), default="50s", show_default=True,
    help="For all of it; Slurm ends a HealthCheckProgram after 60 s.",
)  # fmt: skip
@click.option(
    "--back-off", type=Duration(), default="10m", show_default=True,
    help="How long a node stays out that was drained before within a day; doubles with each drain.",
)  # fmt: skip
@click.option(
    "--needs-validation", is_flag=True,
    help="A drained node whose checks pass serves again only when `validate` has validated it.",
)  # fmt: skip
def slurm_command(
    *, step: Step | Literal["show", "repair"], done: tuple[str, ...], policy_path: str | None, state: str | None,
    node: str | None, breaker_share: float, requeues: int, probes: int, spacing: int, limit: int, back_off: int,
    prometheus: str | None, idle: bool, needs_validation: bool,
) -> int:  # fmt: skip
    """Run the checks of this node. A fault of low or high severity drains it in Slurm, and one of high severity
    requeues its jobs. A node that was drained by this serves again when its checks pass, after some faults only by
    `resume`, which says that it was validated. What a person drained is left alone.

    `validate` runs validators on a node that waits for nothing else: drained by this, without jobs and a remedy that is
    due, its checks pass. It serves again, or stays with what was found. PROGRAM takes the place of `ff validate --time
    1m`: exit code 0 in order, 2 a fault.

    `show` prints the state of the node's repair with its ticket, and `repair` records that a person has done REMEDY
    (test, reset, reboot, field-diagnosis or rma). Then it serves when its checks pass.

    An error of `prolog` and `epilog` is told, and does not count: the job starts."""
    began_s = time.monotonic()
    if idle and step != "epilog":
        raise click.UsageError("--idle goes with epilog: jobs run at other times")
    name = node or os.environ.get("SLURMD_NODENAME") or socket.gethostname().partition(".")[0]
    if step == "show" or step == "repair":
        _repair(step, done, name, state)
        return 0
    if done and step != "validate":
        raise click.UsageError(f"{step} takes no further words: {' '.join(done)[:80]!r}")

    def made(log: SlurmLog, began_s: float) -> NodeOfSlurm:
        from fireflyer.cli.health.policy_file import read_policy
        from fireflyer.cli.health.slurm_memory import NodeMemory
        from fireflyer.cli.health.slurm_node import NodeOfSlurm
        from fireflyer.cluster.core.slurm.drains import DrainLimits
        from fireflyer.cluster.manager.slurm.commands import SlurmCommands
        from fireflyer.validators.checks.state_file import state_directory

        job = os.environ.get("SLURM_JOB_ID", "") if step in ("prolog", "epilog") else ""
        return NodeOfSlurm(
            name,
            read_policy(policy_path),
            NodeMemory(state if state is not None else state_directory(), log.fail),
            SlurmCommands(os.environ.get("PATH", os.defpath), _SLURM_LIMIT_NS),
            DrainLimits(
                breaker_share=breaker_share,
                requeues=requeues,
                back_off_s=back_off // SECOND,
                validates=needs_validation or step == "validate",
            ),
            probes=probes,
            spacing_s=spacing / SECOND,
            began_s=began_s,
            limit_s=limit / SECOND,
            log=log,
            job=int(job) if job.isdecimal() else 0,
            idle=idle,
        )

    from fireflyer.cli.health.slurm_log import SlurmLog

    log = SlurmLog(quiet=step == "resume")
    try:
        if step == "validate":
            from fireflyer.cli.health.slurm_validate import validate_node
            from fireflyer.validators.checks.state_file import state_directory

            place = state if state is not None else state_directory()
            return validate_node(lambda: made(log, time.monotonic()), done, place, log)
        looking = made(log, began_s)
        try:
            decision = looking.look(step)
        finally:
            if prometheus is not None and looking.state:
                _write(prometheus, looking, log)
    except FireflyerError as error:
        if step in ("check", "validate", "resume"):
            log.note_error(str(error))
            raise
        log.fail(f"ff health slurm {step}: {error}")
        return 0
    if step == "resume":
        return 0 if decision.undrain else 1
    return EXIT_REFUSED if decision.refuse else 0


def _repair(step: Literal["show", "repair"], done: tuple[str, ...], node: str, state: str | None) -> None:
    """Raises `FireflyerError`."""
    from fireflyer.cli.health.slurm_memory import DIRECTORY, NodeMemory, person
    from fireflyer.cli.platform.nodes import REMEDIES
    from fireflyer.cluster.core.health.remedies import Remedy
    from fireflyer.cluster.core.slurm.repair import NodeRepair
    from fireflyer.validators.checks.state_file import state_directory

    directory = state if state is not None else state_directory()
    if step == "show" and done:
        raise click.UsageError("show takes no further words")
    if step == "show" and not os.path.isdir(os.path.join(directory, DIRECTORY)):
        raise NotFound(
            f"nothing is remembered in {directory}; give the --state of the rounds, as the user who runs them"
        )
    memory = NodeMemory(directory, lambda words: click.echo(words, err=True))
    if step == "show":
        repair = memory.record().repair
        if repair.health is not None and repair.health.name != node:
            raise NotFound(f"{directory} is of node {repair.health.name}, not of {node}; give another --node")
        _print(NodeRepair(node, repair))
        return
    if not 1 <= len(done) <= 2 or done[0] not in REMEDIES:
        raise click.UsageError(f"repair is followed by what was done, {', '.join(REMEDIES)}, and a note in quotes")
    words = done[1] if len(done) == 2 else ""
    if len(words) > _MAX_WORDS:
        raise click.UsageError(f"the note has {len(words)} characters; {_MAX_WORDS} are allowed")
    _print(memory.repair(node, time.time_ns(), Remedy(done[0].replace("-", " ")), words, person()))


def _print(repair: NodeRepair) -> None:
    from fireflyer.cli.platform.connect import clock, plain
    from fireflyer.cli.platform.nodes import ticket_lines

    health, faults = repair.health, repair.faults()
    since = f" since {clock(health.since_ns)}" if health.since_ns else ""
    click.echo(f"{'node':<8} {health.name}")
    click.echo(
        f"{'health':<8} {health.state.value}{since}" + (f": {plain(health.reason, 400)}" if health.reason else "")
    )
    if due := repair.waits_for():
        click.echo(f"{'due':<8} {due}")
    if faults:
        click.echo(f"{'part':<8} {counted(faults, 'fault')} of it in 28 days")
    for line in ticket_lines(repair.ticket):
        click.echo(line)


def _write(path: str, looked: NodeOfSlurm, log: SlurmLog) -> None:
    from fireflyer.cli.health.figures import slurm_figures, write_figures

    try:
        write_figures(path, looked.events, looked.evidence, [slurm_figures(looked.state)])
    except FireflyerError as error:
        log.fail(f"no figures: {error}")
