"""What is submitted for a task, and where it finds its corpus and its checkpoints in the file system. Pure."""

from __future__ import annotations

from typing import Final

from fireflyer.base.units import SECOND
from fireflyer.cluster.schema.tasks import Program, TaskSpec
from fireflyer.recipes.testbed.plan import ClusterPlan, TaskPlan, train_arguments

__all__ = ["CHECKPOINTS", "CORPUS", "task_spec"]

CORPUS: Final = "/corpus"
CHECKPOINTS: Final = "/checkpoints"
GRACE_NS: Final = 120 * SECOND


def task_spec(
    plan: ClusterPlan, task: TaskPlan, *, workdir: str, max_restarts: int = 3, max_requeues: int = 10
) -> TaskSpec:
    checkpoints = f"ff://{CHECKPOINTS}/{task.name}"
    program = Program(
        script="fireflyer.recipes.train_gpt",
        kind="module",
        args=(
            *train_arguments(plan, task, corpus=f"ff://{CORPUS}", checkpoints=checkpoints),
            "--least-step",
            plan.least_step,
        ),
        workdir=workdir,
    )
    return TaskSpec(
        name=task.name,
        program=program,
        least_nodes=task.nodes,
        most_nodes=task.nodes,
        priority=task.priority,
        grace_ns=GRACE_NS,
        max_restarts=max_restarts,
        max_requeues=max_requeues,
    )
