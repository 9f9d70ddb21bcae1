"""The nodes of a job are ended together."""

from __future__ import annotations

import asyncio
from typing import Any

from tests.support.loops import on_loop

from fireflyer.cluster.launcher.machines import ThisMachine
from fireflyer.cluster.launcher.nodes import Nodes


@on_loop
async def test_guards_that_do_not_answer_are_waited_for_together() -> None:
    """A hundred hosts behind a cut link would take minutes, one after the other."""
    waiting = asyncio.Barrier(3)

    class Silent:
        def kill(self) -> None:
            pass

        async def wait_gone(self, _timeout_s: float) -> bool:
            await waiting.wait()
            return True

    silent: Any = Silent()
    nodes = Nodes(
        starter=ThisMachine(), job_token="t", logs_dir="/run", feed=lambda _: None, was_up=lambda *_: True
    )  # fmt: skip
    nodes._guards = {(node, 1): silent for node in range(3)}
    async with asyncio.timeout(5):
        assert await nodes.close()
