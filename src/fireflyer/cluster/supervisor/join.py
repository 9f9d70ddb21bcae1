"""A machine joins a job whose launcher runs elsewhere: starts guards when told to, until the job has ended."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Coroutine

import msgspec

from fireflyer.base.errors import FireflyerError, TransientError, Unreachable
from fireflyer.base.units import SECOND
from fireflyer.cluster.schema.addresses import AddressChoice
from fireflyer.cluster.schema.hosts import HostQuestion
from fireflyer.cluster.schema.join import (
    ASK,
    HOST_NEWS,
    HOST_NEXT,
    JOIN,
    GuardEnded,
    JobEnded,
    JoinRequest,
    KillGuard,
    StartGuard,
)
from fireflyer.cluster.schema.wire import Done, Next, supervisor_command
from fireflyer.cluster.supervisor.remote import make_private, probe
from fireflyer.identity.handshake import NodeCredential
from fireflyer.identity.secrets import load_secret
from fireflyer.runtime.processes.guard_command import GuardCommand
from fireflyer.runtime.processes.guarded import Guarded, child_environment, new_token
from fireflyer.runtime.rpc import RpcClient

__all__ = ["JoinSpec", "join_job"]

_log = logging.getLogger(__name__)
_CALL_NS = 24 * 3600 * SECOND
_SILENCE_NS = 60 * SECOND
"""The launcher answers every ten seconds, if only that there is nothing to do."""
_CONNECT_NS = 5 * SECOND
_PAUSE_S = 0.5
_LAST_NEWS_S = 2.0
"""A machine that leaves tells the launcher that its guards have ended: without that proof it waits for their leases."""


class JoinSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Command line of `ff run` on a machine that joins."""

    endpoint: str
    """`host:port` of the launcher."""
    secret_file: str
    """An absolute path."""
    node_rank: int
    nodes: int
    min_nodes: int
    ranks_per_node: int
    workdir: str
    addresses: AddressChoice = AddressChoice()
    """Empty: as the launcher's machine chooses."""
    timeout_ns: int
    """Longest wait for the launcher to be there."""


async def join_job(spec: JoinSpec, *, on_status: Callable[[str], None]) -> JobEnded:
    """Serves the job until it has ended. A stop signal ends the ranks here, and the launcher takes the machine for
    lost. Raises `FireflyerError` where it cannot join, and `Unreachable` when the launcher is lost: then nothing of the
    job is left here."""
    client = await _connect(spec, on_status)
    directory = os.path.join(tempfile.gettempdir(), f"fireflyer-{os.geteuid()}", new_token())
    host = _JoinedHost(client, directory, spec.endpoint, spec.secret_file)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, host.stop, int(number))
    try:
        question = await client.call(ASK, Done(), _CALL_NS)
        facts = probe(_here(question, spec))
        request = JoinRequest(spec.node_rank, spec.nodes, facts, spec.ranks_per_node, spec.min_nodes)
        joined = await client.call(JOIN, request, _CALL_NS)
        on_status(f"machine {joined.host} of job {joined.job}; the launcher at {spec.endpoint} shows what ranks print")
        make_private(directory)
        return await host.serve()
    finally:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.remove_signal_handler(number)
        await host.close()
        await client.close()
        shutil.rmtree(directory, ignore_errors=True)


def _here(question: HostQuestion, spec: JoinSpec) -> HostQuestion:
    """Each machine is asked about the directory in which its own command was started, and interfaces have other names
    on another machine."""
    addresses = spec.addresses or question.addresses
    return msgspec.structs.replace(question, workdir=spec.workdir, addresses=addresses)


async def _connect(spec: JoinSpec, on_status: Callable[[str], None]) -> RpcClient:
    credential = NodeCredential(load_secret(spec.secret_file), f"host {spec.node_rank}")
    loop = asyncio.get_running_loop()
    until_s = loop.time() + spec.timeout_ns / SECOND
    told = False
    while True:
        try:
            return await RpcClient.connect(spec.endpoint, credential, _CONNECT_NS)
        except TransientError as error:
            if loop.time() > until_s:
                raise Unreachable(
                    f"no launcher at {spec.endpoint} (--rdzv-endpoint): {error}; start the same command with "
                    "--node-rank 0 on that machine, and see that its firewall lets the port through"
                ) from None
        if not told:
            on_status(f"waiting for the launcher at {spec.endpoint}")
            told = True
        await asyncio.sleep(_PAUSE_S)


