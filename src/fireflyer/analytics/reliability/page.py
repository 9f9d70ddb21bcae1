"""A characterisation as text rows and as one HTML page that needs nothing else, in the style of a run's report."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Final, NamedTuple

from markupsafe import Markup

from fireflyer.analytics.html import load_template
from fireflyer.analytics.line_chart import MAX_SERIES, Series, line_chart
from fireflyer.analytics.reliability.characterisation import Characterisation, SizeClass, XidCount
from fireflyer.analytics.reliability.intervals import Rate
from fireflyer.analytics.reliability.losses import RESTART_S
from fireflyer.analytics.reliability.rolling import ROLLING_DAYS, RollingRates
from fireflyer.analytics.reliability.taxonomy import SYMPTOMS, XID_CLASSES, xid_class
from fireflyer.analytics.reliability.training_time import TrainingTime
from fireflyer.base.units import SECOND

__all__ = ["Table", "day_text", "headline", "render_page", "tables_of", "title_of"]

DAY_NS: Final = 86_400 * SECOND
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


class Table(NamedTuple):
    """Of text; columns from `numbers` on are aligned to the right."""

    title: str
    headings: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""
    numbers: int = 1


def day_text(day: int) -> str:
    """Days since 1970, as `2026-03-01`."""
    return (_EPOCH + timedelta(days=day)).strftime("%Y-%m-%d")


def title_of(symptom: str) -> str:
    """Of a key in `SYMPTOMS`; a failure without one is of a node that reported nothing."""
    return SYMPTOMS[symptom].title if symptom in SYMPTOMS else symptom or "nothing reported"


def headline(found: Characterisation) -> str:
    """One sentence."""
    days = (found.end_ns - found.begin_ns) / DAY_NS
    again = f" in {found.attempts:,} attempts" if found.attempts > found.jobs else ""
    said = (
        f"{day_text(found.begin_ns // DAY_NS)} to {day_text(found.end_ns // DAY_NS)}, {days:,.1f} days: "
        f"{found.jobs:,} jobs{again}, and {found.events:,} events of {found.nodes_seen:,} nodes"
    )
    large = found.large_jobs
    if large is None:
        return f"{said}."
    return (
        f"{said}; jobs of more than {large.more_than_gpus} GPUs fail {_rate(large.rate)} times per 1000 node-days, "
        f"{large.unattributed:,} of {large.rate.failures:,} times while no node reported anything."
    )


def tables_of(found: Characterisation) -> tuple[Table, ...]:
    """What a terminal and the page show, without tables that have no row."""
    tables = (
        Table(
            "Rates per 1000 node-days, with 90 % intervals",
            ("symptom", "incidents", "per 1000 node-days"),
            tuple((title_of(one.symptom), f"{one.rate.failures:,}", _rate(one.rate)) for one in found.symptoms),
            f"{found.node_days:,.1f} node-days of {found.node_days_of}. What a node reports of one cause within an "
            "hour counts once. Warnings, and what a user's program can cause, do not count.",
        ),
        Table(
            "Failures of jobs, by the symptom that they are counted under",
            ("symptom", "failures"),
            tuple((title_of(symptom), f"{count:,}") for symptom, count in found.failure_symptoms),
            "NODE_FAIL, and FAILED or REQUEUED while a node of the job reported something from 10 minutes before its "
            "end to 5 after.",
        ),
        *_loss_tables(found),
        Table(
            "Size of jobs",
            ("GPUs", "attempts", "node-days", "failures", "MTTF, h", "90 % interval", "lost GPU-h", "by preemption"),
            tuple(_size_row(one) for one in found.sizes),
            f"Lost are {found.lost_gpu_hours:,.1f} GPU-hours of jobs that failed: since the last checkpoint where that "
            "is known, else half an hour of each, or all of a shorter one. "
            f"{found.lost_by_preemption_gpu_hours:,.1f} more are of jobs that their restarts preempted. "
            f"All jobs ran {sum(one.gpu_hours for one in found.states):,.1f} GPU-hours.",
            numbers=0,
        ),
        Table(
            "Time that was trained",
            ("jobs", "attempts", "GPU-hours", "lost GPU-h", "ETTR", "goodput"),
            () if found.training is None else (_training_row(found.training),),
            "ETTR: trained time over the time from the first start of a job to its end. Goodput: trained GPU-hours "
            "over allocated ones. Lost as above.",
            numbers=0,
        ),
        Table(
            "Jobs that failed again and again, or whose restarts preempted others",
            ("job", "failures", "GPUs", "preempted jobs", "their GPUs"),
            tuple(
                (one.job, f"{one.failures:,}", f"{one.gpus:,}", f"{one.preempted_jobs:,}", f"{one.preempted_gpus:,}")
                for one in found.cascades
            ),
            " ".join(
                [
                    *([] if found.complete else ["There are more preemptions than were looked at."]),
                    *_left_out(found, "cascades", "jobs, which cost less,"),
                ]
            ),
        ),
        Table(
            "Attempts by state",
            ("state", "attempts", "GPU-hours"),
            tuple((one.state, f"{one.attempts:,}", f"{one.gpu_hours:,.1f}") for one in found.states),
            f"Without {found.never_started:,} that never started." if found.never_started else "",
        ),
        Table(
            "Checks that are new",
            ("check", "since"),
            tuple((one.check, day_text(one.day)) for one in found.introductions),
            "A rate may rise because something is seen that was not before.",
        ),
        *_xid_tables(found.xids),
        Table(
            "Incidents by day",
            ("day", "symptom", "incidents"),
            tuple((day_text(one.day), title_of(one.symptom), f"{one.incidents:,}") for one in found.days),
            " ".join(
                [
                    "Of low and high severity, the newest first; two causes of one symptom within an hour are one.",
                    *_left_out(found, "days", "older rows"),
                ]
            ),
            numbers=2,
        ),
        Table(
            "Incidents by month and cause",
            ("month", "symptom", "cause", "incidents"),
            tuple((one.month, title_of(one.symptom), one.cause, f"{one.incidents:,}") for one in found.months),
            " ".join(_left_out(found, "months", "older rows")),
            numbers=3,
        ),
    )
    return tuple(table for table in tables if table.rows)


def _left_out(found: Characterisation, name: str, what: str) -> list[str]:
    count = found.left_out.get(name, 0)
    return [f"{count:,} {what} are left out, also of --json and --html."] if count else []


def render_page(found: Characterisation) -> str:
    """A complete HTML document; the same characterisation gives the same bytes."""
    first = found.begin_ns // DAY_NS
    chart = line_chart(
        [_series(one, first) for one in found.rolling[:MAX_SERIES]],
        name="rolling",
        title="Incidents per 1000 node-days over 30 days",
        x_label=f"days since {day_text(first)}",
        y_label="per 1000 node-days",
        y_least=0.0,
        marks=tuple((one.day - first, one.check) for one in found.introductions),
    )
    return load_template("fireflyer.analytics", "reliability.html.j2").render(
        headline=headline(found),
        begin=day_text(first),
        end=day_text(found.end_ns // DAY_NS),
        notes=found.notes,
        tables=tables_of(found),
        chart=Markup(chart),  # noqa: S704 - the chart escapes every text that it draws
    )


def _series(rates: RollingRates, first: int) -> Series:
    """From the first whole window on: before it a single incident in few node-days would give the scale."""
    begin = ROLLING_DAYS - 1 if len(rates.days) >= 2 * ROLLING_DAYS else 0
    points = zip(rates.days[begin:], rates.per_1000_node_days[begin:], strict=True)
    known = tuple((day - first, rate) for day, rate in points if rate is not None)
    return Series(title_of(rates.symptom), known)


def _xid_tables(xids: tuple[XidCount, ...]) -> tuple[Table, ...]:
    """As tables V and VI of the Fire-Flyer paper."""
    classes = [(one, [xid for xid in xids if xid.xid in one.xids]) for one in XID_CLASSES]
    others = [xid for xid in xids if xid_class(xid.xid) is None]
    rows: list[tuple[str, ...]] = [
        (one.name, ", ".join(str(xid.xid) for xid in seen), one.cause, one.remedy, *_sums(seen))
        for one, seen in classes
        if seen
    ]
    if others:
        rows.append(("not in table V", ", ".join(str(xid.xid) for xid in others), "", "", *_sums(others)))
    return (
        Table(
            "Xid errors by class",
            ("class", "Xids", "cause", "remedy", "incidents", "share"),
            tuple(rows),
            "Classes of arXiv:2408.14158, table V.",
            numbers=4,
        ),
        Table(
            "Xid errors",
            ("Xid", "class", "incidents", "share"),
            tuple((str(one.xid), _class_name(one.xid), *_sums([one])) for one in xids),
            "What a node reports of one Xid within an hour counts once, also what a user's program can cause.",
            numbers=2,
        ),
    )


def _class_name(xid: int) -> str:
    known = xid_class(xid)
    return "" if known is None else known.name


def _sums(xids: Sequence[XidCount]) -> tuple[str, str]:
    return f"{sum(one.incidents for one in xids):,}", f"{sum(one.share for one in xids):.2%}"


def _loss_tables(found: Characterisation) -> tuple[Table, ...]:
    losses = found.losses
    return (
        Table(
            "Lost GPU-hours by cause",
            ("symptom", "cause", "failures", "work", "wait", "restart", "preempted", "all"),
            tuple(
                (title_of(one.symptom), one.cause, f"{one.failures:,}",
                 *(_lost(hours) for hours in (one.work, one.wait, one.restart, one.pushed, one.lost)))
                for one in losses.causes
            ),
            "Work since the last checkpoint, or half an hour where that is not known; wait for the next attempt; its "
            f"restart, or {RESTART_S // 60} minutes where that was not measured; work of jobs that it preempted.",
            numbers=2,
        ),
        Table(
            "Lost GPU-hours by node",
            ("node", "failures", "GPU-hours"),
            tuple((one.node or "none reported", f"{one.failures:,}", _lost(one.lost)) for one in losses.nodes),
            " ".join([
                "Of the failures that the node reported the reason of.", *_left_out(found, "nodes", "further nodes"),
            ]),
        ),
        Table(
            "Lost GPU-hours by cause and size of job",
            ("symptom", "cause", "GPUs", "failures", "GPU-hours"),
            tuple(
                (title_of(one.symptom), one.cause, _gpus(one.gpus), f"{one.failures:,}", _lost(one.lost))
                for one in losses.sizes
            ),
            numbers=2,
        ),
    )  # fmt: skip


def _lost(hours: float) -> str:
    return f"{hours:,.1f}" if hours >= 10 else f"{hours:.3g}"


def _gpus(size: int) -> str:
    return f"{size // 2 + 1:,} to {size:,}" if size > 2 else f"{size:,}"


def _training_row(one: TrainingTime) -> tuple[str, ...]:
    return (
        f"{one.jobs:,}",
        f"{one.attempts:,}",
        f"{one.gpu_hours:,.1f}",
        f"{one.lost_gpu_hours:,.1f}",
        f"{one.ettr:.4f}",
        f"{one.goodput:.4f}",
    )


def _size_row(one: SizeClass) -> tuple[str, ...]:
    return (
        _gpus(one.gpus),
        f"{one.attempts:,}",
        f"{one.node_days:,.1f}",
        f"{one.failures:,}",
        _hours(one.mttf_h),
        f"{_hours(one.mttf_low_h)} to {_hours(one.mttf_high_h)}",
        f"{one.lost_gpu_hours:,.1f}",
        f"{one.lost_by_preemption_gpu_hours:,.1f}",
    )


def _rate(rate: Rate) -> str:
    per = 1000
    return f"{rate.per_node_day * per:.3g} ({rate.low * per:.3g} to {rate.high * per:.3g})"


def _hours(hours: float | None) -> str:
    return "∞" if hours is None else f"{hours:,.3g}" if hours < 1000 else f"{hours:,.0f}"
