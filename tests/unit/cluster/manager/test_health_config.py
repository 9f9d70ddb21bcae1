"""The table [health] of a manager's configuration: what it becomes, and what it refuses."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from fireflyer.base.errors import UsageError
from fireflyer.base.units import SECOND
from fireflyer.cluster.core.health.policy import HealthPolicy
from fireflyer.cluster.manager.config import HealthConfig, PlatformConfig


def test_what_is_not_set_is_the_default_of_the_policy_and_nodes_are_not_checked() -> None:
    config = HealthConfig()
    policy = msgspec.structs.replace(config.policy(), probe_limit_ns=HealthPolicy().probe_limit_ns)
    assert (policy, config.order()) == (HealthPolicy(), None)


def test_a_validation_must_pass_before_a_node_returns() -> None:
    config = HealthConfig(program=("fireflyer:health",), validation=("fireflyer:node-check",), required=("mounts",))
    assert config.policy().required == ("mounts", "validation")
    order = config.order()
    assert order is not None
    assert (order.period_ns, order.limit_ns) == (300 * SECOND, 60 * SECOND)


def test_a_probe_has_the_time_of_all_that_it_may_run() -> None:
    config = HealthConfig(timeout_ms=1000, validation_timeout_ms=9000)
    assert config.policy().probe_limit_ns == 20 * SECOND


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"program": ("health",)}, "no absolute path"),
        ({"program": ("/opt/health",), "validation": ("./validate",)}, "health.validation"),
        ({"validation": ("/opt/validate",)}, "needs health.program"),
    ],
)
def test_programs_are_named_so_that_nodes_find_them(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        HealthConfig(**fields)


def test_under_slurm_it_is_refused() -> None:
    with pytest.raises(UsageError, match="HealthCheckProgram"):
        PlatformConfig(
            name="m", cluster="c", store="embedded:/s", directory="/d", secret_file="/s", engine="slurm",
            health=HealthConfig(program=("/opt/health",)),
        )  # fmt: skip
