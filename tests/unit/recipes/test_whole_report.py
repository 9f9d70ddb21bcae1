"""The report of the whole demonstration: its time line, its figures, its page."""

from __future__ import annotations

import math
import re

import msgspec
import pytest
from tests.support.jobs.whole_facts import PLAN, RunLog, good_facts, run_of

from fireflyer.analytics import expected_ettr
from fireflyer.base.units import MIB, SECOND
from fireflyer.recipes.testbed.collecting import shards_of
from fireflyer.recipes.testbed.facts import FileFact, StorageSample
from fireflyer.recipes.whole.checks import judge
from fireflyer.recipes.whole.efficiency import ettr_of
from fireflyer.recipes.whole.facts import Fault, Operation
from fireflyer.recipes.whole.html import render_whole
from fireflyer.recipes.whole.pictures import Curve, chart
from fireflyer.recipes.whole.report import WholeReport, report_of, throughput
from fireflyer.recipes.whole.timeline import lanes
from fireflyer.recipes.whole.watching import recovery_of

GOOD = good_facts()
change = msgspec.structs.replace


def report() -> WholeReport:
    return report_of(PLAN, GOOD, judge(PLAN, GOOD), took_ns=60 * SECOND)


def test_a_lane_for_each_task_and_node_with_spans_that_do_not_overlap() -> None:
    found = lanes(PLAN, GOOD)
    names = [lane.name for lane in found]
    assert names == ["first", "second", "urgent", "agent-1", "agent-2", "storage 1", "storage 2", "storage 3"]
    for lane in found:
        assert all(span.begin_ns < span.end_ns for span in lane.spans)
        ends = [span.end_ns for span in lane.spans]
        begins = [span.begin_ns for span in lane.spans]
        assert all(end <= begin for end, begin in zip(ends, begins[1:], strict=False)), lane.name
    kinds = {lane.name: [span.kind for span in lane.spans] for lane in found}
    assert kinds["first"] == ["start", "start", "train", "lost", "lost", "start", "train"]
    assert kinds["second"].count("wait") == 1
    assert kinds["storage 2"] == ["up", "down", "sync", "up"]
    assert kinds["storage 1"] == ["up"]


def test_ettr_is_measured_over_the_life_and_filled_into_the_formula() -> None:
    wanted, task = PLAN.tasks[0], GOOD.tasks[0]
    found = ettr_of(wanted, task)
    life_s = (task.ended_ns or 0) / SECOND
    assert found.measured == pytest.approx(60 * 0.1 / life_s)
    terms = {row.label: row.value for row in found.terms}
    assert terms["N·r_f"] == f"{1 / life_s:.4f} /s"
    assert terms["Δt"] == "1.00 s"
    assert terms["R"] == "6.0 s"
    assert found.expected is not None
    u0 = float(terms["u0"].split()[0])
    again = expected_ettr(
        failures_per_s=1 / life_s, restart_s=u0, period_s=1.0, stall_s=0.0, productive_s=6.0, queue_s=1.0
    )
    assert found.expected == pytest.approx(again, abs=0.01)
    numbers = found.filled.rpartition("=")
    formula = numbers[0].replace("−", "-").replace("·", "*")
    assert eval(formula) == pytest.approx(float(numbers[2]), abs=0.01)


def test_steps_that_a_run_lost_with_its_launcher_count_once() -> None:
    """The log of such a run ends in the middle; the next run did its last steps again."""
    wanted, nodes = PLAN.tasks[0], ("agent-1", "agent-2")
    cut, again = RunLog(wanted), RunLog(wanted)
    cut.attempt(0, 0, 35)
    again.attempt(0, 30, 60)
    runs = (run_of(0, nodes, 0, cut, "infrastructure"), run_of(1, nodes, 20 * SECOND, again, "succeeded"))
    found = ettr_of(wanted, change(GOOD.tasks[0], runs=runs, ended_ns=60 * SECOND))
    assert found.measured == pytest.approx(60 * 0.1 / 60, rel=0.02)
    assert found.terms[0].note.startswith("1 in 60.0 s")


