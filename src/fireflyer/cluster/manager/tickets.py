"""What a run's launcher gets beside its orders, sealed for the node on which it is: a ticket for each of its nodes, and
the token of the run."""

from __future__ import annotations

import secrets
import time
from typing import Final, Protocol

import msgspec

from fireflyer.base.errors import UsageError
from fireflyer.cluster.schema.sync import LaunchOrder, Orders
from fireflyer.cluster.schema.tickets import MAX_LIFE_S, Claims, seal_launch
from fireflyer.identity.handshake import NONCE_BYTES

__all__ = ["MachineKeys", "Tickets"]

AFTER_END_S: Final = 86_400
"""A ticket outlives the time that the task has declared."""


class MachineKeys(Protocol):
    def key_of(self, name: str) -> bytes | None: ...


class IssueRunToken(Protocol):
    async def issue(self, task: int, run: int, run_token: str, user: str) -> str:
        """Empty where there is no such user."""


class ManagerUrls(Protocol):
    @property
    def urls(self) -> tuple[str, ...]:
        """As `LaunchOrder` has them."""


class Tickets:
    def __init__(self, machines: MachineKeys, tokens: IssueRunToken, managers: ManagerUrls) -> None:
        self._machines = machines
        self._tokens = tokens
        self._managers = managers

    async def add(self, orders: Orders) -> Orders:
        """Orders with tickets and token in each launch order. A run that has a node whose machine was revoked is not
        launched: the manager ends it when it does not start in time."""
        if all(run.launch is None for run in orders.runs):
            return orders
        runs = []
        for run in orders.runs:
            launch = None if run.launch is None else await self._sealed(run.run_token, run.launch)
            runs.append(msgspec.structs.replace(run, launch=launch))
        return msgspec.structs.replace(orders, runs=tuple(runs))

    async def _sealed(self, token: str, launch: LaunchOrder) -> LaunchOrder | None:
        keys = {node.name: self._machines.key_of(node.name) for node in launch.nodes}
        known = {name: key for name, key in keys.items() if key is not None}
        if len(known) < len(keys):
            return None
        life_s = MAX_LIFE_S if launch.spec.time_ns is None else launch.spec.time_ns // 10**9 + AFTER_END_S
        claims = Claims(
            run_token=token,
            task=launch.task,
            user=launch.user,
            account=launch.account,
            nodes=len(launch.nodes),
            expires_s=int(time.time()) + min(MAX_LIFE_S, life_s),
        )
        token = await self._tokens.issue(launch.task, launch.run, token, launch.user)
        launch = msgspec.structs.replace(launch, manager_urls=self._managers.urls)
        try:
            return seal_launch(launch, claims, known, nonce=secrets.token_bytes(NONCE_BYTES), user_token=token)
        except UsageError:
            return None
