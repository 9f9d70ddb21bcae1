"""Which part has which serial number: one key for a part, whatever name a check or the kernel has for it.

The kernel names a GPU by its address, nvidia-smi also by its number and its UUID; an adapter or an NVMe device has an
address and a name. Where a GPU tells no serial number, its UUID stands for it. A number that may be that of other
parts, too, is none: it would give them one history. Such a part is known by its place.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Final

import msgspec

from fireflyer.base.health_event import HealthEvent
from fireflyer.validators.core.checks.evidence import MAX_SERIALS, CannotJudge, Evidence
from fireflyer.validators.core.checks.gpu import gpus_of, part_of, text_of, uuid_of
from fireflyer.validators.core.checks.placeholders import is_placeholder
from fireflyer.validators.core.checks.sources import Files

__all__ = ["PART_SERIALS", "merged", "part_serials", "with_serial"]

_NET: Final = "sys/class/net"
_IB: Final = "sys/class/infiniband"
_NVME: Final = "sys/class/nvme"
PART_SERIALS: Final = Files(
    name="part_serials",
    patterns=(
        *(f"{_IB}/*/{name}" for name in ("node_guid", "device/uevent")),
        *(f"{_NET}/*/{name}" for name in ("address", "addr_assign_type", "device/uevent")),
        *(f"{_NVME}/nvme*/{name}" for name in ("serial", "device/uevent")),
    ),
)
"""Read in each round."""
_SLOT: Final = re.compile(r"^PCI_SLOT_NAME=([0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-9])$", re.MULTILINE)
_PERMANENT: Final = "0"
"""As `addr_assign_type`: the address of an interface is the one that its adapter has."""
_ON_THE_BUS: Final = ("gpu", "infiniband", "ethernet", "nvme", "pcie")
"""Kinds of parts that are named by an address, too."""
_NAMES: Final = (
    re.compile(r"(infiniband:[^/]+)/[^/]*"),
    re.compile(r"(disk:sd[a-z]+)[0-9]+"),
    re.compile(r"(disk:nvme[0-9]+)(?:c[0-9]+)?n[0-9]+(?:p[0-9]+)?"),
)
"""Ports, partitions and namespaces of the part that the first group names."""
_MAX_LENGTH: Final = 128


def part_serials(evidence: Evidence) -> dict[str, str]:
    """Of what was captured in a round: serial numbers by names of parts, as `gpu:0000:3b:00.0`, and by UUIDs. Empty:
    the part is there, and has no number of its own."""
    found = (*_adapters(evidence), *_drives(evidence), *_gpus(evidence))
    return merged(
        {},
        {
            name: serial
            for name, serial in found
            if len(serial) <= _MAX_LENGTH and serial.isprintable() and 0 < len(name) <= _MAX_LENGTH
        },
    )


def merged(known: Mapping[str, str], newer: Mapping[str, str]) -> dict[str, str]:
    """What is newer counts: another part is in the place. A part that is not found any more keeps its number."""
    kept = [*((name, serial) for name, serial in known.items() if name not in newer), *newer.items()]
    return dict(kept[-MAX_SERIALS:])


def with_serial(event: HealthEvent, serials: Mapping[str, str]) -> HealthEvent:
    """With the serial number of its part in place of a UUID or none, where it is known."""
    if event.serial:
        serial = serials.get(event.serial, event.serial)
    else:
        serial = serials.get(event.part) or serials.get(_whole(event.part), "")
    return event if serial == event.serial else msgspec.structs.replace(event, serial=serial)


def _whole(part: str) -> str:
    """Name of the part of which the named one is a port, a partition or a namespace."""
    return next((match[1] for name in _NAMES if (match := name.fullmatch(part)) is not None), part)


def _of_one_part(told: Mapping[str, str]) -> dict[str, str]:
    """Numbers by parts of one kind: empty where it is a placeholder, or two parts have it."""
    borne = Counter(told.values())
    return {
        part: "" if borne[serial] > 1 or is_placeholder(serial) else serial for part, serial in told.items() if serial
    }


def _gpus(evidence: Evidence) -> Iterator[tuple[str, str]]:
    """By address, UUID, and the number that NVML and DCGM give them. The serial number is that of the board, which may
    have two GPUs. Of a GPU that the driver has lost nothing is said: what was known of it stays."""
    try:
        gpus = gpus_of(evidence)
    except CannotJudge:
        return
    numbers = _of_one_part({str(number): text_of(gpu, "serial") for number, gpu in enumerate(gpus)})
    for number, gpu in enumerate(gpus):
        serial = numbers.get(str(number)) or uuid_of(gpu)
        if not serial:
            continue
        address = part_of(gpu).removeprefix("gpu:")
        for name in (f"gpu:{address}", f"pcie:{address}", uuid_of(gpu), f"gpu:{number}"):
            yield name, serial


def _adapters(evidence: Evidence) -> Iterator[tuple[str, str]]:
    """The GUID of an adapter that has one counts for its network interface, too."""
    by_address: dict[str, str] = {}
    names: dict[str, str] = {}
    for name in evidence.entries(_NET):
        slot = _slot(evidence, f"{_NET}/{name}")
        if slot and evidence.text(f"{_NET}/{name}/addr_assign_type") == _PERMANENT:
            by_address[slot] = evidence.text(f"{_NET}/{name}/address")
            names[f"ethernet:{name}"] = slot
    by_address = _of_one_part(by_address)
    guids = _of_one_part({name: evidence.text(f"{_IB}/{name}/node_guid") for name in evidence.entries(_IB)})
    for name, guid in guids.items():
        slot = _slot(evidence, f"{_IB}/{name}")
        if not guid:
            continue
        yield f"infiniband:{name}", guid
        if slot:
            by_address[slot] = guid
    for slot, serial in by_address.items():
        yield from ((f"{kind}:{slot}", serial) for kind in _ON_THE_BUS)
    yield from ((name, by_address.get(slot, "")) for name, slot in names.items())


def _drives(evidence: Evidence) -> Iterator[tuple[str, str]]:
    told: dict[str, str] = {}
    disks = []
    for device, output in evidence.outputs_of("smartctl"):
        try:
            report = json.loads(output.text)
        except (ValueError, RecursionError):
            continue
        serial = report.get("serial_number") if isinstance(report, dict) else None
        if isinstance(serial, str):
            disks.append(f"disk:{device}")
            told[_whole(disks[-1])] = serial.strip()
    numbers = _of_one_part(told)
    yield from ((disk, numbers[_whole(disk)]) for disk in disks if _whole(disk) in numbers)
    devices = {name: evidence.text(f"{_NVME}/{name}/serial") for name in evidence.entries(_NVME)}
    for name, serial in _of_one_part(devices).items():
        slot = _slot(evidence, f"{_NVME}/{name}")
        places = (f"{kind}:{slot}" for kind in _ON_THE_BUS if slot)
        yield from ((place, serial) for place in (f"nvme:{name}", f"disk:{name}", *places))


def _slot(evidence: Evidence, base: str) -> str:
    found = _SLOT.search(evidence.text(f"{base}/device/uevent"))
    return found[1] if found is not None else ""
