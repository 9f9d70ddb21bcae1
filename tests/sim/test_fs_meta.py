"""Open files at the meta service under faults: lengths, truncations, locks, what is unlinked and what dies.

What must be is said in `tests.support.fs.meta_sim.chaos` (at the end) and `meta_sim.oracle` (all the time).
"""

from __future__ import annotations

import errno
import hashlib
import os
import subprocess
import sys
from collections.abc import Awaitable, Callable

import pytest
from tests.support.campaigns.known_seeds import search
from tests.support.campaigns.seeds import more_seeds
from tests.support.fs.meta_sim.chaos import begin, chaos, check_store, quiet
from tests.support.fs.meta_sim.chunks import CELL_BYTES, CHAINS, CHUNK_BYTES
from tests.support.fs.meta_sim.mutants import MUTANTS
from tests.support.fs.meta_sim.steps import drive
from tests.support.fs.meta_sim.workload import MetaClient
from tests.support.fs.meta_sim.world import MetaWorld

from fireflyer.base.units import SECOND
from fireflyer.fs.core.meta.inodes.layout import chain_of, order_of
from fireflyer.fs.core.meta.open_files import write_grants, write_survey
from fireflyer.fs.core.meta.open_rows import CUTS
from fireflyer.fs.schema.inodes import ROOT, FileDetails, Inode
from fireflyer.fs.schema.meta import (
    UNKNOWN_CUT,
    Allocate,
    AllocateMode,
    Answer,
    Close,
    Done,
    ErrorReply,
    Found,
    Lock,
    LockKind,
    Open,
    Opened,
    OpenFlag,
    PathRef,
    Remove,
    Report,
    Request,
    Reserve,
    Reserved,
    Stat,
    Truncate,
    Window,
)

SEEDS = range(8)
WRITING = OpenFlag.READ | OpenFlag.WRITE | OpenFlag.CREATE
PATH = PathRef(ROOT, b"d/a")


@pytest.mark.parametrize("seeds", [SEEDS, *more_seeds(8, 28, blocks=1, wide=2000, seed_s=0.2)])
def test_whatever_fails_files_are_what_clients_were_told_and_nothing_is_left(seeds: range) -> None:
    for seed in seeds:
        try:
            chaos(seed)
        except AssertionError as error:
            raise AssertionError(f"chaos({seed}) of tests.support.fs.meta_sim.chaos: {error}") from error


