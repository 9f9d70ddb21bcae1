"""A node whose GPUs do not show is no model of its own: it is at fault beside the nodes that are as it is else."""

from __future__ import annotations

import msgspec
import pytest

from fireflyer.validators.core.validation.node_measurements import NodeMeasurements
from fireflyer.validators.core.validation.node_models import usual_model
from fireflyer.validators.core.validation.records import Found, NodeRecord, as_written
from fireflyer.validators.core.validation.reports import NodeReport
from fireflyer.validators.stress import run

MACHINE = "ESC8000 / 128 x AMD EPYC 7543 32-Core Processor"
USUAL = f"{MACHINE} / 8 x NVIDIA H800"
GEMM = "cpu_gemm_flop_per_s"


def record(node: str, model: str, seen_ns: int = 1, value: float = 100.0) -> NodeRecord:
    return NodeRecord(node=node, model=model, seen_ns=seen_ns, figures={GEMM: value})


def nodes(model: str, count: int, prefix: str = "peer") -> list[NodeRecord]:
    return [record(f"{prefix}-{number}", model, value=100.0 + number % 3) for number in range(count)]


@pytest.mark.parametrize(
    ("model", "has"), [(MACHINE, 0), (f"{MACHINE} / 7 x NVIDIA H800", 7), (f"{MACHINE} / 1 x NVIDIA H800", 1)]
)
def test_a_node_with_fewer_gpus_than_before_is_at_fault_and_compared_with_them(model: str, has: int) -> None:
    found = [Found(validator="cpu_stress", figures={GEMM: 10.0}, measured={GEMM: (10.0, 10.0)})]
    missing, slow = run.events_of(found, record("me", model, 9, 10.0), [*nodes(USUAL, 8), record("me", USUAL, 5)], 9)
    assert (missing.severity, missing.cause) == ("high", "fewer_gpus")
    assert missing.words == f"{has} of 8 GPUs; its 8 peers have 8 (NVIDIA H800), and it had 8 when it was recorded last"
    assert (slow.severity, slow.cause) == ("low", GEMM)
    assert "8 peers" in slow.words


@pytest.mark.parametrize(
    "model",
    [
        USUAL, f"{MACHINE} / 9 x NVIDIA H800", f"{MACHINE} / 4 x NVIDIA A100", f"Other{MACHINE}", "", "my model",
        f"{MACHINE} / 8 x NVIDIA H800 / 1 x Other",
    ],
)  # fmt: skip
def test_nodes_of_other_hardware_are_other_nodes(model: str) -> None:
    assert usual_model(record("me", model, 9), nodes(USUAL, 8)) is None


def test_a_node_that_was_never_recorded_with_more_gpus_is_warned_of_and_compared_as_it_is() -> None:
    found = [Found(validator="cpu_stress", figures={GEMM: 10.0}, measured={GEMM: (10.0, 10.0)})]
    missing, own = run.events_of(found, record("me", MACHINE, 9, 10.0), nodes(USUAL, 8), 9)
    assert (missing.severity, missing.cause, missing.could_not_run) == ("warn", "fewer_gpus", False)
    assert missing.words.startswith("0 of 8 GPUs; its 8 peers have 8 (NVIDIA H800); it was not recorded with more")
    assert own.severity == "ok"


def test_of_nodes_that_are_meant_to_have_fewer_nothing_is_said() -> None:
    login = nodes(MACHINE, 4, "login")
    assert usual_model(record("me", MACHINE, 9), [*nodes(USUAL, 8), *login]) is None, "enough are like it"
    few = usual_model(record("me", MACHINE, 9), [*nodes(USUAL, 8), *login[1:]])
    assert few is not None
    assert not few.is_fault
    recorded = record("me", MACHINE, 5)
    assert usual_model(record("me", MACHINE, 9), [*nodes(USUAL, 8), recorded]) is None, "it was recorded so"
    rebuilt = [record("me", USUAL, 3), recorded]
    assert usual_model(record("me", MACHINE, 9), [*nodes(USUAL, 8), *rebuilt]) is None, "the newest record counts"
    assert usual_model(record("me", MACHINE, 9), nodes(USUAL, 3)) is None, "three say nothing of what is usual"


def test_a_node_that_had_gpus_is_at_fault_whatever_others_are_like_it() -> None:
    known = [*nodes(USUAL, 8), *nodes(MACHINE, 20, "login"), record("me", MACHINE, 3), record("me", USUAL, 5)]
    usual = usual_model(record("me", MACHINE, 9), known)
    assert usual is not None
    assert (usual.model, usual.has, usual.had, usual.is_fault) == (USUAL, 0, 8, True)


