"""The shell of a manager whose engine is Slurm: the product's own `SlurmLoop`, `SlurmRecords` and `SlurmCommands`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import msgspec
from tests.support.platform.managers import SETTINGS, ManagerHost
from tests.support.platform.oracle import PlatformOracle
from tests.support.platform.post import Post, Tell
from tests.support.platform.slurm.controller import OURS, Controller
from tests.support.platform.slurm.coroutines import Later, drive
from tests.support.platform.slurm.programs import TIMEOUT_NS, SimCommands
from tests.support.platform.slurm.steps import JobTokens
from tests.support.platform.store import SimStore

from fireflyer.base.errors import FireflyerError, Unreachable, error_to_wire
from fireflyer.base.units import MS, SECOND
from fireflyer.cluster.agent.accounts import Accounts
from fireflyer.cluster.core.platform.access import check
from fireflyer.cluster.core.platform.commands import DrainNode, ResumeNode
from fireflyer.cluster.core.platform.messages import (
    Commanded,
    Done,
    Effect,
    NotLeader,
    Refused,
    SlurmFollowed,
    StepDown,
    Submitted,
)
from fireflyer.cluster.core.platform.orders import orders_of_retired
from fireflyer.cluster.core.platform.slurm.messages import SlurmEvent, SlurmSettings, WatchedJob, Work
from fireflyer.cluster.manager.config import SlurmConfig
from fireflyer.cluster.manager.slurm.loop import SlurmLoop
from fireflyer.cluster.manager.slurm.records import SlurmRecords
from fireflyer.cluster.schema.sync import Sync
from fireflyer.sim import SimNode, World

__all__ = ["SlurmManager"]

POLL_NS: Final = 800 * MS
UNIX_S: Final = 1_700_000_000
SLURM: Final = SlurmSettings(
    most_jobs=6,
    submit_slack_ns=2 * TIMEOUT_NS + SETTINGS.lease_ns,
    refusal_pause_ns=3 * SECOND,
    agents_timeout_ns=25 * SECOND,
    leave_timeout_ns=12 * SECOND,
)


class SlurmManager(ManagerHost):
    settings = msgspec.structs.replace(SETTINGS, slurm=SLURM)

    def __init__(
        self,
        world: World,
        post: Post,
        store: SimStore,
        oracle: PlatformOracle,
        name: str,
        drift_ppm: int,
        *,
        controller: Controller,
        tokens: JobTokens,
        cut: Callable[[str, str], bool],
    ) -> None:
        self._controller, self._tokens, self._is_cut = controller, tokens, cut
        self._told: list[tuple[SlurmEvent, Later[None]]] = []
        super().__init__(world, post, store, oracle, oracle.tables, name, drift_ppm)

    def _boot(self, node: SimNode) -> None:
        super()._boot(node)
        self._told = []
        self._commands = SimCommands(self._controller, self.name, self._is_cut)
        records = SlurmRecords(
            self._commands,
            "",
            monotonic_s=lambda: self.world.now_ns / SECOND,
            unix_s=lambda: UNIX_S + self.world.now_ns / SECOND,
        )
        loop = SlurmLoop(
            SlurmConfig(own_user=True),
            self,
            self._tokens.of_manager(self.name),
            lambda: ("managers:1",),
            Accounts(OURS),
            commands=self._commands,
            records=records,
        )

        def later() -> None:
            node.after(POLL_NS, turn)

        def turn() -> None:
            drive(node, loop.turn(), later)

        node.after(self.world.random.randrange(POLL_NS), turn)

    # --- as `manager.platform`, for the loop ---

    def require_lead(self) -> int:
        if not self.acts():
            raise Unreachable("this manager does not lead")
        return self.now_ns

    def slurm_jobs(self) -> tuple[WatchedJob, ...]:
        return self.machine.slurm_jobs(self.require_lead())

    def slurm_work(self) -> tuple[Work, ...]:
        return self.machine.slurm_work(self.require_lead())

    async def tell_slurm(self, event: SlurmEvent) -> None:
        self.require_lead()
        followed: Later[None] = Later(self.world)
        told, of_this_life = (event, followed), self._told
        of_this_life.append(told)
        try:
            self.node.after(0, lambda: self._handle(event))
            await followed
        finally:
            of_this_life.remove(told)

    def _perform(self, effect: Effect) -> None:
        super()._perform(effect)
        match effect:
            case SlurmFollowed(events):
                for event, followed in self._told:
                    if any(event is one for one in events):
                        followed.give(None)
            case StepDown(reason):
                for _, followed in self._told:
                    followed.fail(Unreachable(reason))
            case _:
                pass

    def _on_sync(self, node: str, number: int, sync: Sync) -> None:
        """Nodes of jobs that ended are told to go."""
        if node in self._tokens.joined:
            super()._on_sync(node, number, sync)
        elif node in self._tokens.retired:
            self._tokens.told_to_go[node] = None
            self.post.send(self.name, node, Tell(number, orders_of_retired(sync, ())))

    # --- nodes are Slurm's ---

    def _asked(self, source: str, number: int, body: Submitted | Commanded) -> None:
        if isinstance(body, Commanded) and isinstance(body.command, DrainNode | ResumeNode):
            drive(self.node, self._command(source, number, body, body.command), lambda: None)
        else:
            super()._asked(source, number, body)

    async def _command(self, source: str, number: int, body: Commanded, command: DrainNode | ResumeNode) -> None:
        """As `Platform._command_slurm`."""
        answer: Done | Refused | NotLeader
        try:
            now_ns = self.require_lead()
            check(command, body.user, body.roles, None)
            self.machine.node(command.node, now_ns)
            if isinstance(command, DrainNode):
                await self._commands.drain(command.node, f"{body.user}: {command.reason}")
            else:
                await self._commands.resume(command.node)
            answer = Done("done")
        except FireflyerError as error:
            answer = Refused(*error_to_wire(error)) if self.acts() else NotLeader(self.machine.leader_address)
        self.post.send(self.name, source, Tell(number, answer))
