"""Simulated training jobs that save checkpoints: several ranks, one shared disk, crashes anywhere.

What runs is the manager's own code, `SaveMachine` and the engine; simulated are the disk, the store, the other ranks
and time. The content of every tensor follows from (step, attempt, name), so that a mixture of two saves is seen.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Generator
from dataclasses import dataclass, field

import msgspec

from fireflyer.base.errors import Fenced, FireflyerError, Timeout, error_to_wire
from fireflyer.base.events import SkippedCheckpoint
from fireflyer.base.ports import Disk
from fireflyer.base.units import MS, SECOND
from fireflyer.checkpoint import opening
from fireflyer.checkpoint.core.effects import (
    Await,
    Begin,
    Done,
    Effect,
    Event,
    Failed,
    Finish,
    Forget,
    KeyReceived,
    Publish,
    TakeSnapshot,
)
from fireflyer.checkpoint.core.fence import writers
from fireflyer.checkpoint.core.manager import SaveMachine, Settings
from fireflyer.checkpoint.core.manifest import Manifest, TensorRecord
from fireflyer.checkpoint.core.names import candidates, is_leftover
from fireflyer.checkpoint.core.safetensors import TensorSpec, place
from fireflyer.checkpoint.core.shares import layout_digest, share_of
from fireflyer.checkpoint.engine.directory import OpenFiles
from fireflyer.checkpoint.engine.image import Share, header_of
from fireflyer.checkpoint.engine.loading import Sink, sink_of
from fireflyer.checkpoint.engine.performing import perform
from fireflyer.checkpoint.reader import choose, verify
from fireflyer.sim import SimDisk, SimNode, World

ROOT = "/shared/checkpoints"
LAUNCH = "1234567890abcdef"
PLAN = {"algorithm": "tree"}
PIECE_BYTES = 192
SHARED = [
    TensorSpec("model/weight", "F32", (5, 5)),
    TensorSpec("model/bias", "BF16", (7,)),
    TensorSpec("optimizer/0/step", "F32", ()),
]
OWN = [TensorSpec("rng/torch", "U8", (11,))]
Wrap = Callable[[Disk], Disk]


def content(step: int, attempt: int, name: str, size: int) -> bytes:
    seed = f"{step}/{attempt}/{name}".encode()
    return hashlib.shake_128(seed).digest(size)


def make_share(step: int, attempt: int, rank: int, world_size: int) -> Share:
    placed = place(share_of(rank, SHARED, OWN, world_size))
    data = b"".join(content(step, attempt, item.spec.name, item.spec.size_bytes) for item in placed)
    header = header_of(placed, step=step, rank=rank)
    return Share(rank, step, layout_digest(SHARED), placed, len(header), memoryview(header + data))


@dataclass
class Job:
    """One attempt of a job that saves after each of `steps`, or if there are none every 10 steps after the newest
    checkpoint, `saves` times. Several jobs may share a `world`; then the nodes of each have a name of their own."""

    disk: SimDisk
    world_size: int
    steps: list[int]
    saves: int = 2
    attempt: int = 0
    keep: int = 2
    seed: int = 0
    refused: tuple[str, ...] = ()
    wrap: Wrap = lambda disk: disk
    launch: str = LAUNCH
    name: str = ""
    shared_world: World | None = None
    jitter_ns: int = MS
    begun: bool = False
    """Its rank 0 has become the writer of the directory."""
    ended_by: Fenced | None = None
    """Its rank 0 was told at the start that it is left over."""
    committed: list[tuple[int, str]] = field(default_factory=list)
    """(step, name) of every save that rank 0 reported as committed."""
    errors: list[tuple[int, int, str]] = field(default_factory=list)
    """(rank, step, message) of every save that was reported as failed."""
    notes: list[str] = field(default_factory=list)
    crashed_rank: int | None = None

    def __post_init__(self) -> None:
        self.world = self.shared_world or World(self.seed)
        self.writer_directory = ""
        self.newest_step: int | None = None
        self.nodes: list[SimNode] = []
        self.store: dict[str, bytes] = {}
        self.finished = 0
        self.disk.on_operation = lambda it: self.world.record(it.operation, it.owner, it.path)

    def run(self) -> None:
        """Until every rank is done; a rank that dies takes the others with it a little later, as a launcher does."""
        self.start()
        while self.finished < self.world_size and self.world.step():
            dead = [index for index, node in enumerate(self.nodes) if not node.alive]
            if dead and self.crashed_rank is None:
                self.crashed_rank = dead[0]
                self.world.call_after(self.world.random.randrange(20 * MS), self._kill)

    def start(self) -> None:
        self.nodes = [self.world.node(f"{self.name}rank{rank}", self._boot) for rank in range(self.world_size)]

    @property
    def over(self) -> bool:
        return self.finished == self.world_size or self.ended_by is not None

    def _kill(self) -> None:
        for node in self.nodes:
            node.crash()

    def _boot(self, node: SimNode) -> None:
        rank = int(node.name.removeprefix(f"{self.name}rank"))
        disk = self.wrap(self.disk.mount(node.name))
        node.spawn(self._program(rank, disk, node), done=self._finished, jitter_ns=self.jitter_ns)

    def _finished(self) -> None:
        self.finished += 1

    def _program(self, rank: int, disk: Disk, node: SimNode) -> Generator[int | None, None, None]:
        if rank == 0:
            try:
                yield from self._open(disk)
            except Fenced as error:
                self.ended_by = error
                return
        yield from self._wait_for("open", 10 * SECOND)
        settings = Settings(
            rank=rank,
            world_size=self.world_size,
            attempt=self.attempt,
            keep=self.keep,
            prefix="checkpoint/main",
            timeout_ns=60 * SECOND,
            job_plan=PLAN,
            writer=f"{self.attempt:08x}",
        )
        for sequence, step in enumerate(self.steps, start=1):
            if rank == 0:
                self.store[f"go/{sequence}"] = b""
            yield from self._wait_for(f"go/{sequence}", 60 * SECOND)
            snapshot: Event = Done()
            if rank == 0:
                snapshot = yield from self._become_writer(disk)
            if rank == 0:
                newest_step = self._newest_step()
                settings = msgspec.structs.replace(
                    settings, writer_directory=self.writer_directory, newest_step=newest_step
                )
            machine = SaveMachine(
                settings,
                step=step,
                sequence=sequence,
                values={"step": step, "attempt": self.attempt},
                refused=self.refused,
                forget_from=sequence - 1,
            )
            yield from self._save(machine, disk, node, snapshot)

    def _open(self, disk: Disk) -> Generator[int | None, None, None]:
        tag = f"{self.attempt:08x}"
        opened = yield from opening.open_root(disk, ROOT, PLAN, launch=self.launch, attempt=self.attempt, tag=tag)
        self.notes += opened.notes
        self.newest_step = opened.newest_step
        if opened.writer is not None:
            self.writer_directory = opened.writer.name
            self.begun = True
        if not self.steps:
            newest = max((candidate.step for candidate in candidates(disk.list(ROOT))), default=0)
            self.steps = [newest + 10 * number for number in range(1, self.saves + 1)]
        self.store["open"] = b""

    def _newest_step(self) -> int | None:
        """As the manager has it."""
        return None if self.newest_step is None else max([self.newest_step, *(step for step, _ in self.committed)])

    def _become_writer(self, disk: Disk) -> Generator[int | None, None, Event]:
        """As the manager does where the directory could not be written at the start."""
        try:
            if not self.writer_directory:
                tag = f"{self.attempt:08x}"
                writer = yield from opening.become_writer(disk, ROOT, launch=self.launch, attempt=self.attempt, tag=tag)
                self.writer_directory = writer.name
        except FireflyerError as error:
            return Failed(*error_to_wire(error))
        return Done()

    def _save(
        self, machine: SaveMachine, disk: Disk, node: SimNode, snapshot: Event
    ) -> Generator[int | None, None, None]:
        settings = machine.settings
        share = make_share(machine.step, settings.attempt, settings.rank, settings.world_size)
        files = OpenFiles() if self.world_size == 1 else None
        effects = machine.handle(node.clock.now_ns(), Begin())
        while effects:
            effect = effects.pop(0)
            event = snapshot
            if not isinstance(effect, TakeSnapshot):
                event = yield from self._perform(effect, machine, disk, share, files)
            effects += machine.handle(node.clock.now_ns(), event)
            yield None
        self.notes += machine.notes

    def _perform(
        self, effect: Effect, machine: SaveMachine, disk: Disk, share: Share, files: OpenFiles | None
    ) -> Generator[int | None, None, Event]:
        match effect:
            case Publish(key, payload):
                self.store[key] = payload
                return Done()
            case Await(key, timeout_ns):
                try:
                    return KeyReceived((yield from self._wait_for(key, timeout_ns)))
                except Timeout as error:
                    return Failed(*error_to_wire(error))
            case Forget(prefix):
                self.store = {key: value for key, value in self.store.items() if not key.startswith(prefix)}
                return Done()
            case Finish(name, _, error):
                if error is not None:
                    self.errors.append((machine.settings.rank, machine.step, error.message))
                elif machine.settings.rank == 0 and name is not None:
                    self.committed.append((machine.step, name))
                return Done()
        return (yield from perform(effect, disk, ROOT, share, piece_bytes=PIECE_BYTES, files=files))

    def _wait_for(self, key: str, timeout_ns: int) -> Generator[int | None, None, bytes]:
        deadline_ns = self.world.now_ns + timeout_ns
        while key not in self.store:
            if self.world.now_ns >= deadline_ns:
                raise Timeout(f"no {key}")
            yield None
        return self.store[key]


@dataclass(frozen=True)
class Found:
    """What a restore made of the disk."""

    step: int
    attempt: int
    name: str
    world_size: int
    passed_over: tuple[SkippedCheckpoint, ...]


def restore(disk: SimDisk) -> Found | None:
    """Restores as a new process would, and holds every byte to what the save of that step and attempt wrote."""
    received: dict[str, bytearray] = {}

    def make_sink(_manifest: Manifest) -> Sink:
        received.clear()

        def place_of(_rank: int, tensor: TensorRecord) -> memoryview:
            return memoryview(received.setdefault(tensor.name, bytearray(tensor.size_bytes)))

        return sink_of(place_of)

    chosen, passed_over = choose(disk.mount("restore"), ROOT, make_sink)
    if chosen is None:
        return None
    candidate, manifest = chosen
    step, attempt = manifest.values["step"], manifest.values["attempt"]
    assert step == manifest.step == candidate.step
    own = [f"own/{rank}/{spec.name}" for rank in range(manifest.world_size) for spec in OWN]
    assert sorted(received) == sorted([spec.name for spec in SHARED] + own)
    for name, data in received.items():
        assert data == content(step, attempt, name, len(data)), f"{name} is not of step {step}, attempt {attempt}"
    return Found(step, attempt, candidate.name, manifest.world_size, passed_over)


def check_recovery(disk: SimDisk, *, at_least: int, world_size: int, attempt: int, keep: int = 2) -> Found | None:
    """After a crash: the newest complete checkpoint is found, nothing half-made has a checkpoint's name, and the next
    attempt saves, tidies up and finds its own newest. `at_least`: the newest step whose save was reported."""
    found = restore(disk)
    step = found.step if found is not None else 0
    assert step >= at_least, f"restored step {step}, although step {at_least} was committed"
    if found is not None:
        broken = [info for info in verify(ROOT, disk.mount("verify")) if info.problem is not None]
        assert not broken, f"a checkpoint's name on something that is not whole: {broken}"
    job = Job(disk, world_size, [step + 10, step + 20], attempt=attempt, keep=keep)
    job.run()
    assert [committed for committed, _ in job.committed] == [step + 10, step + 20]
    assert not job.errors
    assert not job.notes
    after = restore(disk)
    assert after is not None
    assert (after.step, after.attempt) == (step + 20, attempt)
    names = disk.mount().list(ROOT)
    assert not [name for name in names if is_leftover(name)]
    (writer,) = writers(names)
    assert disk.mount().list(f"{ROOT}/{writer.name}") == []
    assert len([name for name in names if name.startswith("step-")]) <= keep
    return found
