"""Which parts of an answer a user may see, and who is an operator."""

from __future__ import annotations

from typing import Final

import msgspec

from fireflyer.cluster.core.platform.views import TaskAnswer

__all__ = ["OPERATORS", "shown_to"]

OPERATORS: Final = ("platform:operator", "platform:admin")


def shown_to(answer: TaskAnswer, user: str, roles: tuple[str, ...]) -> TaskAnswer:
    """Environment variables may hold secrets: they are for the task's user and operators."""
    spec = answer.task.spec
    if spec is None or answer.task.user == user or any(role in OPERATORS for role in roles):
        return answer
    program = msgspec.structs.replace(spec.program, env=dict.fromkeys(spec.program.env, "(hidden)"))
    task = msgspec.structs.replace(answer.task, spec=msgspec.structs.replace(spec, program=program))
    return msgspec.structs.replace(answer, task=task)
