"""A low figure is measured again: noise that passes accuses no node, what stays low does, and says how often."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.validators.validation.test_paths import FakeTorch, Numa, here

from fireflyer.base.health_event import HealthEvent
from fireflyer.validators.core.checks.evidence import Finding
from fireflyer.validators.core.validation.node_measurements import NodeMeasurements
from fireflyer.validators.core.validation.paths import path_name
from fireflyer.validators.core.validation.records import Found, NodeRecord
from fireflyer.validators.core.validation.repetition import MEASUREMENTS, LowFigures, validators_of
from fireflyer.validators.core.validation.reports import NodeReport
from fireflyer.validators.stress import cuda_paths, paths, processor, run, storage

GEMM, MEMORY = "cpu_gemm_flop_per_s", "memory_bytes_per_s"
PEERS = [
    NodeRecord(node=f"n{number}", model="m", seen_ns=1, figures={GEMM: value, MEMORY: 100.0})
    for number, value in enumerate((99, 100, 101, 100, 102, 98))
]


def record(node: str, **figures: float) -> NodeRecord:
    return NodeRecord(node=node, model="m", seen_ns=5, figures=figures)


class Script:
    """Measures these values of `cpu_stress`, one after the other; None: it could not run."""

    def __init__(self, *values: float | None, faults: tuple[Finding, ...] = ()) -> None:
        self.values = iter(values)
        self.asked: list[list[str]] = []
        self.faults = faults

    def __call__(self, names: Iterable[str]) -> Iterator[Found]:
        self.asked.append(list(names))
        value = next(self.values)
        could_not_run = "" if value is not None else "OSError: no"
        figures = {GEMM: value} if value is not None else {}
        yield Found(validator="cpu_stress", figures=figures, faults=self.faults, could_not_run=could_not_run)


def validated(first: float, script: Script) -> tuple[list[HealthEvent], NodeRecord]:
    """Of a node with a sound memory."""
    found = [
        Found(validator="cpu_stress", figures={GEMM: first}),
        Found(validator="memory_bandwidth", figures={MEMORY: 99.0}),
    ]
    found = run.repeat_low(found, run.record_of(found, "m", 5), PEERS, script)
    mine = run.record_of(found, "m", 5)
    return run.events_of(found, mine, PEERS, 5), mine


def test_what_is_not_low_is_measured_once() -> None:
    script = Script()
    events, mine = validated(99.0, script)
    assert script.asked == []
    assert [event.severity for event in events] == ["ok", "ok"]
    assert mine.figures == {GEMM: 99.0, MEMORY: 99.0}


def test_noise_that_passes_accuses_no_node() -> None:
    script = Script(99.5, 100.5)
    events, mine = validated(40.0, script)
    assert script.asked == [["cpu_stress"], ["cpu_stress"]], "two of three decide"
    assert [event.severity for event in events] == ["warn", "ok"], "which is told all the same"
    assert events[0].words.endswith("; 1 of 3 measurements is too low")
    assert mine.figures[GEMM] == 99.5, "the median is what counts, for others too"
    assert mine.repeated == {GEMM: (40.0, 99.5, 100.5)}, "and the low one is kept"


def test_a_figure_that_stays_low_is_a_fault_which_says_how_often() -> None:
    script = Script(41.0)
    events, mine = validated(40.0, script)
    assert script.asked == [["cpu_stress"]], "two agree; a third measurement would take minutes for nothing"
    assert [(event.check, event.severity, event.cause) for event in events if event.severity != "ok"] == [
        ("cpu_stress", "low", GEMM)
    ]
    assert events[0].words.startswith(f"{GEMM} is 41.0, 59.0% below the median of 6 peers, 100, ")
    assert events[0].words.endswith("deviations; 2 of 2 measurements are too low")
    assert mine.figures[GEMM] == 41.0


def test_a_figure_that_is_low_two_times_of_three_is_a_fault() -> None:
    events, mine = validated(40.0, Script(100.0, 42.0))
    assert events[0].words.endswith("2 of 3 measurements are too low")
    assert (events[0].severity, mine.figures[GEMM]) == ("low", 42.0)


def test_a_low_figure_that_cannot_be_measured_again_is_a_warning() -> None:
    script = Script(None, None)
    events, _ = validated(40.0, script)
    assert len(script.asked) == MEASUREMENTS - 1
    assert events[0].severity == "warn"
    assert events[0].words.endswith("; it could not be measured again")


def test_a_low_figure_on_which_two_measurements_do_not_agree_is_a_warning() -> None:
    """The third could not be made: the better one does not count."""
    events, _ = validated(40.0, Script(100.0, None))
    assert events[0].severity == "warn"
    assert events[0].words.endswith("; 1 of 2 measurements is too low; it could not be measured again")


def test_a_fault_that_comes_up_in_a_repetition_counts() -> None:
    wrong = Finding(severity="high", cause="wrong_result", words="1 of 9 products is wrong", at_once=True)
    events, _ = validated(40.0, Script(100.0, 100.0, faults=(wrong,)))
    assert {event.cause for event in events if event.severity == "high"} == {"wrong_result"}
    assert not [event for event in events if event.severity == "low"]


@given(st.lists(st.floats(0, 2), min_size=1, max_size=MEASUREMENTS))
def test_repetitions_accuse_nobody_whom_the_first_measurement_does_not(values: list[float]) -> None:
    low = LowFigures({"x": values[0]}, {"x": 1.0, "absent": 1.0})
    for value in values[1:]:
        low.add({"x": value})
    assert bool(low.counted) == (values[0] < 1.0)
    if len(values) == MEASUREMENTS and values[0] < 1.0:
        assert not low.undecided
        assert (low.counted["x"] < 1.0) == (sum(value < 1.0 for value in values) * 2 > MEASUREMENTS)


def test_of_healthy_nodes_a_hundredth_is_accused_of_those_that_one_measurement_accuses() -> None:
    """With noise that is independent and below the bound once in a hundred."""
    random = np.random.default_rng(11)
    first = accused = 0
    for values in random.random((40_000, MEASUREMENTS)):
        low = LowFigures({0: float(values[0])}, {0: 0.01})
        for value in values[1:]:
            low.add({0: float(value)})
        first += bool(low.measured)
        accused += any(value < 0.01 for value in low.counted.values())
    assert 330 < first < 470
    assert accused <= 0.05 * first


# --- nodes of a cluster ---


def report(node: str, value: float, memory: float = 100.0, *events: HealthEvent) -> NodeReport:
    return NodeReport(record=record(node, **{GEMM: value, MEMORY: memory}), events=events)


def cluster(slow: float = 40.0) -> NodeMeasurements:
    """Five nodes, the last of which is slow."""
    measured = NodeMeasurements(PEERS[:2])
    for number, value in enumerate((99.0, 100.0, 101.0, 100.0, slow)):
        measured.first(f"n{number}", report("of-the-node", value), 7)
    return measured


def faults(measured: NodeMeasurements) -> dict[str, list[tuple[str, str]]]:
    found = {
        node: [(str(event.severity), event.words) for event in events if event.severity != "ok"]
        for node, events in measured.events().items()
    }
    return {node: events for node, events in found.items() if events}


def test_only_the_slow_node_runs_the_validator_of_its_figure_again() -> None:
    assert cluster().to_repeat() == {"n4": ["cpu_stress"]}
    assert cluster(99.0).to_repeat() == {}


def test_a_node_of_a_cluster_that_is_slow_once_is_in_order_and_leaves_a_record() -> None:
    measured = cluster()
    measured.to_repeat()
    measured.again("n4", report("n4", 100.0))
    assert measured.to_repeat() == {"n4": ["cpu_stress"]}
    measured.again("n4", report("n4", 98.0))
    assert measured.to_repeat() == {}
    ((severity, words),) = faults(measured)["n4"]
    assert (severity, words.endswith("; 1 of 3 measurements is too low")) == ("warn", True)
    assert [(one.node, one.seen_ns, one.figures[GEMM]) for one in measured.records()][-1] == ("n4", 7, 98.0)
    repeated = {one.node: one.repeated for one in measured.records()}
    assert (list(repeated["n4"]), repeated["n4"][GEMM][1:]) == ([GEMM], (100.0, 98.0))
    assert not repeated["n1"]


def test_a_node_of_a_cluster_that_stays_slow_is_at_fault() -> None:
    measured = cluster()
    measured.to_repeat()
    measured.again("n4", report("n4", 42.0))
    assert measured.to_repeat() == {}
    ((severity, words),) = faults(measured)["n4"]
    assert severity == "low"
    assert words.endswith("; 2 of 2 measurements are too low")
    assert set(faults(measured)) == {"n4"}


def test_a_node_of_a_cluster_that_was_needed_meanwhile_is_warned_of_and_stays_due() -> None:
    measured = cluster()
    measured.to_repeat()
    measured.again("n4", None)
    ((severity, words),) = faults(measured)["n4"]
    assert (severity, words.endswith("it could not be measured again")) == ("warn", True)
    assert [one.node for one in measured.records()] == ["n0", "n1", "n2", "n3"]


def test_a_node_of_a_cluster_whose_two_measurements_do_not_agree_is_warned_of_and_stays_due() -> None:
    measured = cluster()
    measured.to_repeat()
    measured.again("n4", report("n4", 100.0))
    measured.again("n4", None)
    assert [severity for severity, _ in faults(measured)["n4"]] == ["warn"]
    assert [one.node for one in measured.records()] == ["n0", "n1", "n2", "n3"]


@pytest.mark.parametrize(("only", "told"), [((), True), (("gpu_gemm",), True), (("memory_bandwidth",), False)])
def test_a_node_that_has_not_the_figures_of_its_peers_is_warned_of_and_stays_due(
    only: tuple[str, ...], told: bool
) -> None:
    """Its GPU is lost, or its job was not given it. A figure of another release, or of three peers, says nothing."""
    more = {"gpu0_gemm_flop_per_s": 5.0, "of_another_release": 1.0}
    known = [record(f"p{number}", **{GEMM: 100.0, MEMORY: 100.0}, **more) for number in range(4)]
    known += [record(f"p{number}", **{GEMM: 100.0, "storage_read_bytes_per_s": 1.0}) for number in range(4, 7)]
    measured = NodeMeasurements(known, only)
    measured.first("n0", report("n0", 100.0), 7)
    words = "gpu_gemm: 1 figure of its peers could not be measured here; it stays due"
    assert faults(measured) == ({"n0": [("warn", words)]} if told else {})
    assert [one.node for one in measured.records()] == ([] if told else ["n0"])


def test_wrong_results_of_a_repetition_are_told_of_a_node_of_a_cluster() -> None:
    measured = cluster()
    measured.to_repeat()
    wrong = HealthEvent(check="cpu_stress", severity="high", cause="wrong_result", words="wrong", seen_ns=1)
    measured.again("n4", report("n4", 100.0, 100.0, wrong))
    assert ("high", "wrong") in faults(measured)["n4"]


# --- who measures what ---


def test_each_figure_leads_back_to_its_validator(tmp_path: Path) -> None:
    found = [
        processor.multiply(0, threads=1), processor.memory_bandwidth(0, array_bytes=1 << 16, threads=1),
        processor.allreduce_in_memory(0, array_bytes=1 << 12, ranks=2),
        storage.stress_storage(str(tmp_path), 1, file_bytes=4 << 20),
        paths.host_paths(0, machine=here(2), thread_bytes=1 << 14, kernel=Numa().kernel),
        cuda_paths.gpu_paths(FakeTorch(2), 0, machine=here(1), block_bytes=4096),
    ]  # fmt: skip
    for one in found:
        assert one.figures
        assert validators_of(one.figures) == [one.validator]
        assert one.validator in run.VALIDATORS
    assert validators_of(["gpu3_gemm_flop_per_s", "gpu_allreduce_bytes_per_s"]) == ["gpu_allreduce", "gpu_gemm"]
    assert validators_of([path_name("gpu0", "gpu1", by_host=True)]) == ["gpu_paths"]
    assert validators_of(["of_a_later_release"]) == []
