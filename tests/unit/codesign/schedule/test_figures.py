"""Formulas and figures of the schedules that others have published, reproduced by the simulator."""

from __future__ import annotations

import pytest

from fireflyer.codesign.schedule import (
    Costs,
    Pair,
    Timeline,
    build_schedule,
    compiled,
    peak_activations,
    simulate,
    uniform_costs,
)

RANKS = (4, 8, 16)
TIMES = ((1.0, 2.0, 1.0), (1.0, 2.2, 1.0), (1.0, 1.9, 0.8))
"""F, B and W of one micro-batch on one rank."""


def timed(
    name: str,
    ranks: int,
    micro_batches: int,
    times: tuple[float, float, float] = TIMES[0],
    *,
    pair: float | None = None,
    stages_per_rank: int = 2,
) -> Timeline:
    program = compiled(name, ranks, micro_batches, stages_per_rank)
    forward, backward, weights = times
    placement = program.schedule.placement
    return simulate(program, uniform_costs(placement, forward=forward, backward=backward, weights=weights, pair=pair))


@pytest.mark.parametrize("times", TIMES)
@pytest.mark.parametrize("ranks", RANKS)
def test_the_bubble_of_1f1b_and_gpipe_is_a_forward_and_a_backward_of_all_other_ranks(
    ranks: int, times: tuple[float, float, float]
) -> None:
    forward, backward, _ = times
    for name in ("1f1b", "gpipe"):
        assert timed(name, ranks, 4 * ranks, times).bubble_s == pytest.approx((ranks - 1) * (forward + backward))
    halved = timed("interleaved", ranks, 4 * ranks, times).bubble_s
    assert halved == pytest.approx((ranks - 1) * (forward + backward) / 2)


@pytest.mark.parametrize("times", TIMES)
@pytest.mark.parametrize("ranks", RANKS)
def test_the_bubble_of_zb_h1_is_shorter_by_twice_the_time_for_the_weights(
    ranks: int, times: tuple[float, float, float]
) -> None:
    forward, backward, weights = times
    bubble = (ranks - 1) * (forward + backward - 2 * weights)
    assert timed("zb-h1", ranks, 4 * ranks, times).bubble_s == pytest.approx(bubble)


