"""The process of one manager: the store, the lease, HTTP for people, RPC for agents.

It may be killed at any moment. Several of them run over one PostgreSQL database: one leads, and the others send those
who ask to it, until its lease ends.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import os
import secrets
import socket
import time
from collections.abc import Callable, Sequence
from typing import Final
from urllib.parse import urlsplit

import fireflyer
from fireflyer.accounts.serving import serving_accounts
from fireflyer.base.units import MIB, MS, SECOND
from fireflyer.cluster.agent.accounts import Accounts
from fireflyer.cluster.core.platform.messages import Settings
from fireflyer.cluster.core.platform.node_checking import NodeChecking
from fireflyer.cluster.core.platform.slurm.messages import SlurmSettings
from fireflyer.cluster.history.audit import AuditLog
from fireflyer.cluster.manager.administrators import users_of
from fireflyer.cluster.manager.agents import AgentService
from fireflyer.cluster.manager.changes import Changes
from fireflyer.cluster.manager.config import PlatformConfig, SlurmConfig, history_url
from fireflyer.cluster.manager.execs import Execs
from fireflyer.cluster.manager.health_reload import HealthReload, follow_configuration
from fireflyer.cluster.manager.history import History
from fireflyer.cluster.manager.known import KnownManagers
from fireflyer.cluster.manager.logs import LogLimits, Logs
from fireflyer.cluster.manager.machines import Machines
from fireflyer.cluster.manager.metrics import manager_series
from fireflyer.cluster.manager.platform import Platform
from fireflyer.cluster.manager.run_tokens import RunTokens
from fireflyer.cluster.manager.slurm.commands import SlurmCommands
from fireflyer.cluster.manager.slurm.loop import SlurmLoop
from fireflyer.cluster.manager.slurm.records import SlurmRecords
from fireflyer.cluster.manager.snapshots import Snapshots
from fireflyer.cluster.manager.tickets import Tickets
from fireflyer.cluster.manager.users import Users
from fireflyer.cluster.manager.web.app import RequestLimits, make_app
from fireflyer.cluster.manager.web.measured import MeasuredApp, RequestFigures
from fireflyer.cluster.manager.web.server import bind, serving
from fireflyer.cluster.manager.web.sessions import FindUser, Sessions
from fireflyer.cluster.manager.web.tls import certificate_of
from fireflyer.cluster.manager.webhooks import WebhookSender
from fireflyer.cluster.objects import open_objects
from fireflyer.identity import Accepts, UserKey, load_secret
from fireflyer.kvstore import open as open_store
from fireflyer.runtime.address import Address, parse_listen
from fireflyer.runtime.garbage import collect_at_times
from fireflyer.runtime.metrics import HistogramSeries, Series, serving_metrics
from fireflyer.runtime.rpc import RpcServer, ServerLimits

__all__ = ["run_platform_manager"]

_log = logging.getLogger(__name__)
_LIMITS: Final = ServerLimits(
    connections=20_000, handshakes=256, calls_per_connection=8, request_bytes_per_connection=2 * MIB, frame_bytes=MIB
)


async def run_platform_manager(
    config: PlatformConfig, *, on_ready: Callable[[str], None], reload: HealthReload | None = None
) -> None:
    """Until it is cancelled, then gives the lease up. `on_ready` is called with its URL, its address for agents and,
    where it serves TLS, the fingerprint of its certificate, with spaces between them. `reload`: of the file that
    `config` is from; None: it is read once. Raises `FireflyerError` when it cannot begin or go on."""
    secret = load_secret(config.secret_file)
    if len(config.managers) > 1 and not config.objects:
        _log.warning(
            "other managers do not find snapshots and logs in the directory of this one; set objects to what all of "
            "them reach"
        )
    host, port = parse_listen(config.listen)
    certificate = None
    if config.secure:
        names = (_reached_at(host), urlsplit(config.advertise).hostname or "")
        certificate = certificate_of(config.directory, names, config.tls_certificate, config.tls_key)
    listener = bind(host, port)
    url = config.advertise or f"http{'s' * config.secure}://{Address(_reached_at(host), listener.getsockname()[1])}"
    async with await open_store(config.store) as engine:
        machines = Machines(engine)
        await machines.refresh()

        async def find_machine(token_id: str) -> UserKey | None:
            return await machines.find_now(token_id, int(time.time()))

        server = RpcServer(Accepts(None, find_machine), identity=f"platform manager {config.name}", limits=_LIMITS)
        agents = AgentService(machines)
        agents.register(server)
        try:
            listening = await server.start(*parse_listen(config.listen_agents))
            at_agents = config.advertise_agents or str(Address(_reached_at(listening.host), listening.port))
            changes = Changes()
            store = users_of(config, engine)
            run_tokens = RunTokens(secret.reveal(), engine, store)
            here = url if certificate is None else f"{url}#{certificate.fingerprint}"
            known = KnownManagers(engine, config.name, here, config.manager_urls)
            tickets = Tickets(machines, run_tokens, known)
            history_at = history_url(config)
            audit = AuditLog(engine if history_at else None)
            users = Users(store, config.operators, run_tokens, audit)
            sender = WebhookSender(secret.reveal(), config.webhook_networks, users.roles_of)
            platform = Platform(_settings(config, url, at_agents), engine, tickets, changes, sender)
            logs = _logs(config, platform)
            changes.listen(logs.on_change)
            snapshots = Snapshots(platform, await asyncio.to_thread(open_objects, _snapshots_at(config)))
            history = History(history_at, platform, engine, config.history_keep)
            sessions = Sessions(secret.reveal(), FindUser(users.verify, users.still))
            execs = Execs(platform, sessions)
            changes.listen(execs.on_change)
            agents.begin(platform, logs, snapshots, execs, config.managers or (at_agents,))
            app = make_app(
                platform,
                machines,
                agents,
                sessions,
                changes,
                users,
                logs,
                snapshots,
                history,
                audit,
                execs,
                limits=RequestLimits(config.user_requests_per_s, config.failed_logins_per_minute),
                secure=config.secure,
                version=fireflyer.__version__,
            )
            requests = RequestFigures()

            async def collect() -> Sequence[Series | HistogramSeries]:
                return manager_series(platform, changes, requests, history)

            loop = asyncio.get_running_loop()
            services = [
                machines.follow(),
                known.follow(),
                logs.run(),
                snapshots.collect_for_ever(),
                history.run(),
                execs.run(),
                collect_at_times(),
            ]
            if reload is not None:
                services.append(follow_configuration(reload, platform.check_nodes))
            if config.engine == "slurm":
                slurm = _slurm(config.slurm, platform, machines, agents)
                platform.slurm_nodes = slurm.commands
                services.append(slurm.run())
            beside = [loop.create_task(work) for work in services]
            try:
                async with (
                    serving_accounts(
                        config.listen_accounts,
                        config.accounts_secret_file,
                        f"platform manager {config.name}",
                        users.find,
                    ),
                    serving(MeasuredApp(app, requests), listener, certificate),
                    serving_metrics(config.metrics_listen, collect),
                ):
                    on_ready(" ".join([url, at_agents, "" if certificate is None else certificate.fingerprint]).strip())
                    await platform.run()
            finally:
                await server.close()
                for task in beside:
                    task.cancel()
                await asyncio.wait(beside)
                snapshots.close()
        finally:
            await server.close()


def _reached_at(host: str) -> str:
    """By others; one that listens at all addresses is reached by its name."""
    try:
        return socket.gethostname() if ipaddress.ip_address(host).is_unspecified else host
    except ValueError:
        return host


def _objects_at(config: PlatformConfig) -> str:
    where = config.objects or os.path.join(config.directory, "objects")
    return (where if "://" in where else os.path.abspath(where)).rstrip("/")


def _logs(config: PlatformConfig, platform: Platform) -> Logs:
    return Logs(
        platform,
        config.logs_directory or os.path.join(os.path.abspath(config.directory), "logs"),
        _objects_at(config),
        LogLimits(config.logs_of_run_mib * MIB, config.logs_keep_days * 24 * 3600 * SECOND),
    )


def _snapshots_at(config: PlatformConfig) -> str:
    """A folder of its own: what is collected there is what no task names."""
    return f"{_objects_at(config)}/snapshots"


def _slurm(config: SlurmConfig, platform: Platform, machines: Machines, agents: AgentService) -> SlurmLoop:
    accounts = Accounts(os.geteuid(), config.accounts or None, own_user=config.own_user)
    commands = SlurmCommands(config.path, config.command_timeout_ms * MS)
    records = SlurmRecords(commands, config.jobcomp)
    return SlurmLoop(config, platform, machines, lambda: agents.managers, accounts, commands=commands, records=records)


def _settings(config: PlatformConfig, url: str, at_agents: str) -> Settings:
    return Settings(
        holder=f"{config.name}/{secrets.token_hex(8)}",
        address=url,
        managers=config.managers or (at_agents,),
        cluster=config.cluster,
        lease_ns=config.lease_ms * MS,
        lost_ns=config.lost_ms * MS,
        stop_after_ns=config.stop_after_ms * MS,
        stop_slack_ns=config.stop_slack_ms * MS,
        settle_ns=config.settle_ms * MS,
        history=bool(history_url(config)),
        slurm=SlurmSettings(most_jobs=config.slurm.most_jobs, submit_slack_ns=_slack_ns(config))
        if config.engine == "slurm"
        else None,
        slurm_output=config.slurm.output,
        slurm_options=config.slurm.options,
        node_check=config.node_check,
        node_check_limit_ns=config.node_check_timeout_ms * MS,
        checking=NodeChecking(config.health.checks()),
    )


def _slack_ns(config: PlatformConfig) -> int:
    """A manager that leads no longer has ended its last `sbatch` by then."""
    return (2 * config.slurm.command_timeout_ms + config.lease_ms) * MS
