"""What checks make of what the kernel shows in /sys and /proc, of machines that are not here."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

import msgspec
import pytest
from tests.support.fake_sysfs import tree_of_epyc, write_tree

from fireflyer.base.health_event import HealthEvent
from fireflyer.base.units import SECOND
from fireflyer.runtime.disk import RealDisk
from fireflyer.validators.checks.capture import capture
from fireflyer.validators.core.checks.catalogue import CHECKS, CheckSpec, chosen_checks, sources_of
from fireflyer.validators.core.checks.evidence import Evidence, Output
from fireflyer.validators.core.checks.health_round import judge_round
from fireflyer.validators.core.checks.mounts import MountSettings
from fireflyer.validators.core.checks.policy import HealthPolicy, Inventory
from fireflyer.validators.core.checks.processor import ProcessorSettings
from fireflyer.validators.core.checks.sources import Files

RECORDED: Final = Path(__file__).parent / "recorded"
NOW_NS: Final = 1_709_546_400 * SECOND
NO_INVENTORY: Final = Inventory()
DEFAULTS: Final = HealthPolicy()
PORT: Final = "sys/class/infiniband/mlx5_0/ports/1"
INFINIBAND: Final = {
    "sys/class/infiniband/mlx5_0/node_guid": "0c42:a103:0065:1234\n",
    f"{PORT}/state": "4: ACTIVE\n",
    f"{PORT}/phys_state": "5: LinkUp\n",
    f"{PORT}/rate": "200 Gb/sec (4X HDR)\n",
    f"{PORT}/counters/link_downed": "3\n",
    f"{PORT}/counters/symbol_error": "70\n",
}
NET: Final = "sys/class/net/eth0"
ETHERNET: Final = {
    f"{NET}/device/uevent": "DRIVER=mlx5_core\n",
    f"{NET}/carrier": "1\n",
    f"{NET}/speed": "25000\n",
    f"{NET}/carrier_changes": "2\n",
    f"{NET}/statistics/rx_crc_errors": "0\n",
}
MC: Final = "sys/devices/system/edac/mc/mc0"
EDAC: Final = {
    "proc/meminfo": "MemTotal:  527843596 kB\nHardwareCorrupted:     0 kB\n",
    f"{MC}/ue_count": "0\n",
    f"{MC}/ce_count": "5\n",
    f"{MC}/dimm0/dimm_label": "P0_DIMM_A1\n",
    f"{MC}/dimm0/dimm_ue_count": "0\n",
    f"{MC}/dimm0/dimm_ce_count": "5\n",
    f"{MC}/dimm0/size": "32768\n",
    f"{MC}/dimm1/size": "0\n",
}


def found(
    check: str,
    files: Mapping[str, str],
    inventory: Inventory = NO_INVENTORY,
    *,
    before: Mapping[str, str] | None = None,
    policy: HealthPolicy = DEFAULTS,
    after_s: int = 3600,
) -> list[HealthEvent]:
    """Events of one check; `before`: files of the round `after_s` before."""
    policy = msgspec.structs.replace(policy, inventory=inventory)
    checks, earlier = chosen_checks(policy, [check]), None
    if before is not None:
        then = Evidence(now_ns=NOW_NS - after_s * SECOND, boot="b", files=before)
        earlier = judge_round(checks, then, policy).counters
    return list(judge_round(checks, Evidence(now_ns=NOW_NS, boot="b", files=files), policy, earlier).events)


def told(*args: object, **kwargs: object) -> list[tuple[str, str, str]]:
    return [(one.severity, one.cause, one.part) for one in found(*args, **kwargs)]  # type: ignore[arg-type]


def test_infiniband() -> None:
    expected = Inventory(infiniband={"mlx5_0": 200})
    port = "infiniband:mlx5_0/1"
    assert told("infiniband", INFINIBAND, expected) == [("ok", "", "")], "counters of before may be years old"
    assert told("infiniband", {}, expected) == [("high", "missing", "infiniband:mlx5_0")]
    down = {**INFINIBAND, f"{PORT}/state": "1: DOWN\n", f"{PORT}/phys_state": "3: Disabled\n"}
    assert told("infiniband", down, expected) == [("high", "down", port)]
    assert told("infiniband", down) == [("ok", "", "")], "a port without a cable"
    assert told("infiniband", down, before=INFINIBAND) == [("high", "down", port)], "it was active before"
    slow = {**INFINIBAND, f"{PORT}/rate": "100 Gb/sec (4X EDR)\n"}
    (event,) = found("infiniband", slow, expected)
    assert (event.severity, event.cause, event.serial) == ("high", "rate", "0c42:a103:0065:1234")
    assert "200 Gbit/s" in event.words


def test_flaps_and_errors_count_by_their_rate() -> None:
    port = "infiniband:mlx5_0/1"
    flapped = {**INFINIBAND, f"{PORT}/counters/link_downed": "4\n"}
    assert told("infiniband", flapped, before=INFINIBAND) == [("warn", "flaps", port)]
    assert told("infiniband", flapped, before=INFINIBAND, after_s=60) == [("warn", "flaps", port)], "one is no storm"
    bad = {**INFINIBAND, f"{PORT}/counters/link_downed": "30\n"}
    assert told("infiniband", bad, before=INFINIBAND) == [("low", "flaps", port)]
    noisy = {**INFINIBAND, f"{PORT}/counters/symbol_error": "170\n"}
    assert told("infiniband", noisy, before=INFINIBAND) == [("ok", "", "")]
    assert told("infiniband", noisy, before=INFINIBAND, after_s=1800) == [("warn", "errors", port)]


def test_a_counter_that_went_down_was_reset() -> None:
    reset = {**INFINIBAND, f"{PORT}/counters/symbol_error": "5\n"}
    assert told("infiniband", reset, before=INFINIBAND) == [("ok", "", "")]


def test_ethernet() -> None:
    expected = Inventory(ethernet={"eth0": 25})
    assert told("ethernet", ETHERNET, expected) == [("ok", "", "")]
    assert told("ethernet", {**ETHERNET, f"{NET}/carrier": "0\n"}, expected) == [("high", "down", "ethernet:eth0")]
    assert told("ethernet", {**ETHERNET, f"{NET}/speed": "1000\n"}, expected) == [("low", "rate", "ethernet:eth0")]
    assert told("ethernet", {}, expected) == [("high", "missing", "ethernet:eth0")]
    flapped = {**ETHERNET, f"{NET}/carrier_changes": "4\n"}
    assert told("ethernet", flapped, before=ETHERNET) == [("warn", "flaps", "ethernet:eth0")]


def test_memory_errors() -> None:
    assert told("memory_errors", EDAC) == [("ok", "", "")]
    broken = {**EDAC, f"{MC}/dimm0/dimm_ue_count": "1\n"}
    assert told("memory_errors", broken, before=EDAC) == [("high", "uncorrected", "memory:P0_DIMM_A1")]
    assert told("memory_errors", broken, before=broken) == [("ok", "", "")]
    noisy = {**EDAC, f"{MC}/ce_count": "205\n"}
    assert told("memory_errors", noisy, before=EDAC) == [("warn", "corrected", "memory:mc0")]
    poisoned = {**EDAC, "proc/meminfo": "MemTotal:  527843596 kB\nHardwareCorrupted:     4 kB\n"}
    assert told("memory_errors", poisoned, before=EDAC) == [("high", "poisoned", "")]


def test_memory_size_and_modules() -> None:
    assert told("memory_size", EDAC, Inventory(memory_gib=512, memory_modules=1)) == [("ok", "", "")]
    assert told("memory_size", EDAC, Inventory(memory_gib=1024)) == [("low", "size", "")]
    policy = HealthPolicy(inventory=Inventory(memory_modules=2))
    checks = chosen_checks(policy, ["memory_size"])
    for name, severity in (("healthy", "ok"), ("faulty", "low")):
        output = Output((RECORDED / f"dmidecode_{name}.out").read_text())
        evidence = Evidence(now_ns=NOW_NS, files=EDAC, outputs={"dmidecode": output})
        assert [event.severity for event in judge_round(checks, evidence, policy).events] == [severity]


def test_processors() -> None:
    base = "sys/devices/system/cpu"
    files = {
        "sys/devices/system/clocksource/clocksource0/current_clocksource": "hpet\n",
        f"{base}/online": "0-1,4\n",
        f"{base}/cpu0/cpufreq/scaling_governor": "powersave\n",
        f"{base}/cpu0/cpufreq/scaling_max_freq": "1200000\n",
    }
    policy = HealthPolicy(processors=ProcessorSettings(least_mhz=1500))
    assert told("processors", files, Inventory(cpus=4), policy=policy) == [
        ("low", "missing", ""),
        ("warn", "clock_source", ""),
        ("warn", "governor", ""),
        ("low", "frequency", ""),
    ]


def stat(pid: int, name: str, state: str, started: int) -> dict[str, str]:
    fields = " ".join(["1"] * 18)
    return {f"proc/{pid}/stat": f"{pid} ({name}) {state} {fields} {started} 0 0\n"}


def test_a_process_hangs_only_when_it_was_so_in_a_round_before() -> None:
    files = {**stat(1, "init", "S", 1), **stat(7, "a) D (b", "D", 70), **stat(8, "gone", "Z", 80)}
    assert told("processes", files) == [("ok", "", "")]
    assert told("processes", files, before=files) == [("low", "uninterruptible", ""), ("warn", "zombie", "")]
    assert told("processes", files, before=files, after_s=60) == [("ok", "", "")]
    other = {**stat(1, "init", "S", 1), **stat(7, "a) D (b", "D", 71)}
    assert told("processes", other, before=files) == [("ok", "", "")], "another process with the same number"


def test_mounts() -> None:
    healthy = {"proc/self/mountinfo": (RECORDED / "mountinfo_healthy.out").read_text()}
    faulty = {"proc/self/mountinfo": (RECORDED / "mountinfo_faulty.out").read_text()}
    expected = Inventory(mounts=("/data", "/scratch disk"))
    assert told("mounts", healthy, expected) == [("ok", "", "")]
    assert told("mounts", faulty, expected) == [
        ("high", "missing", "mount:/data"),
        ("high", "read_only", "mount:/scratch disk"),
    ]
    assert [event.at_once for event in found("mounts", faulty, expected)] == [False, False], "it is probed"
    fstab = {"etc/fstab": "# a comment\nhost:/x /nfs nfs rw 0 0\n/dev/x /usb ext4 noauto 0 0\nnone swap swap sw 0 0\n"}
    assert told("mounts", {**healthy, **fstab}) == [("high", "missing", "mount:/nfs")]


def test_a_missing_mount_counts_at_once_where_the_policy_says_so() -> None:
    files = {"proc/self/mountinfo": (RECORDED / "mountinfo_healthy.out").read_text()}
    rules = HealthPolicy(inventory=Inventory(mounts=("/gone",)), mounts=MountSettings(at_once=True))
    (event,) = judge_round(chosen_checks(rules, ["mounts"]), Evidence(now_ns=NOW_NS, files=files), rules).events
    assert (event.cause, event.at_once) == ("missing", True)


def test_nvme_devices() -> None:
    files = {"sys/class/nvme/nvme0/state": "dead\n", "sys/class/nvme/nvme0/serial": "S64HNE0R100001  \n"}
    events = found("nvme", files, Inventory(nvme=2))
    assert [(one.cause, one.part, one.serial) for one in events] == [
        ("missing", "", ""),
        ("state", "nvme:nvme0", "S64HNE0R100001"),
    ]


def test_pci_express_of_a_whole_machine(tmp_path: Path) -> None:
    disk = RealDisk()
    tree = {path: text for path, text in tree_of_epyc().items() if "/pci/" in path}
    narrow = "sys/bus/pci/devices/0000:21:00.0/current_link_width"
    assert narrow in tree
    write_tree(disk, str(tmp_path), {**tree, narrow: "8\n"})
    policy = HealthPolicy(inventory=Inventory(gpus=9))
    checks = chosen_checks(policy, ["pcie"])
    evidence = capture(sources_of(checks, policy), NOW_NS, root=str(tmp_path))
    events = judge_round(checks, evidence, policy).events
    assert [(one.severity, one.cause, one.part) for one in events] == [
        ("warn", "width", "gpu:0000:21:00.0"),
        ("high", "gpu_missing", ""),
    ]


def test_a_link_that_was_wider_before_is_a_fault_and_a_narrow_slot_is_none() -> None:
    base = "sys/bus/pci/devices/0000:a1:00.0"
    wide = {f"{base}/class": "0x020700\n", f"{base}/max_link_width": "16\n", f"{base}/current_link_width": "16\n"}
    narrow = {**wide, f"{base}/current_link_width": "8\n"}
    assert told("pcie", narrow) == told("pcie", narrow, before=narrow) == [("warn", "width", "infiniband:0000:a1:00.0")]
    assert told("pcie", narrow, before=wide) == [("low", "width", "infiniband:0000:a1:00.0")]


def test_mount_points_are_compared_as_the_kernel_writes_them() -> None:
    files = {
        "proc/self/mountinfo": (RECORDED / "mountinfo_healthy.out").read_text(),
        "etc/fstab": "host:/x /data/ nfs rw 0 0\n/dev/x //scratch\\040disk/. xfs rw 0 0\n",
    }
    assert told("mounts", files, Inventory(mounts=("/data/",))) == [("ok", "", "")]


def test_errors_of_pci_express() -> None:
    base = "sys/bus/pci/devices/0000:a1:00.0"
    clean = {
        f"{base}/class": "0x020700\n",
        f"{base}/vendor": "0x15b3\n",
        f"{base}/aer_dev_fatal": "DLP 0\nTOTAL_ERR_FATAL 0\n",
    }
    broken = {**clean, f"{base}/aer_dev_fatal": "DLP 2\nTOTAL_ERR_FATAL 2\n"}
    assert told("pcie", broken, before=clean) == [("high", "aer_fatal", "infiniband:0000:a1:00.0")]


def test_a_check_of_what_the_kernel_does_not_let_us_read_says_so() -> None:
    evidence = Evidence(now_ns=NOW_NS, unreadable={f"{MC}/ue_count": "permission denied"})
    (event,) = judge_round(chosen_checks(HealthPolicy(), ["memory_errors"]), evidence, HealthPolicy()).events
    assert event.could_not_run
    assert "permission denied" in event.words


@pytest.mark.parametrize("check", [check for check in CHECKS if check.name != "gpu_dcgm"], ids=lambda one: one.name)
def test_what_was_not_read_is_not_missing(check: CheckSpec) -> None:
    """Of a machine where nothing was read: with an inventory, each device would be missing."""
    inventory = Inventory(
        gpus=8, cpus=4, memory_gib=512, nvme=2, disks=("sda",), mounts=("/data",), ethernet={"eth0": 25},
        infiniband={"mlx5_0": 200},
    )  # fmt: skip
    policy = HealthPolicy(inventory=inventory)
    patterns = [
        pattern
        for source in sources_of([check], policy)
        if isinstance(source, Files)
        for pattern in source.patterns
    ]  # fmt: skip
    for pattern in patterns:
        evidence = Evidence(now_ns=NOW_NS, incomplete={pattern: "there are more than 40000 files"})
        (event,) = judge_round([check], evidence, policy).events
        assert (event.severity, event.could_not_run) == ("ok", True)
        assert f"/{pattern} was not read completely: there are more" in event.words


def test_processes_take_no_files_from_the_checks_of_devices() -> None:
    evidence = Evidence(now_ns=NOW_NS, files=INFINIBAND, incomplete={"proc/[0-9]*/stat": "it took longer than 5 s"})
    checks = chosen_checks(DEFAULTS, ["processes", "infiniband"])
    assert [(one.check, one.could_not_run) for one in judge_round(checks, evidence, DEFAULTS).events] == [
        ("processes", True),
        ("infiniband", False),
    ]
    assert [one.name for one in sources_of(CHECKS, DEFAULTS) if isinstance(one, Files) and one.last] == ["processes"]


def test_a_mount_point_that_is_a_link_is_mounted_where_it_leads(tmp_path: Path) -> None:
    mountinfo = (RECORDED / "mountinfo_healthy.out").read_text()
    for name, text in (("proc/self/mountinfo", mountinfo), ("etc/fstab", "host:/x /nfs/link nfs rw 0 0\n")):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "nfs").mkdir()
    (tmp_path / "nfs/link").symlink_to("../data")
    (tmp_path / "lost").symlink_to("scratch")
    policy = HealthPolicy(inventory=Inventory(mounts=("/lost", "/scratch disk")))
    checks = chosen_checks(policy, ["mounts"])
    events = judge_round(checks, capture(sources_of(checks, policy), NOW_NS, root=str(tmp_path)), policy).events
    assert [(one.cause, one.part) for one in events] == [("missing", "mount:/lost")]


def test_a_mount_point_on_a_server_that_does_not_answer_is_not_missing() -> None:
    files = {"proc/self/mountinfo": (RECORDED / "mountinfo_healthy.out").read_text()}
    hangs = Evidence(now_ns=NOW_NS, files=files, unreadable={"nfs/link": "where it leads was not found within 2 s"})
    for mounts, told_of in ((("/nfs/link",), [("", True)]), (("/nfs/link", "/gone"), [("mount:/gone", False)])):
        policy = HealthPolicy(inventory=Inventory(mounts=mounts))
        events = judge_round(chosen_checks(policy, ["mounts"]), hangs, policy).events
        assert [(one.part, one.could_not_run) for one in events] == told_of


def test_users_can_have_processes_hang() -> None:
    files = {**stat(1, "init", "S", 1), **stat(7, "a", "D", 70), **stat(8, "gone", "Z", 80)}
    assert [one.user_made for one in found("processes", files, before=files)] == [True, True]
    many = {path: text for pid in range(1, 30) for path, text in stat(pid, "gone", "Z", pid).items()}
    assert [(one.cause, one.user_made) for one in found("processes", many)] == [("zombies", True)]


def test_an_interface_that_the_inventory_does_not_name_takes_no_node_out() -> None:
    """As that of a laptop that roams, or of a dock."""
    expected = Inventory(ethernet={"eth0": 25})
    bad = {**ETHERNET, f"{NET}/carrier_changes": "100\n", f"{NET}/statistics/rx_crc_errors": "900000\n"}
    part = "ethernet:eth0"
    assert told("ethernet", bad, expected, before=ETHERNET) == [("low", "errors", part), ("low", "flaps", part)]
    assert told("ethernet", bad, before=ETHERNET) == [("warn", "errors", part), ("warn", "flaps", part)]


def test_packets_that_a_busy_host_leaves_in_the_adapter_are_no_fault_of_the_link() -> None:
    path = f"{NET}/statistics/rx_missed_errors"
    calm, busy = {**ETHERNET, path: "0\n"}, {**ETHERNET, path: "900000\n"}
    (event,) = found("ethernet", busy, Inventory(ethernet={"eth0": 25}), before=calm)
    assert (event.severity, event.cause, event.user_made) == ("warn", "errors", True)


def test_a_link_whose_state_the_kernel_does_not_tell_is_not_down() -> None:
    policy = HealthPolicy(inventory=Inventory(infiniband={"mlx5_0": 200}, ethernet={"eth0": 25}))
    files = {
        path: text for path, text in {**INFINIBAND, **ETHERNET}.items() if not path.endswith(("/state", "/carrier"))
    }
    unreadable = {f"{PORT}/state": "input/output error", f"{NET}/carrier": "input/output error"}
    evidence = Evidence(now_ns=NOW_NS, files=files, unreadable=unreadable)
    events = judge_round(chosen_checks(policy, ["infiniband", "ethernet"]), evidence, policy).events
    assert [(one.severity, one.could_not_run) for one in events] == [("ok", True)] * 2
    assert all("input/output error" in one.words for one in events)
