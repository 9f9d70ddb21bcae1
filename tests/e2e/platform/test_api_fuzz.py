"""The API as its OpenAPI document describes it, and as it does not: no request makes the manager fail."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, Final, Self

import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from tests.support.patience import allowed_s
from tests.support.platform.manager import ManagerProcess, ScriptedAgent
from tests.support.platform.running import wait_for

pytestmark = [pytest.mark.processes, pytest.mark.slow]

EXAMPLES: Final = 16
"""Of each route."""
EXAMPLES_OF: Final = {"POST /api/v1/tasks": 5}
"""Lists of specifications take seconds to make up; `POST /tasks/test` gets one of the same kind at a time."""
LOG_IN: Final = "POST /api/v1/session"
"""Refuses every token that is made up; no other route refuses the users' own."""
USER_EVERY: Final = 3
"""One example in so many is sent by an ordinary user, too."""
Operation = schemathesis.APIOperation[Any, Any, Any, Any]


@pytest.fixture(scope="module")
def manager(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ManagerProcess]:
    with ManagerProcess(tmp_path_factory.mktemp("fuzz") / "manager") as running:
        wait_for(lambda: running.ask("GET", "/api/v1/health").status == 200, "it leads")
        with ScriptedAgent(running, "gpu-1") as agent, running.client("admin") as admin:
            agent.appear(admin)
        yield running


@pytest.fixture(scope="module")
def operations(manager: ManagerProcess) -> list[Operation]:
    described = schemathesis.openapi.from_url(f"{manager.url}/schema/openapi.json")
    return [found.ok() for found in described.get_all_operations()]  # type: ignore[union-attr]


class Sender:
    """Sends what was made up, and keeps who has asked which route."""

    def __init__(self, manager: ManagerProcess) -> None:
        self._manager = manager
        self._session = requests.Session()
        self.asked: dict[str, set[str]] = {"admin": set(), "ada": set()}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._session.close()

    def send(self, case: schemathesis.Case[Any], user: str) -> None:
        """503 is the manager's word for "not now", and it says so in JSON. Streams are left once they have begun."""
        token = {"Authorization": f"Bearer {self._manager.tokens[user]}"}
        request = case.as_transport_kwargs(base_url=self._manager.url, headers=token)
        self._session.cookies.clear()
        with self._session.request(**request, stream=True, timeout=allowed_s(30)) as response:
            if response.status_code != 401 or case.operation.label == LOG_IN:
                self.asked[user].add(case.operation.label)
            if response.headers.get("content-type", "").startswith("text/event-stream"):
                return
            assert response.status_code < 500 or response.status_code == 503, (user, case, response.text)
            if response.status_code == 503:
                assert response.json()["code"] in ("busy", "transient", "unreachable")
            assert response.content is not None  # read, so that the connection is used again


@pytest.mark.parametrize("mode", [schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE])
def test_no_request_makes_the_manager_fail(
    manager: ManagerProcess, operations: list[Operation], mode: schemathesis.GenerationMode
) -> None:
    """From an administrator, who may do everything, and an ordinary user; with what the document allows, and with what
    it does not."""
    with Sender(manager) as sender:
        for operation in operations:
            send_examples(operation, mode, sender)
    every = {operation.label for operation in operations}
    never = {user: sorted(every - asked) for user, asked in sender.asked.items()}
    assert not any(never.values()), f"routes that were never asked: {never}"


def send_examples(operation: Operation, mode: schemathesis.GenerationMode, sender: Sender) -> None:
    turn = itertools.cycle(range(USER_EVERY))

    @settings(
        max_examples=EXAMPLES_OF.get(operation.label, EXAMPLES),
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(generation_mode=mode))
    def ask(case: schemathesis.Case[Any]) -> None:
        if next(turn) == 0:
            sender.send(case, "ada")
        sender.send(case, "admin")

    ask()


def test_the_manager_still_leads_after_all_that(manager: ManagerProcess) -> None:
    assert manager.ask("GET", "/api/v1/health").status == 200
    assert "unexpected error" not in manager.log()
