"""Replicas under managers whose store is exchanged for what it was a while ago, as `ff fs admin load` does it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

import pytest
from tests.support.fs.chain_sim.managed import ManagedWorld
from tests.support.fs.chain_sim.world import FAULTS_NS

from fireflyer.base.units import MS
from fireflyer.fs.core.chain import node_membership
from fireflyer.fs.core.chain.served_notes import ServedNote, note_of
from fireflyer.fs.core.manager import chains
from fireflyer.fs.schema.manager import TargetReport
from fireflyer.fs.schema.routing import Chain, TargetState
from fireflyer.fs.service.meta.inode_ids import KEY as IDS_KEY
from fireflyer.fs.service.meta.offline_store import NUMBERS_PER_S, rows_to_load

__all__ = ["MUTANTS", "RestoredWorld", "attempt"]

SECONDS: Final = 1000
"""Since 1970, when the first dump is loaded."""


class RestoredWorld(ManagedWorld):
    """Dumps are made while everything runs; for a load all processes are stopped first."""

    loads = 0

    def plan_faults(self) -> None:
        super().plan_faults()
        for _ in range(self.rng.randrange(1, 3)):
            made_ns = self.rng.randrange(FAULTS_NS // 2)
            loaded_ns = self.rng.randrange(made_ns + 100 * MS, FAULTS_NS)
            self.sim.call_after(made_ns, lambda after_ns=loaded_ns - made_ns: self._dump(after_ns))  # type: ignore[misc]

    def _dump(self, after_ns: int) -> None:
        kept = dict(self.store.contents)
        self.sim.call_after(after_ns, lambda: self._load(kept))

    def _load(self, kept: dict[bytes, bytes]) -> None:
        self.loads += 1
        self.sim.record("load", self.loads)
        for host in self.hosts:
            if host.node.alive:
                host.node.crash()
        for node in self.nodes:
            node.crash(power=self.rng.random() < 0.5)
        first = (SECONDS * self.loads) * NUMBERS_PER_S
        self.store.replace({key: value for key, value in rows_to_load(kept.items(), first) if key != IDS_KEY})
        for host in self.hosts:
            host.node.restart()
        for node in self.nodes:
            self.sim.call_after(self.rng.randrange(300 * MS), lambda node=node: self.faults.start(node))  # type: ignore[misc]

    @property
    def lost(self) -> bool:
        """Also where one that would have to say when it served never comes back, and where bits flipped in the only
        replica that serves, which a load may leave alone: an administrator decides."""
        chain = self.oracle.chain
        serving = [self.nodes[one.target - 1] for one in chain.members if one.state is TargetState.SERVING]
        flipped = len(serving) == 1 and any(one.damaged for one in serving[0].engine.index.records.values())
        return super().lost or flipped or (chain.restored and any(one.disk_failed for one in self.nodes))


class Mutant(NamedTuple):
    """`within`: as in `mutants.Mutant`."""

    plant: Callable[[pytest.MonkeyPatch], None]
    within: int


_States = tuple[dict[int, TargetState] | None, str]


def _believes_the_dump(patch: pytest.MonkeyPatch) -> None:
    def believing(chain: Chain, reports: dict[int, TargetReport]) -> _States:
        return {one.target: TargetState.LASTSRV for one in chain.members}, "all of the dump"

    patch.setattr(chains, "confirmed", believing)


def _notes_only_the_first(patch: pytest.MonkeyPatch) -> None:
    def once(chain: Chain, target: int, noted: ServedNote | None) -> ServedNote | None:
        return noted if noted is not None else note_of(chain, target, noted)

    patch.setattr(node_membership, "note_of", once)


MUTANTS: Final = {
    "believes the dump": Mutant(_believes_the_dump, 150),
    "notes only the first version": Mutant(_notes_only_the_first, 150),
}


def attempt(mutant: str, seed: int, patch: pytest.MonkeyPatch) -> str | None:
    """What the simulation found, or None."""
    with patch.context() as planted:
        MUTANTS[mutant].plant(planted)
        world = RestoredWorld(seed)
        world.plan_faults()
        try:
            world.run()
            world.check()
        except Exception as error:
            return f"{type(error).__name__}: {error}"
    return None
