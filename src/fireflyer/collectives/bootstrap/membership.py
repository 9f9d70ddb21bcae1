"""Who belongs to the next generation of a group: decided by its survivors over a store, without trusting any of them.

Pure: a `Membership` is one process that takes part. It says what to do next (an effect), is told how that went (an
event) and what time it is, until it is `Admitted` or `Rejected`. The shell is
`fireflyer.collectives.bootstrap.reconfiguration`.

A group has a lineage: generation 0 was made by `create`, and generation g + 1 follows from g. *Survivors* are the ranks
of generation g, *newcomers* were no members of it.

    survivor:  WriteJoinRequest ──> ReadGeneration ... ──> Propose ──> Admitted, or Rejected where it has no slot
    newcomer:  AnnounceAndWait ──> WriteJoinRequest ──> ReadGeneration ... ──> Admitted, or again with the next one

1. A survivor writes its arrival, with the rank that it has seen fail, if any (`suspects`). Two processes that claim to
   be the same rank are told apart by their random `uid`; the second is refused.
2. Survivors look who has arrived, the lower their rank the sooner and the more often. Whoever finds that enough have
   come (`_verdict`) proposes the member slots: who is in the new generation, with which rank, and the plan.
3. The store keeps the first proposal of a generation and answers every other one with it (`set_if_missing`). So there
   is one list of slots for each generation, whoever dies when, and nobody has to be elected: when the lowest rank dies,
   also in the middle of proposing, the next one looks and proposes.
4. Who finds itself in the slots meets the others there. Who does not is told so in one line. If the rendezvous fails (a
   second failure), its members are the survivors of that generation and do the same for the next.

Newcomers announce themselves (`waiting`), and arrive only when a generation has been opened by a survivor: so one that
died while it waited takes no slot. A newcomer never proposes: without survivors there is no next generation.

When is it enough? At once when all have come. When those who are missing are suspected, after `suspect_ns`: they may
still be alive and on their way. Otherwise after `grace_ns`: they are slow, or dead without a witness. Newcomers that
were announced get `newcomer_ns`. There must be `min_world_size` of them, otherwise the wait goes on to its deadline.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

import msgspec

from fireflyer.base.errors import FireflyerError, StaleVersion, Timeout, UsageError
from fireflyer.base.units import MS, SECOND, format_duration
from fireflyer.collectives.planning.plan import Plan

__all__ = [
    "Admitted",
    "AnnounceAndWait",
    "Effect",
    "Event",
    "Generation",
    "GenerationOpened",
    "GenerationRead",
    "JoinRequest",
    "JoinRequestWritten",
    "MemberSlot",
    "Membership",
    "Policy",
    "Propose",
    "Proposed",
    "ReadGeneration",
    "Rejected",
    "WriteJoinRequest",
    "number_nodes",
]

NOBODY: Final = -1
RANK_STAGGER_NS: Final = 100 * MS
"""How much later the survivor of the next rank begins to look."""
READ_PERIOD_NS: Final = 20 * MS
CANDIDATES: Final = 16
"""Survivors of higher ranks look so rarely that they serve only where all of the lower ones have died."""
SLOW_READ_PERIOD_NS: Final = SECOND
_SHOWN: Final = 16


class Policy(NamedTuple):
    """What a process asks of the next generation. All survivors should ask the same; the proposer's counts."""

    min_world_size: int
    max_world_size: int | None
    grace_ns: int
    suspect_ns: int = SECOND
    newcomer_ns: int = SECOND

    def again(self, skew_ns: int) -> Policy:
        """After a rendezvous that failed, which its members notice up to `skew_ns` apart."""
        return self._replace(grace_ns=max(self.grace_ns, skew_ns))


class JoinRequest(msgspec.Struct, frozen=True):
    """What a process says of itself."""

    uid: str
    rank: int
    """In the generation before; `NOBODY` for a newcomer."""
    join_order: int = msgspec.field(name="ticket")
    """Of a newcomer: it counts in which order they came. `NOBODY` for a survivor."""
    node: int
    """As its launcher numbers them."""
    leaves: bool = False
    """It will not be in the next generation."""
    suspects: tuple[int, ...] = ()
    """Ranks of the generation before that it has seen fail."""

    @property
    def place(self) -> str:
        """Under which it is written: one for each survivor and each newcomer."""
        return f"rank-{self.rank}" if self.rank >= 0 else f"new-{self.join_order:08d}"

    def survivor(self, rank: int, suspects: tuple[int, ...]) -> JoinRequest:
        """The same process as rank `rank` of a generation that is no more."""
        return JoinRequest(self.uid, rank, NOBODY, self.node, suspects=suspects)


