"""What docs/how-to/health-checks.md tells administrators to type works."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest
from tests.support.how_to import Shell

from fireflyer.base.health_event import HealthEvent
from fireflyer.validators.core.checks.catalogue import CHECKS
from fireflyer.validators.stress.run import VALIDATORS

TEXT = (Path(__file__).parents[3] / "docs/how-to/health-checks.md").read_text()


def test_the_page_names_each_check_and_validator() -> None:
    assert [check.name for check in CHECKS if f"`{check.name}`" not in TEXT] == []
    assert [name for name in VALIDATORS if f"| `{name}` |" not in TEXT] == []


@pytest.mark.processes
@pytest.mark.slow
def test_the_commands_run(tmp_path: Path) -> None:
    shell = Shell(tmp_path)
    policy, of_site = re.findall(r"```toml\n(.*?)```", TEXT, re.DOTALL)
    (tmp_path / "gpu.toml").write_text(policy)
    (tmp_path / "site.toml").write_text(of_site)
    first, more, with_policy, validate, pairs = re.findall(r"```bash\n(.*?)```", TEXT, re.DOTALL)
    allowed = "[ $? -le 2 ]"  # whatever this machine has
    assert "mounts" in shell.run("bash", "-c", f"{first} {allowed}")
    listed = shell.run("ff", "health", "--list", "--policy", "site.toml")
    assert "\nversions: " in listed, "it is on"
    assert "dpkg-query -W" in listed
    assert "runs   smartctl" in shell.run("bash", "-c", f"{more} {allowed}")
    for line in (tmp_path / "events.jsonl").read_bytes().splitlines():
        msgspec.json.decode(line, type=HealthEvent)
    assert "RAID OK: 2 disks (disks 2)" in shell.run("bash", "-c", f"{with_policy} {allowed}")
    assert "cpu_gemm_flop_per_s" in shell.run("bash", "-c", f"{validate} {allowed}")
    assert shell.run("bash", "-c", pairs).splitlines()[0] == "round 1: n1-n4 n2-n3"
