"""Jobs on machines with two networks and a firewall: on which ports and addresses they listen and meet; and that the
streams of all ranks are kept in one place."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

import pytest
from tests.support.machines.machines import WORK, MachineProcess, Machines, needs_machines
from tests.support.patience import allowed_s

pytestmark = [needs_machines, pytest.mark.processes]

FIRST: Final = 29500
SSH: Final = 22
SCRIPT: Final = """
import ipaddress, json, os, socket, sys
import numpy as np
from fireflyer.collectives import Communicator
from fireflyer.runtime import read_environment
from fireflyer.runtime.port_search import reserve_port

def sockets(state):
    found = []
    for name in ("tcp", "tcp6"):
        for line in open("/proc/net/" + name).readlines()[1:]:
            fields = line.split()
            if fields[3] == state:
                found.append([place(field) for field in fields[1:3]])
    return found

def place(field):
    packed, port = field.split(":")
    words = b"".join(bytes.fromhex(packed[at:at + 8])[::-1] for at in range(0, len(packed), 8))
    return [str(ipaddress.ip_address(words)), int(port, 16)]

env = read_environment()
family = socket.AF_INET6 if ":" in env.master_addr else socket.AF_INET
store = socket.create_server((env.master_addr, env.master_port), family=family) if env.rank == 0 else None
with Communicator.from_environment(env) as comm:
    total = np.ones(1000)
    comm.allreduce(total)
    comm.barrier()
    seen = {
        "sum": total[0], "listening": sorted({one[0][1] for one in sockets("0A")}),
        "connections": [one for one in sockets("01") if one[0][0] != one[1][0]],
        "reserved": reserve_port(env.master_port) is None,
        "place": {name: int(os.environ[name]) for name in ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK",
                  "GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_WORLD_SIZE", "WORLD_SIZE")},
        "environment": {name: value for name, value in os.environ.items() if "SOCKET_IFNAME" in name},
        "master": [env.master_addr, env.master_port], "control": env.control, "node": env.node,
    }
    comm.barrier()
