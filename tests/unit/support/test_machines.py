"""The harness of several machines: what each has for itself, what they share, how links fail, what is left."""

from __future__ import annotations

import contextlib
import errno
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from ipaddress import IPv6Address
from pathlib import Path
from typing import Final, TypeVar

import pytest
from tests.support.machines.machines import USER, WORK, Machine, Machines, needs_machines
from tests.support.machines.plan import link_local
from tests.support.network.namespaces import enter_namespace
from tests.support.patience import allowed_s

pytestmark = [needs_machines, pytest.mark.processes]
Result = TypeVar("Result")
SSH: Final = ("ssh", "-o", "BatchMode=yes")
END_S: Final = 30.0


@pytest.fixture(scope="module")
def shared(module_path: Path) -> Path:
    return module_path


@pytest.fixture(scope="module")
def running(shared: Path) -> Iterator[Machines]:
    with Machines(["a", "b", "c"], shared=[shared], nics=2) as machines:
        yield machines


@pytest.fixture
def machines(running: Machines) -> Iterator[Machines]:
    """For tests that change them."""
    yield running
    running.reset()


def shell(machine: Machine, script: str, *, user: str = "root") -> str:
    return machine.run(["sh", "-ec", script], user=user, check=True).stdout


def in_network(machine: Machine, call: Callable[[], Result]) -> Result:
    """Sockets that `call` makes are those of the machine."""
    results: list[Result] = []

    def enter() -> None:
        enter_namespace(f"/proc/{machine.first}/ns/net")
        results.append(call())

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    return results[0]


def listening(machine: Machine) -> socket.socket:
    return in_network(machine, lambda: socket.create_server((machine.address, 0)))


def begin_to_connect(machine: Machine, address: tuple[str, int]) -> socket.socket:
    def call() -> socket.socket:
        sock = socket.socket()
        sock.setblocking(False)
        assert sock.connect_ex(address) == errno.EINPROGRESS
        return sock

    return in_network(machine, call)


def next_peer(server: socket.socket) -> str:
    server.settimeout(allowed_s(END_S))
    accepted, (address, _) = server.accept()
    accepted.close()
    return str(address)


def wait_for_lost_packet(sock: socket.socket) -> None:
    """Until TCP has sent something again; nobody has told it anything meanwhile, and nothing has come."""
    deadline_s = time.monotonic() + allowed_s(END_S)
    while sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 8)[2] == 0:
        assert time.monotonic() < deadline_s, "nothing was sent again"
        assert select.select([sock], [], [sock], 0.02)[0] == []
    assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == 0


def namespaces_of(pid: int) -> set[str]:
    return {os.readlink(f"/proc/{pid}/ns/{kind}") for kind in ("net", "mnt", "pid", "ipc", "uts")}


