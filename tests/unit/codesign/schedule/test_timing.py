"""The simulator beside cases that can be computed by hand."""

from __future__ import annotations

import pytest

from fireflyer.base.errors import UsageError
from fireflyer.codesign.schedule import (
    Costs,
    build_schedule,
    compile_schedule,
    compiled,
    last_gradients,
    simulate,
    uniform_costs,
)


def equal(stages: int, **others: tuple[float, ...] | float) -> Costs:
    each = {"forward_s": 1.0, "backward_s": 2.0, "input_s": 1.0, "weights_s": 1.0}
    values = {name: (value,) * stages for name, value in each.items()}
    return Costs(**{**values, **others})  # type: ignore[arg-type]


def test_unequal_stages_send_times_and_latency_add_up_along_the_longest_path() -> None:
    costs = Costs(
        forward_s=(1.0, 4.0),
        backward_s=(2.0, 5.0),
        input_s=(1.0, 2.0),
        weights_s=(1.0, 3.0),
        send_s=(0.25,),
        latency_s=0.5,
    )
    timeline = simulate(compiled("1f1b", 2, 2), costs)
    assert [(begin, end, str(item)) for begin, end, item in timeline.spans(1)] == [
        (1.75, 5.75, "1F0"),
        (5.75, 10.75, "1B0"),
        (10.75, 14.75, "1F1"),
        (14.75, 19.75, "1B1"),
    ]
    assert [end for _, end, _ in timeline.spans(0)] == [1.0, 2.0, 13.5, 22.5]
    assert timeline.total_s == 22.5
    assert timeline.parts(0).bubble == 22.5 - 2 - 4


def test_outputs_for_a_stage_of_the_same_rank_are_not_sent() -> None:
    costs = equal(4, send_s=(10.0, 10.0, 10.0))
    timeline = simulate(compiled("zbv", 2, 1), costs)  # stages 1 and 2 are on rank 1
    ends = {str(item): end for rank in (0, 1) for _, end, item in timeline.spans(rank)}
    assert [ends[f"{stage}F0"] for stage in range(4)] == [1.0, 12.0, 13.0, 24.0]


def test_a_sum_of_gradients_begins_after_the_last_gradient_of_its_stage_and_waits_for_the_one_before() -> None:
    program = compiled("interleaved", 2, 2, 2)
    assert [str(program.schedule.rows[0][index]) for index in last_gradients(program.schedule, 0).values()] == [
        "2B1",
        "0B1",
    ]
    plain = simulate(program, equal(4))
    ends = {str(item): end for _, end, item in plain.spans(0)}
    summed = simulate(program, equal(4, reduce_s=(3.0, 0.0, 7.0, 0.0), optimizer_s=(0.5, 0.0, 0.25, 0.0)))
    first = ends["2B1"] + 7.0
    assert summed.tails_s[0] == max(first, ends["0B1"]) + 3.0 - ends["0B1"] + 0.75
    assert summed.total_s == ends["0B1"] + summed.tails_s[0]
    assert sum(summed.parts(0)) == pytest.approx(summed.total_s)


def test_shares_of_stages_change_no_sum() -> None:
    placement = build_schedule("1f1b", 4, 4).placement
    costs = uniform_costs(placement, forward=1, backward=2, weights=1, shares=(1, 2, 2, 3))
    assert costs.forward_s == (0.5, 1.0, 1.0, 1.5)
    assert simulate(compiled("1f1b", 4, 8), costs).ideal_s == 24


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"forward_s": (1.0,)}, "backward_s has 2 entries, forward_s has 1; give one for each stage"),
        ({"send_s": (1.0, 1.0)}, "send_s has 2 entries; give one for each of the 1 boundaries"),
        ({"input_s": (1.0, -1.0)}, "input_s has -1.0; a time is a finite number, at least 0"),
        ({"latency_s": float("nan")}, "latency_s has nan"),
        ({"pair_ratio": 0.0}, "pair_ratio 0.0 is not a positive number"),
        ({"reduce_s": (1.0,)}, "reduce_s has 1 entries"),
    ],
)
def test_costs_that_are_none_are_refused(change: dict[str, tuple[float, ...]], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        equal(2, **change)


def test_times_that_contradict_each_other_are_refused() -> None:
    placement = build_schedule("1f1b", 2, 2).placement
    with pytest.raises(UsageError, match="weights 3 is a part of backward 2"):
        uniform_costs(placement, forward=1, backward=2, weights=3)
    with pytest.raises(UsageError, match="give 2 to 3"):
        uniform_costs(placement, forward=1, backward=2, weights=1, pair=3.5)
    with pytest.raises(UsageError, match="costs are for 3 stages; schedule '1f1b' has 2"):
        simulate(compile_schedule(build_schedule("1f1b", 2, 2)), equal(3))
