"""What the report says, and what it refuses to say."""

from __future__ import annotations

import re
from html.parser import HTMLParser

import msgspec
import pytest
from tests.support.jobs.job_logs import Break, JobScript, example_log, make_log

from fireflyer.analytics.accounting import LossPoint, account
from fireflyer.analytics.charts import MAX_POINTS, loss_chart, nice_ticks, thin_out, time_chart
from fireflyer.analytics.html import render_html
from fireflyer.analytics.report import Fact, JobReport, Row, build_report, one_line
from fireflyer.base.events import (
    AttemptFailed,
    AttemptStarted,
    CheckpointReport,
    JobFinished,
    JobStarted,
    Logged,
    RankExited,
    ResumeReport,
    SaturationReport,
    SkippedCheckpoint,
    StepReport,
    Suspended,
    SuspendRequested,
)
from fireflyer.base.units import SECOND

HOSTILE = "<script>alert('x')</script>\"&\x1b[31m\nsecond line"


def row(rows: tuple[Row, ...], label: str) -> Row:
    return next(row for row in rows if row.label == label)


def silent_log() -> list[Logged]:
    started = JobStarted("quiet", ("train.py",), 1, 2, 0, 0.0)
    return [Logged(0, started), Logged(0, AttemptStarted(0)), Logged(3 * SECOND, JobFinished(0, "done"))]


def test_the_example_is_told_step_by_step() -> None:
    report = build_report(example_log(), facts=[Fact("curve", "bitwise equal", True)])
    assert report.headline == "Finished in 42.3 s: 120 steps, loss 6.337 → 2.117, 1 failure survived."
    (story,) = report.failures
    assert story.title == "Failure 1: node 1 lost at step 71"
    assert row(story.rows, "Resumed").value == "from step 60"
    assert row(story.rows, "Repeated").value == "10 steps"
    assert row(report.facts, "curve").mark == "good"
    assert row(report.summary, "Throughput").value == "16,384 tokens/s"
    assert row(report.ettr_rows, "Measured").value == "0.709"
    assert [part.kind for part in report.parts] == [
        "productive",
        "lost",
        "restart",
        "checkpoint",
        "startup",
        "other",
    ]
    assert sum(part.spent_ns or 0 for part in report.parts) == report.account.wall_ns


def test_a_job_without_reports_has_unknown_parts_not_zeros() -> None:
    report = build_report(silent_log())
    known = {part.kind: part.duration for part in report.parts}
    assert known["productive"] == known["lost"] == known["checkpoint"] == known["startup"] == "unknown"
    assert known["unknown"] == "3.0 s"
    assert row(report.summary, "Steps").value == "unknown"
    assert row(report.ettr_rows, "Measured").value == "unknown"
    assert "No loss was reported." in render_html(report)


def test_steps_without_a_word_on_resuming_are_not_said_to_be_from_the_start() -> None:
    script = JobScript(steps=50, breaks=(Break(after_step=30),), resumes=False)
    resumed = row(build_report(make_log(script)[0]).failures[0].rows, "Resumed")
    assert (resumed.value, resumed.note) == ("from step 20", "the ranks reported no checkpoint name")


def broken_silent_log(exit_code: int) -> list[Logged]:
    started, *_ = silent_log()
    return [
        started,
        Logged(0, AttemptStarted(0)),
        Logged(SECOND, AttemptFailed(0, "rank 1 died", True, 0, 1)),
        Logged(2 * SECOND, AttemptStarted(1)),
        *([Logged(3 * SECOND, AttemptFailed(1, "rank 1 died", False, 0, 1))] if exit_code else []),
        Logged(4 * SECOND, JobFinished(exit_code, "rank 1 died" if exit_code else "done")),
    ]


