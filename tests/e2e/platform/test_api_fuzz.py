"""The API as its OpenAPI document describes it, and as it does not: no request makes the manager fail."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.errors import Unsatisfiable
from tests.support.platform.manager import ManagerProcess, ScriptedAgent
from tests.support.platform.running import wait_for

pytestmark = [pytest.mark.processes, pytest.mark.slow]

EXAMPLES: Final = 60
"""Of each route."""


@pytest.fixture(scope="module")
def manager(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ManagerProcess]:
    with ManagerProcess(tmp_path_factory.mktemp("fuzz") / "manager") as running:
        wait_for(lambda: running.ask("GET", "/api/v1/health").status == 200, "it leads")
        with ScriptedAgent(running, "gpu-1") as agent:
            agent.sync()
        yield running


def operations(manager: ManagerProcess) -> Iterator[schemathesis.APIOperation[Any, Any, Any, Any]]:
    """All routes but the stream of changes, which does not end."""
    described = schemathesis.openapi.from_url(f"{manager.url}/schema/openapi.json")
    for found in described.get_all_operations():
        operation = found.ok()  # type: ignore[union-attr]
        if not operation.path.endswith("/events"):
            yield operation


@pytest.mark.parametrize("mode", [schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE])
def test_no_request_makes_the_manager_fail(manager: ManagerProcess, mode: schemathesis.GenerationMode) -> None:
    """As an operator, who may do everything; with what the document allows, and with what it does not. 503 is the
    manager's word for "not now", and it says so in JSON."""
    asked: dict[str, int] = {}
    for operation in operations(manager):

        @settings(
            max_examples=EXAMPLES,
            deadline=None,
            derandomize=True,
            database=None,
            phases=[Phase.explicit, Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(case=operation.as_strategy(generation_mode=mode))
        def ask(case: schemathesis.Case[Any]) -> None:
            response = case.call(headers={"Authorization": f"Bearer {manager.tokens['admin']}"})
            asked[case.operation.label] = asked.get(case.operation.label, 0) + 1
            assert response.status_code < 500 or response.status_code == 503, (case, response.text)
            if response.status_code == 503:
                assert response.json()["code"] in ("busy", "transient", "unreachable")

        try:
            ask()
        except Unsatisfiable:
            continue  # nothing is wrong that could be sent to this route
    assert len(asked) > 8, asked


def test_the_manager_still_leads_after_all_that(manager: ManagerProcess) -> None:
    assert manager.ask("GET", "/api/v1/health").status == 200
    assert "unexpected error" not in manager.log()