def test_a_node_is_compared_with_what_it_was_where_others_have_still_more() -> None:
    half = f"{MACHINE} / 4 x NVIDIA H800"
    known = [*nodes(USUAL, 8), *nodes(half, 4, "half"), record("me", half, 5)]
    usual = usual_model(record("me", f"{MACHINE} / 3 x NVIDIA H800", 9), known)
    assert usual is not None
    assert (usual.model, usual.has, usual.had) == (half, 3, 4)


def test_a_node_of_a_cluster_that_has_lost_gpus_is_at_fault_and_stays_due() -> None:
    measured = NodeMeasurements([*nodes(USUAL, 8), record("me", USUAL, 5)])
    measured.first("me", NodeReport(events=(), record=record("me", MACHINE)), 9)
    measured.first("well", NodeReport(events=(), record=record("well", USUAL)), 9)
    events = measured.events()
    assert [(one.severity, one.words) for one in events["me"]] == [
        ("high", "0 of 8 GPUs; its 9 peers have 8 (NVIDIA H800), and it had 8 when it was recorded last")
    ]
    assert events["well"] == []
    assert [one.node for one in measured.records()] == ["well"]


def test_nodes_that_have_all_lost_their_driver_are_at_fault_and_stay_due_until_they_are_meant_so() -> None:
    """A new kernel without a driver on every node: no peer says what is usual, but their own records do."""
    names = [f"node-{number}" for number in range(20)]
    known = [record(name, USUAL) for name in names]
    for now_ns in (9, 10):
        measured = NodeMeasurements(known)
        for name in names[1:]:
            measured.first(name, NodeReport(events=(), record=record(name, MACHINE)), now_ns)
        for name, events in measured.events().items():
            assert [(one.severity, one.cause) for one in events] == [("high", "fewer_gpus")], name
            assert events[0].words.startswith("0 of 8 GPUs: it had 8 (NVIDIA H800) when it was recorded last; load")
        assert measured.records() == [], "no record says that they are meant so"
    meant = [*known, *(record(name, MACHINE, 11) for name in names)]
    assert usual_model(record("node-1", MACHINE, 12), meant) is None


def test_a_new_node_whose_gpus_never_showed_is_warned_of_by_each_validation_until_they_do_or_it_is_meant_so() -> None:
    def validated(known: list[NodeRecord], model: str, now_ns: int) -> tuple[list[str], NodeRecord]:
        measured = NodeMeasurements(known)
        measured.first("new", NodeReport(events=(), record=record("new", model)), now_ns)
        (recorded,) = measured.records()
        return [one.severity for one in measured.events()["new"]], recorded

    known = nodes(USUAL, 8)
    for now_ns in (9, 10, 11):
        severities, recorded = validated(known, MACHINE, now_ns)
        assert (severities, recorded.model, recorded.fewer_gpus) == (["warn"], MACHINE, True)
        known = [*known, recorded]
    severities, recorded = validated(known, USUAL, 12)
    assert (severities, recorded.fewer_gpus) == ([], False), "its driver is loaded"
    meant = record("new", MACHINE, 12)
    assert validated([*known, meant], MACHINE, 13)[0] == [], "recorded on the node, without peers"


def test_a_node_that_was_recorded_with_a_warning_and_then_loses_the_rest_is_at_fault() -> None:
    few = msgspec.structs.replace(record("me", f"{MACHINE} / 4 x NVIDIA H800", 5), fewer_gpus=True)
    usual = usual_model(record("me", MACHINE, 9), [*nodes(USUAL, 8), few])
    assert usual is not None
    assert (usual.has, usual.had, usual.is_fault) == (0, 4, True)


def test_a_record_is_written_as_an_older_release_reads_it_where_it_says_nothing_new() -> None:
    assert "fewer_gpus" not in as_written(record("me", USUAL))
    assert as_written(msgspec.structs.replace(record("me", MACHINE), fewer_gpus=True))["fewer_gpus"] is True


def test_the_first_gpu_that_has_a_name_names_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = {"0": "", "1": "Model: \t NVIDIA H800"}
    monkeypatch.setattr(run, "_entries", lambda _path: ["0", "1"])
    monkeypatch.setattr(run, "_line", lambda path: lines.get(path.split("/")[-2], ""))
    assert run.model_of_node().endswith(" / 2 x NVIDIA H800")
    lines["1"] = ""
    assert not run.model_of_node().endswith((" x ", " x"))


def test_names_of_models_are_read_in_time_that_grows_with_their_length() -> None:
    hostile = ("1 x / " * 40)[:200]
    assert usual_model(record("me", hostile, 9), nodes(f"{hostile[:190]} / 8 x G", 8)) is None