def test_throughput_has_the_bytes_of_all_operations() -> None:
    operations = [
        Operation(kind="write", begin_ns=0, end_ns=2 * SECOND, bytes=4 * MIB),
        Operation(kind="read", begin_ns=SECOND // 2, end_ns=SECOND // 2 + 1, bytes=MIB),
        Operation(kind="read", begin_ns=0, end_ns=SECOND, bytes=MIB, error="lost"),
    ]
    writes, reads = throughput(operations, 3 * SECOND)
    assert [y for _, y in writes.points] == pytest.approx([2.0, 2.0, 0.0])
    assert [y for _, y in reads.points] == pytest.approx([1.0, 0.0, 0.0])


def test_when_a_storage_node_failed_and_was_back() -> None:
    def sample(at_ns: int, *, alive: bool = True, incarnation: int = 1, whole: int = 6) -> StorageSample:
        return StorageSample(
            at_ns=at_ns,
            alive=(1, 2, 3) if alive else (1, 3),
            incarnations=(1, incarnation, 1),
            chains=6,
            whole=whole,
            serving=6,
        )

    fault = Fault(kind="storage", at_ns=10, what="2")
    history = [sample(9, whole=3), sample(11), sample(12, alive=False, whole=2), sample(13, incarnation=2, whole=2),
               sample(14, incarnation=2, whole=5), sample(15, incarnation=2)]  # fmt: skip
    seen = [recovery_of(history[:count], fault, 1) for count in range(len(history) + 1)]
    assert [(one.failed_ns, one.over_ns, one.whole_ns) for one in seen] == [
        (None, None, None), (None, None, None), (None, None, None), (12, None, None), (12, 13, None), (12, 13, None),
        (12, 13, 15)]  # fmt: skip
    assert recovery_of([sample(12, incarnation=2)], fault, 1).over_ns is None, "it never counted as failed"
    late = [sample(12, alive=False), sample(13), sample(14, incarnation=2)]
    assert recovery_of(late, fault, 1).over_ns == 14, "a heartbeat that came late is not the new process"


def test_the_shards_of_the_last_checkpoint_are_found() -> None:
    paths = ["step-00000020/shard-0", "step-00000100/shard-0", "step-00000100/shard-1", "step-00000100/manifest.json",
             ".writer-1/.tmp-step-00000110/shard-0", "job.json"]  # fmt: skip
    stored = [FileFact(path=f"/checkpoints/first/{one}", bytes=1, digest=one) for one in paths]
    stored.append(FileFact(path="/checkpoints/second/step-00000200/shard-0", bytes=1, digest="another task's"))
    assert shards_of(stored, "/checkpoints/first") == {
        "shard-0": "step-00000100/shard-0",
        "shard-1": "step-00000100/shard-1",
    }
    assert shards_of(stored, "/checkpoints/third") == {}


def test_the_page_says_everything_and_is_the_same_twice() -> None:
    page = render_whole(report())
    assert page == render_whole(report())
    assert page.count("<svg ") == 4
    assert page.count('class="curve under"') == page.count('class="curve over"') == 6, (
        "curve and legend, of three tasks"
    )
    for said in (
        "All 10 checks hold",
        "SIGKILL to storage node 2",
        "SIGKILL to agent-2",
        "What was lost, and why",
        "5 steps of first",
        "no byte",
        "second interrupted",
        "E[ETTR] ≳",
        "N·r_f",
    ):
        assert said in page
    assert "<script" not in page
    assert not re.search(r"(src|href)=\"https?:", page)


def test_a_failed_check_is_told_and_hostile_text_is_text() -> None:
    facts = change(GOOD, trouble=("<script>alert(1)</script>",))
    page = render_whole(report_of(PLAN, facts, judge(PLAN, facts), took_ns=SECOND))
    assert "1 of 10 checks failed" in page
    assert "&lt;script&gt;" in page
    assert "<script" not in page


def test_what_no_check_has_shown_is_not_claimed() -> None:
    facts = change(GOOD, stored=GOOD.stored[1:])
    rows = {row.label: row.value for row in report_of(PLAN, facts, judge(PLAN, facts), took_ns=SECOND).lost}
    assert rows["storage 2 killed"] == "see the checks"
    assert rows["second interrupted"] == "no step"


def test_a_report_of_nothing_is_one() -> None:
    """As after a demonstration that ended at once."""
    facts = change(GOOD, faults=(), tasks=(), nodes=(), storage=(), operations=(), stored=(), twins=(), end_ns=0)
    page = render_whole(report_of(PLAN, facts, judge(PLAN, facts), took_ns=0))
    assert "checks failed" in page


def test_a_curve_is_lifted_where_a_value_is_missing() -> None:
    drawn = chart(
        [Curve("as it ran", "over", ((1.0, 3.0), (2.0, math.nan), (3.0, 2.0), (4.0, 1.0)))],
        name="loss", title="Loss", x_label="step", y_label="loss",
    )  # fmt: skip
    path = re.search(r'<path class="curve over" d="([^"]*)"', drawn)
    assert path is not None
    assert path[1].count("M") == 2
    assert "nan" not in path[1]
