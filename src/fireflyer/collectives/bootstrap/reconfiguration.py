"""How a group is formed anew from its survivors and newcomers: `membership`'s decisions, carried out over the store.

Everything of a lineage lies under its first group's name in the store:

    generation-G/waiting/TICKET   a newcomer that waits for generation G
    generation-G/open             a survivor is forming it
    generation-G/member/PLACE     who has arrived
    generation-G/seats            the decision; written once, never changed, replaced by a mark when it is old
    generation-G/...              the rendezvous of the members (see `rendezvous`)

After the decision the members meet as ranks of any group do, with the job's secret, and confirm that all of them are
there by a barrier. A rank that dies on the way makes the rendezvous or the barrier fail; then the others form the next
generation without it, until the deadline.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable
from typing import Final, NamedTuple, Protocol, TypeVar

import msgspec

from fireflyer.base.decoding import decode_published
from fireflyer.base.errors import (
    Aborted,
    FireflyerError,
    PeerFailed,
    StaleVersion,
    Timeout,
    Unreachable,
    UsageError,
)
from fireflyer.base.units import SECOND
from fireflyer.collectives.bootstrap.membership import (
    Admitted,
    AnnounceAndWait,
    Effect,
    Event,
    Generation,
    GenerationOpened,
    GenerationRead,
    JoinRequest,
    JoinRequestWritten,
    Membership,
    Policy,
    Propose,
    Proposed,
    ReadGeneration,
    Rejected,
    WriteJoinRequest,
)
from fireflyer.collectives.bootstrap.rendezvous import RankMissing
from fireflyer.collectives.planning.plan import Plan, make_plan
from fireflyer.runtime.store import Store

__all__ = ["FormedGroup", "Lineage", "follow", "new_uid", "perform", "seek", "successor"]

logger = logging.getLogger(__name__)

KEPT_GENERATIONS: Final = 8
"""Of which it can be said why a process was left out."""
MIN_RENDEZVOUS_NS: Final = 2 * SECOND
SKEW_NS: Final = 6 * SECOND
"""How far apart members notice that their rendezvous has failed."""
_GONE: Final = b"gone"


class Lineage(NamedTuple):
    """Where a group and those that follow from it stand in the store."""

    prefix: str
    generation: int

    def of(self, generation: int) -> str:
        """The prefix of a generation's keys; generation 0 has none of its own."""
        return f"{self.prefix}/generation-{generation}" if generation else self.prefix

    @property
    def here(self) -> str:
        return self.of(self.generation)


class FormedGroup(Protocol):
    """What is formed: a communicator."""

    def barrier(self) -> object: ...
    def retire(self) -> None: ...


MemberT = TypeVar("MemberT", bound=FormedGroup)


def new_uid() -> str:
    return secrets.token_hex(16)


def seek(
    store: Store,
    lineage: Lineage,
    me: JoinRequest,
    world_size: int,
    form: Callable[[Lineage, Generation, int, int], MemberT],
    *,
    policy: Policy,
    plan_of: Callable[[tuple[int, ...]], Plan] | None,
    timeout_ns: int,
) -> MemberT | None:
    """Takes part until this process is a member of a group that is complete; None where it only said that it leaves.

    `lineage` names the generation that `world_size` ranks have formed before. `form(lineage, formed, rank, timeout_ns)`
    meets the others. `plan_of` None: as the plan of the generation before. Raises `StaleVersion` where the group was
    formed without this process, `Timeout`, `UsageError`, and what `form` raises, where that is no other rank's failure.
    """
    deadline_ns = time.monotonic_ns() + timeout_ns
    following = plan_of or make_plan
    while True:
        machine = Membership(
            me,
            generation=lineage.generation + 1,
            world_size=world_size,
            policy=policy,
            plan_of=following,
            deadline_ns=deadline_ns,
        )
        end = _run(store, lineage, machine)
        if isinstance(end, Rejected):
            if end.error is not None:
                raise end.error
            return None
        lineage = lineage._replace(generation=end.formed.generation)
        meeting_ns = min(max(1, deadline_ns - time.monotonic_ns()), max(policy.grace_ns, MIN_RENDEZVOUS_NS))
        try:
            return _complete(store, lineage, end, form, meeting_ns)
        except (RankMissing, Timeout, Unreachable, PeerFailed, Aborted) as error:
            if time.monotonic_ns() >= deadline_ns:
                raise
            logger.warning("reform=again generation=%d rank=%d reason=%s", lineage.generation, end.rank, error)
            me = me.survivor(end.rank, _absent(store, lineage, end, error))
            world_size = len(end.formed.slots)
            following = plan_of or successor(end.formed.plan)
            policy = policy.again(SKEW_NS)


def follow(store: Store, prefix: str) -> Lineage:
    """The newest generation of a lineage whose slots are known."""
    hint = store.try_get(f"{prefix}/latest")
    lineage = Lineage(prefix, int(hint) if hint is not None and hint.isdigit() else 0)
    while store.try_get(f"{lineage.of(lineage.generation + 1)}/seats") is not None:
        lineage = lineage._replace(generation=lineage.generation + 1)
    return lineage


