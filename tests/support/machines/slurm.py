"""A Slurm cluster on machines of `Machines`: `munged` and `slurmd` on each, `slurmctld` on the first one.

    with Machines(["a", "b", "c"], private=slurm.PRIVATE) as machines, slurm_cluster(machines):
        machines["a"].run(["srun", "-N2", "hostname"])

Configuration, state and logs are in private directories, so that commands need no options and nothing of a Slurm that
the host may have is read. Processes of a step are found through their parents (`proctrack/linuxproc`): a container has
no control groups to give away.
"""

from __future__ import annotations

import functools
import os
import secrets
import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import pytest
from tests.support.machines.machines import Machine, MachineProcess, Machines
from tests.support.patience import allowed_s

__all__ = ["PRIVATE", "SlurmCluster", "missing", "needs_slurm", "slurm_cluster"]

PRIVATE: Final = ("/etc/slurm",)
"""To be given to `Machines`."""
START_S: Final = 60.0
_TOOLS: Final = ("munged", "slurmctld", "slurmd", "srun", "salloc", "sbatch", "sinfo")
_CONFIGURATION: Final = "/etc/slurm/slurm.conf"
_STATE: Final = "/run/slurm"
_MUNGE: Final = "/run/munge"
_POLL_S: Final = 0.2
GRACE_S: Final = 60
"""Jobs of the partition "polite" have this long after Slurm's signal when it preempts them."""
JOBCOMP: Final = f"{_STATE}/jobcomp.log"
"""On the first machine."""


@functools.cache
def missing() -> str:
    """Which programs of Slurm there are not; empty where there are all."""
    path = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin"
    lacking = [name for name in _TOOLS if shutil.which(name, path=path) is None]
    return f"no Slurm: {', '.join(lacking)} not found (`make test-slow` installs the packages)" if lacking else ""


_MISSING: Final = missing()
needs_slurm: Final = pytest.mark.skipif(bool(_MISSING), reason=_MISSING)


