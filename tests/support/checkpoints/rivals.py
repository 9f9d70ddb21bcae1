"""Two attempts of a job alive at once on one checkpoint directory: an old one that nobody could stop, and the next."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from tests.support.checkpoints.jobs import LAUNCH, ROOT, Job, Wrap

from fireflyer.base.ports import Disk, DiskFile
from fireflyer.base.units import MS
from fireflyer.checkpoint.core.names import candidates
from fireflyer.checkpoint.reader import verify
from fireflyer.sim import SimDisk, World
from fireflyer.sim.files import DirectoryNode

__all__ = ["Around", "Handles", "Rivals", "checkpoints"]

T = TypeVar("T")


def checkpoints(disk: Disk) -> list[tuple[str, list[str]]]:
    """Every committed checkpoint with the names in it."""
    if not disk.is_dir(ROOT):
        return []
    return [(item.name, disk.list(f"{ROOT}/{item.name}")) for item in candidates(disk.list(ROOT))]


class Around(Disk):
    """A disk that tells of every change before and after it. Paths are passed through `translate`."""

    def __init__(
        self, disk: Disk, *, check: Callable[[str], Callable[[], None]], translate: Callable[[str], str] | None = None
    ) -> None:
        self._disk, self._check = disk, check
        self._translate = translate or (lambda path: path)
        self.durable_names = disk.durable_names

    def create(self, path: str, *, direct: bool = False) -> DiskFile:
        return self._changing("create", path, lambda: self._disk.create(self._below(path), direct=direct))

    def open(self, path: str, *, direct: bool = False) -> DiskFile:
        return self._disk.open(self._below(path), direct=direct)

    def mkdir(self, path: str) -> None:
        self._changing("mkdir", path, lambda: self._disk.mkdir(self._below(path)))

    def rename(self, source: str, target: str) -> None:
        self._changing(
            "rename", f"{source} to {target}", lambda: self._disk.rename(self._below(source), self._below(target))
        )

    def remove(self, path: str) -> None:
        self._changing("remove", path, lambda: self._disk.remove(self._below(path)))

    def rmdir(self, path: str) -> None:
        self._changing("rmdir", path, lambda: self._disk.rmdir(self._below(path)))

    def list(self, path: str) -> list[str]:
        return self._disk.list(self._translate(path))

    def exists(self, path: str) -> bool:
        return self._disk.exists(path)

    def is_dir(self, path: str) -> bool:
        return self._disk.is_dir(path)

    def sync_dir(self, path: str) -> None:
        self._disk.sync_dir(self._translate(path))

    def free_bytes(self, path: str) -> int:
        return self._disk.free_bytes(path)

    def _below(self, path: str) -> str:
        directory, _, name = path.rpartition("/")
        return f"{self._translate(directory or '/').rstrip('/')}/{name}"

    def _changing(self, operation: str, path: str, act: Callable[[], T]) -> T:
        after = self._check(f"{operation} {path}")
        result = act()
        after()
        return result


class Handles:
    """A client of a network file system, or a kernel in the middle of an operation: a directory that it has looked up
    once stays the same directory for it, whatever others rename it to meanwhile."""

    def __init__(self, device: SimDisk) -> None:
        self._device = device
        self._known: dict[str, DirectoryNode] = {}

    def translate(self, path: str) -> str:
        """Where the directory that was at `path` is now; `path` itself when it is new, or removed."""
        node = self._known.get(path)
        if node is None:
            found = self._device.lookup(path)
            if isinstance(found, DirectoryNode):
                self._known[path] = found
            return path
        now = self._find(node, "", self._device.directory("/", "walk"))
        return f"{path}-removed" if now is None else now

    def _find(self, wanted: DirectoryNode, path: str, node: DirectoryNode) -> str | None:
        if node is wanted:
            return path or "/"
        for name, inner in sorted(node.entries.items()):
            if isinstance(inner, DirectoryNode):
                found = self._find(wanted, f"{path}/{name}", inner)
                if found is not None:
                    return found
        return None


@dataclass
class Rivals:
    """Attempts that share a disk and a world. When a later one has begun, no earlier one may change a checkpoint."""

    seed: int
    disk: SimDisk = field(default_factory=SimDisk)
    handles: bool = False
    jobs: list[Job] = field(default_factory=list)
    violations: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.world = World(self.seed)
        self._looker = self.disk.mount("looker")

    def add(
        self,
        attempt: int,
        steps: list[int],
        *,
        launch: str = LAUNCH,
        keep: int = 2,
        slow: int = 1,
        ordered: bool = True,
    ) -> Job:
        """A job of two ranks. An operation of one that is `slow` takes so many times longer. Where attempts are not
        `ordered`, either may be the one that begins last."""
        number = len(self.jobs)
        job = Job(
            self.disk,
            2,
            steps,
            attempt=attempt,
            keep=keep,
            name=f"job{number}-",
            shared_world=self.world,
            wrap=self._wrap(number) if ordered else (lambda disk: disk),
            launch=launch,
            jitter_ns=slow * MS,
        )
        self.jobs.append(job)
        return job

    def _wrap(self, number: int) -> Wrap:
        def wrap(disk: Disk) -> Disk:
            handles = Handles(self.disk) if self.handles else None
            return Around(
                disk,
                check=lambda what: self._expect_no_change(number, what),
                translate=None if handles is None else handles.translate,
            )

        return wrap

    def _expect_no_change(self, number: int, what: str) -> Callable[[], None]:
        if not any(later.begun for later in self.jobs[number + 1 :]):
            return lambda: None
        before = checkpoints(self._looker)

        def after() -> None:
            if checkpoints(self._looker) != before:  # not raised here: a save reports whatever is raised
                self.violations.append(f"job {number} changed a checkpoint after the next had begun: {what}")

        return after

    def run(self, until: Callable[[], bool]) -> None:
        while not until() and self.world.step():
            pass

    def run_to_the_end(self) -> None:
        self.run(lambda: all(job.over for job in self.jobs))
        assert not self.violations
        assert all(info.problem is None for info in verify(ROOT, self._looker)), "a checkpoint is not whole"
