"""Hosts of their own on one machine: network namespaces, joined by bridges, with links as slow as a test wants them.

    with network_of(3, rate_bits_per_s=100e6) as network:
        subprocess.run(network.hosts[0].command(["ping", "-c1", network.hosts[1].address]))

A namespace has no name: a child process holds it (`unshare -n`, then `cat` on a pipe from here), and it ends with the
last process in it. So nothing is left behind, whatever kills the test: the pipe's end ends the holder, and every
command that `command` wraps is killed by the kernel when its parent dies.

Two kinds of network, with the same interface name, addresses and control address (where a test serves its store):

- `network_of`: pairs of virtual cables to one bridge for each zone; a token bucket (`tc tbf`) at both ends of each
  cable and of the link between two zones. Large packets stay whole, as with the offloads of a real card.
- `delayed_network_of`: a switch of ours in user space (`tests.support.network.delaying_switch`) that delivers every
  frame some time later; for latency, not for bandwidth. The kernels of build machines have no `netem`.
"""

from __future__ import annotations

import ctypes
import functools
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final, NamedTuple

__all__ = ["INTERFACE", "Host", "Network", "delayed_network_of", "enter_namespace", "missing", "network_of"]

INTERFACE: Final = "eth0"
CONTROL_ADDRESS: Final = "10.77.0.254"
MOST_HOSTS: Final = 64
BURST_BYTES: Final = 128 * 1024
"""Of a token bucket: more than the largest packet, so that none must be cut up, and a few milliseconds at most."""
QUEUE_MS: Final = 50
"""What a token bucket keeps waiting before it drops."""
_CLONE_NEWNET: Final = 0x40000000
_REPOSITORY: Final = Path(__file__).parents[3]
_SETTINGS: Final = (
    "echo reno > /proc/sys/net/ipv4/tcp_congestion_control",
    "test ! -e /proc/sys/net/ipv6/conf/all/disable_ipv6 || echo 1 > /proc/sys/net/ipv6/conf/all/disable_ipv6",
    "ip link set lo up",
)
"""A congestion control that every kernel has and allows here, and no traffic of IPv6 beside what is measured."""


