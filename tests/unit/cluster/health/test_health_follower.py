"""What a follower prints is reported as it comes; it is bounded, started again, and leaves nothing behind."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

import pytest
from tests.support.patience import allowed_s

from fireflyer.base.errors import FireflyerError
from fireflyer.cluster.agent import health_follower, health_program
from fireflyer.cluster.agent.health import NodeChecks
from fireflyer.cluster.schema.sync import HealthOrder
from fireflyer.runtime.processes.guarded import watch_exit


class Node:
    """`orders` what is followed; `said` gets each line that is reported."""

    def __init__(self, *, any_program: bool = True) -> None:
        self.said: asyncio.Queue[bytes] = asyncio.Queue()
        self._taken = 0
        self.checks = NodeChecks(1, self._take, any_program=any_program)

    def orders(self, script: str) -> None:
        self.checks.hear(HealthOrder(program=("/bin/true",), follow=("/bin/sh", "-c", script)))

    def _take(self) -> None:
        for report in self.checks.reports():
            if report.number > self._taken:
                self._taken = report.number
                for line in report.lines:
                    self.said.put_nowait(line)

    async def hears(self) -> bytes:
        async with asyncio.timeout(allowed_s(60)):
            return await self.said.get()


@asynccontextmanager
async def node(*, any_program: bool = True) -> AsyncIterator[Node]:
    found = Node(any_program=any_program)
    task = asyncio.create_task(found.checks.run())
    try:
        yield found
    finally:
        task.cancel()
        await asyncio.wait([task])


async def is_gone(pid: int) -> None:
    gone = asyncio.Event()
    try:
        watch_exit(asyncio.get_running_loop(), pid, gone.set)
    except FireflyerError:
        return
    async with asyncio.timeout(allowed_s(30)):
        await gone.wait()


LEAVES_A_CHILD: Final = "sleep 600 & echo $!; wait"


def test_what_a_follower_prints_is_reported_while_it_runs() -> None:
    async def scenario() -> None:
        async with node() as here:
            here.orders("echo one; read forever < /dev/zero")
            assert await here.hears() == b"one"

    asyncio.run(scenario())


def test_one_that_ends_has_its_last_words_reported_and_is_started_again(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with node() as here:
            here.orders(f"echo x >> {tmp_path}/starts; echo last words; exit 1")
            assert [await here.hears(), await here.hears()] == [b"last words"] * 2

    asyncio.run(scenario())
    assert len((tmp_path / "starts").read_text().splitlines()) >= 2


@pytest.mark.parametrize("ends", ["other orders", "no orders", "the agent"])
def test_it_is_killed_with_what_it_has_started(ends: str) -> None:
    async def scenario() -> None:
        async with node() as here:
            here.orders(LEAVES_A_CHILD)
            child = int(await here.hears())
            if ends == "other orders":
                here.orders("echo other; sleep 600")
                assert await here.hears() == b"other"
            elif ends == "no orders":
                here.checks.hear(None)
                await is_gone(child)
        await is_gone(child)

    asyncio.run(scenario())


def test_one_that_prints_without_end_waits_and_its_lines_are_bounded() -> None:
    async def scenario() -> None:
        async with node() as here:
            here.orders("i=0; while :; do echo $i; i=$((i+1)); done")
            assert await here.hears() == b"0"
            await here.hears()
            assert len(here.checks.reports()) <= 4
            assert all(len(report.lines) <= 256 for report in here.checks.reports())

    asyncio.run(scenario())


def test_an_agent_of_root_follows_only_what_root_allows_and_tries_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    allowed: list[bool] = []

    def refused(program: tuple[str, ...]) -> str:
        allowed.append(not (words := health_program.refused(program)) or len(allowed) > 0)
        return "" if allowed[-1] else words

    async def scenario() -> None:
        async with node(any_program=False) as here:
            here.orders(f"[ -e {tmp_path}/refused ] && echo follows; sleep 600")
            assert await here.hears() == b"follows"

    class Told(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "/bin/sh is not run as root" in record.getMessage():
                (tmp_path / "refused").touch()

    monkeypatch.setattr(health_follower, "refused", refused)
    handler, logger = Told(), logging.getLogger("fireflyer.cluster.agent.health_follower")
    logger.addHandler(handler)
    asyncio.run(scenario())
    logger.removeHandler(handler)
    assert allowed == [False, True]
