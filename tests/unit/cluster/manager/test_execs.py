"""Exec sessions of a manager: who may have one."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from fireflyer.base.errors import NotFound
from fireflyer.cluster.core.exec_deadlines import ExecTimes
from fireflyer.cluster.manager.exec_session import ManagedExec
from fireflyer.cluster.manager.execs import MAX_ORDERS, Execs
from fireflyer.cluster.manager.web.sessions import Principal
from fireflyer.cluster.schema.execs import ExecOrder, ExecProgram


def test_only_the_token_that_asked_for_a_session_is_connected_to_it() -> None:
    """A session ends with the token that is looked at again, so with no other may anybody be in it."""

    async def world() -> None:
        execs = Execs(cast("Any", None), cast("Any", None))
        order = ExecOrder(id="0" * 32, run_token="5eed5eed", user="ann", program=ExecProgram())
        times = ExecTimes(asked_ns=execs.now_ns(), idle_ns=1)
        session = ManagedExec(order, node="n1", task=1, user="ann", token_id="a1", ends_task=False, times=times)
        execs._sessions[order.id] = session
        refused = [
            Principal(user="ann", token_id="b2"),
            Principal(user="bob", token_id="a1"),
            Principal(user="ann", token_id="a1", csrf="of a browser"),
        ]
        for who in refused:
            with pytest.raises(NotFound):
                execs.attach(who, order.id)
        assert execs.attach(Principal(user="ann", token_id="a1"), order.id) is session
        with pytest.raises(NotFound):
            execs.attach(Principal(user="ann", token_id="a1"), order.id)

    asyncio.run(world())


def test_sessions_that_ended_wait_for_no_node() -> None:
    """Else those of one user, for a node whose agent is away, would keep everybody's out."""

    async def world() -> None:
        execs = Execs(cast("Any", None), cast("Any", None))
        ann = Principal(user="ann", token_id="a1")
        for number in range(2 * MAX_ORDERS):
            order = ExecOrder(id=f"{number:032x}", run_token="5eed5eed", user="ann", program=ExecProgram())
            times = ExecTimes(asked_ns=execs.now_ns(), idle_ns=1)
            execs._sessions[order.id] = ManagedExec(
                order, node="n1", task=1, user="ann", token_id="a1", ends_task=False, times=times
            )
            execs.forget(execs.attach(ann, order.id))
        assert execs.sessions == 0

    asyncio.run(world())