class MemberSlot(msgspec.Struct, frozen=True):
    uid: str
    previous_rank: int = msgspec.field(name="before")
    """In the generation before, `NOBODY` for a newcomer."""
    join_order: int = msgspec.field(name="ticket")
    node: int


class Generation(msgspec.Struct, frozen=True):
    """A generation: rank r is in `slots[r]`."""

    generation: int
    slots: tuple[MemberSlot, ...] = msgspec.field(name="seats")
    plan: Plan
    reason: str
    """Why these, for people."""


# --- effects: what the machine asks for; there is always exactly one under way ---


class AnnounceAndWait(NamedTuple):
    """Announce the newcomer, and wait until this generation is open. Answer: `GenerationOpened`."""

    generation: int
    join_order: int
    timeout_ns: int


class WriteJoinRequest(NamedTuple):
    """Write the arrival unless its place is taken, and open the generation if it is a survivor's. Answer:
    `JoinRequestWritten`."""

    generation: int
    arrival: JoinRequest


class ReadGeneration(NamedTuple):
    """Wait for the generation to be formed, at most so long, then read what is there. Answer: `GenerationRead`."""

    generation: int
    timeout_ns: int
    everybody: bool
    """Whether arrivals are of interest, or only the generation."""


class Propose(NamedTuple):
    """Write the generation unless there is one. Answer: `Proposed`."""

    proposal: Generation


class Admitted(NamedTuple):
    """The end: it is in."""

    formed: Generation
    rank: int


class Rejected(NamedTuple):
    """The end: it is not."""

    error: FireflyerError | None
    """None: it has left as it wished."""


Effect = AnnounceAndWait | WriteJoinRequest | ReadGeneration | Propose | Admitted | Rejected


# --- events ---


class GenerationOpened(NamedTuple):
    opened: bool
    """False: the time was up."""


class JoinRequestWritten(NamedTuple):
    holder: JoinRequest
    """Who has the place."""


class GenerationRead(NamedTuple):
    formed: Generation | None
    arrivals: tuple[JoinRequest, ...] = ()
    waiting: tuple[int, ...] = ()
    """Join orders of the newcomers that have announced themselves."""


class Proposed(NamedTuple):
    formed: Generation
    """The one that was written first."""


Event = GenerationOpened | JoinRequestWritten | GenerationRead | Proposed


