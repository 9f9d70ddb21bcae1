"""How gradients are shared out among buckets."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from fireflyer.training.buckets import plan_buckets

Parameters = list[tuple[str, int]]
PARAMETERS = st.lists(st.tuples(st.sampled_from(["f32", "bf16", "f64"]), st.integers(0, 50)), max_size=40)


@given(parameters=PARAMETERS, limit=st.integers(1, 120))
def test_every_parameter_has_one_bucket_of_its_dtype_within_the_limit(parameters: Parameters, limit: int) -> None:
    plan = plan_buckets(parameters, limit)
    assert sorted(index for members in plan for index in members) == list(range(len(parameters)))
    for members in plan:
        assert len({parameters[index][0] for index in members}) == 1
        assert len(members) == 1 or sum(parameters[index][1] for index in members) <= limit


@given(parameters=PARAMETERS, limit=st.integers(1, 120))
def test_buckets_fill_in_order_when_gradients_come_from_the_last_to_the_first(
    parameters: Parameters, limit: int
) -> None:
    plan = plan_buckets(parameters, limit)
    assert all(members == sorted(members, reverse=True) for members in plan)
    assert [members[-1] for members in plan] == sorted((members[-1] for members in plan), reverse=True)


@given(parameters=PARAMETERS, limit=st.integers(1, 120))
def test_neighbouring_buckets_of_a_dtype_could_not_be_one(parameters: Parameters, limit: int) -> None:
    plan = plan_buckets(parameters, limit)
    for dtype in ("f32", "bf16", "f64"):
        mine = [members for members in plan if parameters[members[0]][0] == dtype]
        for earlier, later in pairwise(mine):
            assert sum(parameters[index][1] for index in earlier) + parameters[later[0]][1] > limit


def test_the_order_is_that_of_the_backward_pass() -> None:
    assert plan_buckets([("f32", 10), ("bf16", 10), ("f32", 10), ("f32", 10)], 20) == [[3, 2], [1], [0]]
