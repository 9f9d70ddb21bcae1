"""What holds of a chain whatever is reported, and of a fence whatever the clocks and the network do."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from fireflyer.fs.core.fence import MAX_DRIFT, Fence
from fireflyer.fs.core.manager.chains import next_chain
from fireflyer.fs.schema.manager import Condition, TargetReport
from fireflyer.fs.schema.routing import Chain, Member, TargetState

SERVING = TargetState.SERVING
SAID = st.tuples(st.none() | st.sampled_from(Condition), st.booleans())
"""Of each target in one evaluation: what, or nothing, and whether it is clean."""


def with_state(chain: Chain, state: TargetState) -> list[int]:
    return [one.target for one in chain.members if one.state is state]


def reports_of(chain: Chain, said: Sequence[tuple[Condition | None, bool]]) -> dict[int, TargetReport]:
    return {
        target: TargetReport(target, condition, chain.version, clean)
        for target, (condition, clean) in enumerate(said)
        if condition is not None
    }


@settings(max_examples=150)
@given(st.integers(1, 6).flatmap(lambda size: st.lists(st.lists(SAID, min_size=size, max_size=size), min_size=1)))
def test_a_chain_lives_through_any_reports(rounds: list[list[tuple[Condition | None, bool]]]) -> None:
    chain = Chain(1, 1, tuple(Member(target, target, SERVING) for target in range(len(rounds[0]))))
    last = with_state(chain, SERVING)
    for said in rounds:
        reports = reports_of(chain, said)
        following, _ = next_chain(chain, reports)
        serving = with_state(following, SERVING)
        synced = [one for one in with_state(chain, TargetState.SYNCING) if said[one][0] is Condition.UP_TO_DATE]
        assert all(one in last or one in synced for one in serving), "serves although it may lack something"
        returned = [one for one in serving if one not in with_state(chain, SERVING) and one not in synced]
        assert len(returned) <= 1
        assert all(said[one][1] and said[one][0] not in (None, Condition.GONE) for one in returned), (
            "comes back although it is not clean"
        )
        kept = with_state(chain, SERVING)
        assert all(said[one][0] is Condition.GONE for one in kept if one not in serving), "taken from one that is there"
        still = [one for one in kept if one in serving]
        assert serving[: len(still)] == still, "the heads stay in front"
        assert len(with_state(following, TargetState.SYNCING)) <= (1 if serving else 0)
        assert not (serving and with_state(following, TargetState.LASTSRV))
        assert serving or with_state(following, TargetState.LASTSRV), "nobody knows any more who has everything"
        assert sorted(one.target for one in following.members) == list(range(len(said)))
        assert following.version == chain.version + (following.members != chain.members)
        online = [(Condition.ONLINE if one is Condition.UP_TO_DATE else one, clean) for one, clean in said]
        same, _ = next_chain(following, reports_of(following, online))
        assert same is following, "the same news change it twice"
        chain, last = following, serving or last


BEATS = st.lists(st.tuples(st.integers(0, 400), st.integers(0, 300), st.booleans(), st.integers(0, 900)), max_size=12)
"""Of each heartbeat: after which pause it is sent, how long it is under way, whether and how late it is answered."""


@given(
    BEATS,
    st.floats(-MAX_DRIFT, MAX_DRIFT),
    st.floats(-MAX_DRIFT, MAX_DRIFT),
    st.integers(0, 10**15),
    st.integers(20, 600),
)
def test_the_fence_ends_before_the_manager_gives_a_node_up(
    beats: list[tuple[int, int, bool, int]], node_drift: float, manager_drift: float, offset_ns: int, timeout_ms: int
) -> None:
    """True time in ms. The manager is told of the beats that are answered, and of no other: the worst for the node."""
    timeout_ns = timeout_ms * 1_000_000
    fence, sent_ms = Fence(timeout_ns), 0
    answers, last_arrival_ms = [], None
    for pause_ms, under_way_ms, answered, back_ms in beats:
        sent_ms += pause_ms
        sequence = fence.sent(offset_ns + round(sent_ms * 1_000_000 * (1 + node_drift)))
        if answered:
            arrival_ms = sent_ms + under_way_ms
            answers.append((arrival_ms + back_ms, sequence, arrival_ms))
            last_arrival_ms = max(arrival_ms, last_arrival_ms or 0)
    for _, sequence, _ in sorted(answers):
        fence.answered(sequence)
        fence.answered(sequence)
    if last_arrival_ms is None:
        assert fence.until_ns is None
        assert not fence.is_open(offset_ns)
        return
    assert fence.until_ns is not None
    end_ms = (fence.until_ns - offset_ns) / (1 + node_drift) / 1_000_000
    given_up_ms = last_arrival_ms + timeout_ms / (1 + manager_drift)
    assert end_ms < given_up_ms
    assert not fence.is_open(fence.until_ns)


@given(st.integers(0, 1 << 63))
def test_answers_to_what_was_never_sent_open_nothing(sequence: int) -> None:
    fence = Fence(10**9)
    fence.answered(sequence)
    assert fence.until_ns is None
