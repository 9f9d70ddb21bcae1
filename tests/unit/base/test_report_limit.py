"""How many lines of a kind others may cause."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from fireflyer.base.report_limit import REPORT_INTERVAL_NS, REPORTS, ReportLimit


def test_some_are_let_through_and_the_next_interval_says_how_many_were_not() -> None:
    limit = ReportLimit()
    assert [limit.ask(5) for _ in range(REPORTS + 3)] == [0] * REPORTS + [None] * 3
    assert limit.ask(4 + REPORT_INTERVAL_NS) is None
    assert [limit.ask(5 + REPORT_INTERVAL_NS) for _ in range(2)] == [4, 0]


@given(st.lists(st.integers(0, REPORT_INTERVAL_NS // 8), max_size=400))
def test_each_is_let_through_or_counted(pauses_ns: list[int]) -> None:
    limit, now_ns, through, counted = ReportLimit(), 0, [], 0
    for pause_ns in pauses_ns:
        now_ns += pause_ns
        left_out = limit.ask(now_ns)
        if left_out is not None:
            through.append(now_ns)
            counted += left_out
    assert counted + len(through) <= len(pauses_ns)
    # At most so many in one interval; so behind twice as many there is a whole one.
    assert all(
        later - earlier >= REPORT_INTERVAL_NS for earlier, later in zip(through, through[2 * REPORTS :], strict=False)
    )
    last = limit.ask(now_ns + REPORT_INTERVAL_NS)
    assert last is not None
    assert counted + last + len(through) == len(pauses_ns)