def processes_in(namespaces: set[str]) -> list[int]:
    """A pidfd of each process that is in one of them."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError):  # it has ended
                if namespaces_of(int(name)) & namespaces:
                    found.append(os.pidfd_open(int(name)))
    return found


def test_each_machine_has_a_hostname_identity_and_directories_of_its_own(running: Machines, shared: Path) -> None:
    directories = ["/tmp", "/dev/shm", "/run", "/var/tmp", "/root", "/home", WORK]
    identities = ["/etc/hostname", "/etc/machine-id", "/proc/sys/kernel/random/boot_id", "/proc/sys/kernel/hostname"]
    seen: dict[str, set[str]] = {path: {Path(path).read_text()} for path in identities if os.path.exists(path)}
    for name, machine in running.items():
        for path, values in seen.items():
            values.add(shell(machine, f"cat {path}"))
        shell(machine, "; ".join(f"test ! -e {place}/mark; echo {name} > {place}/mark" for place in directories))
        assert machine.path(f"{WORK}/mark").read_text() == shell(machine, "hostname") == f"{name}\n"
    assert {path: len(values) for path, values in seen.items()} == dict.fromkeys(seen, 4)
    assert not any(os.path.exists(f"{place}/mark") for place in directories)


def test_the_rest_of_the_host_cannot_be_written_and_python_is_there(running: Machines) -> None:
    shell(running["a"], "for place in / /usr /etc /var/log $(dirname $(which python)); do test ! -w $place; done")
    shell(running["a"], "python -c 'import fireflyer.base'", user=USER)


def test_a_shared_directory_is_the_same_everywhere(running: Machines, shared: Path) -> None:
    shell(running["a"], f"echo of a > {shared}/written")
    assert shell(running["c"], f"cat {shared}/written") == (shared / "written").read_text() == "of a\n"


def test_names_resolve_to_addresses_on_both_networks(running: Machines) -> None:
    b = running["b"]
    program = "import socket; print(*sorted({one[4][0] for n in ('b', 'b-eth1') for one in socket.getaddrinfo(n, 1)}))"
    found = running["a"].run(["python", "-c", program], check=True).stdout.split()
    assert found == sorted([*b.addresses, *b.addresses6])
    assert (b.addresses[0], b.addresses6[0]) == (b.address, b.address6)


@pytest.mark.parametrize("user", ["root", USER])
def test_ssh_needs_no_password_and_no_question(running: Machines, user: str) -> None:
    done = running["a"].run([*SSH, "b", "hostname; whoami; pwd; cat"], user=user, given="passed on", check=True)
    home = "/root" if user == "root" else f"/home/{USER}"
    assert done.stdout.split("\n") == ["b", user, home, "passed on"]
    assert done.stderr == ""


def test_ssh_takes_keys_only(running: Machines) -> None:
    options = ["-o", "PubkeyAuthentication=no", "-o", "NumberOfPasswordPrompts=0"]
    done = running["a"].run(["ssh", *options, running["b"].addresses6[1], "true"])
    assert done.returncode == 255
    assert done.stderr.strip().endswith("Permission denied (publickey).")


def test_a_machine_sees_its_own_processes_only(machines: Machines) -> None:
    process = machines["a"].start(["sleep", "1000"])
    assert machines["a"].processes() == [(process.pid_inside, ["sleep", "1000"])]
    assert machines["b"].processes() == []
    assert "1000" not in shell(machines["b"], "cat /proc/*/cmdline | tr '\\0' ' '")
    machines["a"].kill(process.pid_inside, signal.SIGTERM)
    assert process.wait(allowed_s(END_S)) == -signal.SIGTERM
    with pytest.raises(ProcessLookupError, match="machine a"):
        machines["a"].kill(process.pid_inside)


def test_signals_and_exit_codes_are_those_of_the_command(machines: Machines) -> None:
    script = "trap 'echo caught; exit 7' USR1; echo ready; while :; do sleep 1000 & wait $!; done"
    process = machines["a"].start(["bash", "-c", script], stdout=subprocess.PIPE, user=USER)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGUSR1)
    assert process.stdout.readline() == "caught\n"
    assert process.wait(allowed_s(END_S)) == 7
    killed = machines["a"].start(["sleep", "1000"])
    inside = machines["a"].path(f"/proc/{killed.pid_inside}")
    killed.kill()
    killed.wait()
    while inside.exists() and "(zombie)" not in (inside / "status").read_text():
        select.select([], [], [], 0.01)
    with pytest.raises(FileNotFoundError, match="no-such-program on machine b"):
        machines["b"].start(["no-such-program"])


def test_a_machine_that_is_cut_off_is_silent_and_goes_on_when_it_is_healed(machines: Machines) -> None:
    a, b, _ = machines.values()
    with listening(b) as server, begin_to_connect(a, server.getsockname()) as open_connection:
        accepted, _ = server.accept()
        with accepted:
            machines.cut("b")
            open_connection.send(b"late")
            with begin_to_connect(a, server.getsockname()) as new_connection:
                wait_for_lost_packet(open_connection)
                wait_for_lost_packet(new_connection)
                machines.heal("b")
                assert accepted.recv(4) == b"late"
                assert select.select([], [new_connection], [], allowed_s(END_S))[1] == [new_connection]
                assert new_connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == 0


def test_only_the_link_between_two_machines_is_cut_and_a_reset_heals_it(machines: Machines) -> None:
    a, b, c = machines.values()
    own_addresses = Path(f"/proc/{b.first}/net/if_inet6").read_text()
    assert IPv6Address(link_local(2, 0)).packed.hex() in own_addresses  # which the cut has to know
    machines.cut("b", from_="a")
    with (
        listening(b) as server,
        begin_to_connect(a, server.getsockname()) as from_a,
        begin_to_connect(c, server.getsockname()),
    ):
        assert next_peer(server) == c.address
        wait_for_lost_packet(from_a)
        machines.reset()
        assert next_peer(server) == a.address


def test_one_network_is_cut_and_the_other_goes_on(machines: Machines) -> None:
    machines.cut("b", nic=0)
    done = machines["a"].run([*SSH, "-o", "ConnectTimeout=30", "b-eth1", "hostname"], check=True)
    assert done.stdout == "b\n"


def test_a_reset_leaves_what_was_there_at_the_start(machines: Machines, shared: Path) -> None:
    a = machines["a"]
    before = shell(a, "find / -xdev | sort; wc -l < /proc/self/mountinfo; cat /root/.ssh/*")
    (shared / "kept").touch()
    shell(a, f"mkdir -p {WORK}/x/y /dev/shm/z; touch {WORK}/x/y/z /tmp/.z; mount -t tmpfs none {WORK}/x; ipcmk -Q")
    shell(a, "rm -r /root/.ssh; kill $(cat /run/sshd.pid); setsid -f sleep 1000 > /dev/null 2>&1")
    machines.reset()
    assert a.processes() == []
    assert shell(a, "find / -xdev | sort; wc -l < /proc/self/mountinfo; cat /root/.ssh/*") == before
    assert shell(a, "ipcs -q | grep -c 0x || true") == "0\n"
    assert (shared / "kept").exists()
    assert machines["b"].run([*SSH, "a", "hostname"], check=True).stdout == "a\n"


OWNER: Final = """
import sys
from tests.support.machines.machines import Machines
with Machines(["a", "b"]) as machines:
    process = machines["a"].start(["sleep", "1000"])
    print(*(one.first for one in machines.values()), machines.supervisor, flush=True)
    sys.stdin.read()
