"""One save, rank by rank: the order of effects, and what becomes of every failure."""

from __future__ import annotations

import subprocess
import sys
import zlib
from collections import deque
from typing import Any

import pytest
from tests.support.checkpoints.jobs import make_share

from fireflyer.base.errors import InvariantViolation, UsageError
from fireflyer.checkpoint.core import record_parts
from fireflyer.checkpoint.core.effects import (
    Await,
    Begin,
    Commit,
    Committed,
    Discard,
    Done,
    Effect,
    Event,
    Failed,
    Finish,
    Forget,
    KeyReceived,
    Listed,
    Listing,
    Open,
    Publish,
    ShardWritten,
    TakeSnapshot,
    WriteShard,
)
from fireflyer.checkpoint.core.manager import Phase, SaveMachine, Settings
from fireflyer.checkpoint.core.manifest import ShardRecord
from fireflyer.checkpoint.engine.image import write_shard
from fireflyer.checkpoint.engine.steps import run_steps
from fireflyer.sim import SimDisk

WORLD = 2


def machine(rank: int, world_size: int = WORLD, values: dict[str, Any] | None = None) -> SaveMachine:
    settings = Settings(
        rank=rank, world_size=world_size, attempt=3, keep=1, prefix="checkpoint/main", timeout_ns=10, job_plan=None
    )
    return SaveMachine(settings, step=20, sequence=5, values=values or {}, forget_from=4)


def record(rank: int, world_size: int) -> ShardRecord:
    disk = SimDisk().mount()
    disk.mkdir("/d")
    share = make_share(20, 3, rank, world_size)
    return run_steps(write_shard(disk, f"/d/shard-{rank:05d}-of-{world_size:05d}.safetensors", share))


def failed(effect: Effect) -> Failed:
    return Failed("no_space", f"{type(effect).__name__} failed")


class Run:
    """Machines whose effects succeed, except those that `fails` names as (rank, effect, how many before it)."""

    def __init__(
        self,
        world_size: int = WORLD,
        fails: tuple[int, type[Effect], int] | None = None,
        values: dict[str, Any] | None = None,
    ) -> None:
        self.machines = [machine(rank, world_size, values) for rank in range(world_size)]
        self.queues: list[deque[Effect]] = [deque(one.handle(0, Begin())) for one in self.machines]
        self.log: list[list[str]] = [[] for _ in self.machines]
        self.finished: dict[int, Finish] = {}
        self.store: dict[str, bytes] = {}
        self._fails = fails

    def run(self) -> Run:
        """Round robin until nobody can go on; then whoever still waits times out."""
        while any(self.queues):
            advanced = [self._advance(rank, wait=True) for rank in range(len(self.machines))]
            if not any(advanced):
                for rank in range(len(self.machines)):
                    self._advance(rank, wait=False)
        assert all(one.phase is Phase.END for one in self.machines)
        assert sorted(self.finished) == list(range(len(self.machines))), "every save ends exactly once"
        return self

    def _advance(self, rank: int, *, wait: bool) -> bool:
        queue = self.queues[rank]
        if not queue or (wait and isinstance(queue[0], Await) and queue[0].key not in self.store):
            return False
        effect = queue.popleft()
        before = sum(text.startswith(type(effect).__name__) for text in self.log[rank])
        self.log[rank].append(" ".join([type(effect).__name__, getattr(effect, "key", "").rpartition("5/")[2]]).strip())
        event: Event = failed(effect)
        if (rank, type(effect), before) != self._fails:
            event = self._perform(rank, effect)
        elif isinstance(effect, Publish):
            self._perform(rank, effect)  # the worst case: it was heard, only the answer was lost
        queue.extend(self.machines[rank].handle(0, event))
        return True

    def _perform(self, rank: int, effect: Effect) -> Event:
        match effect:
            case Publish(key, payload):
                self.store[key] = payload
            case Await(key, _):
                return KeyReceived(self.store[key]) if key in self.store else Failed("timeout", f"no {key}")
            case WriteShard():
                return ShardWritten(record(rank, len(self.machines)))
            case Commit():
                return Committed("step-00000020")
            case Listing():
                return Listed(("step-00000010", "step-00000020"))
            case Finish():
                assert rank not in self.finished
                self.finished[rank] = effect
            case _:
                pass
        return Done()


