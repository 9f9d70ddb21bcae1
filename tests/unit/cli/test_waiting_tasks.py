"""What the commands of the platform say of a task that waits, and of a limit for nobody."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from fireflyer.base.errors import PermissionDenied, Unreachable
from fireflyer.cli.platform.quota import _may_be_known
from fireflyer.cli.platform.submit import _why_it_waits
from fireflyer.cluster.core.platform.views import Why


class Platform:
    """A client of one whose first task waits for this, and whose users are these."""

    def __init__(self, why: Why | None = None, users: tuple[str, ...] | None = ()) -> None:
        self.why, self.users = why, users

    def task(self, task: int) -> Any:
        assert task == 7
        return SimpleNamespace(why=self.why)

    def known_users(self, *, after: str = "") -> tuple[Any, ...]:
        if self.users is None:
            raise PermissionDenied("operators list users")
        return tuple(SimpleNamespace(name=name) for name in self.users if name > after)[:1]


def test_who_submits_a_task_that_waits_is_told_why() -> None:
    client: Any = Platform(Why("needs 99 nodes of default; 4 have what it asks for", before=0))
    assert _why_it_waits(client, 7) == "task 7 waits: needs 99 nodes of default; 4 have what it asks for"


@pytest.mark.parametrize("why", [Why("it is being started"), Why("it can start now", nodes=("n1",), before=0)])
def test_who_submits_a_task_that_starts_is_told_nothing_more(why: Why) -> None:
    client: Any = Platform(why)
    assert _why_it_waits(client, 7) is None


def test_a_task_that_was_submitted_is_not_failed_by_a_platform_that_then_does_not_answer() -> None:
    class Silent:
        def task(self, task: int) -> Any:
            raise Unreachable(f"nothing is known of task {task}")

    client: Any = Silent()
    assert _why_it_waits(client, 7) is None


@pytest.mark.parametrize(
    ("users", "known"), [(("ann", "bob"), True), (("ann", "carl"), False), ((), False), (None, True)]
)
def test_a_limit_is_for_a_user_of_the_platform_as_far_as_one_may_know(
    users: tuple[str, ...] | None, known: bool
) -> None:
    client: Any = Platform(users=users)
    assert _may_be_known(client, "bob") is known
