"""What is checked on the nodes of a group, what is allowed, and what the nodes should have."""

from __future__ import annotations

from typing import Annotated, Final

import msgspec

from fireflyer.base.errors import UsageError
from fireflyer.validators.core.checks.dcgm import DcgmSettings
from fireflyer.validators.core.checks.drives import NvmeSettings, SmartSettings
from fireflyer.validators.core.checks.gpu import (
    GpuClockSettings,
    GpuCountSettings,
    GpuEccSettings,
    GpuProcessSettings,
    GpuRowSettings,
    GpuTemperatureSettings,
)
from fireflyer.validators.core.checks.ipmi import IpmiLogSettings, IpmiSensorSettings
from fireflyer.validators.core.checks.kernel_log import KernelErrorSettings, XidSettings
from fireflyer.validators.core.checks.links import LinkSettings
from fireflyer.validators.core.checks.memory import MemoryErrorSettings, MemorySizeSettings
from fireflyer.validators.core.checks.mounts import MountSettings, SpaceSettings
from fireflyer.validators.core.checks.nagios import ProgramSettings
from fireflyer.validators.core.checks.nvlink import NvlinkSettings
from fireflyer.validators.core.checks.pcie import PcieSettings
from fireflyer.validators.core.checks.places import PlaceSettings
from fireflyer.validators.core.checks.processor import ProcessorSettings, ProcessSettings
from fireflyer.validators.core.checks.services import ServiceSettings, TimeSettings
from fireflyer.validators.core.checks.settings import CheckSettings, Name, Names
from fireflyer.validators.core.checks.system import MachineCheckSettings, MemoryLeftSettings, SystemSettings
from fireflyer.validators.core.checks.versions import VersionSettings

__all__ = ["HealthPolicy", "Inventory", "settings_of"]

_Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 20)]
_Speed = Annotated[float, msgspec.Meta(ge=0, le=1e5)]
_NOT_CHECKS: Final = frozenset({"version", "group", "inventory", "programs"})


class Inventory(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The devices that a node of the group has; 0 and empty: nothing is said."""

    gpus: _Count = 0
    cpus: _Count = 0
    """Processors of the operating system: hardware threads."""
    memory_gib: Annotated[float, msgspec.Meta(ge=0, le=1 << 20)] = 0.0
    memory_modules: _Count = 0
    nvme: _Count = 0
    disks: Names = ()
    """By name, as `sda`."""
    mounts: Names = ()
    """Mount points."""
    ethernet: Annotated[dict[Name, _Speed], msgspec.Meta(max_length=64)] = {}
    """Gbit/s of each interface."""
    infiniband: Annotated[dict[Name, _Speed], msgspec.Meta(max_length=64)] = {}
    """Gbit/s of each adapter."""
    management_controller: bool = False


class HealthPolicy(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A file of the policy; a table for each check, by its name. Raises `UsageError`."""

    version: Annotated[int, msgspec.Meta(ge=1, le=1)] = 1
    group: Annotated[str, msgspec.Meta(max_length=64)] = ""
    """Of nodes; for people."""
    inventory: Inventory = Inventory()
    mounts: MountSettings = MountSettings()
    disk_space: SpaceSettings = SpaceSettings()
    disk_smart: SmartSettings = SmartSettings()
    nvme: NvmeSettings = NvmeSettings()
    memory_errors: MemoryErrorSettings = MemoryErrorSettings()
    memory_size: MemorySizeSettings = MemorySizeSettings()
    processors: ProcessorSettings = ProcessorSettings()
    processes: ProcessSettings = ProcessSettings()
    services: ServiceSettings = ServiceSettings()
    time_offset: TimeSettings = TimeSettings()
    ethernet: LinkSettings = LinkSettings()
    infiniband: LinkSettings = LinkSettings()
    pcie: PcieSettings = PcieSettings()
    places: PlaceSettings = PlaceSettings()
    versions: VersionSettings = VersionSettings()
    system: SystemSettings = SystemSettings()
    memory_left: MemoryLeftSettings = MemoryLeftSettings()
    machine_checks: MachineCheckSettings = MachineCheckSettings()
    kernel_errors: KernelErrorSettings = KernelErrorSettings()
    ipmi_log: IpmiLogSettings = IpmiLogSettings()
    ipmi_sensors: IpmiSensorSettings = IpmiSensorSettings()
    gpu_xid: XidSettings = XidSettings()
    gpu_count: GpuCountSettings = GpuCountSettings()
    gpu_ecc: GpuEccSettings = GpuEccSettings()
    gpu_rows: GpuRowSettings = GpuRowSettings()
    gpu_nvlink: NvlinkSettings = NvlinkSettings()
    gpu_clocks: GpuClockSettings = GpuClockSettings()
    gpu_temperature: GpuTemperatureSettings = GpuTemperatureSettings()
    gpu_processes: GpuProcessSettings = GpuProcessSettings()
    gpu_dcgm: DcgmSettings = DcgmSettings()
    programs: Annotated[tuple[ProgramSettings, ...], msgspec.Meta(max_length=64)] = ()

    def __post_init__(self) -> None:
        taken = set(self.__struct_fields__)
        for program in self.programs:
            if program.name in taken:
                raise UsageError(f"program {program.name}: a check has that name already; give it another")
            taken.add(program.name)


def settings_of(policy: HealthPolicy, check: str) -> CheckSettings:
    """Of a check, or of a program of the site. Raises `UsageError`."""
    for program in policy.programs:
        if program.name == check:
            return program
    found = getattr(policy, check, None) if check not in _NOT_CHECKS else None
    if not isinstance(found, CheckSettings):
        raise UsageError(f"no check {check[:64]!r}; `ff health --list` shows them")
    return found