def test_two_ranks_save_in_this_order() -> None:
    run = Run().run()
    assert run.log == [
        [
            "TakeSnapshot",
            "Open",
            "Publish dir",
            "WriteShard",
            "Await record/1",
            "Commit",
            "Publish outcome",
            "Finish",
            "Listing",
            "Discard",
            "Forget",
        ],
        ["TakeSnapshot", "Await dir", "WriteShard", "Publish record/1", "Await outcome", "Finish"],
    ]
    assert {finish.name for finish in run.finished.values()} == {"step-00000020"}


@pytest.mark.parametrize("value", ["model\udcff", object()])
def test_values_that_no_manifest_can_hold_end_the_save_on_every_rank(value: object) -> None:
    """`check_plain` refuses them before: here they have come so far."""
    run = Run(values={"value": value}).run()
    assert [finish.name for finish in run.finished.values()] == [None] * WORLD
    assert run.log[0][-3:] == ["Publish outcome", "Finish", "Discard"]


@pytest.fixture
def long_records(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if every record had many tensors."""
    monkeypatch.setattr("fireflyer.checkpoint.core.manager.WHOLE_BYTES", 10)
    monkeypatch.setattr(record_parts, "PART_BYTES", 120)


@pytest.mark.usefixtures("long_records")
def test_a_long_record_is_published_in_parts_which_are_forgotten_when_they_are_collected() -> None:
    run = Run().run()
    sent = [effect for effect in run.log[1] if "record" in effect]
    assert len(sent) > 2
    parts = [f"record/1/part/{number}" for number in range(len(sent) - 1)]
    assert sent == [*(f"Publish {part}" for part in parts), "Publish record/1"]
    collected = ["Await record/1", *(f"Await {part}" for part in parts), "Forget", "Commit"]
    assert run.log[0][4 : 4 + len(collected)] == collected
    assert {finish.name for finish in run.finished.values()} == {"step-00000020"}


@pytest.mark.usefixtures("long_records")
@pytest.mark.parametrize("fails", [(1, Publish, 0), (1, Publish, 1), (0, Await, 1), (0, Forget, 0)])
def test_a_part_that_is_not_heard_ends_the_save_on_every_rank(fails: tuple[int, type[Effect], int]) -> None:
    run = Run(fails=fails).run()
    assert {finish.error.code for finish in run.finished.values() if finish.error} == {"no_space"}
    assert len(run.finished) == WORLD
    assert "Commit" not in run.log[0]


@pytest.mark.usefixtures("long_records")
@pytest.mark.parametrize("wrong", [b"", b"junk", zlib.compress(b"{}"), zlib.compress(bytes(3_000))[:-3]])
def test_parts_that_are_no_record_are_refused(wrong: bytes) -> None:
    run = Run()
    honest = run.store

    class Damaged(dict[str, bytes]):
        def __getitem__(self, key: str) -> bytes:
            return wrong if key.endswith("part/0") else honest[key]

        def __contains__(self, key: object) -> bool:
            return key in honest

        def __setitem__(self, key: str, value: bytes) -> None:
            honest[key] = value

    run.store = Damaged()
    run.run()
    assert {finish.error.code for finish in run.finished.values() if finish.error} == {"data_corruption"}
    assert "Commit" not in run.log[0]


def test_a_number_of_parts_that_nobody_needs_is_refused() -> None:
    leader, answer = machine(0), b'{"record":{"parts":%d}}' % (record_parts.MAX_PARTS + 1)
    for event in (Begin(), Done(), Done(), Done(), ShardWritten(record(0, WORLD))):
        leader.handle(0, event)
    (effect,) = leader.handle(0, KeyReceived(answer))
    assert isinstance(effect, Publish)
    assert b"claims 129 parts" in effect.payload


def test_a_single_rank_needs_no_store() -> None:
    run = Run(world_size=1).run()
    assert run.log == [["TakeSnapshot", "Open", "WriteShard", "Commit", "Finish", "Listing", "Discard"]]


BEFORE_COMMIT: list[tuple[int, type[Effect], int]] = [
    (0, TakeSnapshot, 0),
    (0, Open, 0),
    (0, Publish, 0),
    (0, WriteShard, 0),
    (0, Await, 0),
    (0, Commit, 0),
    (1, TakeSnapshot, 0),
    (1, Await, 0),
    (1, WriteShard, 0),
]


@pytest.mark.parametrize("fails", BEFORE_COMMIT, ids=lambda fails: f"rank {fails[0]} {fails[1].__name__}")
def test_a_failure_before_the_commit_ends_the_save_on_every_rank(fails: tuple[int, type[Effect], int]) -> None:
    run = Run(fails=fails).run()
    assert all(finish.error is not None and finish.name is None for finish in run.finished.values())
    assert {finish.error.code for finish in run.finished.values() if finish.error} == {"no_space"}, "nobody times out"
    assert "Commit" not in run.log[0] or fails[1] is Commit
    assert run.log[0][-1] == "Discard", "what was written is cleared away"
    if fails[0] == 1:
        assert run.finished[0].error == Failed("no_space", f"rank 1: {fails[1].__name__} failed")


@pytest.mark.parametrize("fails", [(0, Publish, 1), (0, Listing, 0), (0, Discard, 0), (0, Forget, 0)])
def test_a_failure_after_the_commit_does_not_undo_it(fails: tuple[int, type[Effect], int]) -> None:
    run = Run(fails=fails).run()
    assert run.finished[0].name == "step-00000020"
    assert run.finished[0].error is None
    assert run.machines[0].notes == [f"{fails[1].__name__} failed"]


@pytest.mark.parametrize("payload", [b"", b"{", b'{"record":5}', b'{"record":{"rank":0}}', b"[]", b"\xff"])
def test_an_unreadable_record_fails_the_save(payload: bytes) -> None:
    leader = machine(0)
    events: list[Event] = [Begin(), Done(), Done(), Done(), ShardWritten(record(0, WORLD))]
    for event in events:
        leader.handle(0, event)
    (effect,) = leader.handle(0, KeyReceived(payload))
    assert isinstance(effect, Publish)
    (finish,) = leader.handle(0, Done())
    assert isinstance(finish, Finish)
    assert finish.error is not None
    assert finish.error.code == "data_corruption"


def test_an_unreadable_outcome_fails_the_save_of_that_rank() -> None:
    follower = machine(1)
    follower.handle(0, Begin())
    follower.handle(0, Done())
    (finish,) = follower.handle(0, KeyReceived(b"nonsense"))
    assert isinstance(finish, Finish)
    assert finish.error is not None


@pytest.mark.parametrize("name", ["", "step-00000010", "../.tmp-step-00000020-00003-000005", ".tmp-step-x"])
def test_a_directory_that_is_none_of_ours_is_not_written_to(name: str) -> None:
    follower = machine(1)
    follower.handle(0, Begin())
    follower.handle(0, Done())
    (effect,) = follower.handle(0, KeyReceived(b'{"name":"%b"}' % name.encode()))
    assert isinstance(effect, Publish), "rank 0 hears of it"
    (finish,) = follower.handle(0, Done())
    assert isinstance(finish, Finish)
    assert finish.error is not None
    assert finish.error.code == "data_corruption"


def test_an_event_out_of_order_is_our_own_bug() -> None:
    for rank in (0, 1):
        with pytest.raises(InvariantViolation, match="Committed in phase 'new'"):
            machine(rank).handle(0, Committed("x"))


def test_steps_out_of_range_are_refused() -> None:
    for step in (-1, 10**13):
        with pytest.raises(UsageError, match="out of range"):
            SaveMachine(machine(0).settings, step=step, sequence=1, values={})


def test_looking_at_checkpoints_needs_no_torch() -> None:
    program = "import sys, fireflyer.checkpoint as c; c.describe, c.verify; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True)