class SlurmCluster:
    """A cluster that runs."""

    def __init__(self, machines: Machines) -> None:
        self._machines = machines
        self.controller = next(iter(machines.values()))
        """Runs `slurmctld`."""
        self.daemons: dict[str, MachineProcess] = {}
        """`slurmd` by machine."""

    def node_states(self) -> dict[str, str]:
        """As `sinfo` says them: "idle", "allocated", "down*", ... Empty while the controller does not answer."""
        done = self.controller.run(["sinfo", "--noheader", "--Node", "--format=%N %T"])
        return {} if done.returncode else dict(line.split() for line in done.stdout.splitlines())

    def wait_for_states(self, wanted: Mapping[str, str], limit_s: float = START_S) -> None:
        """Until nodes have these states. Raises `TimeoutError` with the states and the last lines of the logs."""
        deadline_s = time.monotonic() + allowed_s(limit_s)
        while not wanted.items() <= (states := self.node_states()).items():
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"nodes {states}, wanted {dict(wanted)}\n{self.logs()}")
            time.sleep(_POLL_S)

    def start_controller(self) -> None:
        self.controller.start(["slurmctld", "-D"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def stop_controller(self) -> None:
        for pid, argv in self.controller.processes():
            if argv[:1] == ["slurmctld"]:
                self.controller.kill(pid)

    @property
    def state(self) -> Path:
        """Directory where `slurmctld` keeps what it knows of jobs. It writes every 5 seconds: when it is killed it has
        lost the last ones, and gives their numbers again."""
        return self.controller.path(f"{_STATE}/controller")

    def wait_for_saved(self, job: str) -> None:
        """Until what it knows of the job now is in `state`. Raises `TimeoutError`."""
        began_ns, deadline_s = time.time_ns(), time.monotonic() + allowed_s(START_S)
        self.controller.run(["scontrol", "update", f"JobId={job}", "Comment=saved"], check=True)
        file = self.state / "job_state"
        while not file.exists() or file.stat().st_mtime_ns < began_ns:
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"job {job} was not saved\n{self.logs()}")
            time.sleep(_POLL_S)

    def start_daemon(self, machine: Machine) -> None:
        """Its `slurmd`, at first or after it was killed."""
        self.daemons[machine.name] = machine.start(
            ["slurmd", "-D", "-N", machine.name], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )

    def logs(self, last_bytes: int = 2000) -> str:
        """Of all daemons."""
        files = [(name, file) for name, one in self._machines.items() for file in one.path(_STATE).glob("*.log")]
        return "\n".join(
            f"{name} {file.name}:\n{file.read_text(errors='replace')[-last_bytes:]}" for name, file in files
        )


@contextmanager
def slurm_cluster(
    machines: Machines, *, cpus: int = 4, slurmd_timeout_s: int = 300, lines: Sequence[str] = ()
) -> Iterator[SlurmCluster]:
    """All nodes are idle when it begins. Each has `cpus`, whatever the host has; a node whose `slurmd` does not answer
    for `slurmd_timeout_s` is down. `lines` of the configuration replace those of the same name. At the end daemons are
    killed; what jobs have left is for `Machines.reset`. Raises `ValueError` for machines that were made without
    `PRIVATE`."""
    if not all(os.path.ismount(machine.path(path)) for machine in machines.values() for path in PRIVATE):
        raise ValueError("a Slurm cluster needs machines that were made with private=slurm.PRIVATE")
    configuration, key = _configuration(list(machines), cpus, slurmd_timeout_s, lines), secrets.token_bytes(128)
    cluster = SlurmCluster(machines)
    try:
        for machine in machines.values():
            machine.path(_CONFIGURATION).write_text(configuration)
            machine.run(["mkdir", "-p", f"{_STATE}/controller", f"{_STATE}/node"], check=True)
            _start_munged(machine, key)
        cluster.start_controller()
        for machine in machines.values():
            cluster.start_daemon(machine)
        cluster.wait_for_states(dict.fromkeys(machines, "idle"))
        yield cluster
    finally:
        for machine in machines.values():
            _kill_daemons(machine)


def _start_munged(machine: Machine, key: bytes) -> None:
    """It goes to the background when it serves. As another user than root, as its package has it."""
    machine.run(["install", "-d", "-o", "munge", "-g", "munge", "-m", "755", _MUNGE], check=True)
    machine.path(f"{_MUNGE}/key").write_bytes(key)
    machine.run(["sh", "-ec", f"chown munge:munge {_MUNGE}/key; chmod 600 {_MUNGE}/key"], check=True)
    files = {"key-file": "key", "log-file": "log", "pid-file": "pid", "seed-file": "seed"}
    options = [f"--{option}={_MUNGE}/{file}" for option, file in files.items()]
    user = ["setpriv", "--reuid=munge", "--regid=munge", "--clear-groups"]
    machine.run([*user, "munged", *options], check=True)


def _configuration(names: list[str], cpus: int, slurmd_timeout_s: int, lines: Sequence[str]) -> str:
    every = f"Nodes={','.join(names)} MaxTime=INFINITE State=UP"
    replaced = {line.partition("=")[0] for line in lines}
    own = [line for line in _own_lines(names, every, cpus, slurmd_timeout_s) if line.partition("=")[0] not in replaced]
    return "\n".join([*own, *lines, ""])


def _own_lines(names: list[str], every: str, cpus: int, slurmd_timeout_s: int) -> list[str]:
    return [
        "ClusterName=test",
        f"SlurmctldHost={names[0]}",
        "SlurmUser=root",
        "SlurmdUser=root",
        "AuthType=auth/munge",
        "ProctrackType=proctrack/linuxproc",
        "TaskPlugin=task/none",
        "SelectType=select/cons_tres",
        "SelectTypeParameters=CR_CPU",
        "SlurmdParameters=config_overrides",
        "SchedulerParameters=batch_sched_delay=0,sched_interval=5",
        "MpiDefault=none",
        "ReturnToService=2",
        f"SlurmdTimeout={slurmd_timeout_s}",
        "KillWait=5",
        "UnkillableStepTimeout=60",
        "JobCompType=jobcomp/filetxt",
        f"JobCompLoc={JOBCOMP}",
        f"StateSaveLocation={_STATE}/controller",
        f"SlurmdSpoolDir={_STATE}/node",
        f"SlurmctldPidFile={_STATE}/slurmctld.pid",
        f"SlurmdPidFile={_STATE}/slurmd.pid",
        f"SlurmctldLogFile={_STATE}/slurmctld.log",
        f"SlurmdLogFile={_STATE}/slurmd.log",
        f"NodeName={','.join(names)} CPUs={cpus} State=UNKNOWN",
        "PreemptType=preempt/partition_prio",
        "PreemptMode=REQUEUE",
        f"PartitionName=test {every} Default=YES PriorityTier=1",
        f"PartitionName=polite {every} PriorityTier=1 GraceTime={GRACE_S}",
        "SlurmctldParameters=preempt_send_user_signal",
        f"PartitionName=urgent {every} PriorityTier=2",
    ]


def _kill_daemons(machine: Machine) -> None:
    for pid, argv in machine.processes():
        if argv and argv[0].rpartition("/")[2] in ("munged", "slurmctld", "slurmd"):
            try:
                machine.kill(pid)
            except ProcessLookupError:
                pass
