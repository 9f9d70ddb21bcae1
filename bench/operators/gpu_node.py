"""A node with eight GPUs, as files and as tools that print what those of such a node do: in their formats and lengths.

The tools are scripts that print a file, so what they compute themselves (the driver, the management controller) is not
part of what is measured; reading, parsing and judging their output is.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Final

__all__ = ["RULES", "make_gpu_node"]

_GPUS: Final = 8
_CPUS: Final = 128
_MODULES: Final = 32
_NVME: Final = 10
_PROCESSES: Final = 2000
_SENSORS: Final = 160
_EVENTS: Final = 400
_LINKS: Final = 18
"""NVLinks of a GPU."""
_CLOCKS: Final = 120
"""Graphics clocks that a GPU lists for each memory clock: most of the report of `nvidia-smi -q -x`."""
_SERIAL: Final = 1650023000000
RULES: Final = f"""
[inventory]
gpus = {_GPUS}
cpus = {_CPUS}
memory_modules = {_MODULES}
nvme = {_NVME}
management_controller = true
[processors]
least_mean_mhz = 2000
[services]
units = ["munge.service", "chrony.service"]
[places.adapters]
mlx5_0 = "0000:18:00.0"
[versions]
driver = ["550.54.15"]
packages = {{ munge = "0.5.15-2" }}
[system]
least_uptime_s = 600
modules = ["nvidia"]
[memory_left]
least_available_gib = 64
least_large_blocks = 10
[machine_checks]
most_per_day = 100
"""
"""A policy by which each check of the node comes to a result."""


def make_gpu_node(directory: Path) -> tuple[str, str]:
    """Where its files of /sys and /proc lie, and its tools."""
    root, tools = directory / "root", directory / "tools"
    for path, text in _files().items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
    for number in range(_NVME):
        (root / f"sys/block/nvme{number}n1/device").mkdir(parents=True)
    tools.mkdir()
    for name, printed in _printed().items():
        _write_tool(tools, name, printed)
    return str(root), str(tools)


def _write_tool(tools: Path, name: str, printed: Mapping[str, str]) -> None:
    """`printed`: by arguments; `*`: of all others."""
    cases = []
    for number, (arguments, text) in enumerate(printed.items()):
        output = tools / f"{name}.{number}"
        output.write_text(text)
        cases.append(f"{'*' if arguments == '*' else shlex.quote(arguments)}) /bin/cat {shlex.quote(str(output))};;")
    script = tools / name
    script.write_text(f'#!/bin/sh\ncase "$*" in\n{os.linesep.join(cases)}\nesac\n')
    script.chmod(0o755)


def _files() -> dict[str, str]:
    files = {
        "proc/sys/kernel/random/boot_id": "00000000-0000-0000-0000-000000000001\n",
        "proc/self/mountinfo": "23 1 259:2 / / rw,relatime shared:1 - ext4 /dev/nvme0n1p2 rw\n",
        "proc/meminfo": "MemTotal: 2113516416 kB\nMemFree: 99 kB\nMemAvailable: 2000000000 kB\nSwapTotal: 0 kB\n"
        "SwapFree: 0 kB\nHardwareCorrupted: 0 kB\n",
        "proc/buddyinfo": "Node 0, zone   Normal" + "   1000" * 11 + "\n",
        "proc/uptime": "864000.00 100.00\n",
        "proc/modules": "".join(f"module{number} 16384 0 - Live 0x0\n" for number in range(120))
        + "nvidia 56000000 1 nvidia_uvm, Live 0x0\n",
        "proc/interrupts": "".join(
            f"{name}: {' '.join(['12345'] * _CPUS)}  {name} of a device\n" for name in (*range(300), "THR", "MCE")
        ),
        "proc/cpuinfo": "".join(
            f"processor\t: {number}\nmodel name\t: AMD EPYC 9554\ncpu MHz\t\t: 3100.000\nflags\t\t: {'flag ' * 150}\n\n"
            for number in range(_CPUS)
        ),
        "sys/devices/system/cpu/online": f"0-{_CPUS - 1}\n",
        "sys/devices/system/clocksource/clocksource0/current_clocksource": "tsc\n",
    }
    for cpu in range(_CPUS):
        base = f"sys/devices/system/cpu/cpu{cpu}"
        files[f"{base}/cpufreq/scaling_governor"] = "performance\n"
        files[f"{base}/cpufreq/cpuinfo_max_freq"] = files[f"{base}/cpufreq/scaling_max_freq"] = "3750000\n"
    for module in range(_MODULES):
        base = f"sys/devices/system/edac/mc/mc{module // 4}/dimm{module % 4}"
        files |= {
            f"{base}/dimm_ue_count": "0\n",
            f"{base}/dimm_ce_count": "2\n",
            f"{base}/dimm_label": f"P0_{module}\n",
        }
        files |= {f"{base}/size": "65536\n", f"{os.path.dirname(base)}/ue_count": "0\n"}
    for pid in range(1, _PROCESSES):
        files[f"proc/{pid}/stat"] = f"{pid} (process {pid}) S 1 {' '.join(['1'] * 48)}\n"
    for number in range(_GPUS):
        files |= _pci(f"0000:{0x1B + number:02x}:00.0", "0x030200", "0x10de", "32.0 GT/s PCIe", 16)
        files |= _adapter(number, f"0000:{0x18 if not number else 0x60 + number:02x}:00.0")
    for number in range(_NVME):
        address = f"0000:{0x80 + number:02x}:00.0"
        base = f"sys/class/nvme/nvme{number}"
        files |= {f"{base}/state": "live\n", f"{base}/model": "M\n", f"{base}/serial": f"S64H{number}\n"}
        files |= {
            f"{base}/device/uevent": f"PCI_SLOT_NAME={address}\n",
            f"sys/block/nvme{number}n1/size": "7501476528\n",
        }
        files |= _pci(address, "0x010802", "0x144d", "16.0 GT/s PCIe", 4)
    return files


def _pci(address: str, kind: str, vendor: str, speed: str, width: int) -> dict[str, str]:
    base = f"sys/bus/pci/devices/{address}"
    errors = {f"{base}/aer_dev_{name}": "RxErr 0\n" * 12 for name in ("correctable", "nonfatal", "fatal")}
    files = {f"{base}/class": f"{kind}\n", f"{base}/vendor": f"{vendor}\n"}
    files |= {f"{base}/{which}_link_speed": f"{speed}\n" for which in ("current", "max")}
    return files | {f"{base}/{which}_link_width": f"{width}\n" for which in ("current", "max")} | errors


def _adapter(number: int, address: str) -> dict[str, str]:
    base, net = f"sys/class/infiniband/mlx5_{number}", f"sys/class/net/ib{number}"
    port = f"{base}/ports/1"
    files = _pci(address, "0x020700", "0x15b3", "32.0 GT/s PCIe", 16)
    files |= {f"{base}/node_guid": f"b83f:d203:0012:{number:04x}\n", f"{base}/fw_ver": "28.39.1002\n"}
    files |= {f"{one}/device/uevent": f"DRIVER=mlx5_core\nPCI_SLOT_NAME={address}\n" for one in (base, net)}
    files |= {f"{port}/state": "4: ACTIVE\n", f"{port}/phys_state": "5: LinkUp\n", f"{port}/link_layer": "InfiniBand\n"}
    files[f"{port}/rate"] = "400 Gb/sec (4X NDR)\n"
    names = (
        "symbol_error", "link_error_recovery", "local_link_integrity_errors", "excessive_buffer_overrun_errors",
        "port_rcv_errors", "port_rcv_remote_physical_errors", "link_downed",
    )  # fmt: skip
    files |= {f"{port}/counters/{name}": "0\n" for name in names}
    files |= {
        f"{net}/carrier": "1\n",
        f"{net}/operstate": "up\n",
        f"{net}/speed": "400000\n",
        f"{net}/carrier_changes": "2\n",
    }
    return files | {f"{net}/address": "00:00:10:49\n", f"{net}/addr_assign_type": "0\n"}


def _printed() -> dict[str, dict[str, str]]:
    nvme = (
        '{"smartctl":{"version":[7,3],"exit_status":0},"serial_number":"S64H%d","smart_status":{"passed":true},'
        '"nvme_smart_health_information_log":{"critical_warning":0,"available_spare":100,"available_spare_threshold":10,'
        '"percentage_used":1,"power_cycles":9,"data_units_read":5,"data_units_written":7,"media_errors":0},'
        '"temperature":{"current":33},"nvme_error_information_log":{"table":[%s]}}'
    )
    row = '{"error_count":7,"submission_queue_id":0,"command_id":1,"status_field":{"value":8194}}'
    module = "Handle 0x{:04x}, DMI type 17, 92 bytes\nMemory Device\n\tSize: 64 GB\n" + "\tField: value\n" * 30 + "\n"
    unit = "NRestarts=0\nId={}.service\nLoadState=loaded\nActiveState=active\nSubState=running\n"
    return {
        "nvidia-smi": {"-q -x": _report(), "nvlink -s": _links("25 GB/s"), "nvlink -e": _links("{} Errors: 0")},
        "ipmitool": {
            "sel elist": "".join(
                f"{number:4x} | 01/02/2024 | 10:00:01 | Power Unit Pwr Unit Status | Power off/down | Asserted\n"
                for number in range(1, _EVENTS)
            ),
            "sdr elist": "".join(
                f"SENSOR{number:03}        | {number:02X}h | ok  |  3.1 | 45 degrees C\n" for number in range(_SENSORS)
            ),
        },
        "smartctl": {
            f"-j -a /dev/nvme{number}n1": nvme % (number, ",".join([row] * 64)) for number in range(_NVME)
        },
        "dmidecode": {"*": "# dmidecode 3.4\n\n" + "".join(module.format(one) for one in range(_MODULES))},
        "systemctl": {"*": "\n".join(unit.format(name) for name in ("munge", "chrony"))},
        "chronyc": {"*": "0A000001,10.0.0.1,3,1700000000.1,-0.000012345,0.00001,0.00002,-12.3,0.001,0.05,0.0004,0.0002,"
                         "64.2,Normal\n"},
        "df": {"*": "Filesystem Type 1B-blocks Avail Inodes IFree Mounted on\n/dev/nvme0n1p2 ext4 960197124096 "
                    "700000000000 16777216 16277851 /\n"},
        "dpkg-query": {"*": "munge\t0.5.15-2\tinstalled\n"},
        "journalctl": {"*": "".join(
            '{"__REALTIME_TIMESTAMP":"1700000000000000","_TRANSPORT":"kernel","SYSLOG_FACILITY":"0","PRIORITY":"6",'
            f'"__MONOTONIC_TIMESTAMP":"{number}","MESSAGE":"usb 1-1: new high-speed USB device"}}\n'
            for number in range(1, 1000)
        )},
    }  # fmt: skip


def _report() -> str:
    return (
        '<?xml version="1.0" ?>\n<!DOCTYPE nvidia_smi_log SYSTEM "nvsmi_device_v12.dtd">\n<nvidia_smi_log>\n'
        f"\t<driver_version>550.54.15</driver_version>\n\t<attached_gpus>{_GPUS}</attached_gpus>\n"
        f"{''.join(_gpu(number) for number in range(_GPUS))}</nvidia_smi_log>\n"
    )


def _gpu(number: int) -> str:
    clocks = "".join(
        f"\t\t\t<supported_mem_clock>\n\t\t\t\t<value>{memory} MHz</value>\n"
        + "".join(
            f"\t\t\t\t<supported_graphics_clock>{1980 - 15 * step} MHz</supported_graphics_clock>\n"
            for step in range(_CLOCKS)
        )
        + "\t\t\t</supported_mem_clock>\n"
        for memory in (2619, 1593)
    )
    errors = "".join(
        f"<{name}>0</{name}>" for name in ("sram_correctable", "sram_uncorrectable_parity", "dram_correctable",
                                           "dram_uncorrectable")
    )  # fmt: skip
    rows = "".join(f"<remapped_row_{name}>0</remapped_row_{name}>" for name in ("corr", "unc"))
    rows += "".join(f"<remapped_row_{name}>No</remapped_row_{name}>" for name in ("pending", "failure"))
    reasons = "".join(
        f"<clocks_event_reason_{name}>Not Active</clocks_event_reason_{name}>"
        for name in ("hw_slowdown", "hw_thermal_slowdown", "hw_power_brake_slowdown", "sw_thermal_slowdown")
    )
    other = "".join(f"\t\t<field_{one}>N/A</field_{one}>\n" for one in range(400))
    return (
        f'\t<gpu id="00000000:{0x1B + number:02X}:00.0">\n\t\t<product_name>NVIDIA H100 80GB HBM3</product_name>\n'
        f"\t\t<serial>{_SERIAL + number}</serial>\n\t\t<uuid>GPU-00000000-0000-0000-0000-{number:012}</uuid>\n"
        f"\t\t<vbios_version>96.00.74.00.01</vbios_version>\n{other}\t\t<fb_memory_usage><used>4 MiB</used>"
        f"</fb_memory_usage>\n\t\t<ecc_errors><volatile>{errors}</volatile></ecc_errors>\n"
        f"\t\t<remapped_rows>{rows}</remapped_rows>\n\t\t<temperature><gpu_temp>31 C</gpu_temp>"
        f"<memory_temp>40 C</memory_temp></temperature>\n\t\t<clocks_event_reasons>{reasons}</clocks_event_reasons>\n"
        f"\t\t<supported_clocks>\n{clocks}\t\t</supported_clocks>\n\t\t<processes></processes>\n\t</gpu>\n"
    )


def _links(said: str) -> str:
    """For each link a line, or one for each kind of error."""
    kinds = ("Replay", "Recovery", "CRC") if "{}" in said else ("",)
    return "".join(
        f"GPU {gpu}: NVIDIA H100 80GB HBM3 (UUID: GPU-00000000-0000-0000-0000-{gpu:012})\n"
        + "".join(f"\t Link {link}: {said.format(kind)}\n" for link in range(_LINKS) for kind in kinds)
        for gpu in range(_GPUS)
    )
