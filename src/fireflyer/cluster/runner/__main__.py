"""`python -P -m fireflyer.cluster.runner FD`: the launcher of a run, with `RunnerOrders` in the descriptor FD.

SIGUSR1 suspends the run, SIGTERM stops it. Both are blocked when this program begins, so that none is lost. Until the
job has begun, and `run_job` hears them, they end it before it has started anything.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Final

import msgspec

from fireflyer.base.decoding import decode_msgpack
from fireflyer.base.errors import FireflyerError, NotFound, UsageError
from fireflyer.base.events import AttemptStarted, CheckpointReport, Logged, ResumeReport, StepReport, decode_log
from fireflyer.base.os_errors import translate_os_error
from fireflyer.cluster.launcher import HostsRefused, UserToken, run_job
from fireflyer.cluster.runner.ending import ending_of, shown
from fireflyer.cluster.runner.job import agents_of, job_of, token_path, workdir_of
from fireflyer.cluster.schema.job import JobResult
from fireflyer.cluster.schema.runner import PROGRESS_NAME, RESULT_NAME, RunnerOrders, RunProgress
from fireflyer.cluster.schema.sync import EndedRun
from fireflyer.cluster.schema.tasks import Cause
from fireflyer.identity.private_files import write_private_file
from fireflyer.runtime import run
from fireflyer.runtime.clock import BootClock

_log = logging.getLogger("runner")
_MAX_ORDERS_BYTES: Final = 16 << 20
_PROGRESS_S: Final = 1.0
_SIGNALS: Final = (signal.SIGUSR1, signal.SIGTERM)


class _Progress:
    """The file in which the agent sees how far the run is."""

    def __init__(self, directory: str) -> None:
        self._path = os.path.join(directory, PROGRESS_NAME)
        self._clock = BootClock()
        self._now: RunProgress | None = None
        self._started_ns = 0
        self._written_s = 0.0
        self._later: asyncio.TimerHandle | None = None

    def take(self, entry: Logged) -> None:
        event, now = entry.event, self._now
        if isinstance(event, AttemptStarted):
            self._started_ns = entry.at_ns
            self._now = msgspec.structs.replace(now or RunProgress(attempt=0), attempt=event.attempt)
            self._write()
        elif now is not None:
            self._now = self._after(now, entry)
            if self._now != now and self._later is None:
                delay_s = max(0.0, self._written_s + _PROGRESS_S - time.monotonic())
                self._later = asyncio.get_running_loop().call_later(delay_s, self._write)

    def _after(self, now: RunProgress, entry: Logged) -> RunProgress:
        match entry.event:
            case StepReport(step=step) if step > (now.step or 0):
                return msgspec.structs.replace(now, step=step)
            case ResumeReport(attempt=now.attempt):
                return msgspec.structs.replace(now, start_ns=max(0, entry.at_ns - self._started_ns))
            case CheckpointReport(stall_ns=stall_ns, write_ns=write_ns, error=None):
                save_ns = max(0, stall_ns) + max(0, write_ns)
                at_ns = max(0, self._clock.now_ns() - save_ns)
                return msgspec.structs.replace(now, saved_at_ns=at_ns, save_ns=save_ns)
            case _:
                return now

    def asks(self) -> None:
        if self._now is not None and not self._now.asks:
            self._now = msgspec.structs.replace(self._now, asks=True)
            self._write()

    def _write(self) -> None:
        if self._later is not None:
            self._later.cancel()
        self._written_s, self._later = time.monotonic(), None
        temporary = f"{self._path}.new"
        with contextlib.suppress(OSError):
            with open(temporary, "wb") as file:
                file.write(msgspec.json.encode(self._now))
            os.rename(temporary, self._path)


class _Signals:
    """What the agent wants, before the job has begun and after."""

    def __init__(self, cancel: Callable[[], object]) -> None:
        self._cancel = cancel
        self.heard: signal.Signals | None = None

    def take_over(self, loop: asyncio.AbstractEventLoop) -> None:
        for number in _SIGNALS:
            loop.add_signal_handler(number, self._hear, number)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)

    def ignore(self, loop: asyncio.AbstractEventLoop) -> None:
        """The job has ended: one that comes now must not kill this process before the result is written."""
        for number in _SIGNALS:
            loop.remove_signal_handler(number)
            signal.signal(number, signal.SIG_IGN)

    def _hear(self, number: signal.Signals) -> None:
        if self.heard is None:
            self.heard = number
            self._cancel()


async def _run(orders: RunnerOrders) -> EndedRun:
    task = asyncio.current_task()
    if task is None:
        raise UsageError("the launcher of a run needs an event loop")
    signals = _Signals(task.cancel)
    signals.take_over(asyncio.get_running_loop())
    progress = _Progress(orders.directory)
    try:
        spec = job_of(orders, os.environ)
        result = await run_job(
            spec,
            on_entry=progress.take,
            on_asks=progress.asks,
            job_token=orders.run_token,
            agents=agents_of(orders) if orders.tickets else None,
            user_token=UserToken(token_path(orders), orders.token) if orders.token else None,
        )
    except asyncio.CancelledError:
        cause = Cause.SUSPENDED if signals.heard is signal.SIGUSR1 else Cause.STOPPED
        return EndedRun(cause=cause, exit_code=0, reason="it was asked to leave before its ranks were started")
    except HostsRefused as error:
        bad = tuple(sorted({host for host, _ in error.rows}))
        return EndedRun(cause=Cause.INFRASTRUCTURE, exit_code=1, reason=shown(str(error)), bad_nodes=bad)
    except FireflyerError as error:
        cause = Cause.PROGRAM if isinstance(error, UsageError | NotFound) else Cause.INFRASTRUCTURE
        return EndedRun(cause=cause, exit_code=1, reason=shown(str(error)))
    finally:
        signals.ignore(asyncio.get_running_loop())
    return await asyncio.to_thread(_ended, orders, result)


def _ended(orders: RunnerOrders, result: JobResult) -> EndedRun:
    with open(result.events_path, "rb") as file:
        log = decode_log(file)
    return ending_of(result, log, [node.name for node in orders.order.nodes])


def _run_there(orders: RunnerOrders) -> EndedRun:
    """In the working directory. Raises `FireflyerError`."""
    workdir = workdir_of(orders, os.environ)
    try:
        os.chdir(workdir)
    except OSError as error:
        reason = shown(str(translate_os_error(error, f"working directory {workdir}")))
        return EndedRun(cause=Cause.PROGRAM, exit_code=1, reason=reason)
    if orders.token:
        write_private_file(token_path(orders), orders.token.encode())
    return run(_run(orders))


def main(arguments: list[str]) -> int:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    with open(int(arguments[0]), "rb") as file:
        orders = decode_msgpack(file.read(_MAX_ORDERS_BYTES), RunnerOrders)
    try:
        ended = _run_there(orders)
    except (FireflyerError, OSError) as error:
        _log.error("the run ends on an error reason=%s", error)
        ended = EndedRun(cause=Cause.INFRASTRUCTURE, exit_code=1, reason=shown(str(error)))
    with contextlib.suppress(OSError):
        os.unlink(token_path(orders))
    write_private_file(os.path.join(orders.directory, RESULT_NAME), msgspec.json.encode(ended))
    return ended.exit_code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