@pytest.mark.parametrize("overlap", [1.0, 0.85])
@pytest.mark.parametrize("times", [*TIMES, (2.0, 4.0, 2.0)])
@pytest.mark.parametrize("ranks", RANKS)
def test_the_bubble_of_dual_pipe_is_that_of_its_formula_where_f_i_and_w_take_the_same_time(
    ranks: int, times: tuple[float, float, float], overlap: float
) -> None:
    forward, backward, weights = times
    pair = overlap * (forward + backward)
    bubble = (ranks // 2 - 1) * (pair + backward - 3 * weights)
    halves = (ranks - 1) * (pair + backward - 3 * weights) / 2  # 2 x `ranks` stages, each a half
    near = 1e-9 if forward == weights == backward - weights else 0.12  # the formula is exact only there
    assert timed("dualpipe", ranks, 4 * ranks, times, pair=pair).bubble_s == pytest.approx(bubble, rel=near)
    assert timed("dualpipev", ranks, 4 * ranks, times, pair=pair).bubble_s == pytest.approx(halves, rel=near)


@pytest.mark.parametrize(
    ("name", "pair", "stages_per_rank", "total"),
    [
        ("1f1b", None, 1, 117),
        ("interleaved", None, 2, 106.5),
        ("zb-h1", None, 1, 103),
        ("interleaved-zb", None, 1, 103),
        ("interleaved-zb", None, 2, 99.5),
        ("zbv", None, 2, 99.5),
        ("dualpipev", None, 2, 103),
        ("dualpipe", None, 1, 102),
        ("dualpipev", 2.5, 2, 89.5),
        ("dualpipe", 2.5, 1, 89),
    ],
)
def test_8_ranks_take_these_times_for_32_micro_batches(
    name: str, pair: float | None, stages_per_rank: int, total: float
) -> None:
    timeline = timed(name, 8, 32, pair=pair, stages_per_rank=stages_per_rank)
    assert timeline.total_s == pytest.approx(total)
    assert timeline.ideal_s == pytest.approx(96)


@pytest.mark.parametrize("ranks", RANKS)
def test_activations_are_p_for_1f1b_zb_h1_and_zbv_and_p_plus_1_for_dual_pipe(ranks: int) -> None:
    expected = {"gpipe": 4 * ranks, "1f1b": ranks, "zb-h1": ranks, "zbv": ranks, "dualpipe": ranks + 1}
    expected |= {"zb-h2": 2 * ranks - 1}
    found = {name: max(peak_activations(build_schedule(name, ranks, 4 * ranks))) for name in expected}
    assert found == expected
    assert max(peak_activations(build_schedule("dualpipev", ranks, 4 * ranks))) == ranks + 0.5


def test_activations_are_counted_in_bytes_of_unequal_stages() -> None:
    schedule = build_schedule("1f1b", 3, 8)
    assert peak_activations(schedule, (5.0, 7.0, 11.0)) == (15.0, 14.0, 11.0)
    halves = peak_activations(build_schedule("zb-h1", 3, 8), (5.0, 7.0, 11.0), kept_for_weights=0.5)
    assert halves == (15.0, 17.5, 22.0)  # F of the next begins with 2 and 4 half-freed micro-batches at hand


@pytest.mark.parametrize("ranks", RANKS)
def test_zero_bubble_rates_where_f_i_and_w_take_the_same_time(ranks: int) -> None:
    micro_batches = 4 * ranks
    plain = timed("1f1b", ranks, micro_batches)
    rate = (ranks - 1) / (micro_batches + ranks - 1)
    assert plain.bubble_s / plain.total_s == pytest.approx(rate)
    assert timed("zb-h1", ranks, micro_batches).bubble_s == pytest.approx(plain.bubble_s / 3)
    for name in ("zb-h2", "zbv"):
        timeline = timed(name, ranks, micro_batches)
        assert timeline.period_s == pytest.approx(timeline.ideal_s)  # no bubble if no rank waits at the optimizer
    skew = timed("zbv", ranks, micro_batches)
    assert skew.total_s - skew.ideal_s == pytest.approx((ranks - 1) / 2)


STEP = 19.926
PARTS = {"forward": 1.13, "bubble": 2.06, "backward": 1.99, "weights": 0.48, "pairs": 13.95, "optimizer": 0.29}
"""Seconds of a step of DeepSeek-V3 on 2,048 GPUs (paper on its hardware, table 4)."""


def test_the_parts_of_the_published_step_are_nearly_all_of_it_and_the_simulator_predicts_its_length() -> None:
    """15,360 sequences a step on 16 ranks and 128 replicas: 120 micro-batches. The busy parts give the times of single
    passes on the first rank; from these the simulator computes bubble and step, which it was not given."""
    assert sum(PARTS.values()) == pytest.approx(19.90)
    schedule = build_schedule("dualpipe", 16, 15360 // 128)
    counts = dict.fromkeys("FBIW&", 0)
    for item in schedule.rows[0]:
        counts["&" if isinstance(item, Pair) else item.kind.value] += 1
    assert counts == {"F": 23, "B": 8, "I": 15, "W": 15, "&": 97}
    forward, weights, pair = (
        PARTS[part] / counts[kind] for part, kind in (("forward", "F"), ("weights", "W"), ("pairs", "&"))
    )
    for_input = (PARTS["backward"] - counts["B"] * weights) / (counts["B"] + counts["I"])
    backward = for_input + weights
    assert pair < forward + backward  # communication is hidden
    costs = Costs(
        forward_s=(forward,) * 16,
        backward_s=(backward,) * 16,
        input_s=(for_input,) * 16,
        weights_s=(weights,) * 16,
        pair_ratio=pair / (forward + backward),
        optimizer_s=(PARTS["optimizer"] / 2,) * 16,  # a rank holds two stages
    )
    timeline = simulate(compiled("dualpipe", 16, 120), costs)
    parts = timeline.parts(0)
    assert sum(parts) == pytest.approx(timeline.total_s)
    assert parts.forward == pytest.approx(PARTS["forward"])
    assert parts.pairs == pytest.approx(PARTS["pairs"])
    assert parts.tail == pytest.approx(PARTS["optimizer"])
    assert parts.backward + parts.input + parts.weights == pytest.approx(PARTS["backward"] + PARTS["weights"])
    # The published bubble has also what no schedule knows: communication that is not hidden, unequal stages.
    assert 0.4 * PARTS["bubble"] < parts.bubble < PARTS["bubble"]
    assert timeline.total_s == pytest.approx(STEP, rel=0.07)
