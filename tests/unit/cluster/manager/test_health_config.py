"""The table [health] of a manager's configuration: what it becomes, and what it refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from fireflyer.base.errors import UsageError
from fireflyer.base.units import SECOND
from fireflyer.cli.fs.processes import read_config
from fireflyer.cluster.core.health.policy import HealthPolicy
from fireflyer.cluster.core.platform.node_checking import Checks, NodeChecking
from fireflyer.cluster.manager.config import GroupHealth, HealthConfig, PlatformConfig
from fireflyer.cluster.manager.health_reload import HealthReload


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


def test_groups_of_nodes_have_their_own_program_validation_and_required_checks() -> None:
    config = HealthConfig(
        program=("fireflyer:health",),
        validation=("fireflyer:validate", "--time", "1m"),
        required=("mounts",),
        groups=("cpu",),
        by_group={
            "gpu": GroupHealth(
                program=("fireflyer:health", "--policy", "/etc/fireflyer/health/gpu.toml"),
                required=("gpu_count",),
                validation_timeout_ms=1_200_000,
            ),
            "old": GroupHealth(validation=()),
            "lab": GroupHealth(program=()),
        },
    )
    checking, policy = NodeChecking(config.checks()), config.policy()
    orders = {group: checking.order_of(group) for group in ("cpu", "gpu", "old", "lab", "others")}
    assert {group for group, order in orders.items() if order is None} == {"lab", "others"}
    cpu, gpu, old = orders["cpu"], orders["gpu"], orders["old"]
    assert cpu is not None
    assert gpu is not None
    assert old is not None
    assert gpu.program == ("fireflyer:health", "--policy", "/etc/fireflyer/health/gpu.toml")
    assert gpu.follow == gpu.program
    assert (gpu.validation, gpu.validation_limit_ns) == (cpu.validation, 1200 * SECOND)
    assert old.validation == ()
    assert policy.required_of("gpu") == ("gpu_count", "validation")
    assert policy.required_of("old") == ("mounts",)
    assert policy.required_of("cpu") == policy.required_of("others") == ("mounts", "validation")
    assert policy.probe_limit_ns == 2 * (60 + 1200) * SECOND
    assert checking.now.any_node()


def test_nodes_of_one_group_alone_may_be_checked() -> None:
    checking = NodeChecking(HealthConfig(by_group={"gpu": GroupHealth(program=("fireflyer:health",))}).checks())
    assert checking.order_of("cpu") is None
    assert checking.order_of("gpu") is not None
    assert checking.now.any_node()
    assert not NodeChecking(HealthConfig(by_group={"gpu": GroupHealth(period_ms=1000)}).checks()).now.any_node()


def test_what_is_wrong_for_a_group_names_it() -> None:
    with pytest.raises(UsageError, match=r"health\.by_group\.gpu: health\.program: 'health' is no absolute path"):
        HealthConfig(program=("/opt/health",), by_group={"gpu": GroupHealth(program=("health",))})


def test_under_slurm_it_is_refused() -> None:
    with pytest.raises(UsageError, match="HealthCheckProgram"):
        PlatformConfig(
            name="m", cluster="c", store="embedded:/s", directory="/d", secret_file="/s", engine="slurm",
            health=HealthConfig(program=("/opt/health",)),
        )  # fmt: skip


FILE = 'name = "m"\ncluster = "c"\nstore = "embedded:/s"\ndirectory = "/d"\nsecret_file = "/s"\n'


def test_what_changes_in_its_table_is_applied_and_a_wrong_file_changes_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "platform.toml"

    def read(where: str) -> PlatformConfig:
        return read_config(where, PlatformConfig)

    def said(text: str, *, asked: bool = False) -> tuple[Checks | None, list[str]]:
        caplog.clear()
        path.write_text(f"{FILE}{text}")
        return reload.look(asked=asked), [record.getMessage() for record in caplog.records]

    path.write_text(FILE)
    reload = HealthReload(str(path), read, read(str(path)))
    caplog.set_level("INFO")
    assert reload.look() is None
    checks, _ = said('[health]\nprogram = ["fireflyer:health"]\nversion = 2\ngroups = ["gpu"]\n')
    assert checks is not None
    assert (checks.policy.version, checks.order is not None, checks.groups) == (2, True, ("gpu",))
    checks, lines = said('[health]\nprogram = ["health"]\n')
    assert (checks, len(lines)) == (None, 1)
    assert "no absolute path" in lines[0]
    assert "\n" not in lines[0]
    checks, lines = said('lease_ms = 5000\n[health]\nprogram = ["/opt/health"]\n')
    assert checks is not None
    assert "only [health]" in lines[0]
    assert said('[health]\nprogram = ["/opt/health"]\n', asked=True) == (None, [])
    path.unlink()
    assert reload.look() is None


def test_what_was_written_since_the_manager_has_read_its_file_is_found(tmp_path: Path) -> None:
    path = tmp_path / "platform.toml"
    path.write_text(FILE)
    config = read_config(str(path), PlatformConfig)
    path.write_text(f"{FILE}[health]\nversion = 2\n")
    reload = HealthReload(str(path), lambda where: read_config(where, PlatformConfig), config)
    checks = reload.look()
    assert checks is not None
    assert checks.policy.version == 2


def test_ports_that_were_found_for_port_0_are_no_change(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "platform.toml"
    any_port = 'listen = "127.0.0.1:0"\nlisten_agents = "127.0.0.1:0"\n'
    found = 'listen = "127.0.0.1:7"\nlisten_agents = "127.0.0.1:8"\n'
    path.write_text(f"{FILE}{any_port}")
    reload = HealthReload(
        str(path),
        lambda where: read_config(where, PlatformConfig),
        read_config(str(path), PlatformConfig),
    )
    path.write_text(f"{FILE}{found}[health]\nversion = 2\n")
    assert reload.look() is not None
    assert [record for record in caplog.records if record.levelname == "WARNING"] == []
