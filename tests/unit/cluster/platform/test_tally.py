"""What is counted for metrics: what was committed, once."""

from __future__ import annotations

from tests.support.platform.desk import Desk, spec

from fireflyer.base.units import SECOND
from fireflyer.cluster.core.platform.access import ADMIN
from fireflyer.cluster.core.platform.commands import SetPolicy
from fireflyer.cluster.core.platform.messages import Submitted
from fireflyer.cluster.core.platform.store.rows import Wish
from fireflyer.cluster.core.scheduler.model import Policy
from fireflyer.cluster.schema.tasks import Cause, Outcome
from fireflyer.kvstore.core.fenced import Failed, Transact


def test_runs_interrupts_requeues_and_waits_are_counted() -> None:
    desk = Desk("n1", requeue_pause_ns=SECOND)
    desk.command(SetPolicy(Policy(), guaranteed_ns=0), roles=(ADMIN,))
    low = desk.task(spec("low", priority=5))
    desk.runs_on(low, "n1")
    high = desk.task(spec("high", priority=20), user="bob")
    desk.pass_time(20 * SECOND)
    desk.gone(low, Cause.SUSPENDED)
    desk.gone(high, Cause.INFRASTRUCTURE)
    desk.gone(low, Cause.SUCCEEDED)
    desk.pass_time(5 * SECOND)
    desk.gone(high, Cause.SUCCEEDED)
    tally = desk.machine.tally(desk.now_ns)
    assert tally.submitted == 2
    assert tally.finished == {Outcome.SUCCEEDED: 2}
    assert tally.requeued == {Cause.INFRASTRUCTURE: 1}
    assert tally.ended == {Cause.SUSPENDED: 1, Cause.INFRASTRUCTURE: 1, Cause.SUCCEEDED: 2}
    assert tally.told_to_leave[Wish.INTERRUPT] >= 1
    assert (tally.scheduled, tally.started) == (4, 1)
    waited = dict(tally.waits_s.cumulative())
    assert waited[float("inf")] == 4
    assert waited[10] < 4, "the second task waited for 20 s"


def test_what_the_store_did_not_take_is_not_counted() -> None:
    desk = Desk("n1")
    asked = Submitted(call=77, user="ann", specs=(spec(),))
    (order,) = [one for one in desk.machine.handle(desk.now_ns, asked) if isinstance(one, Transact)]
    desk.handle(Failed(order.number, "no disk"))
    assert desk.machine.tally(desk.now_ns).submitted == 0
    desk.pass_time(5 * SECOND)
    desk.task(spec())
    assert desk.machine.tally(desk.now_ns).submitted == 1
