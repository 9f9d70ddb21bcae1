"""What the machines are like: addresses, links, files of /etc. No IO.

Machine k (from 1) has on network n the addresses 10.88.n.k and fd00:0:0:n::k and the interface `eth<n>`; network n is
the bridge `lan<n>` in the namespace of the supervisor, and the other end of the cable is `m<k>n<n>` there. All
neighbours are permanent entries: nobody asks for addresses, so a machine that is cut off is silent, as one behind a
router is, and no machine gets "No route to host" because ARP had no answer.
"""

from __future__ import annotations

import ipaddress
import json
from collections.abc import Iterator
from typing import Final, NamedTuple

__all__ = ["HOME", "MOST_MACHINES", "USER", "USER_ID", "WORK", "Order", "accounts", "hosts_file", "sshd_config"]

USER: Final = "trainer"
USER_ID: Final = 54321
HOME: Final = f"/home/{USER}"
WORK: Final = "/machine-work"
MOST_MACHINES: Final = 64
MOST_NETWORKS: Final = 8
PRIVATE: Final = {
    "/tmp": 0o1777,
    "/run": 0o755,
    "/root": 0o711,
    "/home": 0o755,
    "/var/tmp": 0o1777,
    "/dev/shm": 0o1777,
    WORK: 0o1777,
}
"""Directories that each machine has for itself, empty at first, and their modes."""
_NOBODYS_MAC: Final = "02:00:00:00:00:00"


class Order(NamedTuple):
    """What the supervisor is asked for."""

    names: tuple[str, ...]
    networks: int
    base: str
    """An existing directory of the host, of which nothing is seen in the machines."""
    visible: tuple[str, ...]
    """Directories that are visible, read-only, although a private directory lies over them."""
    shared: tuple[str, ...]
    private: tuple[str, ...]
    """More directories of the host in whose place each machine has an empty one for itself, of mode 755."""

    def to_json(self) -> str:
        return json.dumps(self._asdict())

    @classmethod
    def from_json(cls, text: str) -> Order:
        read = json.loads(text)
        lists = {name: tuple(value) for name, value in read.items() if isinstance(value, list)}
        return cls(**(read | lists))

    def check(self) -> None:
        """Raises `ValueError`."""
        if not 1 <= len(self.names) <= MOST_MACHINES or len(set(self.names)) < len(self.names):
            raise ValueError(f"machines {list(self.names)}: 1 to {MOST_MACHINES} different names are needed")
        if not all(name.isascii() and name.replace("-", "a").isalnum() and name[0].isalpha() for name in self.names):
            raise ValueError(f"machines {list(self.names)}: a name is a letter, then letters, digits and hyphens")
        if not 1 <= self.networks <= MOST_NETWORKS:
            raise ValueError(f"{self.networks} networks: 1 to {MOST_NETWORKS} are possible")

    @property
    def private_modes(self) -> dict[str, int]:
        return PRIVATE | dict.fromkeys(self.private, 0o755)

    def place(self, name: str) -> int:
        return self.names.index(name) + 1


def address(place: int, network: int) -> str:
    return f"10.88.{network}.{place}"


def address6(place: int, network: int) -> str:
    return str(ipaddress.IPv6Address(f"fd00:0:0:{network}::{place:x}"))


def mac(place: int, network: int) -> str:
    return f"02:58:00:00:{network:02x}:{place:02x}"


def link_local(place: int, network: int) -> str:
    """What the kernel derives from the MAC (EUI-64, RFC 4291)."""
    return str(ipaddress.IPv6Address(f"fe80::58:ff:fe00:{network:02x}{place:02x}"))


def interface(network: int) -> str:
    return f"eth{network}"


def port(place: int, network: int) -> str:
    """The end of its cable at the bridge."""
    return f"m{place}n{network}"


def bridge_lines(order: Order) -> Iterator[str]:
    """For `ip -batch` in the supervisor, before there are machines."""
    for network in range(order.networks):
        yield f"link add lan{network} type bridge forward_delay 0 mcast_snooping 0"
        yield f"link set lan{network} up"


