"""Tasks that train, and the cluster on which they do, as data. Pure."""

from __future__ import annotations

import msgspec

__all__ = ["ADA", "BEN", "ClusterPlan", "TaskPlan", "train_arguments"]

ADA, BEN = "ada", "ben"


class TaskPlan(msgspec.Struct, frozen=True, kw_only=True):
    """One task: a run of `fireflyer.recipes.train_gpt` with one rank on each node."""

    name: str
    user: str
    steps: int
    seed: int
    priority: int = 10
    nodes: int = 2


class ClusterPlan(msgspec.Struct, frozen=True, kw_only=True):
    nodes: int = 4
    storage_nodes: int = 3
    replicas: int = 2
    targets_per_node: int = 4
    checkpoint_every: int = 10
    global_batch: int = 8
    sequence_length: int = 128
    corpus_bytes: int = 2_000_000
    least_step: str = "200ms"
    """Tasks wait after a step that took less: a storage node counts as failed after 6 s on every machine, and on a fast
    one they would have ended by then."""


def train_arguments(plan: ClusterPlan, task: TaskPlan, *, corpus: str, checkpoints: str) -> tuple[str, ...]:
    """Of `train_gpt`. The losses depend on all of these but the two places."""
    options: dict[str, object] = {
        "--steps": task.steps,
        "--seed": task.seed,
        "--global-batch": plan.global_batch,
        "--sequence-length": plan.sequence_length,
        "--checkpoint-every": plan.checkpoint_every,
        "--corpus-dir": corpus,
        "--checkpoint-dir": checkpoints,
    }
    return tuple(str(part) for pair in options.items() for part in pair)