class Host(NamedTuple):
    """A network namespace."""

    number: int
    address: str
    holder: int
    """The process that holds it."""

    @property
    def namespace(self) -> str:
        return f"/proc/{self.holder}/ns/net"

    def command(self, words: Sequence[str]) -> list[str]:
        """The same command, to be run there by this process; it is killed when the thread that starts it
        ends (but not what it starts itself)."""
        started_by = 'test "$PPID" = "$0" && exec "$@"'  # or the parent has died before the signal was asked for
        shell = ["sh", "-c", started_by, str(os.getpid())]
        return ["nsenter", f"--net={self.namespace}", "setpriv", "--pdeathsig", "KILL", *shell, *words]

    def run(self, *script: str) -> str:
        """What the lines of a shell say. Raises `RuntimeError` with what they complain about."""
        lines = "\n".join(["set -e", *script])
        done = subprocess.run(self.command(["sh", "-c", lines]), capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise RuntimeError(f"{done.stderr.strip() or done.stdout.strip()} (in: {'; '.join(script)})")
        return done.stdout


class Network:
    """`hosts` with addresses of one subnet; `control` is where their bridges are."""

    def __init__(self, hosts: Sequence[Host], control: Host, change_rate: Callable[[Host, float], None]) -> None:
        self.hosts = tuple(hosts)
        self.control = control
        self._change_rate = change_rate

    def cut(self, host: Host) -> None:
        """From now on nothing arrives at a host or leaves it, and nobody is told: its cable stays plugged in."""
        self.control.run(f"bridge link set dev {_port(host)} state 0")

    def slow_down(self, host: Host, rate_bits_per_s: float) -> None:
        """Its link, in both directions."""
        self._change_rate(host, rate_bits_per_s)

    def bytes_between_zones(self) -> tuple[int, int]:
        """How many have crossed the link between the two zones, in each direction, headers included."""
        links = json.loads(self.control.run("ip -s -j link show dev thin0"))
        stats = links[0]["stats64"]
        return stats["tx"]["bytes"], stats["rx"]["bytes"]


@functools.cache
def missing() -> str:
    """Why there can be no networks here, in a line; empty where there can be."""
    tools = [name for name in ("ip", "tc", "bridge", "unshare", "nsenter", "setpriv") if _tool(name) is None]
    if tools:
        return f"no network namespaces: {', '.join(tools)} not found (packages iproute2 and util-linux)"
    tries = [
        "ip link add ffa type veth peer name ffb",
        "ip link add ffc type bridge",
        f"tc qdisc add dev ffa root {_bucket(1e9)}",
    ]
    command = ["unshare", "-n", "sh", "-c", " && ".join(tries)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return f"no network namespaces: {done.stderr.strip()[-200:]} (root is needed)" if done.returncode else ""


@contextmanager
def network_of(
    count: int, *, rate_bits_per_s: float, zones: Sequence[int] = (), between_bits_per_s: float = 0.0
) -> Iterator[Network]:
    """Hosts that can send and receive `rate_bits_per_s` each. `zones[n]` is 0 or 1 for host n: each zone has a bridge,
    and all traffic between the two goes over one link of `between_bits_per_s`."""
    zones = tuple(zones) or (0,) * count
    with ExitStack() as stack:
        control, *hosts = _held(count, stack)
        control.run(*(line for zone in sorted({0, *zones}) for line in _bridge(zone)))
        control.run(f"ip addr add {CONTROL_ADDRESS}/24 dev zone0")
        if len(set(zones)) == 2:
            control.run("ip link add thin0 type veth peer name thin1", *_link("thin0", 0), *_link("thin1", 1))
            control.run(*(f"tc qdisc add dev {end} root {_bucket(between_bits_per_s)}" for end in ("thin0", "thin1")))

        def change_rate(host: Host, rate: float) -> None:
            control.run(f"tc qdisc replace dev {_port(host)} root {_bucket(rate)}")
            host.run(f"tc qdisc replace dev {INTERFACE} root {_bucket(rate)}")

        for host, zone in zip(hosts, zones, strict=True):
            peer = f"{INTERFACE} netns {host.holder}"
            control.run(f"ip link add {_port(host)} type veth peer name {peer}", *_link(_port(host), zone))
            host.run(*_address(host))
            change_rate(host, rate_bits_per_s)
        yield Network(hosts, control, change_rate)


@contextmanager
def delayed_network_of(count: int, *, delay_us: float, mtu_bytes: int = 9000) -> Iterator[Network]:
    """Hosts whose frames arrive `delay_us` after they were sent."""
    with ExitStack() as stack:
        control, *hosts = _held(count, stack)
        order = {"interface": INTERFACE, "delay_us": delay_us, "namespaces": [h.namespace for h in (control, *hosts)]}
        command = ["setpriv", "--pdeathsig", "KILL", sys.executable, "-m", "tests.support.network.delaying_switch"]
        _said_ready([*command, json.dumps(order)], stack)
        for port, host in enumerate((control, *hosts)):
            host.run(f"ip link set {INTERFACE} mtu {mtu_bytes} address 02:00:00:00:00:{port:02x}", *_address(host))

        def change_rate(host: Host, rate: float) -> None:
            host.run(f"tc qdisc replace dev {INTERFACE} root {_bucket(rate)}")

        yield Network(hosts, control, change_rate)


def enter_namespace(path: str) -> None:
    """Moves the calling thread: sockets that it, and threads that it starts, make from now on are those of the host."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(path, "rb") as file:
        if libc.setns(file.fileno(), _CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), path)


def _held(count: int, stack: ExitStack) -> list[Host]:
    """The namespace of the switch, and those of the hosts; they end with `stack`."""
    assert 1 <= count <= MOST_HOSTS
    script = "; ".join([*_SETTINGS, "echo ready", "exec cat"])
    holders = [_said_ready(["unshare", "-n", "sh", "-c", script], stack) for _ in range(count + 1)]
    addresses = [CONTROL_ADDRESS, *(f"10.77.0.{number + 1}" for number in range(count))]
    return [
        Host(number - 1, address, pid) for number, (address, pid) in enumerate(zip(addresses, holders, strict=True))
    ]


def _said_ready(command: Sequence[str], stack: ExitStack) -> int:
    """Starts a process that says it is ready, and ends with its standard input."""
    process = subprocess.Popen(command, cwd=_REPOSITORY, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def end() -> None:
        assert process.stdin is not None
        process.stdin.close()
        process.wait(30)
        assert process.stdout is not None
        process.stdout.close()

    stack.callback(end)
    assert process.stdout is not None
    if process.stdout.readline() != "ready\n":
        raise RuntimeError(f"{' '.join(command)} did not start; see what it wrote")
    return process.pid


def _tool(name: str) -> str | None:
    return shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")


def _port(host: Host) -> str:
    """The end of its cable at the bridge."""
    return f"port{host.number}"


def _bridge(zone: int) -> list[str]:
    name = f"zone{zone}"
    return [f"ip link add {name} type bridge forward_delay 0 mcast_snooping 0", f"ip link set {name} up"]


def _link(name: str, zone: int) -> list[str]:
    return [f"ip link set {name} master zone{zone}", f"ip link set {name} up"]


def _address(host: Host) -> list[str]:
    return [f"ip addr add {host.address}/24 dev {INTERFACE}", f"ip link set {INTERFACE} up"]


def _bucket(rate_bits_per_s: float) -> str:
    return f"tbf rate {rate_bits_per_s:.0f}bit burst {BURST_BYTES} latency {QUEUE_MS}ms"
