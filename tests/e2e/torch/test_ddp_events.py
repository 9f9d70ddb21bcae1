"""How gradients travel, by the events in the flight recorders of the ranks; no times."""

from __future__ import annotations

from typing import Any

import pytest
from tests.support.torch_ranks.processes import run_torch_ranks

pytestmark = pytest.mark.processes

OPERATIONS = 3


def ranks(**arguments: Any) -> list[dict[str, Any]]:
    ended = run_torch_ranks("tests.support.torch_ranks.ddp_events", (0, 0), limit_s=100, **arguments)
    assert [rank.code for rank in ended] == [0, 0], [rank.errors[-3000:] for rank in ended]
    return [rank.result for rank in ended]


@pytest.mark.parametrize(
    "way",
    [
        "eager",
        pytest.param("compiled_inside", marks=pytest.mark.slow),
        pytest.param("compiled_wrapper", marks=pytest.mark.slow),
    ],
)
def test_the_sums_of_later_layers_have_ended_before_the_first_layer_computes_its_gradients(way: str) -> None:
    """Of a compiled model, too: dynamo cuts its graph where a bucket ends."""
    for rank in ranks(scenario="overlap", way=way):
        assert rank["later"] > 3
        assert rank["before the first layer"] == [[rank["later"]] * 2]
        assert rank["compiled graphs"] == (0 if way == "eager" else 4)


@pytest.mark.slow
def test_with_one_bucket_no_sum_starts_before_the_last_gradient() -> None:
    for rank in ranks(scenario="overlap", way="eager_in_one_bucket"):
        assert rank["buckets"] == 1
        assert rank["before the first layer"] == [[0, 0]]


@pytest.mark.parametrize("peer_memory", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_private_tensors_are_read_out_of_the_other_process_where_that_is_allowed(
    peer_memory: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`vm`: process_vm_readv; `staged`: through slots; `direct`: in shared memory, without a copy."""
    if not peer_memory:
        monkeypatch.setenv("FF_PEER_MEMORY", "0")
    for rank in ranks(scenario="paths"):
        expected = "vm" if peer_memory and rank["allowed"] else "staged"
        assert rank["paths"] == {"private": {expected: OPERATIONS}, "shared": {"direct": OPERATIONS}}


@pytest.mark.slow
def test_parameters_in_shared_memory_are_copied_from_where_they_lie_and_stay_there() -> None:
    for rank in ranks(scenario="parameters"):
        size = rank["parameters"]
        assert rank["shared"]["path of the largest"] == "direct"
        assert rank["shared"]["bytes"] >= size
        assert rank["shared"]["registered"]
        assert rank["private"]["path of the largest"] == ("vm" if rank["allowed"] else "staged")
        assert not rank["private"]["registered"]
        assert rank["private"]["size"] == size + 4  # gradients, and an element that says whether some are missing
        assert 2 * size < rank["shared"]["size"] < 2.01 * size
