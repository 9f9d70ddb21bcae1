"""The launcher's process: serves the control RPC, drives the gang machine, writes the event log."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import threading
from collections.abc import Callable, Mapping

from msgspec import structs

from fireflyer.base.errors import FireflyerError
from fireflyer.base.events import Logged
from fireflyer.base.launch import LOGS_NAME, TOPOLOGY_NAME
from fireflyer.cluster.core.messages import Finish
from fireflyer.cluster.launcher.agents import AgentTarget, UserToken
from fireflyer.cluster.launcher.checks import EVENTS_NAME, check_job
from fireflyer.cluster.launcher.event_log import EventLog
from fireflyer.cluster.launcher.job import SECRET_NAME, Job
from fireflyer.cluster.launcher.machines import HERE
from fireflyer.cluster.launcher.places import find_places
from fireflyer.cluster.launcher.preflight import HostsRefused
from fireflyer.cluster.schema.job import JobResult, JobSpec, RankLine
from fireflyer.identity.private_files import require_own_directory
from fireflyer.identity.secrets import load_secret, new_secret, save_secret
from fireflyer.runtime.address import Address
from fireflyer.runtime.devices import Devices, find_devices
from fireflyer.runtime.disk import translate_os_error
from fireflyer.runtime.port_search import reserve_port
from fireflyer.runtime.processes.guarded import child_environment, new_token
from fireflyer.runtime.rpc import Accepts, RpcServer, ServerLimits
from fireflyer.runtime.store import StoreService

__all__ = ["AgentTarget", "Devices", "HostsRefused", "UserToken", "find_devices", "run_job"]

_CONNECTIONS_PER_RANK = 8


def _ignore(_: object) -> None:
    return None


async def run_job(
    spec: JobSpec,
    *,
    on_entry: Callable[[Logged], None] = _ignore,
    on_line: Callable[[RankLine], None] = _ignore,
    on_waiting: Callable[[list[int]], None] = _ignore,
    on_asks: Callable[[], None] = lambda: None,
    devices: Devices | None = None,
    job_token: str = "",
    agents: Mapping[str, AgentTarget] | None = None,
    user_token: UserToken | None = None,
) -> JobResult:
    """Runs one job to its end; see the package docstring. `devices` None: those of this machine. `on_waiting` is called
    with the numbers of the machines that are to join and have not yet, `on_asks` again and again once ranks have asked
    whether they are to suspend. `job_token` marks the processes of the job;
    empty: a new one does. `agents`: how those of the hosts are reached; None: by what machines left when they joined.
    `user_token`: for a file on each node that agents start.

    Raises `UsageError`, `Exists`, `PermissionDenied` or `NoSpace` where it cannot start."""
    check_job(spec, devices or find_devices(child_environment({})))
    rendezvous = spec.rendezvous
    secret = new_secret() if rendezvous is None else load_secret(rendezvous.secret_file)
    log, is_new = _make_run_dir(spec.run_dir)
    secret_file = os.path.join(log.directory, SECRET_NAME)
    server = RpcServer(
        Accepts(secret),
        identity="launcher",
        limits=ServerLimits(connections=1024 + spec.nodes + _CONNECTIONS_PER_RANK * spec.world_size),
    )
    try:
        save_secret(secret, secret_file)
        if spec.topology:
            _write(os.path.join(log.directory, TOPOLOGY_NAME), spec.topology)
        address = await _listen(server, spec)
        places = await find_places(
            spec,
            run_dir=log.directory,
            job_token=job_token or new_token(),
            secret=secret,
            server=server,
            control_port=address.port,
            on_waiting=on_waiting,
            agents=agents,
            user_token=user_token,
        )
        job = Job(
            structs.replace(spec, host_ranks=places.host_ranks or spec.host_ranks),
            logs_dir=os.path.join(log.directory, LOGS_NAME),
            secret_file=secret_file,
            log=log,
            places=places,
            on_entry=on_entry,
            on_line=on_line,
            on_asks=on_asks,
        )
        finish = await _serve(job, server, address.port)
        await places.end(finish.exit_code, finish.reason)
        return _result(job, finish, log)
    finally:
        await server.close()
        log.close()
        _remove(secret_file)
        if log.empty:  # refused, or stopped before it began: the same command must find nothing in its way
            _empty_run_dir(log)
            if is_new:
                _remove_directory(log.directory)


async def _listen(server: RpcServer, spec: JobSpec) -> Address:
    """At a port that is not the one of --master-port."""
    with contextlib.ExitStack() as stack:
        if spec.ports is not None and spec.master_port and (kept := reserve_port(spec.master_port)) is not None:
            stack.enter_context(kept)
        return await _listen_there(server, spec)


async def _listen_there(server: RpcServer, spec: JobSpec) -> Address:
    if spec.rendezvous is not None:
        return await server.start_everywhere(spec.rendezvous.port, spec.ports)
    if spec.hosts:
        return await server.start_everywhere(spec.remote.port, spec.ports)
    return await server.start(HERE, 0, spec.ports)


def _make_run_dir(path: str) -> tuple[EventLog, bool]:
    """Its event log, and whether the directory was not there."""
    is_new = not os.path.isdir(path)
    run_dir = os.path.abspath(path)
    logs_dir = os.path.join(run_dir, LOGS_NAME)
    try:
        os.makedirs(run_dir, mode=0o700, exist_ok=True)
        os.makedirs(logs_dir, mode=0o700, exist_ok=True)
    except OSError as error:
        raise translate_os_error(error, f"make run directory {run_dir} (--run-dir chooses another)") from error
    for directory in (run_dir, logs_dir):  # which another user may have made since it was checked
        require_own_directory(directory)
    return EventLog(run_dir, EVENTS_NAME), is_new


async def _serve(job: Job, server: RpcServer, port: int) -> Finish:
    job.control.serve(server)
    job.whole_life.serve(server)
    server.on_disconnect(job.control.disconnected)
    store = StoreService(server)
    loop = asyncio.get_running_loop()
    in_main = threading.current_thread() is threading.main_thread()
    give_back = _take_signals(loop, job.stop, job.suspend) if in_main else lambda: None
    try:
        return await job.run(port, store)
    finally:
        await job.nodes.close()
        give_back()


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
        signal=finish.signal,
        reports_dropped=job.control.reports_dropped,
        faults_left=job.gang.faults_left,
        suspended=finish.suspended and exit_code == finish.exit_code,
        whole_life_state=job.whole_life.value,
    )


def _write(path: str, data: bytes) -> None:
    try:
        with open(path, "wb") as file:
            file.write(data)
    except OSError as error:
        raise translate_os_error(error, f"write {path}") from error


def _remove(path: str) -> None:
    with contextlib.suppress(OSError):
        os.unlink(path)


def _empty_run_dir(log: EventLog) -> None:
    """Of a job that never began; what somebody else has put there stays."""
    log.remove()
    _remove(os.path.join(log.directory, TOPOLOGY_NAME))
    _remove_directory(os.path.join(log.directory, LOGS_NAME))


def _remove_directory(path: str) -> None:
    """If nothing is in it."""
    with contextlib.suppress(OSError):
        os.rmdir(path)


def _take_signals(
    loop: asyncio.AbstractEventLoop, on_stop: Callable[[int], None], on_suspend: Callable[[], None]
) -> Callable[[], None]:
    """Passes SIGINT, SIGTERM and SIGHUP to `on_stop`, and SIGUSR1 to `on_suspend`, except those that were ignored when
    we were started (nohup). Returns what gives them back."""
    taken = [
        number
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
        if signal.getsignal(number) is not signal.SIG_IGN
    ]
    before = {number: signal.getsignal(number) for number in taken}
    for number in taken:
        if number == signal.SIGUSR1:
            loop.add_signal_handler(number, on_suspend)
        else:
            loop.add_signal_handler(number, on_stop, int(number))

    def give_back() -> None:
        for number in taken:
            loop.remove_signal_handler(number)
            if before[number] is not None:
                signal.signal(number, before[number])

    return give_back