@pytest.mark.parametrize("seeds", [range(2), *more_seeds(2, 12, blocks=1, wide=800, seed_s=0.3)])
def test_files_that_are_surveyed_while_they_are_used_are_the_same(
    seeds: range, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Again and again, since capabilities count for seconds here: nothing is longer by that than what was written."""
    monkeypatch.setattr(write_grants, "COUNTS_NS", 2 * SECOND)
    monkeypatch.setattr(write_grants, "MINUTE_NS", SECOND // 2)
    monkeypatch.setattr(write_survey, "LOOK_EVERY_NS", SECOND // 2)
    monkeypatch.setattr(write_survey, "PUT_OFF_NS", SECOND)
    for seed in seeds:
        try:
            chaos(seed, with_tokens=True)
        except AssertionError as error:
            raise AssertionError(f"chaos({seed}, with_tokens=True): {error}") from error


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    MUTANTS[name].apply(monkeypatch)
    print(name, *search("files", name, MUTANTS[name].within, MUTANTS[name].attempt))


def history(seed: int) -> str:
    return hashlib.sha256(chaos(seed).sim.trace.to_bytes()).hexdigest()


@pytest.mark.slow
def test_a_seed_has_one_history_whatever_the_hashes_of_python() -> None:
    code = "from tests.sim.test_fs_meta import history; print(history(2), history(3))"
    outputs = []
    for hash_seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
        done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
        outputs.append(done.stdout)
    assert outputs[0] == outputs[1] == f"{history(2)} {history(3)}\n"


# --- single stories ---


class Story:
    """Clients that do only what they are told, one request after the other."""

    def __init__(self, *, clients: int = 2) -> None:
        self.world = MetaWorld(1)
        begin(self.world)
        self.clients = [MetaClient(self.world, f"c{at}", busy=False) for at in range(clients)]

    def run(self, work: Callable[[], Awaitable[None]], by: int = 0, *, limit_ns: int = 30 * SECOND) -> None:
        over: list[bool] = []

        async def all_of_it() -> None:
            await work()
            over.append(True)

        drive(self.clients[by].node, all_of_it)
        until_ns = self.world.sim.now_ns + limit_ns
        self.world.sim.run(until_ns=until_ns, stop=lambda: bool(over))
        assert over, "it did not come to an end"

    def ask(self, *requests: Request, by: int = 0, limit_ns: int = 30 * SECOND) -> list[Answer]:
        answers: list[Answer] = []

        async def work() -> None:
            answers.extend([await self.clients[by].ask(one) for one in requests])

        self.run(work, by, limit_ns=limit_ns)
        return answers

    def open(self, handle: int, *, by: int = 0, flags: int = WRITING, place: PathRef = PATH) -> Inode:
        (answer,) = self.ask(Open(place, flags, handle), by=by)
        assert isinstance(answer, Opened), answer
        return answer.inode

    def write(self, inode: Inode, first: int, tags: list[int], *, by: int = 0) -> None:
        async def work() -> None:
            for at, tag in enumerate(tags, first):
                index, within = divmod(at * CELL_BYTES, CHUNK_BYTES)
                chain = chain_of(order_of(body_of(inode).layout, CHAINS), index)
                await self.clients[by].chunks.write(inode.id, chain, index, within // CELL_BYTES, [tag])

        self.run(work, by)

    def length(self, inode: Inode, *, by: int = 0) -> int:
        (answer,) = self.ask(Stat(PathRef(inode.id)), by=by)
        assert isinstance(answer, Found), answer
        assert body_of(answer.inode).length % CELL_BYTES == 0
        return body_of(answer.inode).length // CELL_BYTES

    def end(self) -> None:
        for one in self.clients:
            one.crash()
            one.stay_away = True
        quiet(self.world, [])
        check_store(self.world)


def body_of(inode: Inode) -> FileDetails:
    assert isinstance(inode.body, FileDetails)
    return inode.body


def test_a_report_makes_the_file_longer_for_everybody_and_never_shorter() -> None:
    story = Story()
    file = story.open(1)
    story.write(file, 0, [1, 2, 3])
    assert story.length(file) == 0
    story.ask(Report(file.id, 1, 3 * CELL_BYTES, 0), Report(file.id, 1, CELL_BYTES, 0))
    assert story.length(file, by=1) == 3
    story.end()


def test_a_report_from_before_a_truncation_does_not_bring_back_what_was_cut_off() -> None:
    story = Story()
    file = story.open(1)
    story.write(file, 0, [1] * 9)
    story.ask(Truncate(PATH, 0), by=1)
    story.ask(Report(file.id, 1, 9 * CELL_BYTES, 0))
    assert story.length(file) == 0
    story.end()


def test_a_report_from_before_a_truncation_does_not_lose_what_was_written_after_it() -> None:
    story = Story()
    file = story.open(1)
    story.write(file, 0, [1] * 9)
    story.ask(Truncate(PATH, 0), by=1)
    story.write(file, 2, [5])
    story.ask(Close(file.id, 1, 9 * CELL_BYTES, 0))
    assert story.length(file) == 3
    story.end()


def test_who_does_not_know_what_his_writes_did_has_the_chains_asked() -> None:
    story = Story()
    file = story.open(1)
    story.write(file, 0, [1] * 5)
    story.ask(Close(file.id, 1, 0, UNKNOWN_CUT))
    assert story.length(file) == 5
    story.end()


def test_the_length_of_a_file_whose_writer_died_is_found_in_its_chunks() -> None:
    story = Story()
    file = story.open(1)
    story.write(file, 0, [1] * 6)
    story.clients[0].crash()
    story.world.sim.run(until_ns=story.world.sim.now_ns + 20 * SECOND)
    assert story.length(file, by=1) == 6
    story.end()


def test_opening_to_truncate_cuts_what_a_dead_writer_had_not_reported() -> None:
    story = Story()
    file = story.open(1)
    story.write(file, 0, [1] * 6)
    story.clients[0].crash()
    story.open(1, by=1, flags=WRITING | OpenFlag.TRUNCATE)
    story.write(file, 0, [2], by=1)
    story.ask(Close(file.id, 1, CELL_BYTES, UNKNOWN_CUT), by=1)
    story.world.sim.run(until_ns=story.world.sim.now_ns + 20 * SECOND)
    assert story.length(file, by=1) == 1
    assert story.world.chunks.of(file.id) == {0: [2]}
    story.end()


def test_a_truncation_is_finished_when_its_service_is_no_more() -> None:
    story = Story()
    file = story.open(1)
    story.write(file, 0, [1] * 9)
    story.ask(Report(file.id, 1, 9 * CELL_BYTES, 0))
    story.world.crashes = 0.08
    (answer,) = story.ask(Truncate(PATH, 2 * CELL_BYTES), by=1, limit_ns=200 * SECOND)
    story.world.crashes = 0.0
    assert isinstance(answer, Found)
    assert story.length(file) == 2
    assert story.world.chunks.of(file.id) == {0: [1, 1]}
    story.end()


def test_reserved_ranges_do_not_overlap_and_read_as_zeros() -> None:
    story = Story()
    file = story.open(1)
    story.open(1, by=1)
    first = story.ask(Reserve(file.id, 1, CELL_BYTES), Reserve(file.id, 1, CELL_BYTES))
    second = story.ask(Reserve(file.id, 1, CELL_BYTES), by=1)
    offsets = [one.offset for one in [*first, *second] if isinstance(one, Reserved)]
    assert offsets == [0, CELL_BYTES, 2 * CELL_BYTES]
    assert story.length(file) == 3
    story.end()


@pytest.mark.parametrize(
    ("mode", "cells", "length"),
    [
        (AllocateMode.DEFAULT, [1] * 9, 14),
        (AllocateMode.KEEP_SIZE, [1] * 9, 9),
        (AllocateMode.PUNCH_HOLE, [1, 1, 1, 0, 0, 0, 0, 0, 0], 9),
        (AllocateMode.ZERO_RANGE, [1, 1, 1, 0, 0, 0, 0, 0, 0], 14),
    ],
)
def test_allocation(mode: AllocateMode, cells: list[int], length: int) -> None:
    story = Story()
    file = story.open(1)
    story.write(file, 0, [1] * 9)
    story.ask(Report(file.id, 1, 9 * CELL_BYTES, 0))
    story.ask(Allocate(file.id, 1, mode, 3 * CELL_BYTES, 11 * CELL_BYTES))
    assert story.length(file) == length
    chunks = story.world.chunks.of(file.id)
    found = [chunks.get(at // 4, [])[at % 4 : at % 4 + 1] or [0] for at in range(9)]
    assert [one for (one,) in found] == cells
    story.end()


def test_over_the_quota_a_report_is_refused_and_its_bytes_are_cut_off() -> None:
    story = Story()
    place = PathRef(ROOT, b"q/a")
    file = story.open(1, place=place)
    story.write(file, 0, [1] * 70)
    answers = story.ask(
        Report(file.id, 1, 50 * CELL_BYTES, 0), Close(file.id, 1, 70 * CELL_BYTES, 0), Report(file.id, 1, 0, 0)
    )
    assert [one.errno for one in answers if isinstance(one, ErrorReply)] == [errno.EDQUOT, errno.EBADF]
    story.world.sim.run(until_ns=story.world.sim.now_ns + 20 * SECOND)
    assert story.length(file) == 50
    assert sum(map(len, story.world.chunks.of(file.id).values())) == 50
    story.end()


def test_what_is_over_the_quota_is_cut_off_too_when_the_last_writer_closes_during_a_hole() -> None:
    story = Story()
    world = story.world
    file = story.open(1, place=PathRef(ROOT, b"q/a"))
    story.write(file, 0, [1] * 70)
    story.ask(Report(file.id, 1, 50 * CELL_BYTES, 0))
    world.chunks.down_until_ns = dict.fromkeys(CHAINS, world.sim.now_ns + 5 * SECOND)

    async def punch() -> None:
        await story.clients[0].ask(Allocate(file.id, 1, AllocateMode.PUNCH_HOLE, 0, CELL_BYTES))

    drive(story.clients[0].node, punch)
    world.sim.run(until_ns=world.sim.now_ns + SECOND)
    assert [key for key, _ in world.items() if key[:2] == CUTS]
    (refused,) = story.ask(Close(file.id, 1, 70 * CELL_BYTES, 0))
    assert isinstance(refused, ErrorReply)
    assert refused.errno == errno.EDQUOT
    world.sim.run(until_ns=world.sim.now_ns + 20 * SECOND)
    assert story.length(file) == 50
    assert sum(map(len, world.chunks.of(file.id).values())) == 50
    story.end()


def test_what_is_unlinked_while_it_is_written_stays_until_the_last_close() -> None:
    story = Story()
    file = story.open(1)
    story.write(file, 0, [1] * 3)
    story.ask(Remove(PATH), by=1)
    story.world.sim.run(until_ns=story.world.sim.now_ns + 30 * SECOND)
    assert len(story.world.chunks.of(file.id)) == 1
    story.ask(Close(file.id, 1, 3 * CELL_BYTES, 0))
    story.world.sim.run(until_ns=story.world.sim.now_ns + 30 * SECOND)
    assert not story.world.chunks.of(file.id)
    story.end()


def locked(story: Story, start: int, end: int, kind: LockKind = LockKind.WRITE, wait_ns: int = 0) -> Lock:
    return Lock(story.world.lock_inode, Window.RANGE, 7, kind, start, end, wait_ns)


def test_a_lock_of_a_client_that_died_is_in_nobodys_way() -> None:
    story = Story()
    assert story.ask(locked(story, 0, 10)) == [Done()]
    (refused,) = story.ask(locked(story, 5, 6), by=1)
    assert isinstance(refused, ErrorReply)
    assert refused.errno == errno.EAGAIN
    story.clients[0].crash()
    assert story.ask(locked(story, 5, 6, wait_ns=10 * SECOND), by=1) == [Done()]
    story.end()


def test_who_would_close_a_circle_of_waiting_owners_is_told_so() -> None:
    story = Story(clients=3)
    for at in range(3):
        assert story.ask(locked(story, at, at + 1), by=at) == [Done()]
    waiting: list[Answer] = []

    def wait(by: int) -> Callable[[], Awaitable[None]]:
        async def work() -> None:
            waiting.append(await story.clients[by].ask(locked(story, by + 1, by + 2, wait_ns=8 * SECOND)))

        return work

    for by in range(2):
        drive(story.clients[by].node, wait(by))
    story.world.sim.run(until_ns=story.world.sim.now_ns + SECOND)
    (refused,) = story.ask(locked(story, 0, 1, wait_ns=8 * SECOND), by=2)
    assert isinstance(refused, ErrorReply)
    assert refused.errno == errno.EDEADLK
    assert story.ask(locked(story, 2, 3, LockKind.NONE), by=2) == [Done()]
    story.world.sim.run(until_ns=story.world.sim.now_ns + SECOND)
    assert waiting == [Done()]
    story.end()
