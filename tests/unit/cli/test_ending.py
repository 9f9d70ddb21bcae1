"""How `ff up` ends: runs leave first, a second signal ends it at once, and `ff down` does the rest itself."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

import pytest
from tests.support.patience import allowed_s

from fireflyer.base.errors import PermanentError
from fireflyer.cli.platform.ending import let_runs_leave, until_stopped
from fireflyer.cluster import client
from fireflyer.cluster.core.scheduler.model import Reservation
from fireflyer.cluster.local.layout import PlatformLayout
from fireflyer.runtime.processes.run_lock import END_NOW


class Up:
    """A platform that runs until it is cancelled, and runs that leave when the test lets them."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.asked = threading.Event()
        self.left = threading.Event()
        self.had_left = False
        """When it ended."""

    async def work(self, *signals: signal.Signals) -> None:
        try:
            for number in signals:
                os.kill(os.getpid(), number)
                if number is not END_NOW:
                    await asyncio.to_thread(self.asked.wait, allowed_s(30))
            await asyncio.Event().wait()
        finally:
            self.had_left = self.left.is_set()

    def let_leave(self) -> None:
        self.asked.set()
        self.left.wait(allowed_s(30))

    def run(self, *signals: signal.Signals) -> bool:
        async def limited() -> bool:
            async with asyncio.timeout(allowed_s(30)):
                return await until_stopped(self.work(*signals), self.let_leave, self.said.append)

        return asyncio.run(limited())


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_the_runs_leave_before_anything_ends(number: signal.Signals) -> None:
    up = Up()
    up.left.set()
    assert up.run(number), "what is left of runs is killed then"
    assert up.had_left
    assert up.said == ["stopping: tasks save and go on with the next `ff up`; once more ends them at once"]


def test_a_second_signal_ends_it_at_once() -> None:
    up = Up()
    assert up.run(signal.SIGINT, signal.SIGTERM)
    assert not up.had_left
    up.left.set()


def test_ff_down_ends_it_at_once_and_has_the_runs_to_itself() -> None:
    up = Up()
    assert not up.run(END_NOW)
    assert not up.asked.is_set()
    assert up.said == []


def test_what_ends_it_by_itself_is_raised() -> None:
    async def broken() -> None:
        raise PermanentError("crash looping")

    with pytest.raises(PermanentError, match="crash looping"):
        asyncio.run(until_stopped(broken(), lambda: None, print))


class Busy:
    """A client of a platform with one node, whose task does not leave before Ctrl-C."""

    def __init__(self, _connection: object) -> None:
        self.windows: list[Reservation] = []
        self.looks = 0
        CLIENTS.append(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def all_nodes(self) -> Iterator[Any]:
        self.looks += 1
        if self.looks == 3:
            raise KeyboardInterrupt
        yield SimpleNamespace(name="agent-1", task=1)

    def add_reservation(self, window: Reservation) -> None:
        self.windows.append(window)

    def reservations(self) -> list[Reservation]:
        return self.windows

    def remove_reservation(self, name: str) -> None:
        self.windows = [one for one in self.windows if one.name != name]


CLIENTS: list[Busy] = []


def test_interrupted_while_runs_leave_it_opens_the_nodes_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(client, "Client", Busy)
    monkeypatch.setattr(client, "read_connection", lambda _: None)
    with pytest.raises(KeyboardInterrupt):
        let_runs_leave(PlatformLayout(str(tmp_path)), 60)
    (asked,) = CLIENTS
    assert asked.looks == 3
    assert asked.windows == []
    assert "its nodes take tasks again" in capsys.readouterr().out
