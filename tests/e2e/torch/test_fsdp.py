"""Our FSDP over real processes: the bits of torch's clip-then-step, the gradients of one process, constant memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.support.torch_ranks.processes import run_torch_ranks

pytestmark = [pytest.mark.processes, pytest.mark.slow]

STEPS, UNITS, PARAMETERS = 200, 3, 9
"""Of the pool's test; of the model: FSDP units, and parameters."""
COMMITTED = 9
"""Of ten steps one overflows."""
CLIPPED = 5


def results(nodes: tuple[int, ...], **scenarios: Any) -> list[dict[str, Any]]:
    ended = run_torch_ranks("tests.support.torch_ranks.fsdp", nodes, scenarios=scenarios, limit_s=110)
    assert [rank.code for rank in ended] == [0] * len(nodes), [rank.errors[-3000:] for rank in ended]
    return [rank.result for rank in ended]


@pytest.mark.parametrize(("nodes", "zero"), [((0,), 2), ((0, 0), 3), ((0, 0, 1, 1), 3)], ids=str)
def test_a_step_in_backward_has_the_bits_of_clipping_and_then_stepping(nodes: tuple[int, ...], zero: int) -> None:
    """Never, always and alternately clipped; with a step that overflows, settings that change, a state that is loaded,
    a layer that runs twice and a tied embedding."""
    for rank in results(nodes, bitwise={"zero": zero, "all": len(nodes) < 4}):
        for name, found in rank["bitwise"].items():
            assert found["differs"] is None, name
            assert found["dropped"] == 1, name
            assert found["steps"] == COMMITTED * PARAMETERS, name
            # clipped, or computed with a setting that has changed since; the step of the changed lr is a clipped one
            assert found["redone"] == (CLIPPED + 1) * PARAMETERS, name
            element = 2 if "bf16" in name else 4
            copies = 3 if "adamw" in name else 2
            counters = 4 * PARAMETERS if "adamw" in name else 0
            assert found["gradient bytes"] == element * found["elements"], name
            assert found["shadow bytes"] == copies * element * found["elements"] + counters, name


@pytest.mark.parametrize(
    ("nodes", "modes"),
    [
        ((0, 0), [(1, 1, 2), (2, 1, 2), (3, 1, 2), (3, 1, 1)]),
        ((0, 0, 1, 1), [(3, 1, 1), (3, 2, 2), (1, 2, 2)]),
    ],
    ids=["2 ranks", "4 ranks"],
)
def test_gradients_are_those_of_one_process(nodes: tuple[int, ...], modes: list[tuple[int, int, int]]) -> None:
    """In float64, over 20 steps: ZeRO 1, 2, 3; two replicas of two shards; one and two micro-batches."""
    for rank in results(nodes, parity={"modes": modes}):
        assert len(rank["parity"]) == len(modes)
        assert {name: worst for name, worst in rank["parity"].items() if not worst <= 1e-10} == {}


def test_memory_is_bounded_and_a_checkpoint_continues_bitwise(tmp_path: Path) -> None:
    ranks = results(
        (0, 0),
        memory={"zero": 3, "replicas": 1, "steps": STEPS},
        peaks={},
        checkpoints={"directory": str(tmp_path)},
    )
    for rank in ranks:
        memory = rank["memory"]
        assert memory["different"] == 1, "bytes held and lent change with the length of the batch"
        held, lent, peak, _ = memory["at the end"]
        assert 0 <= lent < peak <= held
        without = {"zero1 parts1": 0, "zero2 parts1": 0, "zero2 parts2": 0, "zero3 parts1": 0, "zero3 parts2": 0}
        assert rank["peaks"] == without | {"zero1 parts2": UNITS}
        assert rank["checkpoints"] == {"differed": True, "same": True}


def test_a_rank_that_dies_in_its_backward_pass_is_an_error_on_the_others() -> None:
    ended = run_torch_ranks("tests.support.torch_ranks.fsdp", (0, 0, 0), scenarios={"lose_a_rank": {}}, limit_s=100)
    assert ended[2].code != 0
    for rank in ended[:2]:
        assert rank.code == 0, rank.errors[-3000:]
        assert "rank 2" in rank.result["lose_a_rank"]["error"]
        assert rank.result["lose_a_rank"]["kept"], "a step that was not agreed on has changed the parameters"
