"""`ff reliability why`: the domains that the failure of one job may come from, with the evidence."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING

import click

from fireflyer.base.units import SECOND, format_duration
from fireflyer.cli.completion import complete_directory, complete_file
from fireflyer.cli.numbers import WholeNumber

if TYPE_CHECKING:
    from fireflyer.analytics.reliability.attribution import Diagnosis, FlightFinding, JobEvidence

__all__ = ["why_command"]


@click.command(
    "why",
    short_help="What a job failed of: ranked domains, with evidence.",
    epilog="""\b
Examples:
  ff reliability why 4711 --from failures
  ff reliability why 4711 --from failures --flight runs/train-20260101-120000/flight
  ff reliability why 4711 --from failures --attempt 2 --json""",
)
@click.argument("task", metavar="TASK")
@click.option(
    "--from",
    "directory",
    metavar="DIRECTORY",
    required=True,
    shell_complete=complete_directory,
    help="With the tables that `ff reliability import` made.",
)
@click.option(
    "--flight",
    multiple=True,
    metavar="DUMP",
    shell_complete=complete_file,
    help="Flight recorder dumps of its ranks: files, or directories with them.",
)
@click.option(
    "--attempt",
    metavar="N",
    type=WholeNumber(min=1),
    help="Of a task that was started again, from 1.  [default: the last that did not complete]",
)
@click.option(
    "--source", type=click.Choice(["slurm", "platform", "run"]), help="Of TASK, where several have its number."
)
@click.option("--json", "as_json", is_flag=True, help="Print as JSON.")
def why_command(
    *, task: str, directory: str, flight: tuple[str, ...], attempt: int | None, source: str | None, as_json: bool
) -> int:
    """Print which domains (user program, system software, hardware) the failure of TASK may come from, the likeliest
    first, with what its nodes reported from 10 minutes before its end to 5 after, its exit code, and what the dumps of
    its ranks say. TASK is its number in Slurm, or its name for a run. A timeout of a collective alone is no cause."""
    from fireflyer.analytics.reliability.attribution import diagnose
    from fireflyer.analytics.reliability.evidence import evidence_of
    from fireflyer.analytics.reliability.tables import open_tables

    findings = _findings(flight)
    with open_tables(directory) as tables:
        evidence = evidence_of(tables, task, source=source, attempt=attempt, flight=findings)
    found = diagnose(evidence)
    if as_json:
        import msgspec

        click.echo(msgspec.json.format(msgspec.json.encode(found), indent=2))
        return 0
    _print(found, evidence)
    return 0


def _what_ran(job: JobEvidence) -> str:
    nodes = f"{len(job.nodes):,} nodes" if len(job.nodes) != 1 else job.nodes[0]
    attempt = f"Attempt {job.attempt} of {job.attempts}" if job.attempts > 1 else "It"
    if job.start_ns is None or job.end_ns is None:
        return f"{attempt} did not start."
    ended = datetime.fromtimestamp(job.end_ns // SECOND, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    return f"{attempt} ran for {format_duration(job.end_ns - job.start_ns)} on {nodes} and ended at {ended}."


def _findings(paths: tuple[str, ...]) -> tuple[FlightFinding, ...]:
    """A verdict for each group of ranks."""
    if not paths:
        return ()
    from fireflyer.analytics.reliability.attribution import FlightFinding
    from fireflyer.collectives.flight import Dump, explain, find_dumps, read_dumps

    groups: dict[str, list[Dump]] = {}
    for _, dump in read_dumps(find_dumps(paths)):
        groups.setdefault(dump.group, []).append(dump)
    verdicts = [explain(same) for _, same in sorted(groups.items())]
    return tuple(FlightFinding(kind=verdict.kind, summary=verdict.summary) for verdict in verdicts)


def _print(found: Diagnosis, evidence: JobEvidence) -> None:
    click.echo(found.summary)
    click.echo(_what_ran(evidence))
    click.echo("Where its failure may come from, by the weight of what speaks for each:")
    for one in found.domains:
        click.echo(f"  {one.domain:<16}{one.share:>6.0%}")
    for number, hypothesis in enumerate(found.hypotheses, start=1):
        click.echo(f"\n{number}. {hypothesis.title} ({' or '.join(hypothesis.domains)})")
        for line in hypothesis.evidence:
            click.echo(f"   - {line}")
        if hypothesis.causes:
            click.echo(f"   likely: {', '.join(hypothesis.causes)}")
        if hypothesis.remedy:
            click.echo(f"   remedy: {hypothesis.remedy}")
    if found.left_out:
        click.echo(f"\nNot looked at: {found.left_out:,} more reports, of no higher severity or further from the end.")
    if found.consequences:
        click.echo("\nExplained by the first, and no cause:")
        for line in found.consequences:
            click.echo(f"   - {line}")