class _JoinedHost:
    def __init__(self, client: RpcClient, directory: str, endpoint: str, secret_file: str) -> None:
        self._client = client
        self._endpoint = endpoint
        self._directory = directory
        self._secret_file = secret_file
        self._guards: dict[tuple[int, int], Guarded] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._stop_signal = 0
        self._stopped = asyncio.Event()

    def stop(self, number: int) -> None:
        self._stop_signal = self._stop_signal or number
        self._stopped.set()

    async def serve(self) -> JobEnded:
        loop = asyncio.get_running_loop()
        obey, stopped = loop.create_task(self._obey()), loop.create_task(self._stopped.wait())
        try:
            await asyncio.wait([obey, stopped], return_when=asyncio.FIRST_COMPLETED)
            if obey.done():
                return obey.result()
            reason = "this machine was told to leave the job; its launcher goes on without it"
            return JobEnded(128 + self._stop_signal, reason)
        finally:
            obey.cancel()
            stopped.cancel()
            await asyncio.wait([obey, stopped])

    async def _obey(self) -> JobEnded:
        after = 0
        while True:
            try:
                answer = await self._client.call(HOST_NEXT, Next(after), _SILENCE_NS)
            except TransientError as error:
                raise Unreachable(
                    f"the launcher at {self._endpoint} was lost, so the ranks of this machine were ended; to run the "
                    "job again give the same command on each machine"
                ) from error
            after = answer.number
            match answer.command:
                case StartGuard():
                    self._start(answer.command)
                case KillGuard(node, incarnation):
                    guarded = self._guards.get((node, incarnation))
                    if guarded is not None:
                        guarded.kill()
                case JobEnded():
                    await self._client.notify(HOST_NEXT, Next(after))  # says that this was heard
                    return answer.command

    def _start(self, command: StartGuard) -> None:
        config = command.config
        if not config.logs_dir:
            config = msgspec.structs.replace(config, run_dir=self._directory)
        config = msgspec.structs.replace(config, secret_file=self._secret_file, launcher=self._endpoint)
        node, incarnation = config.node, config.incarnation
        how = GuardCommand.here(
            supervisor_command(config), lease_s=config.lease_ns / SECOND, first_lease_s=command.first_lease_ns / SECOND
        )
        try:
            with open(os.path.join(self._directory, f"node-{node}.log"), "ab") as log:
                guarded = Guarded(
                    how,
                    token=command.token,
                    environment=child_environment({}),
                    log=log,
                    on_exit=lambda code: self._tell(
                        node, incarnation, False, f"its supervisor exited with code {code}"
                    ),
                )
        except (FireflyerError, OSError) as error:
            self._tell(node, incarnation, True, f"its supervisor could not be started: {error}")
            return
        self._guards[node, incarnation] = guarded
        self._spawn(self._watch(guarded, node, incarnation))

    async def _watch(self, guarded: Guarded, node: int, incarnation: int) -> None:
        clean = await guarded.wait_gone()
        del self._guards[node, incarnation]
        # Where the guard had told the end of its supervisor before, that is the reason.
        self._tell(node, incarnation, clean, "the process that guards its ranks ended")

    def _tell(self, node: int, incarnation: int, clean: bool, reason: str) -> None:
        self._spawn(self._send(GuardEnded(node, incarnation, clean, reason[:1000])))

    async def _send(self, news: GuardEnded) -> None:
        try:
            await self._client.call(HOST_NEWS, news, _CALL_NS)
        except TransientError:
            pass  # the launcher is lost, which `_obey` tells
        except FireflyerError as error:
            _log.warning("the launcher was not told that a guard ended node=%d reason=%s", news.node, error)

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Nothing of the job is left here afterwards."""
        for guarded in list(self._guards.values()):
            guarded.kill()
        while self._guards:
            await asyncio.wait(list(self._tasks), return_when=asyncio.FIRST_COMPLETED)
        if self._tasks:
            await asyncio.wait(list(self._tasks), timeout=_LAST_NEWS_S)
        for task in self._tasks:
            task.cancel()