def test_without_reports_a_failure_is_not_said_to_have_been_fatal_or_survived_unless_the_end_shows_it() -> None:
    report = build_report(broken_silent_log(0))
    unknown = "This script does not use Reporter: steps and loss are unknown."
    assert report.headline == f"Finished in 4.0 s: 2 attempts, 1 failure survived. {unknown}"
    resumed = row(report.failures[0].rows, "Resumed")
    assert (resumed.value, resumed.mark) == ("unknown", "")
    report = build_report(broken_silent_log(1))
    assert report.headline.endswith("2 attempts, 2 failures. No step was reported: steps and loss are unknown.")
    assert [row(story.rows, "Resumed").value for story in report.failures] == ["unknown", "no"]


def test_a_failed_job_says_what_was_not_saved() -> None:
    log = make_log(JobScript(steps=50, finish=False))[0]
    end_ns = log[-1].at_ns + SECOND
    log += [Logged(end_ns, AttemptFailed(0, "rank 2 died", False, 1, 2)), Logged(end_ns, JobFinished(9, "rank 2 died"))]
    report = build_report(log)
    assert report.succeeded is False
    assert report.headline.startswith("Failed after 17.7 s with exit code 9 (rank 2 died)")
    assert report.headline.endswith("1 failure, 0 survived.")
    assert report.failures[0].title == "Failure 1: rank 2 failed at step 51"
    assert row(report.summary, "Not saved").value == "10 steps"


def test_a_job_that_was_suspended_says_so() -> None:
    started, begun, _ = silent_log()
    log = [started, begun, Logged(SECOND, SuspendRequested(0)), Logged(2 * SECOND, RankExited(0, 0, 85))]
    report = build_report([*log, Logged(3 * SECOND, Suspended(0, 7)), Logged(3 * SECOND, JobFinished(85, "suspended"))])
    assert report.succeeded is None
    assert report.headline.startswith("Suspended after 3.0 s (suspended): ")
    assert "Suspended." in render_html(report)
    assert report.failures == ()


def test_a_job_that_was_stopped_has_neither_succeeded_nor_failed() -> None:
    started, begun, _ = silent_log()
    stopped = AttemptFailed(0, "stopped by SIGINT", False, stopped=True)
    log = [started, begun, Logged(SECOND, stopped), Logged(3 * SECOND, JobFinished(130, "stopped by SIGINT"))]
    report = build_report(log)
    assert report.succeeded is None
    assert report.headline.startswith("Ended after 3.0 s on request (stopped by SIGINT): ")
    assert "Stopped." in render_html(report)
    finished_anyway = build_report([*log[:-1], Logged(3 * SECOND, JobFinished(0, "done"))])
    assert finished_anyway.succeeded is True


def test_a_log_without_an_end_is_incomplete() -> None:
    report = build_report(make_log(JobScript(finish=False))[0])
    assert report.succeeded is None
    assert report.headline.startswith("Not finished")


def hostile_report() -> JobReport:
    log = [
        Logged(0, JobStarted(HOSTILE, (HOSTILE,), 1, 1, 0, 1e300)),
        Logged(0, AttemptStarted(0)),
        Logged(1, ResumeReport(0, 0, 3, HOSTILE, (SkippedCheckpoint(HOSTILE, HOSTILE),))),
        Logged(SECOND, StepReport(0, 0, 4, 1, 1, 1.0, SECOND)),
        Logged(SECOND, CheckpointReport(0, 0, 4, 1, 0, 0, HOSTILE)),
        Logged(SECOND, AttemptFailed(0, HOSTILE, True, 0, None)),
        Logged(SECOND, AttemptStarted(1)),
        Logged(SECOND, ResumeReport(0, 1, 3, HOSTILE, (SkippedCheckpoint(HOSTILE, HOSTILE * 100),))),
        Logged(2 * SECOND, StepReport(0, 1, 4, 1, 1, 2.0, SECOND)),
        Logged(3 * SECOND, JobFinished(1, HOSTILE)),
    ]
    return build_report(log, facts=[Fact(HOSTILE, HOSTILE, False)])


def test_hostile_text_stays_text() -> None:
    page = render_html(hostile_report())
    assert "<script" not in page
    assert "&lt;script&gt;alert" in page
    assert "\x1b" not in page


