"""What the ranks of a checkpoint manager tell each other while training goes on: by keys of the rendezvous store.

Rank 0 decides, the others ask. Keys are below `prefix/attempt/`; those of save N are below `N/`, and go when a later
save has been committed.

Who writes what of save N, below `N/`:

    rank r > 0                                 rank 0
    set  list/r      digest of its list        get  list/1 … list/W-1
    get  go                                    set  go           the stages, or that all have the same

and where ranks have different tensors, and not those of the save before:

    one rank of stage s > 0                    for each stage s > 0
    get  wanted/s                              set  wanted/s
    set  tensors/s   its list, in parts        get  tensors/s, then deletes it
    all ranks of stage s                       for each stage s
    get  share/s                               set  share/s      in parts

So one digest for each rank goes over the network before a save, and names only when they have changed on some rank: of
each stage once, one stage at a time, about 25 bytes for each tensor.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Final, NamedTuple, TypeVar

import msgspec

from fireflyer.base.decoding import DECODE_ERRORS, decode_json
from fireflyer.base.errors import (
    DataCorruption,
    Fenced,
    FireflyerError,
    InvariantViolation,
    error_from_wire,
    error_to_wire,
)
from fireflyer.base.units import SECOND
from fireflyer.checkpoint.core.record_parts import MAX_PARTS, join_parts, split_record
from fireflyer.checkpoint.core.stages import StageList, StageShare, list_digest, plan_stages, stages_of
from fireflyer.checkpoint.snapshot import Agreed, Content
from fireflyer.native import crc32c
from fireflyer.runtime.store import Store
from fireflyer.runtime.store_core import MAX_KEYS_PER_WAIT

__all__ = ["AGREE_TIMEOUT_NS", "Agreement", "Begin"]

_log = logging.getLogger(__name__)
AGREE_TIMEOUT_NS: Final = 120 * SECOND
"""How long a rank waits for what another says while training goes on: it is at the same step, and about to say it."""
LEAVE_TIMEOUT_NS: Final = 10 * SECOND
"""How long rank 0 waits for the others when all close their managers."""
_DUE_KEYS: Final = 64
"""Answers of `decide` that stay in the store; the ranks of a job are at most a step apart."""


class _Go(msgspec.Struct, frozen=True, omit_defaults=True):
    """What rank 0 says of a save."""

    begins: bool
    fenced: str | None = None
    stages: tuple[int, ...] = ()
    """Of each rank its stage; empty where all have the same tensors."""
    kept: bool = False
    """All ranks have what they had when it was last said who writes what."""


class _Message(msgspec.Struct, frozen=True, omit_defaults=True):
    """What is in the parts beside it; or why there are none."""

    parts: int = 0
    error: tuple[str, str] | None = None


class Begin(NamedTuple):
    """That a save begins. `agreed` is None where all ranks have the same tensors."""

    agreed: Agreed | None = None


class Agreement:
    """One rank's end. A job of one rank needs no store. Not for two threads at once, but for `asked_to_stop`."""

    def __init__(self, store: Store | None, prefix: str, *, rank: int, world_size: int) -> None:
        """`prefix` is of this attempt alone."""
        self._store, self._prefix = store, prefix
        self._rank, self._world_size = rank, world_size
        self._times_due = 0
        self._asked_to_stop = False
        self._content: Content | None = None
        self._listed = StageList(())
        self._digest = b""
        self._last_digests: list[bytes] = []
        """Rank 0's: of all ranks, when it was last said who writes what."""
        self._agreed: Agreed | None = None

    def _key(self, topic: str) -> str:
        return f"{self._prefix}/{topic}"

    def _the_store(self) -> Store:
        if self._store is None:
            raise InvariantViolation("ranks of a larger world have a store")
        return self._store

    def agree(self, topic: str, mine: bytes, timeout_ns: int = AGREE_TIMEOUT_NS) -> bytes:
        """What rank 0 says about a topic."""
        if self._world_size == 1:
            return mine
        if self._rank != 0:
            return self._the_store().get(self._key(topic), timeout_ns)
        self._the_store().set(self._key(topic), mine)
        return mine

    def decide(self, mine: bytes) -> bytes:
        """Decision of rank 0; all ranks call it at the same step. One round trip."""
        if self._world_size == 1:
            return mine
        self._times_due += 1
        answer = self.agree(f"due/{self._times_due}/", mine)
        if self._rank == 0 and self._times_due > _DUE_KEYS:
            self._the_store().delete_prefix(self._key(f"due/{self._times_due - _DUE_KEYS}/"))
        return answer

    def ask_to_stop(self) -> None:
        self._asked_to_stop = True
        if self._store is not None:
            self._store.set(self._key("stop"), b"stop")

    def asked_to_stop(self) -> bool:
        if not self._asked_to_stop and self._store is not None:
            self._asked_to_stop = self._store.try_get(self._key("stop")) is not None
        return self._asked_to_stop

    def leave_together(self) -> None:
        """The process of rank 0 may serve the store: it must not end while others read the outcome of a save."""
        if self._store is None:
            return
        try:
            if self._rank != 0:
                self._store.set(self._key(f"left/{self._rank}"), b"left")
            else:
                self._wait([f"left/{rank}" for rank in range(1, self._world_size)], LEAVE_TIMEOUT_NS)
        except FireflyerError as error:
            _log.warning("checkpoint manager closed without the other ranks reason=%s", error)

    def _wait(self, topics: Sequence[str], timeout_ns: int) -> None:
        keys = [self._key(topic) for topic in topics]
        for at in range(0, len(keys), MAX_KEYS_PER_WAIT):
            self._the_store().wait(keys[at : at + MAX_KEYS_PER_WAIT], timeout_ns)

    # Saves.

    def begin(
        self, topic: str, content: Content, timeout_ns: int, *, free: bool = True, fenced: str | None = None
    ) -> Begin | None:
        """Whether a save of `content` begins, and who writes what; None where it is skipped. Rank 0 says so: `free`
        where it has no save in flight, `fenced` where it was fenced. Raises `Fenced` then, `UsageError` on all ranks
        where some have different tensors of one name, and `Timeout`."""
        if self._world_size == 1:
            if fenced is not None:
                raise Fenced(fenced)
            return Begin() if free else None
        self._describe(content)
        if self._rank == 0:
            go = self._go(topic, timeout_ns, free=free, fenced=fenced)
            self._the_store().set(self._key(f"{topic}/go"), msgspec.json.encode(go))
        else:
            self._the_store().set(self._key(f"{topic}/list/{self._rank}"), self._digest)
            go = _decoded(self._the_store().get(self._key(f"{topic}/go"), timeout_ns), _Go)
        if go.fenced is not None:
            raise Fenced(go.fenced)
        if not go.begins:
            return None
        if not go.stages:
            self._agreed = None
        elif not go.kept:
            self._agreed = self._exchange(topic, go.stages, timeout_ns)
        return Begin(self._agreed)

    def _describe(self, content: Content) -> None:
        if content is not self._content:
            self._content, self._listed = content, content.listed()
            self._digest = list_digest(self._listed)

    def _go(self, topic: str, timeout_ns: int, *, free: bool, fenced: str | None) -> _Go:
        if not free or fenced is not None:
            return _Go(begins=False, fenced=fenced)
        keys = [self._key(f"{topic}/list/{rank}") for rank in range(1, self._world_size)]
        digests = [self._digest, *self._the_store().get_all(keys, timeout_ns)]
        kept = digests == self._last_digests
        self._last_digests = digests
        stages = stages_of(digests)
        return _Go(begins=True, stages=tuple(stages) if any(stages) else (), kept=kept)

    def _exchange(self, topic: str, stage_of: Sequence[int], timeout_ns: int) -> Agreed:
        """Where lists have changed on some rank. Raises what rank 0 raises."""
        if len(stage_of) != self._world_size:
            raise DataCorruption(f"rank 0 has told the stages of {len(stage_of)} ranks, and not of {self._world_size}")
        stage = stage_of[self._rank]
        if self._rank == 0:
            try:
                share = self._plan(topic, stage_of, timeout_ns)[0]
            except FireflyerError:
                self._last_digests = []
                raise
        else:
            if stage_of.index(stage) == self._rank and stage:
                self._the_store().get(self._key(f"{topic}/wanted/{stage}"), timeout_ns)
                self._send(f"{topic}/tensors/{stage}", msgspec.json.encode(self._listed))
            share = _decoded(self._receive(f"{topic}/share/{stage}", timeout_ns), StageShare)
        common = [stage_of, share.holders, share.loads, share.total_bytes]
        return Agreed(self._listed, share, crc32c(msgspec.json.encode(common)))

    def _plan(self, topic: str, stage_of: Sequence[int], timeout_ns: int) -> list[StageShare]:
        """Rank 0's part: gathers the lists, says who writes what."""
        others = range(1, max(stage_of) + 1)
        try:
            lists = [self._listed]
            for stage in others:  # one at a time: the store has not room for many
                self._the_store().set(self._key(f"{topic}/wanted/{stage}"), b"")
                data = self._receive(f"{topic}/tensors/{stage}", timeout_ns)
                self._the_store().delete_prefix(self._key(f"{topic}/tensors/{stage}"))
                lists.append(_decoded(data, StageList))
            shares = plan_stages(lists, stage_of)
        except FireflyerError as error:
            refusal = msgspec.json.encode(_Message(error=error_to_wire(error)))
            for stage in range(max(stage_of) + 1):
                self._the_store().set(self._key(f"{topic}/share/{stage}"), refusal)
            raise
        for stage in range(max(stage_of) + 1):  # ranks beside rank 0 read that of its stage
            self._send(f"{topic}/share/{stage}", msgspec.json.encode(shares[stage]))
        return shares

    def _send(self, topic: str, data: bytes) -> None:
        parts = split_record(data)
        for number, part in enumerate(parts):
            self._the_store().set(self._key(f"{topic}/part/{number}"), part)
        self._the_store().set(self._key(topic), msgspec.json.encode(_Message(parts=len(parts))))

    def _receive(self, topic: str, timeout_ns: int) -> bytes:
        message = _decoded(self._the_store().get(self._key(topic), timeout_ns), _Message)
        if message.error is not None:
            raise error_from_wire(*message.error)
        if not 0 < message.parts <= MAX_PARTS:
            raise DataCorruption(f"{topic} claims {message.parts} parts, at most {MAX_PARTS} are allowed")
        parts = [
            self._the_store().get(self._key(f"{topic}/part/{number}"), timeout_ns) for number in range(message.parts)
        ]
        return join_parts(parts, topic)


_T = TypeVar("_T")


def _decoded(data: bytes, kind: type[_T]) -> _T:
    try:
        return decode_json(data, kind)
    except DECODE_ERRORS as error:
        raise DataCorruption(f"a message of another rank is not readable: {error}") from error
