"""A step of any plan in FP32, from the state of one process, differs from that of the process by rounding alone."""

from __future__ import annotations

import functools
from typing import Any, Final

import pytest
from tests.support.torch_ranks.processes import Ended, run_torch_ranks
from tests.support.trainer.recipes import raw_recipe

from fireflyer.recipes.trainer.core.parsing import recipe_of

pytestmark = pytest.mark.processes

Case = tuple[dict[str, Any], dict[str, Any]]
BOUND: Final = 1e-6
OF_TENSOR_RANKS: Final = 5e-6
"""Sums of products are divided over ranks, too."""
OF_PARAMETERS: Final = 1e-5
"""After the step. AdamW divides each element by the root of its second moment, so the step of an element is about the
learning rate, however small its gradient is. The rounding of a gradient is relative to the largest of its tensor, not
to its own size: where an element's gradient is that small, its step has a large relative error. So 2e-7 in gradients
were seen to be 1.8e-6 in parameters. A wrong gradient is seen in the gradients, which keep `BOUND`."""
STEPS: Final = 4
GPT: Final = {"kind": "gpt", "vocabulary": 256, "layers": 4, "heads": 4, "width": 32}
DEEP: Final = {**GPT, "layers": 8}
DEEPSEEK: Final = {"kind": "deepseek", "preset": "tiny", "vocabulary": 256}
EXPERTS: Final = {"replicate": 2, "expert": 2}
SCHEDULES: Final = ("gpipe", "1f1b", "zb-h1", "zbv", "dualpipe", "dualpipev")

QUICK: Final[dict[str, Case]] = {"ep2": (DEEPSEEK, EXPERTS)}
OF_TWO: Final[dict[str, Case]] = {
    "dp2": (GPT, {"replicate": 2}),
    **{f"fsdp2, zero {zero}": (GPT, {"shard": 2, "zero": zero}) for zero in (1, 2, 3)},
    **{f"pp2, {schedule}": (GPT, {"pipeline": 2, "schedule": schedule}) for schedule in SCHEDULES},
    "tp2": (GPT, {"tensor": 2}),
}
OF_FOUR: Final[dict[str, Case]] = {
    "fsdp4": (GPT, {"shard": 4, "zero": 3}),
    "hsdp2x2": (GPT, {"replicate": 2, "shard": 2, "zero": 3}),
    **{f"pp4, {schedule}": (DEEP, {"pipeline": 4, "schedule": schedule}) for schedule in SCHEDULES},
    "ep4": (DEEPSEEK, {"replicate": 4, "expert": 4}),
    "ep2xdp2": (DEEPSEEK, {"replicate": 4, "expert": 2}),
    "pp2xdp2": (GPT, {"pipeline": 2, "replicate": 2}),
    "pp2 with zero 1": (GPT, {"pipeline": 2, "shard": 2, "zero": 1}),
    **{f"ep2xpp2, {one}": (DEEPSEEK, {"pipeline": 2, "schedule": one, **EXPERTS}) for one in ("1f1b", "dualpipe")},
    "fsdp2xtp2": (GPT, {"shard": 2, "zero": 3, "tensor": 2}),
}
ALONE: Final[dict[str, Case]] = {"tp2xdp2": (GPT, {"tensor": 2, "replicate": 2})}
"""In processes of its own: DTensor keeps what it has planned for an equal mesh, with the groups of that one."""
STARTS: Final = (QUICK, OF_TWO, OF_FOUR, ALONE)
SLOW: Final = [pytest.param(name, marks=pytest.mark.slow) for start in STARTS[1:] for name in start]


def tables(case: Case) -> dict[str, Any]:
    model, plan = case
    return {
        "model": model,
        "plan": {"sequence_tokens": 16, "batch_sequences": 32, "micro_batch": 2, **plan},
        "optimizer": {"steps": STEPS, "learning_rate": 1e-3, "warm_up_steps": 0, "max_norm": 0.5},
    }


def started(at: int) -> list[Ended]:
    """All cases of a start, which have equally many ranks; once, also where it fails: each of them would fail again as
    late."""
    found = _outcome(at)
    if isinstance(found, BaseException):
        raise AssertionError(f"the ranks of this case and others failed: {found}") from found
    return found


@functools.cache
def _outcome(at: int) -> list[Ended] | BaseException:
    try:
        return _start(at)
    except (Exception, pytest.fail.Exception) as error:
        return error


def _start(at: int) -> list[Ended]:
    cases = {name: tables(case) for name, case in STARTS[at].items()}
    count = recipe_of(raw_recipe(**next(iter(cases.values())))).plan.world_size
    ended = run_torch_ranks("tests.support.torch_ranks.fp32_steps", (0,) * count, cases=cases, steps=STEPS)
    assert [one.code for one in ended] == [0] * count, [one.errors[-3000:] for one in ended]
    return ended


def test_ranks_that_fail_are_started_once(monkeypatch: pytest.MonkeyPatch) -> None:
    starts: list[Any] = []

    def failing(*given: Any, **_: Any) -> list[Ended]:
        starts.append(given)
        raise AssertionError("rank 1 ended with 3")

    monkeypatch.setattr(f"{__name__}.run_torch_ranks", failing)
    _outcome.cache_clear()
    try:
        for _ in range(2):
            with pytest.raises(AssertionError, match="rank 1 ended with 3"):
                started(len(STARTS) - 1)
    finally:
        _outcome.cache_clear()
    assert len(starts) == 1


@pytest.mark.parametrize("name", [*QUICK, *SLOW])
def test_each_step_from_the_state_of_one_process_is_its_step_within_rounding(name: str) -> None:
    """Gradients before clipping, their norm, the loss, and parameters after the step; experts are those that the gates
    of the one process chose."""
    at = next(number for number, start in enumerate(STARTS) if name in start)
    bound = OF_TENSOR_RANKS if "tp2" in name else BOUND
    for rank, ended in enumerate(started(at)):
        found = ended.result[name]
        print(name, rank, found)
        assert found["biases"], rank
        for kind in ("gradient", "norm", "loss"):
            assert found[kind] <= bound, (rank, kind)
        assert found["parameter"] <= OF_PARAMETERS, rank