print(json.dumps(seen), flush=True)
print("complaint of", env.rank, file=sys.stderr, flush=True)
"""


class Done(NamedTuple):
    code: int
    out: list[str]
    err: str
    directory: Path
    """Of machine a, where the launcher ran."""

    def seen(self) -> dict[int, dict[str, Any]]:
        """What each rank found."""
        assert self.code == 0, (self.out, self.err)
        logs = self.directory / "run/logs/attempt-0"
        return {
            int(path.stem.removeprefix("rank-")): json.loads(
                next(line for line in path.read_text().splitlines() if line.startswith("{"))
            )
            for path in logs.glob("rank-*.log")
        }


@pytest.fixture(scope="module")
def running() -> Iterator[Machines]:
    with Machines(["a", "b"], nics=2) as machines:
        yield machines


@pytest.fixture
def machines(running: Machines) -> Machines:
    running.reset()
    prepare(running)
    return running


def prepare(machines: Machines) -> None:
    for machine in machines.values():
        machine.path(f"{WORK}/job.py").write_text(SCRIPT)
        secret = machine.path(f"{WORK}/secret")
        secret.write_bytes(bytes(range(32)))
        secret.chmod(0o600)


def start(machines: Machines, name: str, *options: str) -> MachineProcess:
    command = ["ff", "run", "--quiet", *options, "job.py"]
    return machines[name].start(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def done(machines: Machines, process: MachineProcess) -> Done:
    out, error = process.communicate(timeout=allowed_s(90))
    return Done(process.returncode, out.splitlines(), error, machines["a"].path(WORK))


def run(machines: Machines, *options: str) -> Done:
    return done(machines, start(machines, "a", "--run-dir=run", *options))


@pytest.fixture(scope="module")
def two_by_two(running: Machines) -> Done:
    """A job with all of it, three ranks on one machine and one on the other: looked at by the tests of the first
    tier."""
    running.reset()
    prepare(running)
    options = ["--port-range=29500-29511", "--interface=eth1", "--log-dir=kept", "--tee=1", "--redirects=0:2"]
    return run(running, "--hosts=a:3,b:1", "--name=streams", *options)


def test_all_listeners_of_a_job_are_in_its_port_range(two_by_two: Done) -> None:
    seen = two_by_two.seen()
    assert len(seen) == 4
    for one in seen.values():
        ports = set(one["listening"]) - {SSH}
        assert len(ports) >= (3 if one["node"] == 0 else 1), "each rank listens at a port at least"
        assert ports <= set(range(FIRST, FIRST + 12))
    assert seen[0]["master"][1] in seen[0]["listening"]
    assert [seen[rank]["reserved"] for rank in range(4)] == [True, True, True, False], "on the machine of rank 0"


def test_ranks_meet_at_the_addresses_of_the_interface_that_was_chosen(two_by_two: Done) -> None:
    seen = two_by_two.seen()
    master = {tuple(one["master"]) for one in seen.values()}
    assert {host for host, _ in master} == {"10.88.1.1"}
    control = int(seen[0]["control"].rpartition(":")[2])
    for one in seen.values():
        assert one["sum"] == 4
        assert one["environment"] == {"GLOO_SOCKET_IFNAME": "eth1", "NCCL_SOCKET_IFNAME": "=eth1"}
        others = [here for here, there in one["connections"] if not {here[1], there[1]} & {SSH, control}]
        assert others, "leaders have connections between nodes"
        assert {host for host, _ in others} == {f"10.88.1.{one['node'] + 1}"}


def test_ranks_of_several_machines_have_the_variables_of_torchrun(two_by_two: Done) -> None:
    for rank, one in two_by_two.seen().items():
        assert one["place"] == {
            "RANK": rank, "WORLD_SIZE": 4, "ROLE_RANK": rank, "ROLE_WORLD_SIZE": 4, "LOCAL_RANK": rank % 3,
            "LOCAL_WORLD_SIZE": 3 - 2 * (rank // 3), "GROUP_RANK": rank // 3, "GROUP_WORLD_SIZE": 2,
        }  # fmt: skip


def test_streams_of_all_ranks_are_kept_and_shown_as_asked(two_by_two: Done) -> None:
    seen = two_by_two.seen()
    kept = {path.parts[-5:]: path.read_text() for path in (two_by_two.directory / "kept").rglob("*.log")}
    names = {(node, rank, "stdout.log") for node, rank in ((0, "0"), (0, "1"), (0, "2"), (1, "0"))}
    names |= {(node, "0", "stderr.log") for node in (0, 1)}
    found = {(int("_node1" in path[1]), path[3], path[4]) for path in kept}
    assert found == names
    for path, text in kept.items():
        rank = 3 * ("_node1" in path[1]) + int(path[3])
        assert path[1].startswith("streams_")
        assert text == (f"complaint of {rank}\n" if path[4] == "stderr.log" else json.dumps(seen[rank]) + "\n")
    shown = sorted(line.partition(" | ")[2] for line in two_by_two.out if "complaint" in line)
    assert shown == ["complaint of 1", "complaint of 2"], "stderr of local rank 0 is not shown"


BYTES: Final = """
import os, signal, sys
import numpy as np
from fireflyer.base.errors import PeerFailed
from fireflyer.base.units import SECOND
from fireflyer.collectives import Communicator
from fireflyer.runtime import read_environment

def sent(name):
    return int(open(f"/sys/class/net/{name}/statistics/tx_bytes").read())

env = read_environment()
with Communicator.from_environment(env, timeout_ns=2 * SECOND) as comm:
    before = [sent("eth0"), sent("eth1")]
    total = np.ones(1 << 20, np.float32)
    for _ in range(8):
        comm.allreduce(total, op="mean")
    print("address", env.address, "names", os.environ["GLOO_SOCKET_IFNAME"], flush=True)
    print("sent", sent("eth0") - before[0], sent("eth1") - before[1], "mean", total.max(), flush=True)
    while sys.argv[1] == "until-cut":
        try:
            comm.allreduce(total, op="mean")
        except PeerFailed as error:
            print("failed", error, flush=True)
            sys.exit(3)
