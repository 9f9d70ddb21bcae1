"""Whether a machine can run a job: compares what it says of itself with what the job needs. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec

from fireflyer.base.units import SECOND
from fireflyer.cluster.schema.addresses import is_link_local
from fireflyer.cluster.schema.hosts import HostFacts

__all__ = ["MAX_SKEW_NS", "Answer", "HostRequirements", "faults_of", "mixed_addresses", "port_fault", "same_machine"]

MAX_SKEW_NS = 5 * SECOND
"""Clocks that differ by more make logs and checkpoints of several machines unreadable. Leases do not depend on it."""


class HostRequirements(msgspec.Struct, frozen=True, kw_only=True):
    """What every host of a job must have."""

    version: str
    python: str
    workdir: str
    script: str
    kind: str
    script_sha256: str
    ranks: int
    ranks_per_core: int
    devices: str
    knows_control_address: bool = False
    """--control-address says where hosts reach the launcher."""
    ports: str = ""
    """The range of --port-range; empty: none."""
    ports_needed: int = 0
    master_port: int = 0


class Answer(NamedTuple):
    """What a host says of itself, and when, on the wall clock of the launcher."""

    facts: HostFacts
    asked_ns: int
    """Before the host looked."""
    answered_ns: int
    """After it."""


def faults_of(answer: Answer, required: HostRequirements) -> list[str]:
    """One line each; empty: the host can run the job."""
    facts, faults = answer.facts, []
    if facts.version != required.version:
        faults.append(f"has Fire-Flyer {facts.version}, and this machine {required.version}; install the same release")
    if facts.python.rpartition(".")[0] != required.python.rpartition(".")[0]:
        faults.append(f"has Python {facts.python}, and this machine {required.python}; use the same minor version")
    if not facts.has_workdir:
        faults.append(f"has no directory {required.workdir}; make it there, or name another one with --workdir")
    elif not facts.has_script:
        faults.append(f"has no {required.kind} {required.script} in {required.workdir}; copy it there")
    elif required.script_sha256 and facts.script_sha256 != required.script_sha256:
        faults.append(f"has another {required.script} (its SHA-256 differs); copy this machine's there")
    faults += _device_faults(facts, required)
    faults += _address_faults(facts, required)
    faults += _port_faults(facts, required)
    skew_ns = max(answer.asked_ns - facts.time_ns, facts.time_ns - answer.answered_ns, 0)
    if skew_ns > MAX_SKEW_NS:
        faults.append(f"has a clock that differs by {skew_ns / SECOND:.0f} s; synchronise the clocks (chrony, ntp)")
    return faults


def _address_faults(facts: HostFacts, required: HostRequirements) -> list[str]:
    if facts.no_address:
        return [_printable(facts.no_address)]
    server = "" if facts.address else facts.server
    client = "" if required.knows_control_address else facts.client
    if is_link_local(server) or is_link_local(client):
        return [
            f"was reached at a link-local address ({facts.server}), which other machines cannot use; name it by a "
            "global or unique local address (fd00::/8)"
        ]
    return []


def _port_faults(facts: HostFacts, required: HostRequirements) -> list[str]:
    faults = port_fault(facts.free_ports, required)
    if required.master_port and facts.master_port_taken:
        faults.append(
            f"has another process at MASTER_PORT {required.master_port}; choose another --master-port, or leave it out"
        )
    if facts.launcher_not_reached:
        faults.append(
            f"does not reach the launcher at {_printable(facts.launcher_not_reached)}; open that port (--control-port "
            "names one), or name this machine's address with --control-address"
        )
    return faults


def port_fault(free: int, required: HostRequirements) -> list[str]:
    """Of a machine with so many free ports of the range: none, or one."""
    if free >= required.ports_needed:
        return []
    return [
        f"has {free} free ports of {required.ports} (--port-range), and needs {required.ports_needed}; end what "
        "listens there, or give a larger range"
    ]


def _printable(text: str) -> str:
    """Of what another machine says, what may get to a terminal."""
    return "".join(char for char in text if char.isprintable())


def mixed_addresses(addresses: Mapping[str, Sequence[str]]) -> list[tuple[str, str]]:
    """(host, fault) of those that have another number of chosen addresses than the first one, or an address not of the
    kind, IPv4 or IPv6, of its first. Hosts for which none was chosen have none."""
    chosen = {name: own for name, own in addresses.items() if own}
    first = next(iter(chosen), "")
    found = []
    for name, own in chosen.items():
        if len(own) != len(chosen[first]):
            fault = (
                f"has {len(own)} of the networks ({', '.join(own)}), and {first} has {len(chosen[first])}; name as "
                "many on each machine (--interface, --subnet)"
            )
            found.append((name, fault))
            continue
        other = next((address for address in own if (":" in address) != (":" in chosen[first][0])), None)
        if other is not None:
            fault = f"has {other}, and {first} has {chosen[first][0]}: all need IPv4, or all IPv6; choose with --subnet"
            found.append((name, fault))
    return found


def _device_faults(facts: HostFacts, required: HostRequirements) -> list[str]:
    gpus = required.devices == "gpu" or (required.devices == "auto" and facts.gpus > 0)
    if gpus and required.ranks > facts.gpus:
        return [f"has {facts.gpus} GPUs for {required.ranks} ranks; use fewer ranks, or --devices cpu"]
    limit = facts.cores * required.ranks_per_core
    if not gpus and required.ranks > limit:
        return [f"has {facts.cores} cores, which hold {limit} ranks, not {required.ranks}; use fewer --ranks-per-node"]
    return []


def same_machine(facts: Mapping[str, HostFacts]) -> list[tuple[str, str]]:
    """Pairs of names that lead to one machine."""
    first: dict[tuple[str, str], str] = {}
    pairs = []
    for name, one in facts.items():
        key = (one.boot_id, one.namespace)
        if key in first and all(key):
            pairs.append((first[key], name))
        first.setdefault(key, name)
    return pairs
