"""When a process of a local cluster is given up: not while it lives, whatever was before."""

from __future__ import annotations

import asyncio
import errno
import sys
from pathlib import Path

from tests.support.patience import allowed_s

from fireflyer.runtime.processes.services import AT_ONCE_S, MAX_DEATHS, READY, CrashHistory, LocalProcess


def died_at_once(times: int) -> tuple[CrashHistory, float]:
    """Every second one before it was ready."""
    deaths, now_s = CrashHistory(), 100.0
    for number in range(times):
        if number % 2:
            deaths.ready(now_s)
            now_s += AT_ONCE_S / 2
        deaths.ended(now_s)
        now_s += 1
    return deaths, now_s


def test_who_dies_at_once_again_and_again_is_hopeless() -> None:
    assert not died_at_once(MAX_DEATHS - 1)[0].crash_looping(1000)
    assert died_at_once(MAX_DEATHS)[0].crash_looping(1000)


def test_who_has_come_to_live_is_not_whatever_happened_before() -> None:
    deaths, now_s = died_at_once(MAX_DEATHS + 2)
    deaths.ready(now_s)
    assert deaths.crash_looping(now_s + AT_ONCE_S / 2)
    assert not deaths.crash_looping(now_s + AT_ONCE_S)
    deaths.ended(now_s + AT_ONCE_S)
    assert not deaths.crash_looping(now_s + AT_ONCE_S)
    for number in range(MAX_DEATHS):
        assert not deaths.crash_looping(now_s + 10)
        deaths.ended(now_s + 10 + number)
    assert deaths.crash_looping(now_s + 100)


def test_who_died_is_started_again_though_nobody_can_be_told(tmp_path: Path) -> None:
    """As on a terminal that was closed."""

    def say(_line: str) -> None:
        raise OSError(errno.EIO, "the terminal is gone")

    async def run() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda *_: None)
        service = LocalProcess("service", [], str(tmp_path / "log"), say)
        service._command = [
            sys.executable,
            "-S",
            "-c",
            f"print('{READY.decode()}1', flush=True); import time; time.sleep(600)",
        ]
        service.start()
        async with asyncio.timeout(allowed_s(30)):
            await service._ready.wait()
            assert service._process is not None
            first = service._process.pid
            service._process.kill()
            await service._ended.wait()
            await service._ready.wait()
        assert service._process.pid != first
        await service.stop()

    asyncio.run(run())
