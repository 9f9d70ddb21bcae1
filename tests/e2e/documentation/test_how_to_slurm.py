"""What docs/how-to/slurm.md says, typed literally, on a real Slurm of two machines."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import msgspec
import pytest
from tests.support.machines import slurm
from tests.support.machines.machines import Machines, needs_machines
from tests.support.machines.slurm import needs_slurm, slurm_cluster
from tests.support.platform.running import wait_for
from tests.support.platform.slurm_desk import SlurmPlatform

from fireflyer.cluster.manager.config import PlatformConfig
from fireflyer.cluster.schema.tasks import TaskState

pytestmark = [needs_machines, needs_slurm, pytest.mark.processes, pytest.mark.slow]

PAGE = Path(__file__).parents[3] / "docs" / "how-to" / "slurm.md"


def test_every_command_does_what_the_page_says(tmp_path: Path) -> None:
    fenced = re.findall(r"^```(\w*)\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    (toml,) = [block for language, block in fenced if language == "toml"]
    use, drain = [block.splitlines() for language, block in fenced if not language]
    said = msgspec.convert(tomllib.loads(toml), PlatformConfig)
    assert said.engine == "slurm"
    machines = Machines(["a", "c"], shared=[tmp_path], private=slurm.PRIVATE)
    with machines, slurm_cluster(machines), SlurmPlatform(machines, tmp_path / "p", options=said.slurm.options) as one:
        work, a = tmp_path / "work", machines["a"]
        work.mkdir()
        (work / "hello.py").write_text("print('hello')\n")
        a.run(["ff", "login", one.url], given=one.token + "\n", check=True)
        wait_for(lambda: set(one.nodes()) == {"a", "c"}, "the manager leads and has asked Slurm")
        shown = [a.run(["sh", "-c", line], cwd=work, check=True).stdout for line in use]
        task = int(re.search(r"\d+", shown[0])[0])  # type: ignore[index]
        assert "first" in shown[1]
        wait_for(lambda: one.task(task).task.state is TaskState.FINISHED, "it ends", limit_s=60)
        assert one.task(task).task.exit_code == 0, one.log()
        a.run(["sh", "-c", drain[0]], cwd=work, check=True)
        wait_for(lambda: one.nodes()["c"].state == "drained", "it is drained")
        a.run(["sh", "-c", drain[1]], cwd=work, check=True)
        wait_for(lambda: one.nodes()["c"].state == "idle", "it is resumed")