class _Tags(HTMLParser):
    VOID = frozenset({"meta", "link", "br"})

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.attributes: list[tuple[str, str, str | None]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += [(tag, name, value) for name, value in attrs]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += [(tag, name, value) for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


@pytest.mark.parametrize("log", [example_log(), silent_log(), []], ids=["example", "silent", "empty"])
def test_the_page_is_well_formed_and_fetches_nothing(log: list[Logged]) -> None:
    page = render_html(build_report(log))
    tags = _Tags()
    tags.feed(page)
    assert tags.open == []
    assert not [item for item in tags.attributes if item[1] in ("src", "srcset", "action", "onload", "onclick")]
    assert [value for _, name, value in tags.attributes if name == "href"] == ["data:,"]
    assert not re.search(r"https?://|@import|url\((?!#)", page)
    ids = [value for _, name, value in tags.attributes if name == "id"]
    assert len(ids) == len(set(ids))


def test_the_same_log_gives_the_same_page() -> None:
    assert render_html(build_report(example_log())) == render_html(build_report(example_log()))


def test_the_curve_marks_the_failure_and_the_steps_done_again() -> None:
    chart = loss_chart(account(example_log()))
    assert chart.count('class="failure"') == 1
    assert "node 1 lost at step 71, resumed from step 60" in chart
    assert chart.count('class="discarded"') == 1
    assert chart.count('class="band"') == 1
    assert "The loss goes from 6.337 at step 1 to 2.117 at step 120." in chart
    assert 'class="failure"' not in loss_chart(account(make_log(JobScript())[0]))


@pytest.mark.parametrize("step", [1, 10, 62, 75, 119])
def test_what_is_said_beside_a_cross_covers_neither_the_name_of_the_axis_nor_an_edge(step: int) -> None:
    broken = make_log(JobScript(breaks=(Break(after_step=step),)))[0]
    chart = loss_chart(account(broken))
    said = re.findall(r'<text class="long" x="([\d.]+)" text-anchor="(\w+)" y="(\d+)">([^<]+)</text>', chart)
    assert len(said) == 2
    assert said[0][3].startswith("node 1 lost at step ")
    for x, anchor, y, text in said:
        width = 8.4 * len(text)
        left = float(x) - (width if anchor == "end" else 0)
        assert left >= 58, "the name of the axis ends at 50"
        assert left + width <= 720
        assert 10 <= int(y) <= 46


def test_names_and_numbers_of_the_axes_have_room_also_twice_as_large_on_a_phone() -> None:
    chart = loss_chart(account(make_log(JobScript(steps=300))[0]))
    assert '<text class="tick" x="720" text-anchor="end" y="314">300</text>' in chart, "in the middle it would be cut"
    heights = dict(re.findall(r'<text class="label"[^>]* y="(\d+)"[^>]*>(\w+)<', chart)[::-1])
    labels = {name: int(y) for y, name in heights.items()}
    assert labels["loss"] + 24 <= 46, "above the highest number"
    assert labels["step"] >= 314 + 24, "below the numbers"


def test_the_undisturbed_curve_is_drawn_beneath_that_of_the_job() -> None:
    undisturbed = make_log(JobScript())[0]
    assert 'class="undisturbed"' not in loss_chart(account(example_log()))
    page = render_html(build_report(example_log(), undisturbed=undisturbed))
    assert page.index('<path class="undisturbed"') < page.index('<path class="curve"')
    last = account(undisturbed).losses[-1]
    assert f"The undisturbed run, drawn beneath, ends with {last.loss:.4g} at step {last.step}." in page


def test_the_formula_is_shown_with_its_numbers() -> None:
    report = build_report(example_log())
    page = render_html(report)
    assert "(1 − N·r_f·(u0 + Δt/2))" in page
    assert report.ettr.expected is not None
    assert f"= {report.ettr.expected:.3f}</p>" in page
    for symbol in ("N·r_f: ", "u0: ", "Δt: ", "w: ", "q: ", "R: "):
        assert f"<small>{symbol}" in page


def test_failures_that_came_in_a_row_say_where_training_went_on_in_the_end() -> None:
    script = JobScript(breaks=(Break(after_step=70), Break(after_step=0, before_ready=True)))
    report = build_report(make_log(script)[0])
    assert [failure.resumed_step for failure in report.account.failures] == [60, 60]
    assert report.headline.endswith("2 failures survived.")
    assert row(report.failures[0].rows, "Restart").value == "failed"
    assert row(report.failures[1].rows, "Restart").value == "4.0 s"


def test_the_time_chart_draws_parts_to_scale() -> None:
    report = build_report(example_log())
    chart = time_chart(report.account, report.parts)
    widths = [float(width) for width in re.findall(r'<rect class="part \w+" x="[\d.]+" y="22" width="([\d.]+)"', chart)]
    assert sum(widths) == pytest.approx(720, abs=0.1)
    assert widths[0] == pytest.approx(720 * (report.parts[0].share or 0), abs=0.01)


@pytest.mark.parametrize(
    "losses", [[1.0], [2.0, 2.0], [float("inf"), 1.0], [1e308, -1e308, 3.0], [float("nan")], [0.0, 1e-12]]
)
def test_curves_of_strange_losses_hold_only_finite_numbers(losses: list[float]) -> None:
    job = msgspec.structs.replace(
        account(example_log()),
        losses=tuple(LossPoint(n, loss, 0) for n, loss in enumerate(losses, start=1)),
        discarded=(),
    )
    chart = loss_chart(job)
    assert "nan" not in chart
    assert "inf" not in chart


def test_thinning_keeps_ends_and_extremes() -> None:
    points = [LossPoint(step, 1.0, 0) for step in range(1, 100_001)]
    points[77_777] = LossPoint(77_778, 9.0, 0)
    thinned = thin_out(points)
    assert len(thinned) <= MAX_POINTS + 2
    assert thinned[0].step == 1
    assert thinned[-1].step == 100_000
    assert max(point.loss for point in thinned) == 9.0
    assert [p.step for p in thinned] == sorted(p.step for p in thinned)


def test_ticks_are_round_and_cover() -> None:
    assert nice_ticks(2.1, 6.3) == [2.0, 3.0, 4.0, 5.0, 6.0, 7.0]
    assert nice_ticks(0.0013, 0.0019) == [0.0012, 0.0014, 0.0016, 0.0018, 0.002]
    assert nice_ticks(5, 5) == [5]
    assert nice_ticks(1, 14, 6, whole=True) == [0, 5, 10, 15]
    assert nice_ticks(1, 3, 6, whole=True) == [1, 2, 3]


def test_one_line_is_one_printable_line_of_bounded_length() -> None:
    assert one_line("a\n b\x00\x1b[2Jc\u2028d") == "a b [2Jc d"
    assert len(one_line("x" * 10_000)) == 300


def test_many_failures_are_drawn_within_bounds() -> None:
    log = make_log(JobScript(steps=40, checkpoint_every=3, breaks=tuple(Break(after_step=n) for n in range(2, 40, 2))))[
        0
    ]
    report = build_report(log)
    assert len(report.failures) == 19
    assert render_html(report).count('<g class="failure">') == 12


def test_fp8_sums_that_did_not_fit_are_counted_over_ranks_groups_and_attempts() -> None:
    """The last counts of a rank include its earlier ones; a rank that is none of the job's is left out."""
    reports = [(0, 0, "world", 3, 500), (0, 0, "world", 10, 1000), (1, 0, "world", 5, 900), (0, 1, "world", 1, 1000)]
    reports += [(1, 0, "half", 4, 2000), (7, 0, "world", 99, 99)]
    log = silent_log()
    log[2:2] = [Logged(SECOND, SaturationReport(*report)) for report in reports]
    found = row(build_report(log).summary, "fp8 overflow")
    assert (found.value, found.mark) == ("20 of 4,000 values (0.50%)", "bad")
    assert found.note.endswith("rounded by rank 0, 1")
    assert not any(one.label == "fp8 overflow" for one in build_report(silent_log()).summary)
