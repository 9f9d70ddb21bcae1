"""Which of a machine's addresses a job uses, where a machine has several networks. Pure."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence

import msgspec

from fireflyer.base.errors import UsageError

__all__ = ["MAX_NETWORKS", "AddressChoice", "is_link_local"]

MAX_NETWORKS = 8
"""That a job uses beside each other."""

_INTERFACE = re.compile(r"[^\s/\0]{1,15}")
"""What Linux allows."""
_MAX_SHOWN = 8


class AddressChoice(msgspec.Struct, frozen=True):
    """By the name of a network interface, by a subnet, or by both; empty: whatever the routes say. Several networks are
    several names, or several subnets, separated by commas."""

    interface: str = ""
    subnet: str = ""
    """`10.0.0.0/16`, `fd00::/64`."""

    def __post_init__(self) -> None:
        """Raises `UsageError`."""
        interfaces, subnets = self._lists()
        for interface in interfaces:
            if not _INTERFACE.fullmatch(interface):
                raise UsageError(f"--interface {interface[:40]!r} is no name of a network interface; see: ip address")
        for subnet in subnets:
            _check_subnet(subnet)
        for option, given in (("--interface", interfaces), ("--subnet", subnets)):
            if len(set(given)) < len(given):
                raise UsageError(f"{option} {','.join(given)[:80]} names one twice; each network is used once")
        if len(interfaces) > 1 and len(subnets) > 1:
            raise UsageError("--interface and --subnet both name several networks; give one of them")
        if len(self.each()) > MAX_NETWORKS:
            raise UsageError(f"{str(self)[:80]} names {len(self.each())} networks; a job uses at most {MAX_NETWORKS}")

    def _lists(self) -> tuple[list[str], list[str]]:
        return self.interface.split(",") if self.interface else [], self.subnet.split(",") if self.subnet else []

    def each(self) -> list[AddressChoice]:
        """One choice for each network."""
        interfaces, subnets = self._lists()
        if len(interfaces) < 2 and len(subnets) < 2:
            return [self]
        return [AddressChoice(interface, subnet) for interface in interfaces or [""] for subnet in subnets or [""]]

    def __bool__(self) -> bool:
        return bool(self.interface or self.subnet)

    def __str__(self) -> str:
        parts = (("--interface", self.interface), ("--subnet", self.subnet))
        return " ".join(f"{option} {value}" for option, value in parts if value)

    def choose_all(self, found: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
        """A pair (interface, address) for each network, in order; shorter where there is none, or only one that another
        network has."""
        pairs = [pair for one in self.each() if self and (pair := one.choose(found)) is not None]
        return list(dict.fromkeys(pairs))

    def choose(self, found: Sequence[tuple[str, str]]) -> tuple[str, str] | None:
        """Of one network: the first pair (interface, address) that fits, IPv4 before IPv6, link-local IPv6 never. None:
        there is none.

        >>> AddressChoice(interface="eth1").choose([("eth0", "10.0.0.3"), ("eth1", "fe80::3"), ("eth1", "10.1.0.3")])
        ('eth1', '10.1.0.3')
        """
        network = ipaddress.ip_network(self.subnet, strict=False) if self.subnet else None
        fit = [
            (name, address)
            for name, address in found
            if self.interface in ("", name)
            and (network is None or ipaddress.ip_address(address) in network)
            and not is_link_local(address)
        ]
        return min(fit, key=lambda one: ":" in one[1], default=None)

    def fault(self, found: Sequence[tuple[str, str]]) -> str:
        """What a machine lacks that has not an address for each network, in a line that names those it has."""
        lacking = next((one for one in self.each() if one.choose(found) is None), None)
        if lacking is not None and lacking != self:
            return lacking.fault(found)
        usable = [f"{address} ({name})" for name, address in found if not is_link_local(address) and name != "lo"]
        shown = ", ".join(usable[:_MAX_SHOWN]) + (", ..." if len(usable) > _MAX_SHOWN else "")
        only = "only a link-local address" if any(name == self.interface for name, _ in found) else "no address"
        if lacking is None:
            only = "one address for several networks"
        return f"has {only} of {self}; it has {shown or 'none that other machines can use'}"


def _check_subnet(subnet: str) -> None:
    try:
        network = ipaddress.ip_network(subnet, strict=False)
    except ValueError:
        raise UsageError(
            f"--subnet {subnet[:60]!r} is not understood; write it like 10.0.0.0/16 or fd00::/64"
        ) from None
    if network.version == 6 and network.is_link_local:
        raise UsageError(
            f"--subnet {subnet} is link-local: such addresses mean something else on each interface; name a subnet of "
            "global or unique local addresses (fd00::/8)"
        )


def is_link_local(host: str) -> bool:
    """Whether it is an IPv6 address that only has a meaning together with an interface (`fe80::1%eth0`, RFC 4007)."""
    try:
        parsed = ipaddress.ip_address(host.strip("[]").partition("%")[0])
    except ValueError:
        return False
    return parsed.version == 6 and parsed.is_link_local
