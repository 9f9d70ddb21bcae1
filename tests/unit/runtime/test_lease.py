"""The lease that a guard gives its command."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from fireflyer.runtime.processes.guard import Lease

LEASE_NS = 1000


@given(
    st.lists(
        st.tuples(st.binary(max_size=30) | st.integers(0, 5000).map(lambda end: b"%d\n" % end), st.integers(0, 300))
    )
)
def test_no_bytes_give_more_than_one_lease_from_now_and_no_lease_is_taken_back(
    history: list[tuple[bytes, int]],
) -> None:
    now_ns = 0
    lease = Lease(LEASE_NS, now_ns)
    lease.take(b"1000\n", 0)
    for data, later_ns in history:
        now_ns += later_ns
        before = lease.end_ns
        lease.take(data, now_ns)
        assert before <= lease.end_ns <= max(before, now_ns + LEASE_NS)


@given(st.lists(st.integers(1, 6), min_size=1))
def test_a_renewal_may_come_in_pieces(cuts: list[int]) -> None:
    lease, words = Lease(LEASE_NS, 0), b"700\n1500\n"
    for cut in cuts:
        lease.take(words[:cut], 600)
        words = words[cut:]
    lease.take(words, 600)
    assert lease.end_ns == 1500
    assert not lease.over(1499)
    assert lease.over(1500)


def test_the_first_renewal_ends_the_first_lease() -> None:
    """Else ranks that were started in it could outlive a lease of the usual length."""
    lease = Lease(LEASE_NS, 0, first_ns=60_000)
    assert lease.end_ns == 60_000
    lease.take(b"1500\n", 600)
    assert lease.end_ns == 1500
