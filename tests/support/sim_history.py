"""One long simulated history as bytes, for comparing runs."""

from __future__ import annotations

import random

from tests.support.checkpoints.jobs import Job

from fireflyer.sim import Fault, FaultKind, Link, SimDisk, SimNet, SimNode, World, choose_outcome

__all__ = ["history"]


def history(seed: int) -> bytes:
    rng = random.Random(seed)
    disk = SimDisk()
    disk.faults = [Fault(kind=FaultKind.CRASH_AFTER, index=rng.randrange(20, 60))]
    first = Job(disk, 3, [10, 20], seed=seed)
    first.run()
    disk.faults = []
    disk.crash(choose_outcome(disk.pending(), rng))
    second = Job(disk, 2, [30, 40], attempt=1, seed=seed + 1)
    second.run()
    return first.world.trace.to_bytes() + second.world.trace.to_bytes() + _chatter(seed) + disk.digest()


def _chatter(seed: int) -> bytes:
    world = World(seed)
    net = SimNet(world, default=Link(loss=0.1, duplication=0.1))

    def boot(node: SimNode) -> None:
        def answer(source: str, payload: bytes) -> None:
            if payload[0]:
                net.send(node.name, source, bytes([payload[0] - 1]))

        node.on_message(answer)

    for name in ("a", "b", "c"):
        world.node(name, boot)
    for source, target in (("a", "b"), ("b", "c"), ("c", "a")):
        net.send(source, target, b"\x20")
    world.call_after(5_000_000, lambda: net.partition(["a"], ["c"]))
    world.run()
    return world.trace.to_bytes()
