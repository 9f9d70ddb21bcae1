"""Where devices are, and how they are connected: names of adapters, width and speed of PCI Express, as the policy lists
them for the machines of a group."""

from __future__ import annotations

import re
from typing import Annotated, Final

import msgspec

from fireflyer.validators.core.checks.evidence import Evidence, Finding, Outcome
from fireflyer.validators.core.checks.pcie import PCI_DEVICES, link_speed
from fireflyer.validators.core.checks.settings import CheckSettings, Name

__all__ = ["PLACE_FILES", "PlaceSettings", "judge_places"]

_IB: Final = "sys/class/infiniband"
PLACE_FILES: Final = (
    f"{_IB}/*/device/uevent",
    f"{_IB}/*/node_guid",
    *(f"{PCI_DEVICES}/*/{name}" for name in ("current_link_speed", "current_link_width", "class")),
)
_Address = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]$")]


class PlaceSettings(CheckSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Addresses are those of /sys/bus/pci/devices."""

    adapters: Annotated[dict[Name, _Address], msgspec.Meta(max_length=64)] = msgspec.field(default_factory=dict)
    """Address of each InfiniBand or RoCE adapter, by its name, as `mlx5_0`."""
    widths: Annotated[dict[_Address, Annotated[int, msgspec.Meta(ge=1, le=32)]], msgspec.Meta(max_length=256)] = (
        msgspec.field(default_factory=dict)
    )
    """Lanes."""
    speeds: Annotated[dict[_Address, Annotated[float, msgspec.Meta(gt=0, le=1e3)]], msgspec.Meta(max_length=256)] = (
        msgspec.field(default_factory=dict)
    )
    """GT/s of each lane. GPUs lower it when they have nothing to do."""

    @property
    def is_set(self) -> bool:
        return bool(self.adapters or self.widths or self.speeds)


def judge_places(evidence: Evidence, settings: PlaceSettings) -> Outcome:
    findings: list[Finding] = []
    for name, address in settings.adapters.items():
        found = re.search(r"^PCI_SLOT_NAME=(\S{1,32})$", evidence.text(f"{_IB}/{name}/device/uevent"), re.MULTILINE)
        if found is None or found[1] != address:
            words = f"adapter {name} is {f'at {found[1]}' if found is not None else 'not there'}; the policy: {address}"
            findings.append(Finding(severity="low", part=f"infiniband:{name}", cause="binding", words=words))
    devices = set(evidence.entries(PCI_DEVICES))
    for address in dict.fromkeys((*settings.widths, *settings.speeds)):
        base, part = f"{PCI_DEVICES}/{address}", f"pcie:{address}"
        width, lanes = evidence.number(f"{base}/current_link_width"), settings.widths.get(address)
        speed, rate = link_speed(evidence, f"{base}/current_link_speed"), settings.speeds.get(address)
        if address not in devices:
            findings.append(Finding(severity="low", part=part, cause="missing", words=f"no PCI device at {address}"))
            continue
        if lanes is not None and (width is None or width < lanes):
            words = f"{'unknown' if width is None else width} lanes of PCI Express; the policy says {lanes}"
            findings.append(Finding(severity="low", part=part, cause="width", words=words))
        if rate is not None and (speed is None or speed < rate):
            words = f"{'unknown' if speed is None else f'{speed:g}'} GT/s on each lane; the policy says {rate:g}"
            findings.append(Finding(severity="low", part=part, cause="speed", words=words))
    return Outcome(findings=tuple(findings), words="devices are where the policy says, and connected so")