"""


@pytest.mark.parametrize("victim", ["its owner", "unshare", "the supervisor"])
def test_nothing_is_left_when_a_process_that_the_machines_need_is_killed(victim: str) -> None:
    mounts = mounts_of_machines()
    command = [sys.executable, "-c", OWNER]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        *firsts, supervisor = (int(word) for word in owner.stdout.readline().split())
        unshare = parent_of(supervisor)
        used = set().union(*(namespaces_of(pid) for pid in (*firsts, supervisor))) - namespaces_of(os.getpid())
        assert len(used) == 5 * 3
        theirs = processes_in(used)
        assert len(theirs) >= 10  # unshare, supervisor, entry and sleep; of each machine two of ours and sshd
        os.kill({"its owner": owner.pid, "unshare": unshare, "the supervisor": supervisor}[victim], signal.SIGKILL)
        for fd in theirs:
            assert select.select([fd], [], [], allowed_s(END_S))[0] == [fd], "a process is left"
            os.close(fd)
        owner.kill()
    assert mounts_of_machines() <= mounts
    assert not {"lan0", "m1n0", "m2n0"} & set(os.listdir("/sys/class/net"))


def mounts_of_machines() -> set[str]:
    """Here: of files, and of namespaces that would be kept by them."""
    lines = Path("/proc/self/mountinfo").read_text().splitlines()
    return {line for line in lines if " /srv " in line or " - nsfs " in line}


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


@pytest.mark.parametrize(
    ("names", "message"),
    [([], "different names"), (["a", "a"], "different names"), (["a b"], "letters"), (["-a"], "letters")],
)
def test_names_that_hosts_cannot_have_are_refused(names: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Machines(names)


def test_what_is_shared_exists() -> None:
    with pytest.raises(ValueError, match="must exist"):
        Machines(["a"], shared=["/no/such/directory"])


def test_a_machine_that_does_not_start_says_why() -> None:
    with pytest.raises(RuntimeError, match=r"machine a: .*sshd did not start; it wrote: .*sshd_config"):
        Machines(["a"], private=["/etc"]).__enter__()
