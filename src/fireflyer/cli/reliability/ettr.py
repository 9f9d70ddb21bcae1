"""`ff reliability ettr`: what share of its time a job trains, and what it takes to reach a share."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final

import click

from fireflyer.base.errors import UsageError
from fireflyer.base.units import SECOND, format_duration
from fireflyer.cli.numbers import Duration, WholeNumber
from fireflyer.cli.reliability.mttf import MAX_GPUS, gpus_per_node_option, node_count, rate_option

if TYPE_CHECKING:
    from fireflyer.analytics.reliability.planning import BlastRadius, Requirements

__all__ = ["ettr_command"]

_MAX_RUNS: Final = 10_000
_DAY_NS: Final = 86_400 * SECOND


@click.command(
    "ettr",
    short_help="Share of its time that a job trains; what a share needs.",
    epilog="""\b
Examples:
  ff reliability ettr --gpus 12000
  ff reliability ettr --gpus 12000 --stall 10s --target 0.9
  ff reliability ettr --gpus 4096 --period 30m --queue 10m --length 14d --simulate 200""",
)
@click.option("--gpus", metavar="N", type=WholeNumber(min=1, max=MAX_GPUS), required=True, help="Of the job.")
@rate_option
@gpus_per_node_option
@click.option(
    "--restart",
    metavar="TIME",
    type=Duration(),
    default="5m",
    show_default=True,
    help="From a start to the first step that is new.",
)
@click.option(
    "--stall",
    metavar="TIME",
    type=Duration(),
    default="5m",
    show_default=True,
    help="Of the training, for each checkpoint.",
)
@click.option(
    "--period", metavar="TIME", type=Duration(), help="Training between checkpoints.  [default: the optimal one]"
)
@click.option("--queue", metavar="TIME", type=Duration(), help="Wait before each start, in the mean.  [default: none]")
@click.option("--length", metavar="TIME", type=Duration(), help="Training that the job needs.  [default: without end]")
@click.option(
    "--target",
    metavar="RATIO",
    type=click.FloatRange(0, 1, min_open=True, max_open=True),
    default=0.9,
    show_default=True,
    help="Share that is wanted: print what each input may be at most.",
)
@click.option(
    "--simulate",
    metavar="RUNS",
    type=WholeNumber(min=2, max=_MAX_RUNS),
    help="Draw this many runs at random as well; of 14 days where there is no --length.",
)
@click.option("--seed", metavar="N", type=WholeNumber(min=0), default=0, show_default=True, help="Of what is drawn.")
@click.option("--json", "as_json", is_flag=True, help="Print as JSON.")
def ettr_command(*, gpus: int, rate: float, gpus_per_node: int, restart: int, stall: int, period: int | None,
                 queue: int | None, length: int | None, target: float, simulate: int | None, seed: int,
                 as_json: bool) -> int:  # fmt: skip
    """Print the effective training time ratio that a job can expect: by formula 1 of arXiv:2410.21680, and by the form
    that is exact for long jobs; the optimal checkpoint period; what each input may be at most for --target, the others
    as they are; and what one failure costs."""
    from fireflyer.analytics.ettr import (
        daly_young_interval_s,
        expected_ettr,
        expected_failures,
        failure_rate_per_s,
        renewal_ettr,
    )
    from fireflyer.analytics.reliability.planning import blast_radius, optimal_period_s, requirements

    if not rate > 0:
        raise UsageError("--rate 0: without failures a job needs no checkpoints; give a rate above 0")
    nodes = node_count(gpus, gpus_per_node)
    failures_per_s = failure_rate_per_s(nodes, rate / 1000)
    inputs = {"failures_per_s": failures_per_s, "restart_s": restart / SECOND, "stall_s": stall / SECOND}
    optimal_s = optimal_period_s(stall_s=stall / SECOND, failures_per_s=failures_per_s)
    period_s = optimal_s if period is None else period / SECOND
    if not period_s > 0:
        raise UsageError("the optimal checkpoint period is shorter than any time can be told; give --period")
    productive_s = math.inf if length is None else length / SECOND
    queue_s = (queue or 0) / SECOND
    shown: dict[str, Any] = {
        "nodes": nodes,
        "mttf_s": 1 / failures_per_s,
        "period_s": period_s,
        "optimal_period_s": optimal_s,
        "daly_young_period_s": daly_young_interval_s(stall_s=stall / SECOND, failures_per_s=failures_per_s),
        "expected": expected_ettr(**inputs, period_s=period_s, productive_s=productive_s, queue_s=queue_s),
        "exact": renewal_ettr(**inputs, period_s=period_s, queue_s=queue_s),
    }
    shown["expected_failures"] = (
        None if length is None else expected_failures(**inputs, period_s=period_s, productive_s=productive_s)
    )
    if simulate is not None:
        from fireflyer.analytics.reliability.monte_carlo import simulated_ettr

        length_s = 14 * _DAY_NS / SECOND if length is None else productive_s
        shown["simulated"] = simulated_ettr(
            seed=seed, runs=simulate, **inputs, period_s=period_s, productive_s=length_s, queue_s=queue_s
        )
    times = {"restart_s": restart / SECOND, "stall_s": stall / SECOND}
    needed = requirements(
        ettr=target,
        nodes=nodes,
        failures_per_node_day=rate / 1000,
        **times,
        queue_s=queue_s,
        period_s=None if period is None else period_s,
    )
    cost = blast_radius(nodes=nodes, failures_per_node_day=rate / 1000, period_s=period_s, **times)
    if as_json:
        import msgspec

        found = {**shown, "requirements": needed, "blast_radius": cost}
        click.echo(msgspec.json.format(msgspec.json.encode(found), indent=2).decode())
        return 0
    _print(shown, needed, cost, rate, queue_s)
    return 0


def _print(shown: dict[str, Any], needed: Requirements, cost: BlastRadius, rate: float, queue_s: float) -> None:
    click.echo(f"{shown['nodes']:,} nodes, {rate:g} failures per 1000 node-days")
    _line("mean time to failure", _duration(shown["mttf_s"]))
    optimal, daly = _duration(shown["optimal_period_s"]), _duration(shown["daly_young_period_s"])
    _line("checkpoint period", f"{_duration(shown['period_s'])}; optimal {optimal}, by Daly and Young {daly}")
    _line("ETTR by formula 1", f"{shown['expected']:.4f}")
    _line("ETTR exact", f"{shown['exact']:.4f}   for long jobs {_waits(queue_s)}")
    if shown["expected_failures"] is not None:
        _line("failures of a run", f"{shown['expected_failures']:,.1f}   by formula 5, if it never queues")
    if "simulated" in shown:
        drawn = shown["simulated"]
        _line("ETTR drawn", f"{drawn.ettr:.4f} ± {drawn.standard_error:.4f}   {drawn.failures:.1f} failures in a run")
    _print_needed(needed, queue_s)
    click.echo("One failure costs the job")
    _line("of each node", _duration(cost.lost_s_per_failure))
    _line("of all", f"{cost.lost_node_hours_per_failure:,.1f} node-hours; "
                   f"{cost.lost_node_hours_per_day:,.1f} a day, at {cost.failures_per_day:.2f} failures")  # fmt: skip


def _line(label: str, value: str) -> None:
    click.echo(f"  {label:<26}{value}")


def _print_needed(needed: Requirements, queue_s: float) -> None:
    period = "the optimal checkpoint period"
    if needed.at_period_s is not None:
        period = f"a checkpoint every {_duration(needed.at_period_s)}"
    click.echo(f"For an ETTR of {needed.ettr:g} each of these alone suffices, with {period}, of long jobs "
               f"{_waits(queue_s)}:")  # fmt: skip
    rate = needed.failures_per_node_day * 1000
    _line("failures, 1000 node-days", f"{_three_digits(rate):g} at most" if rate else "none suffices")
    _line("stall of a checkpoint", _at_most(needed.stall_s))
    _line("restart", _at_most(needed.restart_s))
    if queue_s > 0:
        _line("wait before each start", _at_most(needed.queue_s))
    _line("nodes", _nodes(needed.nodes))
    if needed.period_s is None:
        _line("checkpoint period", f"none suffices: the best one gives {needed.best:.4f}")
    else:
        _line("checkpoint period", f"{_duration(needed.period_s[0])} to {_duration(needed.period_s[1])}")


def _waits(queue_s: float) -> str:
    return f"that wait for {_duration(queue_s)} before each start" if queue_s > 0 else "that never queue"


def _nodes(most: int | None) -> str:
    if most is None:
        return "any number"
    return f"{most:,} at most" if most else "none suffices"


def _three_digits(value: float) -> float:
    """Rounded down: a little more would no longer suffice."""
    unit = 10.0 ** (math.floor(math.log10(value)) - 2) if 0 < value < math.inf else 0.0
    return math.floor(value / unit) * unit if unit else value


def _at_most(seconds: float | None) -> str:
    """Rounded down to what `_duration` shows."""
    if seconds is None:
        return "none suffices"
    unit = 0.001 if seconds < 1 else 0.1 if seconds < 60 else 1 if seconds < 3600 else 60
    return f"{_duration(math.floor(seconds / unit) * unit)} at most"


def _duration(seconds: float) -> str:
    return format_duration(round(seconds * SECOND)) if seconds < 1e9 else f"{seconds / 86_400:,.0f} d"
