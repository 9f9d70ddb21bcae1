"""What happens at a step whose loss or gradient is not finite, or whose loss is a spike."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fireflyer.base.errors import UsageError
from fireflyer.recipes.trainer.core.anomalies import AnomalyPolicy
from fireflyer.recipes.trainer.core.recipe import PolicySettings

FINITE = st.floats(min_value=0.1, max_value=10, allow_nan=False)


def policy(losses: list[float] | None = None, **settings: Any) -> AnomalyPolicy:
    """That accepted these losses."""
    made = AnomalyPolicy(PolicySettings(window=4, **settings))
    for loss in losses or []:
        assert made.before_commit(loss).action == "commit"
        assert made.after_commit(loss, 1.0).action == "commit"
    return made


def test_a_run_stops_at_a_loss_that_is_not_finite_unless_it_says_otherwise() -> None:
    for loss in (math.nan, math.inf):
        decision = policy().before_commit(loss)
        assert decision.action == "stop"
        assert str(loss) in decision.reason
    assert policy(on_not_finite="skip").before_commit(math.nan).action == "skip"
    assert policy(on_not_finite="rewind").before_commit(math.nan).action == "rewind"


def test_a_norm_that_is_not_finite_counts_as_such_a_loss_and_the_loss_is_not_accepted() -> None:
    made = policy([1.0], on_not_finite="skip")
    decision = made.after_commit(1.0, math.nan)
    assert decision.action == "skip"
    assert "norm of the gradients is nan" in decision.reason
    assert made.state.losses == (1.0,)


def test_a_spike_is_measured_against_the_losses_before() -> None:
    losses = [2.0, 2.1, 1.9, 2.0]
    assert policy(losses).before_commit(50.0).action == "commit", "spikes are ignored by default"
    made = policy(losses, on_spike="skip")
    assert made.before_commit(2.05).action == "commit"
    decision = made.before_commit(50.0)
    assert decision.action == "skip"
    assert "the loss 50.0000 is a spike: the median of the last 4 is 2.0000" in decision.reason
    assert policy(losses[:3], on_spike="skip").before_commit(50.0).action == "commit", "the window is not full"


def test_losses_that_do_not_move_make_no_small_rise_a_spike() -> None:
    made = policy([2.0] * 4, on_spike="stop", least_rise=0.05)
    assert made.before_commit(2.09).action == "commit"
    assert made.before_commit(2.11).action == "stop"


@given(st.lists(st.booleans(), max_size=30), st.integers(0, 5))
def test_what_is_let_pass_is_bounded_whatever_comes(bad: list[bool], limit: int) -> None:
    made = AnomalyPolicy(PolicySettings(window=4, on_not_finite="skip", limit=limit))
    answers = [made.before_commit(math.nan if one else 1.0).action for one in bad]
    assert answers.count("skip") == min(sum(bad), limit)
    assert answers.count("stop") == max(0, sum(bad) - limit)


def test_what_was_used_of_the_limit_stays_used_after_a_rewind() -> None:
    made = policy([1.0], on_not_finite="rewind", limit=1)
    saved = made.state_dict()
    assert made.before_commit(math.nan).action == "rewind"
    used = made.state
    made.load_state_dict(saved)
    made.went_back(used)
    assert made.state.losses == (1.0,)
    decision = made.before_commit(math.nan)
    assert decision.action == "stop"
    assert "1 of 1" in decision.reason


def test_a_rewind_before_the_first_checkpoint_becomes_a_skip_that_counts_once() -> None:
    made = policy(on_not_finite="rewind", limit=2)
    decision = made.without_checkpoint(made.before_commit(math.nan))
    assert decision.action == "skip"
    assert decision.reason == "the loss is nan; there is no checkpoint to go back to yet"
    assert (made.state.skipped, made.state.rewound) == (1, 0)
    assert made.before_commit(math.nan).action == "rewind"
    stop = made.before_commit(math.nan)
    assert stop.action == "stop"
    assert made.without_checkpoint(stop) == stop
    assert made.without_checkpoint(made.before_commit(1.0)).action == "commit"


@given(st.lists(FINITE, max_size=12), FINITE)
def test_a_restored_policy_decides_as_the_one_that_was_saved(losses: list[float], loss: float) -> None:
    made = AnomalyPolicy(PolicySettings(window=4, on_spike="skip"))
    for one in losses:
        made.after_commit(one, 1.0)
    other = AnomalyPolicy(PolicySettings(window=4, on_spike="skip"))
    other.load_state_dict(made.state_dict())
    assert other.before_commit(loss) == made.before_commit(loss)
    assert len(made.state.losses) <= 4


@pytest.mark.parametrize("state", [{"losses": "x"}, {"skipped": -1}, {"other": 1}])
def test_a_state_that_is_none_is_refused(state: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="policy for bad steps"):
        policy().load_state_dict(state)
