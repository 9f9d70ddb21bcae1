"""Who may do what: a table. A role is a word of `identity` that the platform gives a meaning."""

from __future__ import annotations

import enum
from typing import Final

from fireflyer.base.errors import PermissionDenied
from fireflyer.cluster.core.platform import commands
from fireflyer.cluster.core.platform.commands import Command

__all__ = [
    "ADMIN",
    "OPERATOR",
    "RIGHTS",
    "Right",
    "check",
    "check_exec",
    "check_roles_of",
    "check_tokens_of",
    "check_user",
    "is_operator",
]

OPERATOR: Final = "platform:operator"
ADMIN: Final = "platform:admin"


class Right(enum.Enum):
    OWNER = "owner"
    """The task's user, operators and administrators."""
    OPERATOR = "operator"
    """Operators and administrators."""
    ADMIN = "admin"


RIGHTS: Final[dict[type[Command], Right]] = {
    commands.StopTask: Right.OWNER,
    commands.SuspendTask: Right.OWNER,
    commands.ResumeTask: Right.OWNER,
    commands.SetPriority: Right.OWNER,
    commands.DrainNode: Right.OPERATOR,
    commands.ResumeNode: Right.OPERATOR,
    commands.ReportFault: Right.OPERATOR,
    commands.RecordRepair: Right.OPERATOR,
    commands.ReturnNode: Right.OPERATOR,
    commands.LabelNode: Right.OPERATOR,
    commands.MoveNode: Right.OPERATOR,
    commands.RemoveNode: Right.OPERATOR,
    commands.AddReservation: Right.OPERATOR,
    commands.RemoveReservation: Right.OPERATOR,
    commands.SetLimit: Right.OPERATOR,
    commands.RemoveLimit: Right.OPERATOR,
    commands.SetLimits: Right.OPERATOR,
    commands.SetShare: Right.ADMIN,
    commands.SetShares: Right.ADMIN,
    commands.SetPolicy: Right.ADMIN,
    commands.SetPriorityBounds: Right.ADMIN,
}
"""Submitting is open to every user, for themselves alone, up to their priority bound."""


def is_operator(roles: tuple[str, ...]) -> bool:
    return OPERATOR in roles or ADMIN in roles


def check_user(name: str, held: tuple[str, ...], roles: tuple[str, ...]) -> None:
    """Somebody with `roles` makes or removes the user `name`, who has the roles `held`. Operators manage users without
    roles: else an operator could become an administrator. Raises `PermissionDenied`."""
    if not is_operator(roles):
        raise PermissionDenied(f"changing users needs the role {OPERATOR}; ask an operator")
    if held and ADMIN not in roles:
        raise PermissionDenied(f"{name} has roles, so this needs the role {ADMIN}; ask an administrator")


def check_roles_of(roles: tuple[str, ...]) -> None:
    """Raises `PermissionDenied`."""
    if ADMIN not in roles:
        raise PermissionDenied(f"granting roles needs the role {ADMIN}; ask an administrator")


def check_tokens_of(name: str, held: tuple[str, ...], user: str, roles: tuple[str, ...]) -> None:
    """Everybody has their own tokens; for those of others, as `check_user`. Raises `PermissionDenied`."""
    if name != user:
        check_user(name, held, roles)


def check_exec(task: int, owner: str, user: str, roles: tuple[str, ...]) -> None:
    """Somebody runs a command with the rights of a task's user. Operators may not: they could read all that the user
    can, and act for them. Raises `PermissionDenied`."""
    if user != owner and ADMIN not in roles:
        raise PermissionDenied(f"task {task} belongs to {owner}; only they and administrators may run commands in it")


def check(command: Command, user: str, roles: tuple[str, ...], owner: str | None) -> None:
    """`owner`: of the task that it names. Raises `PermissionDenied`."""
    right = RIGHTS[type(command)]
    if right is Right.ADMIN and ADMIN not in roles:
        raise PermissionDenied(f"this needs the role {ADMIN}; ask an administrator")
    if right is Right.OPERATOR and not is_operator(roles):
        raise PermissionDenied(f"this needs the role {OPERATOR}; ask an operator")
    if right is Right.OWNER and user != owner and not is_operator(roles):
        raise PermissionDenied(f"the task belongs to {owner}; only they and operators may change it")
