"""A real Slurm whose nodes run the scripts of docs/how-to/health-with-slurm.md, as its administrator sees it.

with slurm_site(tmp_path, "--needs-validation") as site:
    site.breaks("b")
    site.until("b", "drained")
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from tests.support.health import only_program
from tests.support.machines import slurm
from tests.support.machines.machines import MachineProcess, Machines
from tests.support.machines.slurm import SlurmCluster, slurm_cluster
from tests.support.platform.running import wait_for

from fireflyer.cluster.core.slurm.fleet import FLEET_FORMAT, REASON_FORMAT, FleetNode, parse_fleet

__all__ = ["OPTIONS", "Site", "slurm_site"]

PAGE: Final = (Path(__file__).parents[3] / "docs" / "how-to" / "health-with-slurm.md").read_text()
OPTIONS: Final = "--state /run/health --spacing 1s --back-off 1s"
"""Machines of tests have a /run of their own, and nothing else that may be written to."""
_TRAIN: Final = """\
#!/bin/sh
hostname >> {directory}/ran
while [ ! -e {directory}/release ]; do sleep 0.1; done
"""
_CHECK: Final = '[ ! -e "{directory}/broken/$(hostname)" ] || {{ echo "GPU 3 is lost"; exit 2; }}; echo "8 GPUs"\n'


def _blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)


def _install(machines: Machines, directory: Path, check_options: str) -> None:
    """The scripts of the page; only paths and how long a probe waits are others."""
    names = re.findall(r"`/etc/slurm/(ff-\w+)`", PAGE)
    assert names == ["ff-check", "ff-prolog", "ff-epilog"]
    for machine in machines.values():
        for name, script in zip(names, _blocks("sh"), strict=True):
            options = f"{OPTIONS} {check_options}" if name == "ff-check" else OPTIONS
            script = script.replace("/opt/fireflyer/bin", os.path.dirname(sys.executable))
            script = script.replace("/etc/fireflyer/gpu.toml", f"{directory}/gpu.toml {options}")
            path = machine.path(f"/etc/slurm/{name}")
            path.write_text(script)
            path.chmod(0o755)


class Site:
    """`directory` is the same on all nodes. Jobs of `train.sh` there run until `release` is there."""

    def __init__(self, machines: Machines, cluster: SlurmCluster, directory: Path) -> None:
        self.machines, self.cluster, self.directory = machines, cluster, directory

    def types(self, *command: str) -> str:
        return self.cluster.controller.run(command, env={"SLURM_TIME_FORMAT": "%s"}, check=True).stdout

    def nodes(self) -> dict[str, FleetNode]:
        asked = ("sinfo", "--noheader", "--all", "--Node")
        return parse_fleet(
            self.types(*asked, f"--format={FLEET_FORMAT}"), self.types(*asked, f"--format={REASON_FORMAT}")
        )

    def breaks(self, node: str) -> None:
        (self.directory / "broken" / node).touch()

    def repairs(self, node: str) -> None:
        (self.directory / "broken" / node).unlink()

    def submits(self, *options: str) -> str:
        """Its number."""
        train = str(self.directory / "train.sh")
        return self.types("sbatch", "--parsable", "--requeue", "--output=/dev/null", *options, train).strip()

    def job(self, number: str) -> list[str]:
        """State and node."""
        return (
            self.types("squeue", "--noheader", "--states=all", f"--jobs={number}", "--format=%T|%N").strip().split("|")
        )

    def until(self, node: str, state: str) -> None:
        asked = ("sinfo", "--noheader", "--partition=test", f"--nodes={node}", "--format=%T")
        wait_for(lambda: self.types(*asked).split() == [state], f"{node} is {state}", limit_s=90, pause_s=0.5)

    def until_job(self, number: str, state: str) -> str:
        wait_for(lambda: self.job(number)[0] == state, f"job {number} is {state}", limit_s=90, pause_s=0.5)
        return self.job(number)[1]

    def runs(self, node: str, *command: str, **variables: str) -> tuple[int, str]:
        done = self.machines[node].run(command, env=variables)
        return done.returncode, done.stdout + done.stderr

    def starts(self, node: str, *command: str) -> MachineProcess:
        """Its outputs are in `said.NODE`."""
        with open(self.directory / f"said.{node}", "a") as said:
            return self.machines[node].start(command, stdout=said, stderr=said)

    def said(self, node: str) -> str:
        """By what `starts` has started there."""
        return (self.directory / f"said.{node}").read_text()


@contextmanager
def slurm_site(directory: Path, check_options: str = "") -> Iterator[Site]:
    """Nodes a, b and c, checked every 10 s with these further options."""
    (directory / "broken").mkdir()
    (directory / "check.sh").write_text(_CHECK.format(directory=directory))
    (directory / "train.sh").write_text(_TRAIN.format(directory=directory))
    (directory / "gpu.toml").write_text(only_program("site_gpus", directory / "check.sh"))
    (lines,) = _blocks("ini")
    assert "HealthCheckInterval=300\n" in lines
    with Machines(["a", "b", "c"], shared=[directory], private=slurm.PRIVATE) as machines:
        _install(machines, directory, check_options)
        lines = lines.replace("Interval=300", "Interval=10").replace("nohold", "batch_sched_delay=0,nohold")
        with slurm_cluster(machines, slurmd_timeout_s=60, lines=lines.splitlines()) as cluster:
            yield Site(machines, cluster, directory)