def successor(plan: Plan) -> Callable[[tuple[int, ...]], Plan]:
    """How a group's plan is carried over to other nodes and ranks: the same kind of sums, chunks, and routes, where the
    new group can do them."""

    def plan_of(node_of_rank: tuple[int, ...]) -> Plan:
        def make(chunk_bytes: int, routed: bool) -> Plan:
            return make_plan(
                node_of_rank,
                chunk_bytes=chunk_bytes,
                window=plan.window,
                routes=plan.routes if routed else None,
                sockets=plan.sockets,
                sums=plan.sums,
            )

        try:
            return make(plan.chunk_bytes, routed=True)
        except UsageError:  # chunks too small for so many ranks
            return make(plan.chunk_bytes, routed=False)

    return plan_of


def perform(
    store: Store, lineage: Lineage, effect: AnnounceAndWait | WriteJoinRequest | ReadGeneration | Propose
) -> Event:
    """Carries out what a `Membership` asks for."""
    match effect:
        case AnnounceAndWait(generation, join_order, timeout_ns):
            store.set(f"{lineage.of(generation)}/waiting/{join_order:08d}", b"waits")
            try:
                store.wait([f"{lineage.of(generation)}/open"], timeout_ns)
            except Timeout:
                return GenerationOpened(False)
            return GenerationOpened(True)
        case WriteJoinRequest(generation, arrival):
            held = store.set_if_missing(
                f"{lineage.of(generation)}/member/{arrival.place}", msgspec.json.encode(arrival)
            )
            if arrival.rank >= 0:
                store.set(f"{lineage.of(generation)}/open", b"open")
            return JoinRequestWritten(decode_published(held, JoinRequest, "a rank"))
        case ReadGeneration(generation, timeout_ns, everybody):
            try:
                return GenerationRead(_generation(store.get(f"{lineage.of(generation)}/seats", max(1, timeout_ns))))
            except Timeout:
                return _found(store, lineage.of(generation)) if everybody else GenerationRead(None)
        case Propose(proposal):
            key = f"{lineage.of(proposal.generation)}/seats"
            return Proposed(_generation(store.set_if_missing(key, msgspec.json.encode(proposal))))


def _run(store: Store, lineage: Lineage, machine: Membership) -> Admitted | Rejected:
    effect: Effect = machine.begin(time.monotonic_ns())
    while not isinstance(effect, Admitted | Rejected):
        event = perform(store, lineage, effect)
        effect = machine.handle(time.monotonic_ns(), event)
    return effect


def _found(store: Store, prefix: str) -> GenerationRead:
    arrivals = [store.try_get(key) for key in store.keys(f"{prefix}/member/")]
    waiting = [key.rpartition("/")[2] for key in store.keys(f"{prefix}/waiting/")]
    return GenerationRead(
        None,
        tuple(decode_published(arrival, JoinRequest, "a rank") for arrival in arrivals if arrival is not None),
        tuple(int(order) for order in waiting if order.isdigit()),
    )


def _complete(
    store: Store,
    lineage: Lineage,
    end: Admitted,
    form: Callable[[Lineage, Generation, int, int], MemberT],
    timeout_ns: int,
) -> MemberT:
    member = form(lineage, end.formed, end.rank, timeout_ns)
    try:
        member.barrier()
        if end.rank == 0:
            _tidy(store, lineage)
    except BaseException:
        member.retire()
        raise
    return member


def _tidy(store: Store, lineage: Lineage) -> None:
    """What nobody needs once a generation is complete. Its slots stay, so that late ones are told that they are late;
    those of long ago become a mark: a missing key would let them be proposed again."""
    generation = lineage.generation
    store.set(f"{lineage.prefix}/latest", str(generation).encode())
    store.delete_prefix(f"{lineage.here}/waiting/")
    if generation > 1:
        for part in ("waiting/", "member/", "rank/", "node/", "door/", "doors", "roster"):
            store.delete_prefix(f"{lineage.of(generation - 1)}/{part}")
    if generation > KEPT_GENERATIONS:
        store.set(f"{lineage.of(generation - KEPT_GENERATIONS)}/seats", _GONE)


def _absent(store: Store, lineage: Lineage, end: Admitted, error: FireflyerError) -> tuple[int, ...]:
    """The ranks that did not join the rendezvous, or that failed after it."""
    if isinstance(error, PeerFailed):
        return (error.rank,) if error.rank >= 0 else ()
    came = {key.rpartition("/")[2] for key in store.keys(f"{lineage.here}/rank/")}
    return tuple(rank for rank in range(len(end.formed.slots)) if str(rank) not in came)


def _generation(data: bytes) -> Generation:
    if data == _GONE:
        raise StaleVersion(
            "this process missed more generations of its group than the store keeps; to come back, drop the "
            "communicator and call Communicator.join"
        )
    return decode_published(data, Generation, "a rank")
