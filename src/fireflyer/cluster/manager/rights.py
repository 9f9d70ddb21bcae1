"""Which parts of an answer a user may see, and who is an operator."""

from __future__ import annotations

from typing import Final

import msgspec

from fireflyer.base.errors import PermissionDenied
from fireflyer.cluster.core.platform.views import TaskAnswer, TaskView

__all__ = ["OPERATORS", "check_reads_logs", "shown_to"]

OPERATORS: Final = ("platform:operator", "platform:admin")


def check_reads_logs(task: TaskView, user: str, roles: tuple[str, ...]) -> None:
    """What ranks print may hold secrets, too. Raises `PermissionDenied`."""
    if task.user != user and not any(role in OPERATORS for role in roles):
        raise PermissionDenied(f"the logs of task {task.id} are for {task.user} and operators")


def shown_to(answer: TaskAnswer, user: str, roles: tuple[str, ...]) -> TaskAnswer:
    """Environment variables may hold secrets: they are for the task's user and operators."""
    spec = answer.task.spec
    if spec is None or answer.task.user == user or any(role in OPERATORS for role in roles):
        return answer
    program = msgspec.structs.replace(spec.program, env=dict.fromkeys(spec.program.env, "(hidden)"))
    task = msgspec.structs.replace(answer.task, spec=msgspec.structs.replace(spec, program=program))
    return msgspec.structs.replace(answer, task=task)
