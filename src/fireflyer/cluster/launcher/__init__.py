"""The launcher's process: serves the control RPC, drives the gang machine, writes the event log."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Callable

from fireflyer.base.errors import FireflyerError
from fireflyer.base.events import Logged
from fireflyer.base.launch import LOGS_NAME, TOPOLOGY_NAME
from fireflyer.cluster.core.messages import Finish
from fireflyer.cluster.launcher.checks import EVENTS_NAME, check_job
from fireflyer.cluster.launcher.devices import Devices, find_devices
from fireflyer.cluster.launcher.event_log import EventLog
from fireflyer.cluster.launcher.job import MASTER_ADDR, Job
from fireflyer.cluster.schema.job import JobResult, JobSpec, RankLine
from fireflyer.identity.private_files import require_own_directory
from fireflyer.identity.secrets import new_secret, save_secret
from fireflyer.runtime.disk import translate_os_error
from fireflyer.runtime.processes.guarded import child_environment, new_token
from fireflyer.runtime.rpc import Accepts, RpcServer, ServerLimits
from fireflyer.runtime.store import StoreService

__all__ = ["Devices", "find_devices", "run_job"]

SECRET_NAME = "node-secret"  # noqa: S105
_CONNECTIONS_PER_RANK = 8


def _ignore(_: object) -> None:
    return None


async def run_job(
    spec: JobSpec,
    *,
    on_entry: Callable[[Logged], None] = _ignore,
    on_line: Callable[[RankLine], None] = _ignore,
    devices: Devices | None = None,
) -> JobResult:
    """Runs one job to its end; see the package docstring. `devices` None: those of this machine.

    Raises `UsageError`, `Exists`, `PermissionDenied` or `NoSpace` where it cannot start."""
    check_job(spec, devices or find_devices(child_environment({})))
    log = _make_run_dir(spec.run_dir)
    secret_file = os.path.join(log.directory, SECRET_NAME)
    secret = new_secret()
    try:
        save_secret(secret, secret_file)
        if spec.topology:
            _write(os.path.join(log.directory, TOPOLOGY_NAME), spec.topology)
        job = Job(
            spec,
            job_token=new_token(),
            logs_dir=os.path.join(log.directory, LOGS_NAME),
            secret_file=secret_file,
            log=log,
            on_entry=on_entry,
            on_line=on_line,
        )
        server = RpcServer(
            Accepts(secret),
            identity="launcher",
            limits=ServerLimits(connections=1024 + spec.nodes + _CONNECTIONS_PER_RANK * spec.world_size),
            on_disconnect=job.control.disconnected,
        )
        return _result(job, await _serve(job, server), log)
    except FireflyerError:
        if log.empty:
            log.remove()
        raise
    finally:
        log.close()
        _remove(secret_file)


def _make_run_dir(path: str) -> EventLog:
    run_dir = os.path.abspath(path)
    logs_dir = os.path.join(run_dir, LOGS_NAME)
    try:
        os.makedirs(run_dir, mode=0o700, exist_ok=True)
        os.makedirs(logs_dir, mode=0o700, exist_ok=True)
    except OSError as error:
        raise translate_os_error(error, f"make run directory {run_dir} (--run-dir chooses another)") from error
    for directory in (run_dir, logs_dir):  # which another user may have made since it was checked
        require_own_directory(directory)
    return EventLog(run_dir, EVENTS_NAME)


async def _serve(job: Job, server: RpcServer) -> Finish:
    job.control.serve(server)
    store = StoreService(server)
    address = await server.start(MASTER_ADDR, 0)
    loop = asyncio.get_running_loop()
    in_main = threading.current_thread() is threading.main_thread()
    give_back = _take_signals(loop, job.stop) if in_main else lambda: None
    try:
        return await job.run(str(address), store)
    finally:
        await job.nodes.close()
        give_back()
        await server.close()


def _result(job: Job, finish: Finish, log: EventLog) -> JobResult:
    exit_code, reason = finish.exit_code, finish.reason
    try:
        log.sync()
    except FireflyerError as error:
        if exit_code == 0:
            exit_code, reason = 1, str(error)
    return JobResult(
        exit_code=exit_code,
        reason=reason,
        attempts=job.gang.attempts,
        culprit=finish.culprit,
        run_dir=log.directory,
        events_path=log.path,
        logs_dir=os.path.join(log.directory, LOGS_NAME),
        reports_dropped=job.control.reports_dropped,
        faults_left=job.gang.faults_left,
    )


def _write(path: str, data: bytes) -> None:
    try:
        with open(path, "wb") as file:
            file.write(data)
    except OSError as error:
        raise translate_os_error(error, f"write {path}") from error


def _remove(path: str) -> None:
    try:
        os.unlink(path)
    except OSError:
        pass


def _take_signals(loop: asyncio.AbstractEventLoop, on_signal: Callable[[int], None]) -> Callable[[], None]:
    """Passes SIGINT, SIGTERM and SIGHUP to `on_signal`, except those that were ignored when we were started (nohup).
    Returns what gives them back."""
    taken = [
        number
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        if signal.getsignal(number) is not signal.SIG_IGN
    ]
    before = {number: signal.getsignal(number) for number in taken}
    for number in taken:
        loop.add_signal_handler(number, on_signal, int(number))

    def give_back() -> None:
        for number in taken:
            loop.remove_signal_handler(number)
            if before[number] is not None:
                signal.signal(number, before[number])

    return give_back
