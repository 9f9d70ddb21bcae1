"""Checkpoints of small states that are known by their step, and what may be damaged in them."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable
from pathlib import Path

import torch

from fireflyer.checkpoint import (
    CheckpointManager,
    Restored,
    State,
)
from fireflyer.checkpoint.snapshot import Layout, Snapshot, describe_state, plan_snapshot
from fireflyer.runtime.disk import RealDisk

__all__ = [
    "SHARD",
    "Gate",
    "damage",
    "flip",
    "listed",
    "manager",
    "newest",
    "same",
    "save_all",
    "snapshot_of",
    "state_of",
]


def manager(directory: Path | str, **options: object) -> CheckpointManager:
    arguments: dict[str, object] = {"rank": 0, "world_size": 1, "store": None, "disk": RealDisk(), **options}
    return CheckpointManager(directory, **arguments)  # type: ignore[arg-type]


def state_of(step: int) -> State:
    generator = torch.Generator().manual_seed(step)
    shared = {f"w{index}": torch.rand(3, index + 1, generator=generator) for index in range(5)}
    return State(shared, {"rng": torch.full((4,), step, dtype=torch.uint8)}, {"step": step})


def snapshot_of(state: State, *, rank: int = 0, world_size: int = 1, last: Layout | None = None) -> Snapshot:
    """As a manager plans it where all ranks have the same tensors."""
    content = describe_state(state.shared, state.own, state.of_rank_0, last=last.content if last else None)
    return plan_snapshot(rank, world_size, state.shared, state.own, content, last=last)


def same(restored: Restored | None, step: int) -> bool:
    assert restored is not None
    expected = state_of(step)
    assert restored.step == restored.values["step"] == step
    assert sorted(restored.shared) == sorted(expected.shared)
    return all(torch.equal(restored.shared[name], tensor) for name, tensor in expected.shared.items())


def save_all(directory: Path | str, steps: list[int], **options: object) -> None:
    with manager(directory, **options) as ours:
        for step in steps:
            ours.save(step, state_of(step), blocking=True).result()


def newest(directory: Path | str, **options: object) -> Restored:
    with manager(directory, **options) as ours:
        restored = ours.restore()
    assert restored is not None
    return restored


class Gate(RealDisk):
    """A disk on which a save waits for its directory until it is let through."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self.open_gate = threading.Event()

    def mkdir(self, path: str) -> None:
        if "/.tmp-" in path:
            self.reached.set()
            assert self.open_gate.wait(30)
        super().mkdir(path)


def listed(names: Iterable[str]) -> list[str]:
    """The names in a checkpoint directory, sorted, without the writer's directory that always is there."""
    return sorted(name for name in names if not name.startswith(".writer-"))


# Damage.

SHARD = "shard-00000-of-00001.safetensors"


def flip(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


def damage(directory: Path, kind: str) -> None:
    shard, manifest = directory / SHARD, directory / "manifest.json"
    if kind == "flipped byte in a tensor":
        flip(shard, -3)
    elif kind == "flipped byte in the header":
        flip(shard, 20)
    elif kind == "truncated shard":
        os.truncate(shard, shard.stat().st_size - 1)
    elif kind == "longer shard":
        shard.write_bytes(shard.read_bytes() + b"x")
    elif kind == "missing shard":
        shard.unlink()
    elif kind == "missing manifest":
        manifest.unlink()
    elif kind == "garbage manifest":
        manifest.write_bytes(b"\xff\x00 garbage")
    elif kind == "empty manifest":
        manifest.write_bytes(b"")
    elif kind == "flipped byte in the manifest":
        flip(manifest, 60)
    elif kind == "manifest of another step":
        manifest.write_bytes((directory.parent / "step-00000010" / "manifest.json").read_bytes())
    else:
        directory.rename(directory.with_name("aside"))
        directory.write_bytes(b"a file")