class Membership:
    """One process. `begin` once, then `handle` with each answer, until the effect is `Admitted` or `Rejected`."""

    def __init__(
        self,
        me: JoinRequest,
        *,
        generation: int,
        world_size: int,
        policy: Policy,
        plan_of: Callable[[tuple[int, ...]], Plan],
        deadline_ns: int,
    ) -> None:
        """`generation` is the one to be formed, `world_size` that of the one before. `plan_of` makes a plan from the
        node of each rank; it must be the same for all survivors."""
        self._me = me
        self._generation = generation
        self._world_size = world_size
        self._policy = policy
        self._plan_of = plan_of
        self._deadline_ns = deadline_ns
        self._started_ns = 0
        self._enough_ns: int | None = None
        self._reason = "no rank has called reform yet"

    def begin(self, now_ns: int) -> Effect:
        self._started_ns = now_ns
        if self._me.rank < 0:
            return AnnounceAndWait(self._generation, self._me.join_order, self._left_ns(now_ns))
        return WriteJoinRequest(self._generation, self._me)

    def handle(self, now_ns: int, event: Event) -> Effect:
        match event:
            case GenerationOpened(opened):
                return WriteJoinRequest(self._generation, self._me) if opened else self._late()
            case JoinRequestWritten(holder):
                return self._on_arrived(now_ns, holder)
            case Proposed(formed):
                return self._take(now_ns, formed)
            case GenerationRead(formed, arrivals, waiting):
                if formed is not None:
                    return self._take(now_ns, formed)
                return self._on_found(now_ns, arrivals, waiting)

    # --- steps ---

    def _on_arrived(self, now_ns: int, holder: JoinRequest) -> Effect:
        if holder.uid != self._me.uid:
            return Rejected(
                UsageError(
                    f"another process has already joined as {self._me.place} for generation {self._generation}; a "
                    "process re-forms its group once, and two never share an identity"
                )
            )
        if self._me.leaves:
            return Rejected(None)
        if self._me.rank < 0:
            return ReadGeneration(self._generation, self._left_ns(now_ns), everybody=False)
        # The lowest ranks are the first to decide, so that not all do it at once.
        return ReadGeneration(self._generation, min(self._me.rank, CANDIDATES) * RANK_STAGGER_NS, everybody=True)

    def _on_found(self, now_ns: int, arrivals: Sequence[JoinRequest], waiting: Sequence[int]) -> Effect:
        if self._me.rank >= 0:
            enough, self._reason = self._verdict(now_ns, arrivals, waiting)
            if enough:
                return self._proposal(arrivals)
        if now_ns >= self._deadline_ns:
            return self._late()
        if self._me.rank < 0:
            return ReadGeneration(self._generation, self._left_ns(now_ns), everybody=False)
        pause_ns = READ_PERIOD_NS * (1 + self._me.rank) if self._me.rank < CANDIDATES else SLOW_READ_PERIOD_NS
        return ReadGeneration(self._generation, min(pause_ns, self._left_ns(now_ns)), everybody=True)

    def _take(self, now_ns: int, formed: Generation) -> Effect:
        for rank, slot in enumerate(formed.slots):
            if slot.uid == self._me.uid:
                return Admitted(formed, rank)
        if self._me.leaves:
            return Rejected(None)
        if self._me.rank >= 0:
            return Rejected(
                StaleVersion(
                    f"generation {formed.generation} was formed without this process, which was rank {self._me.rank} "
                    f"of the one before ({formed.reason}); to come back, drop the communicator and call "
                    "Communicator.join"
                )
            )
        if now_ns >= self._deadline_ns:
            return self._late()
        self._generation = max(self._generation, formed.generation) + 1
        return AnnounceAndWait(self._generation, self._me.join_order, self._left_ns(now_ns))

    def _late(self) -> Rejected:
        took = format_duration(self._deadline_ns - self._started_ns)
        if self._me.rank < 0:
            return Rejected(Timeout(f"the group did not admit this process within {took}; its ranks must call reform"))
        return Rejected(Timeout(f"the group could not be re-formed within {took}: {self._reason}"))

    # --- the decision ---

    def _verdict(self, now_ns: int, arrivals: Sequence[JoinRequest], waiting: Sequence[int]) -> tuple[bool, str]:
        """Whether to propose now, and why or why not."""
        came = {arrival.rank for arrival in arrivals if arrival.rank >= 0}
        missing = [rank for rank in range(self._world_size) if rank not in came]
        suspects = {rank for arrival in arrivals for rank in arrival.suspects}
        unexplained = [rank for rank in missing if rank not in suspects]
        size = len(_candidates(arrivals))
        reason = "all ranks called reform" if not missing else f"rank {_short(missing)} did not call reform"
        if unexplained and now_ns - self._started_ns < self._policy.grace_ns:
            return False, reason
        if self._enough_ns is None:
            self._enough_ns = now_ns
        settled_ns = now_ns - self._enough_ns
        if missing and not unexplained and settled_ns < min(self._policy.suspect_ns, self._policy.grace_ns):
            return False, reason
        announced = {arrival.join_order for arrival in arrivals}
        if any(order not in announced for order in waiting) and settled_ns < self._policy.newcomer_ns:
            return False, reason
        if size < max(1, self._policy.min_world_size):
            return False, f"{reason}; {size} ranks have, at least {self._policy.min_world_size} are needed"
        return True, reason

    def _proposal(self, arrivals: Sequence[JoinRequest]) -> Effect:
        chosen = _candidates(arrivals)[: self._policy.max_world_size]
        slots = tuple(MemberSlot(one.uid, one.rank, one.join_order, one.node) for one in chosen)
        reason = self._reason
        if len(chosen) < len(_candidates(arrivals)):
            reason += f", and a group has at most {len(chosen)} ranks"
        try:
            plan = self._plan_of(number_nodes([one.node for one in chosen]))
            if plan.node_of_rank != number_nodes([one.node for one in chosen]):
                raise UsageError("plan= returned a plan for other nodes than those of its argument")
        except UsageError as error:
            return Rejected(error)
        return Propose(Generation(self._generation, slots, plan, reason))

    def _left_ns(self, now_ns: int) -> int:
        return max(1, self._deadline_ns - now_ns)


def number_nodes(nodes: Sequence[int]) -> tuple[int, ...]:
    """The same places, numbered from 0 by first appearance, as a plan wants them.

    >>> number_nodes([7, 7, 3])
    (0, 0, 1)
    """
    numbers: dict[int, int] = {}
    return tuple(numbers.setdefault(node, len(numbers)) for node in nodes)


def _candidates(arrivals: Sequence[JoinRequest]) -> list[JoinRequest]:
    """Those who want to stay: survivors by rank, then newcomers in the order in which they came."""
    staying = [arrival for arrival in arrivals if not arrival.leaves]
    return sorted(staying, key=lambda one: (one.rank < 0, one.rank, one.join_order))


def _short(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks[:_SHOWN])) + (" and more" if len(ranks) > _SHOWN else "")