def cable_lines(order: Order, name: str, pid: int) -> Iterator[str]:
    """For `ip -batch` in the supervisor, when process `pid` is in the machine's network namespace."""
    place = order.place(name)
    for network in range(order.networks):
        end = f"name {interface(network)} address {mac(place, network)} netns {pid}"
        yield f"link add name {port(place, network)} type veth peer {end}"
        yield f"link set {port(place, network)} master lan{network} up"


def interface_lines(order: Order, name: str) -> Iterator[str]:
    """For `ip -batch` in the machine, when its interfaces are there."""
    yield "link set lo up"
    place = order.place(name)
    for network in range(order.networks):
        device = f"dev {interface(network)}"
        yield f"address add {address(place, network)}/24 {device}"
        yield f"address add {address6(place, network)}/64 {device} nodad"
        yield f"link set {device} up"
    for other in order.names:
        if other != name:
            for network in range(order.networks):
                yield from neighbour_lines(order, other, network, reachable=True)


def neighbour_lines(order: Order, other: str, network: int, *, reachable: bool) -> Iterator[str]:
    """For `ip -batch` in a machine: frames to `other` go there, or to an address that nobody has."""
    place = order.place(other)
    target = mac(place, network) if reachable else _NOBODYS_MAC
    for its in (address(place, network), address6(place, network), link_local(place, network)):
        yield f"neighbour replace {its} lladdr {target} nud permanent dev {interface(network)}"


def hosts_file(order: Order) -> str:
    """/etc/hosts: a machine's name has its addresses on the first network, `a-eth1` those of `a` on the second."""
    lines = ["127.0.0.1 localhost", "::1 localhost ip6-localhost ip6-loopback"]
    for network in range(order.networks):
        for name in order.names:
            called = name if network == 0 else f"{name}-{interface(network)}"
            lines += [
                f"{address(order.place(name), network)} {called}",
                f"{address6(order.place(name), network)} {called}",
            ]
    return "\n".join(lines) + "\n"


def known_hosts(order: Order, host_keys: dict[str, str]) -> str:
    lines = []
    for name in order.names:
        places = [(order.place(name), network) for network in range(order.networks)]
        called = [name, *(f"{name}-{interface(network)}" for _, network in places if network)]
        called += [found for where in places for found in (address(*where), address6(*where))]
        lines.append(f"{','.join(called)} {host_keys[name]}")
    return "\n".join(lines) + "\n"


def accounts(passwd: str, group: str) -> dict[str, str]:
    """Files of /etc, made from those of the host: one user more, no passwords, and root at home in /root."""
    users = [line.split(":") for line in passwd.splitlines() if line.count(":") == 6]
    users = [["root", "x", "0", "0", "root", "/root", "/bin/bash"], *(user for user in users if user[0] != "root")]
    users = [user for user in users if user[0] != USER]
    users.append([USER, "x", str(USER_ID), str(USER_ID), "", HOME, "/bin/bash"])
    groups = [line for line in group.splitlines() if line and not line.startswith(f"{USER}:")]
    return {
        "passwd": "".join(":".join(user) + "\n" for user in users),
        "group": "".join(line + "\n" for line in [*groups, f"{USER}:x:{USER_ID}:"]),
        "shadow": "".join(f"{user[0]}:*:19000:0:99999:7:::\n" for user in users),
    }


def sshd_config() -> str:
    """Keys only, from the files that the machine has."""
    return "\n".join(
        [
            "Port 22",
            "HostKey /etc/ssh/ssh_host_ed25519_key",
            "PidFile /run/sshd.pid",
            f"AllowUsers root {USER}",
            "PermitRootLogin prohibit-password",
            "PasswordAuthentication no",
            "KbdInteractiveAuthentication no",
            "UsePAM no",
            "StrictModes yes",
            "UseDNS no",
            "X11Forwarding no",
            "PrintMotd no",
            "MaxStartups 100",
            "LogLevel VERBOSE",
            "AcceptEnv LANG LC_*",
            "Subsystem sftp internal-sftp",
            "",
        ]
    )