"""


@pytest.mark.slow
def test_sums_go_over_both_networks_and_the_one_that_fails_is_named_by_its_address(machines: Machines) -> None:
    for machine in machines.values():
        machine.path(f"{WORK}/job.py").write_text(BYTES)
    command = ["ff", "run", "--run-dir=run", "--hosts=a,b", "--interface=eth0,eth1", "job.py", "until-cut"]
    process = machines["a"].start(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    shown: list[str] = []
    while sum(" | sent " in line for line in shown) < 2:
        shown.append(process.stdout.readline())
        assert shown[-1], shown
    machines.cut("b", nic=1)
    out, _ = process.communicate(timeout=allowed_s(60))
    for number, name in enumerate("ab"):
        own = f"10.88.0.{number + 1},10.88.1.{number + 1}"
        assert any(f"rank {number} | address {own} names eth0,eth1" in line for line in shown), (name, shown)
    for line in shown:
        if " | sent " in line:
            words = line.split()
            least = min(int(words[words.index("sent") + 1]), int(words[words.index("sent") + 2]))
            assert least > 8 * (1 << 20), f"each network carries about half of 8 sums of 4 MiB: {line}"
            assert line.rstrip().endswith("mean 1.0")
    failed = [line for line in out.splitlines() if "| failed" in line]
    assert any("from its address 10.88.1." in line and "half-open connection" in line for line in failed), out


@pytest.mark.slow
def test_a_machine_without_one_of_the_networks_is_in_the_table_of_faults(machines: Machines) -> None:
    one = run(machines, "--hosts=a,b", "--interface=eth0,eth7")
    assert one.code == 2
    assert [line.partition("; it has")[0] for line in one.err.splitlines()[:3]] == [
        "HOST  FAULT",
        "a     has no address of --interface eth7",
        "b     has no address of --interface eth7",
    ]


@pytest.mark.slow
def test_two_jobs_on_the_same_machines_share_a_range(machines: Machines) -> None:
    """Just large enough: on machine a two launchers, two ports for the masters, and for each of two ranks its listener
    and one for the time in which the group is made."""
    options = ["--hosts=a,b", "--port-range=29500-29507"]
    both = [start(machines, "a", f"--run-dir=run{number}", *options) for number in (0, 1)]
    for one in [done(machines, process) for process in both]:
        assert one.code == 0, one


@pytest.mark.slow
def test_ports_that_are_not_free_or_not_reached_are_in_the_table_of_faults(machines: Machines) -> None:
    listen = (
        "import socket, time; kept = socket.create_server(('', 29500)); print('listens', flush=True); time.sleep(99)"
    )
    taking = machines["b"].start(["python", "-c", listen], stdout=subprocess.PIPE)
    assert taking.stdout is not None
    assert taking.stdout.readline() == "listens\n"
    ports = ["--port-range=29500-29501", "--control-port=29501", "--control-address=127.0.0.1"]
    one = run(machines, "--hosts=a,b", *ports)
    assert one.code == 2
    free = "has 1 free ports of 29500-29501 (--port-range), and needs"
    mend = "end what listens there, or give a larger range"
    assert one.err.splitlines()[:4] == [
        "HOST  FAULT",
        f"a     {free} 3; {mend}",
        f"b     {free} 2; {mend}",
        "b     does not reach the launcher at 127.0.0.1:29501 (Connection refused); open that port (--control-port "
        "names one), or name this machine's address with --control-address",
    ]
    other = run(machines, "--hosts=b,a", "--master-port=29500")
    assert other.err.splitlines()[:2] == [
        "HOST  FAULT",
        "b     has another process at MASTER_PORT 29500; choose another --master-port, or leave it out",
    ]


@pytest.mark.slow
def test_hosts_are_named_by_ipv6_addresses(machines: Machines) -> None:
    a, b = (machines[name].address6 for name in "ab")
    seen = run(machines, f"--hosts=[{a}],[{b}]").seen()
    assert {one["sum"] for one in seen.values()} == {2}
    assert {one["master"][0] for one in seen.values()} == {a}
    assert {one["control"].rpartition(":")[0] for one in seen.values()} == {f"[{a}]"}


@pytest.mark.slow
def test_machines_that_join_choose_by_subnet_or_each_by_its_interface(machines: Machines) -> None:
    common = ["--nodes=2", f"--rdzv-endpoint=[{machines['a'].address6}]:29505", "--secret-file=secret"]
    joined = start(machines, "b", *common, "--subnet=" + machines["b"].addresses6[1] + "/64", "--interface=eth1")
    seen = run(machines, *common, "--subnet=fd00:0:0:1::/64", "--port-range=29500-29507").seen()
    assert done(machines, joined).code == 0
    assert {one["master"][0] for one in seen.values()} == {machines["a"].addresses6[1]}
    assert {one["sum"] for one in seen.values()} == {2}


@pytest.mark.slow
def test_a_machine_without_the_interface_is_in_the_table_of_faults(machines: Machines) -> None:
    one = run(machines, "--hosts=a,b", "--interface=eth7", "--log-dir=kept", "--tee=3")
    assert one.code == 2
    assert not (one.directory / "kept").exists()
    assert one.err.splitlines()[:3] == [
        "HOST  FAULT",
        f"a     has no address of --interface eth7; it has {_addresses(machines, 'a')}",
        f"b     has no address of --interface eth7; it has {_addresses(machines, 'b')}",
    ]


def _addresses(machines: Machines, name: str) -> str:
    one = machines[name]
    places = [f"{address} (eth{number})" for number, address in enumerate(one.addresses)]
    return ", ".join(places + [f"{address} (eth{number})" for number, address in enumerate(one.addresses6)])
