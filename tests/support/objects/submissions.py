"""Submissions beside collections, in an order that a seed decides: is a snapshot ever named whose blobs are gone?"""

from __future__ import annotations

import random
from collections.abc import Callable

from tests.support.objects.memory import MemoryObjects
from tests.support.objects.turns import Turns, TurnsLock

from fireflyer.base.errors import NotFound
from fireflyer.cluster.core.objects.blobs import hash_of
from fireflyer.cluster.core.objects.manifest import FileEntry, blobs_of, decode_manifest, encode_manifest, make_manifest
from fireflyer.cluster.objects import SnapshotStore

__all__ = ["World", "check_seed"]

CONTENTS = [f"content {number}".encode() for number in range(4)]


class World:
    """All blobs are old here, also those that were renewed just now: only what the store knows protects them."""

    def __init__(self, seed: int, store_class: type[SnapshotStore] = SnapshotStore) -> None:
        self.random = random.Random(seed)
        self.turns = Turns(seed)
        self.now_ns = 0
        self.objects = MemoryObjects(self.tick, self.turns.step)
        self.store = store_class(self.objects, grace_ns=-(1 << 60), wall_ns=self.tick, lock=TurnsLock(self.turns))
        self.named: dict[tuple[str, str], bytes] = {}
        """The rows of tasks."""

    def tick(self) -> int:
        self.now_ns += 1
        return self.now_ns

    def submits(self, owner: str, chosen: list[bytes]) -> Callable[[], None]:
        entries = [FileEntry(f"f{number}", 0o644, len(data), hash_of(data)) for number, data in enumerate(chosen)]
        manifest = encode_manifest(make_manifest(entries))
        snapshot = hash_of(manifest)
        contents = {hash_of(data): data for data in [*chosen, manifest]}

        def submit() -> None:
            for _ in range(20):
                for blob in self.store.begin(owner, snapshot, manifest):
                    self.store.put(owner, snapshot, blob, [contents[blob]])
                try:
                    self.store.seal(owner, snapshot)
                except NotFound:
                    self.store.release(owner, snapshot)
                    continue
                self.turns.step()
                self.named[owner, snapshot] = manifest  # the commit of the task's row
                self.turns.step()
                self.store.release(owner, snapshot)
                return
            raise AssertionError("a submission never ends")

        return submit

    def ends_tasks(self) -> None:
        for _ in range(2):
            self.turns.step()
            if self.named:
                del self.named[self.random.choice(sorted(self.named))]

    def rows(self) -> list[tuple[str, str]]:
        rows = sorted(self.named)
        self.turns.step()
        return rows

    def collects(self) -> None:
        for _ in range(3):
            assert not self.store.collect(self.rows).damaged, "the manifest of a named snapshot is gone"

    def check(self) -> None:
        for snapshot, manifest in ((snapshot, manifest) for (_, snapshot), manifest in self.named.items()):
            for blob in (snapshot, *blobs_of(decode_manifest(manifest))):
                assert blob in self.objects.blobs, "a blob of a named snapshot was collected"


def check_seed(seed: int, store_class: type[SnapshotStore] = SnapshotStore) -> World:
    world = World(seed, store_class)
    for data in world.random.sample(CONTENTS, 2):  # of tasks that are long gone
        world.objects.put(hash_of(data), len(data), [data])
    actors: list[Callable[[], None]] = [world.collects, world.ends_tasks]
    for number in range(3):
        chosen = world.random.sample(CONTENTS, 2)
        actors.append(world.submits(f"user{number % 2}", chosen))
    world.turns.run(actors)
    world.check()
    return world
