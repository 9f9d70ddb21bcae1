"""All checks of a node: what each reads, and which function judges it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final, NamedTuple

from fireflyer.base.errors import UsageError
from fireflyer.validators.core.checks import (
    dcgm,
    drives,
    gpu,
    ipmi,
    kernel_log,
    links,
    memory,
    mounts,
    nagios,
    nvlink,
    pcie,
    places,
    processor,
    services,
    system,
    versions,
)
from fireflyer.validators.core.checks.evidence import Evidence, Outcome
from fireflyer.validators.core.checks.policy import HealthPolicy, Inventory, settings_of
from fireflyer.validators.core.checks.sources import Command, Files, KernelLog, MountPoints, Source

__all__ = ["CHECKS", "CheckSpec", "all_checks", "chosen_checks", "sources_of"]


_DPKG_ROW: Final = "${{{}}}\\t${{Version}}\\t${{db:Status-Status}}\\n"
_DPKG_NAMES: Final = ("Package", "binary:Package")
"""A policy may name a package either way: `libc6`, `libc6:amd64`."""


class CheckSpec(NamedTuple):
    name: str
    summary: str
    sources: tuple[str, ...]
    judge: Callable[[Evidence, HealthPolicy], Outcome]
    device: Callable[[Inventory], bool] = lambda _: False
    """Whether the inventory says that the node has the device: a required check that cannot run is then of high
    severity."""


def _commands(policy: HealthPolicy) -> dict[str, Source]:
    units, level = policy.services.units, policy.gpu_dcgm.level
    smi, packages = "nvidia-smi", tuple(policy.versions.packages)
    found: tuple[Source, ...] = (
        Command(name="df", argv=("df", "-B1", "-l", "--output=source,fstype,size,avail,itotal,iavail,target")),
        Command(name="smartctl", argv=("smartctl", "-j", "-a", "/dev/{}"), each="sys/block/*/device", root=True),
        Command(name="dmidecode", argv=("dmidecode", "-t", "17"), root=True),
        Command(
            name="systemctl",
            argv=("systemctl", "show", "-p", "Id,LoadState,ActiveState,SubState,NRestarts", "--", *units),
        ),
        Command(name="chronyc", argv=("chronyc", "-c", "tracking")),
        Command(name="timedatectl", argv=("timedatectl", "show")),
        Command(name="ipmitool_sel", argv=("ipmitool", "sel", "elist"), limit_s=30, root=True),
        Command(name="ipmitool_sdr", argv=("ipmitool", "sdr", "elist"), limit_s=30, root=True),
        Command(name="nvidia_smi", argv=(smi, "-q", "-x"), limit_s=30),
        Command(name="nvlink_status", argv=(smi, "nvlink", "-s"), limit_s=20),
        Command(name="nvlink_errors", argv=(smi, "nvlink", "-e"), limit_s=20),
        Command(name="dcgmi", argv=("dcgmi", "diag", "-r", str(level), "-j"), limit_s=(0, 60, 300, 1800)[level]),
        Files(name="mounts", patterns=mounts.MOUNTS_FILES),
        MountPoints(name="mount_points", points=policy.inventory.mounts, fstab=policy.mounts.fstab),
        Files(name="disks", patterns=("sys/block/*/size",)),
        Files(name="nvme", patterns=drives.NVME_FILES),
        Files(name="edac", patterns=memory.EDAC_FILES),
        Files(name="processors", patterns=processor.PROCESSOR_FILES),
        Files(name="processes", patterns=("proc/[0-9]*/stat",), last=True),
        Files(name="ethernet", patterns=links.ETHERNET_FILES),
        Files(name="infiniband", patterns=links.INFINIBAND_FILES),
        Files(name="pcie", patterns=pcie.PCIE_FILES),
        Files(name="cpuinfo", patterns=(processor.CPUINFO,)),
        Files(name="places", patterns=places.PLACE_FILES),
        Files(name="versions", patterns=versions.VERSION_FILES),
        Files(name="system", patterns=system.SYSTEM_FILES),
        Files(name="system_paths", patterns=tuple(path.lstrip("/") for path in policy.system.paths)),
        Files(name="memory_left", patterns=system.MEMORY_LEFT_FILES),
        Files(name="machine_checks", patterns=system.MACHINE_CHECK_FILES),
        Command(
            name="dpkg_query",
            argv=("dpkg-query", "-W", "-f", "".join(_DPKG_ROW.format(name) for name in _DPKG_NAMES), "--", *packages),
        ),
        Command(
            name="rpm_query",
            argv=("rpm", "-q", "--qf", "%{NAME}\\t%{VERSION}-%{RELEASE}\\tinstalled\\n", "--", *packages),
        ),
        KernelLog(name="kernel_log"),
        *(
            Command(name=f"program:{one.name}", argv=one.argv, limit_s=one.limit_s, of_site=True)
            for one in policy.programs
        ),
    )  # fmt: skip
    return {one.name: one for one in found}


CHECKS: Final[tuple[CheckSpec, ...]] = (
    CheckSpec(
        "mounts", "file systems that must be mounted are, and can be written to", ("mounts", "mount_points"),
        lambda e, p: mounts.judge_mounts(e, p.mounts, p.inventory.mounts), lambda i: bool(i.mounts),
    ),
    CheckSpec(
        "disk_space", "space and inodes of local file systems", ("df",),
        lambda e, p: mounts.judge_space(e, p.disk_space),
    ),
    CheckSpec(
        "disk_smart", "what disks say of themselves (SMART), also NVMe", ("smartctl", "disks"),
        lambda e, p: drives.judge_smart(e, p.disk_smart, p.inventory.disks), lambda i: bool(i.disks or i.nvme),
    ),
    CheckSpec(
        "nvme", "NVMe devices are there and live", ("nvme",),
        lambda e, p: drives.judge_nvme(e, p.inventory.nvme), lambda i: bool(i.nvme),
    ),
    CheckSpec(
        "memory_errors", "errors of memory that the kernel counts (EDAC)", ("edac",),
        lambda e, p: memory.judge_memory_errors(e, p.memory_errors), lambda i: bool(i.memory_modules),
    ),
    CheckSpec(
        "memory_size", "size of memory and number of modules", ("edac", "dmidecode"),
        lambda e, p: memory.judge_memory_size(e, p.memory_size, p.inventory.memory_gib, p.inventory.memory_modules),
        lambda i: bool(i.memory_gib or i.memory_modules),
    ),
    CheckSpec(
        "processors", "processors online, clock source, governor, frequency, throttling", ("processors", "cpuinfo"),
        lambda e, p: processor.judge_processors(e, p.processors, p.inventory.cpus), lambda i: bool(i.cpus),
    ),
    CheckSpec(
        "processes", "processes that hang in the kernel, zombies", ("processes",),
        lambda e, p: processor.judge_processes(e, p.processes),
    ),
    CheckSpec(
        "services", "units of systemd that the policy names are active", ("systemctl",),
        lambda e, p: services.judge_services(e, p.services),
    ),
    CheckSpec(
        "time_offset", "the clock is synchronized", ("chronyc", "timedatectl"),
        lambda e, p: services.judge_time(e, p.time_offset),
    ),
    CheckSpec(
        "ethernet", "Ethernet: carrier, speed, flaps, errors", ("ethernet",),
        lambda e, p: links.judge_ethernet(e, p.ethernet, p.inventory.ethernet), lambda i: bool(i.ethernet),
    ),
    CheckSpec(
        "infiniband", "InfiniBand and RoCE: state, rate, flaps, errors", ("infiniband",),
        lambda e, p: links.judge_infiniband(e, p.infiniband, p.inventory.infiniband), lambda i: bool(i.infiniband),
    ),
    CheckSpec(
        "pcie", "PCI Express: width, speed and errors of GPUs, adapters and NVMe", ("pcie",),
        lambda e, p: pcie.judge_pcie(e, p.pcie, p.inventory.gpus), lambda i: bool(i.gpus or i.nvme or i.infiniband),
    ),
    CheckSpec(
        "places", "adapters and links of PCI Express are as the policy lists them", ("places",),
        lambda e, p: places.judge_places(e, p.places),
    ),
    CheckSpec(
        "versions", "kernel, driver, VBIOS, firmware and packages are of the policy's versions",
        ("versions", "nvidia_smi", "dpkg_query", "rpm_query"),
        lambda e, p: versions.judge_versions(e, p.versions),
    ),
    CheckSpec(
        "system", "time since the start, modules of the kernel, files", ("system", "system_paths"),
        lambda e, p: system.judge_system(e, p.system),
    ),
    CheckSpec(
        "memory_left", "available memory, swap, free large blocks", ("memory_left",),
        lambda e, p: system.judge_memory_left(e, p.memory_left),
    ),
    CheckSpec(
        "machine_checks", "errors that processors report, in a day", ("machine_checks",),
        lambda e, p: system.judge_machine_checks(e, p.machine_checks),
    ),
    CheckSpec(
        "kernel_errors", "errors of disks, memory, PCI Express and adapters in the kernel's log", ("kernel_log",),
        lambda e, p: kernel_log.judge_kernel_errors(e, p.kernel_errors),
    ),
    CheckSpec(
        "ipmi_log", "new events of the management controller", ("ipmitool_sel",),
        lambda e, p: ipmi.judge_ipmi_log(e, p.ipmi_log), lambda i: i.management_controller,
    ),
    CheckSpec(
        "ipmi_sensors", "fans, power supplies, temperatures, voltages", ("ipmitool_sdr",),
        lambda e, p: ipmi.judge_ipmi_sensors(e, p.ipmi_sensors), lambda i: i.management_controller,
    ),
    CheckSpec(
        "gpu_xid", "errors of NVIDIA's driver (Xid) and of NVSwitch (SXid)", ("kernel_log",),
        lambda e, p: kernel_log.judge_xids(e, p.gpu_xid), lambda i: bool(i.gpus),
    ),
    CheckSpec(
        "gpu_count", "the driver reaches all GPUs", ("nvidia_smi",),
        lambda e, p: gpu.judge_gpu_count(e, p.inventory.gpus), lambda i: bool(i.gpus),
    ),
    CheckSpec(
        "gpu_ecc", "memory errors of GPUs", ("nvidia_smi",),
        lambda e, p: gpu.judge_gpu_ecc(e, p.gpu_ecc), lambda i: bool(i.gpus),
    ),
    CheckSpec(
        "gpu_rows", "rows of GPU memory that were replaced, or could not be", ("nvidia_smi",),
        lambda e, p: gpu.judge_gpu_rows(e, p.gpu_rows), lambda i: bool(i.gpus),
    ),
    CheckSpec(
        "gpu_nvlink", "NVLink: links down, errors", ("nvlink_status", "nvlink_errors"),
        lambda e, p: nvlink.judge_nvlink(e, p.gpu_nvlink), lambda i: bool(i.gpus),
    ),
    CheckSpec(
        "gpu_clocks", "clocks of GPUs: limits, slowdown", ("nvidia_smi",),
        lambda e, p: gpu.judge_gpu_clocks(e, p.gpu_clocks), lambda i: bool(i.gpus),
    ),
    CheckSpec(
        "gpu_temperature", "temperature of GPUs and their memory", ("nvidia_smi",),
        lambda e, p: gpu.judge_gpu_temperature(e, p.gpu_temperature), lambda i: bool(i.gpus),
    ),
    CheckSpec(
        "gpu_processes", "foreign processes and memory in use on idle GPUs", ("nvidia_smi",),
        lambda e, p: gpu.judge_gpu_processes(e, p.gpu_processes), lambda i: bool(i.gpus),
    ),
    CheckSpec(
        "gpu_dcgm", "the diagnostic of DCGM", ("dcgmi",), lambda e, _: dcgm.judge_dcgm(e), lambda i: bool(i.gpus),
    ),
)  # fmt: skip


def all_checks(policy: HealthPolicy) -> list[CheckSpec]:
    """Ours, then the programs of the site."""
    return [*CHECKS, *(_program(settings) for settings in policy.programs)]


def _program(settings: nagios.ProgramSettings) -> CheckSpec:
    def judge(evidence: Evidence, _policy: HealthPolicy) -> Outcome:
        return nagios.judge_program(evidence, settings)

    summary = f"program of the site: {settings.argv[0]}"
    return CheckSpec(settings.name, summary, (f"program:{settings.name}",), judge)


def chosen_checks(policy: HealthPolicy, names: Iterable[str] = ()) -> list[CheckSpec]:
    """Those that are enabled; with `names` those, enabled or not. Raises `UsageError`."""
    wanted = list(dict.fromkeys(names))
    checks = {check.name: check for check in all_checks(policy)}
    for name in wanted:
        if name not in checks:
            raise UsageError(f"no check {name[:64]!r}; checks are {', '.join(checks)}")
    if wanted:
        return [checks[name] for name in wanted]
    return [
        check
        for check in checks.values()
        if (mine := settings_of(policy, check.name)).enabled and (mine.is_set or mine.required)
    ]


def sources_of(checks: Iterable[CheckSpec], policy: HealthPolicy) -> list[Source]:
    """Each once, whichever checks share it; none that would have nothing to do."""
    found, checks = _commands(policy), list(checks)
    names = dict.fromkeys(name for check in checks for name in check.sources)
    packages = bool(policy.versions.packages)
    of_gpus = bool(policy.versions.driver or policy.versions.vbios)
    idle = {
        "systemctl": not policy.services.units, "dpkg_query": not packages, "rpm_query": not packages,
        "cpuinfo": not policy.processors.least_mean_mhz,
    }  # fmt: skip
    if [check.name for check in checks if "nvidia_smi" in check.sources] == ["versions"]:
        idle["nvidia_smi"] = not of_gpus
    return [found[name] for name in names if not idle.get(name, False)]
