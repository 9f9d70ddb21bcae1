"""The options of `ff run` about the network: which ports and which addresses the job uses."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click

from fireflyer.base.errors import UsageError
from fireflyer.base.port_range import PortRange

if TYPE_CHECKING:
    from fireflyer.cluster.schema.addresses import AddressChoice

__all__ = ["network_options", "read_addresses", "read_ports", "refuse_link_local"]

_F = TypeVar("_F", bound=Callable[..., Any])
_OPTIONS = (
    click.option(
        "--port-range",
        metavar="FIRST-LAST",
        envvar="FF_PORT_RANGE",
        help="All ports on which the job listens, on every machine, are of this range, as 29500-29599: see "
        "docs/how-to/several-machines.md.  [default: FF_PORT_RANGE, else any]",
    ),
    click.option(
        "--interface",
        metavar="NAME",
        default="",
        help="Ranks reach those of other machines at the address of this network interface, as eth1; with several, as "
        "eth1,eth2, sums go over all of these networks.  [default: the address at which the machine was reached]",
    ),
    click.option(
        "--subnet",
        metavar="SUBNET",
        default="",
        help="The same by subnet, where interfaces have other names on other machines, as 10.0.0.0/16 or "
        "10.0.0.0/16,10.1.0.0/16.  [default: any]",
    ),
)


def network_options(command: _F) -> _F:
    """Adds the options."""
    for decorator in reversed(_OPTIONS):
        command = decorator(command)
    return command


def read_ports(text: str | None) -> PortRange | None:
    """Raises `UsageError`."""
    if not text:
        return None
    try:
        return PortRange.parse(text)
    except UsageError as error:
        raise UsageError(f"--port-range (or FF_PORT_RANGE): {error}") from None


def read_addresses(interface: str, subnet: str, *, several: bool) -> AddressChoice:
    """`several`: the job has other machines. Raises `UsageError`."""
    from fireflyer.cluster.schema.addresses import AddressChoice

    choice = AddressChoice(interface, subnet)
    if choice and not several:
        raise UsageError(
            f"{choice} needs --hosts or --rdzv-endpoint: the ranks of one machine meet at 127.0.0.1; leave it out"
        )
    return choice


def refuse_link_local(option: str, host: str | None) -> None:
    """Raises `UsageError`."""
    from fireflyer.cluster.schema.addresses import is_link_local

    if host is not None and is_link_local(host):
        raise UsageError(
            f"{option} {host} is a link-local address, which means something else on each machine; give a global or "
            "unique local address (fd00::/8), or a name that has one"
        )
