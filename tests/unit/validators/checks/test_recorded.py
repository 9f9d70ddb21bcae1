"""What each check makes of recorded output: of a healthy machine, of a faulty one, and of text that is no output."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import pytest

from fireflyer.base.health_event import HealthEvent
from fireflyer.base.units import SECOND
from fireflyer.validators.core.checks.catalogue import CHECKS, chosen_checks
from fireflyer.validators.core.checks.evidence import Counters, Evidence, KernelRecord, Output
from fireflyer.validators.core.checks.health_round import judge_round
from fireflyer.validators.core.checks.kernel_log import last_record, parse_journal, parse_kmsg, with_newest_record
from fireflyer.validators.core.checks.mounts import SpaceSettings
from fireflyer.validators.core.checks.policy import HealthPolicy, Inventory
from fireflyer.validators.core.checks.services import ServiceSettings

RECORDED: Final = Path(__file__).parent / "recorded"
HOUR_NS: Final = 3600 * SECOND
NOW_NS: Final = 1_709_546_400 * SECOND
POLICY: Final = HealthPolicy(services=ServiceSettings(units=("munge.service", "chrony.service")))
TOOLS: Final = {
    "disk_space": ("df", "df_healthy.out", "df_malformed.out"),
    "disk_smart": ("smartctl:sda", "smartctl_ata_healthy.json", "smartctl_malformed.json"),
    "services": ("systemctl", "systemctl_healthy.out", "systemctl_malformed.out"),
    "time_offset": ("chronyc", "chronyc_healthy.out", "chronyc_malformed.out"),
    "ipmi_log": ("ipmitool_sel", "ipmitool_sel_healthy.out", "ipmitool_malformed.out"),
    "ipmi_sensors": ("ipmitool_sdr", "ipmitool_sdr_healthy.out", "ipmitool_malformed.out"),
    "gpu_count": ("nvidia_smi", "nvidia_smi_healthy.xml", "nvidia_smi_malformed.xml"),
    "gpu_ecc": ("nvidia_smi", "nvidia_smi_healthy.xml", "nvidia_smi_malformed.xml"),
    "gpu_rows": ("nvidia_smi", "nvidia_smi_healthy.xml", "nvidia_smi_malformed.xml"),
    "gpu_clocks": ("nvidia_smi", "nvidia_smi_healthy.xml", "nvidia_smi_malformed.xml"),
    "gpu_temperature": ("nvidia_smi", "nvidia_smi_healthy.xml", "nvidia_smi_malformed.xml"),
    "gpu_processes": ("nvidia_smi", "nvidia_smi_healthy.xml", "nvidia_smi_malformed.xml"),
    "gpu_dcgm": ("dcgmi", "dcgmi_healthy.json", "dcgmi_malformed.out"),
}
"""Of each check that reads one tool: healthy and malformed output."""


def recorded(name: str) -> str:
    return (RECORDED / name).read_text()


def found(
    check: str, evidence: Evidence, policy: HealthPolicy = POLICY, earlier: Counters | None = None
) -> list[HealthEvent]:
    return list(judge_round(chosen_checks(policy, [check]), evidence, policy, earlier).events)


def told(
    check: str, outputs: Mapping[str, str], policy: HealthPolicy = POLICY, before: Mapping[str, str] | None = None
) -> list[tuple[str, str, str]]:
    """Severity, cause and part of each event; `before`: outputs of the round an hour before."""
    earlier = None
    if before is not None:
        then = Evidence(now_ns=NOW_NS - HOUR_NS, boot="b", outputs=printed(before))
        earlier = judge_round(chosen_checks(policy, [check]), then, policy).counters
    now = Evidence(now_ns=NOW_NS, boot="b", outputs=printed(outputs), idle=True)
    return [(one.severity, one.cause, one.part) for one in found(check, now, policy, earlier)]


ENTITIES = '<!DOCTYPE x [<!ENTITY a "b">]><nvidia_smi_log><gpu id="0"><x>&a;</x></gpu></nvidia_smi_log>'


def printed(outputs: Mapping[str, str]) -> dict[str, Output]:
    return {tool: Output(recorded(name)) for tool, name in outputs.items()}


@pytest.mark.parametrize("check", TOOLS)
def test_a_healthy_machine_gets_one_event_without_a_fault(check: str) -> None:
    tool, healthy, _ = TOOLS[check]
    (event,) = found(check, Evidence(now_ns=NOW_NS, outputs=printed({tool: healthy}), idle=True))
    assert (event.severity, event.could_not_run, event.seen_ns) == ("ok", False, NOW_NS)
    assert event.words, "it says what was found to be well"


@pytest.mark.parametrize("check", TOOLS)
@pytest.mark.parametrize("text", ["", "\x00\xff", "[" * 5000, "{}", "<a/>", "1 | 2", ENTITIES, "malformed"])
def test_what_is_no_output_of_the_tool_could_not_be_judged(check: str, text: str) -> None:
    tool, _, malformed = TOOLS[check]
    output = Output(recorded(malformed) if text == "malformed" else text)
    (event,) = found(check, Evidence(now_ns=NOW_NS, outputs={tool: output}))
    if check == "ipmi_log" and text in ("", "1 | 2"):
        return  # a log without events, or with one of the manufacturer
    assert event.could_not_run
    assert "the check failed" not in event.words, event.words


def test_disks() -> None:
    assert told("disk_smart", {"smartctl:sda": "smartctl_ata_faulty.json"}) == [
        ("low", "failing", "disk:sda"),
        ("warn", "defects", "disk:sda"),
    ]
    healthy = {"smartctl:nvme0n1": "smartctl_nvme_healthy.json"}
    assert told("disk_smart", healthy) == [("ok", "", "")]
    faults = told("disk_smart", {"smartctl:nvme0n1": "smartctl_nvme_faulty.json"}, before=healthy)
    assert {(severity, cause) for severity, cause, _ in faults} == {
        ("warn", "temperature"),
        ("low", "critical_warning"),
        ("low", "spare"),
        ("low", "worn"),
        ("high", "media_errors"),
    }


def test_a_disk_that_smartctl_may_not_open_is_told_beside_those_that_it_may() -> None:
    outputs = {"smartctl:sda": "smartctl_refused.json", "smartctl:nvme0n1": "smartctl_nvme_healthy.json"}
    evidence = Evidence(
        now_ns=NOW_NS, outputs={**printed(outputs), "smartctl:sda": Output(recorded(outputs["smartctl:sda"]), 2)}
    )
    (event,) = found("disk_smart", evidence)
    assert event.severity == "ok"
    assert "Permission denied" in event.words


def test_a_disk_of_the_inventory_that_is_gone_is_a_fault() -> None:
    policy = HealthPolicy(inventory=Inventory(disks=("sda", "sdb")))
    evidence = Evidence(now_ns=NOW_NS, files={"sys/block/sda/size": "1000\n"})
    assert [(one.severity, one.part) for one in found("disk_smart", evidence, policy)] == [("high", "disk:sdb")]


def test_space_and_inodes() -> None:
    assert told("disk_space", {"df": "df_faulty.out"}) == [("warn", "space", "mount:/"), ("low", "inodes", "mount:/")]


def test_services_and_time() -> None:
    assert told("services", {"systemctl": "systemctl_faulty.out"}) == [("low", "inactive", "service:munge.service")]
    assert told("time_offset", {"chronyc": "chronyc_faulty.out"}) == [("low", "offset", "")]
    assert told("time_offset", {"chronyc": "chronyc_alone.out"}) == [("warn", "not_synchronized", "")]
    assert told("time_offset", {"chronyc": "chronyc_malformed.out", "timedatectl": "timedatectl_healthy.out"}) == [
        ("ok", "", "")
    ]
    assert told("time_offset", {"timedatectl": "timedatectl_faulty.out"}) == [("warn", "not_synchronized", "")]


def test_only_new_events_of_the_management_controller_are_faults() -> None:
    faulty = {"ipmitool_sel": "ipmitool_sel_faulty.out"}
    assert told("ipmi_log", faulty) == [("ok", "", "")], "they may be years old"
    assert told("ipmi_log", faulty, before={"ipmitool_sel": "ipmitool_sel_healthy.out"}) == [
        ("high", "uncorrectable", "bmc:Memory DIMM_A1"),
        ("low", "power", "bmc:Power Supply PSU2 Status"),
        ("high", "bus", "bmc:Critical Interrupt PCIe"),
        ("warn", "sensor", "bmc:Temperature Inlet"),
    ]
    assert told("ipmi_log", faulty, before=faulty) == [("ok", "", "")]


def test_records_of_manufacturers_do_not_hide_events_of_the_management_controller() -> None:
    """As ipmitool prints OEM records, which have no sensor, and panics that the kernel has stored."""
    lines = recorded("ipmitool_sel_faulty.out").splitlines()
    others = ["   b | OEM record e0 | 000000000000000000000000000", "   c | 02/11/2024 | 03:22:00 | OEM record c1 | 00"]
    log = "\n".join([*lines, *others, "   d | Linux kernel panic: Fatal ex", "   e | Linux kernel panic: ception"])
    healthy = Evidence(now_ns=NOW_NS - HOUR_NS, boot="b", outputs=printed({"ipmitool_sel": "ipmitool_sel_healthy.out"}))
    earlier = judge_round(chosen_checks(POLICY, ["ipmi_log"]), healthy, POLICY).counters
    events = found(
        "ipmi_log", Evidence(now_ns=NOW_NS, boot="b", outputs={"ipmitool_sel": Output(log)}), POLICY, earlier
    )
    assert [one.cause for one in events] == ["uncorrectable", "power", "bus", "sensor", "panic", "panic"]
    assert (events[-1].severity, events[-1].part) == ("warn", "")
    assert "Linux kernel panic" in events[-1].words
    assert all(one.once for one in events)


@pytest.mark.parametrize(
    ("state", "severity"),
    [(state, "warn") for state in ("nc", "lnc", "unc")]
    + [(state, "low") for state in ("cr", "nr", "lcr", "ucr", "lnr", "unr")]
    + [(state, "ok") for state in ("ok", "ns")],
)
def test_states_of_sensors_in_both_spellings(state: str, severity: str) -> None:
    text = f"FAN2 | 42h | ok | 29.2 | 9100 RPM\nFAN1 | 41h | {state} | 29.1 | 0 RPM\n"
    (event,) = found("ipmi_sensors", Evidence(now_ns=NOW_NS, outputs={"ipmitool_sdr": Output(text)}))
    assert event.severity == severity


def test_sensors() -> None:
    assert told("ipmi_sensors", {"ipmitool_sdr": "ipmitool_sdr_faulty.out"}) == [
        ("warn", "sensor", "bmc:CPU0_TEMP"),
        ("low", "sensor", "bmc:FAN1"),
        ("low", "power", "bmc:PSU2 Status"),
    ]


def test_gpus() -> None:
    faulty = {"nvidia_smi": "nvidia_smi_faulty.xml"}
    first, second = "gpu:0000:1b:00.0", "gpu:0000:3b:00.0"
    assert told("gpu_ecc", faulty) == [("high", "uncorrected", first)]
    assert told("gpu_rows", faulty) == [("low", "pending", first), ("warn", "many", first), ("high", "failed", second)]
    assert told("gpu_clocks", faulty) == [("low", "throttled", first)]
    assert told("gpu_temperature", faulty) == [("low", "temperature", first), ("warn", "temperature", first)]
    assert told("gpu_processes", faulty) == [("warn", "processes", first), ("warn", "memory", second)]
    (event, *_) = found("gpu_ecc", Evidence(now_ns=NOW_NS, outputs=printed(faulty)))
    assert event.serial == "1650023000027", "its history follows the part"
    assert event.at_once


def test_a_gpu_that_is_lost_or_missing() -> None:
    eight = HealthPolicy(inventory=Inventory(gpus=8))
    assert told("gpu_count", {"nvidia_smi": "nvidia_smi_lost.out"}) == [("high", "lost", "")]
    assert told("gpu_count", {"nvidia_smi": "nvidia_smi_healthy.xml"}, eight) == [("high", "missing", "")]
    assert told("gpu_count", {"nvidia_smi": "nvidia_smi_none.out"}, eight) == [("high", "missing", "")]
    assert told("gpu_count", {"nvidia_smi": "nvidia_smi_none.out"}) == [("ok", "", "")]


def test_a_gpu_that_the_report_calls_lost() -> None:
    report = recorded("nvidia_smi_healthy.xml")
    lost = re.sub(r"<gpu_temp>[^<]*<", "<gpu_temp>GPU is lost<", report, count=1)
    events = found("gpu_count", Evidence(now_ns=NOW_NS, outputs={"nvidia_smi": Output(lost)}))
    assert [(one.severity, one.cause, one.part) for one in events] == [("high", "lost", "gpu:0000:1b:00.0")]


@pytest.mark.parametrize(
    "name", ["GPU is lost", "x&#10;GPU is lost", "No devices were found", "Unable to determine the device handle"]
)
def test_the_name_of_a_process_in_the_report_says_nothing_of_the_gpus(name: str) -> None:
    report = recorded("nvidia_smi_healthy.xml")
    process = f"<process_info><pid>7</pid><process_name>{name}\n{name}</process_name></process_info>"
    forged = re.sub(
        r"<processes>.*?</processes>|<processes ?/>", f"<processes>{process}</processes>", report, flags=re.DOTALL
    )
    assert name in forged
    evidence = Evidence(now_ns=NOW_NS, outputs={"nvidia_smi": Output(forged)})
    for check in ("gpu_count", "gpu_ecc"):
        assert [(one.severity, one.could_not_run) for one in found(check, evidence)] == [("ok", False)]


def test_a_report_with_entities_is_not_expanded() -> None:
    bomb = '<!DOCTYPE a [<!ENTITY b "' + "c" * 100 + '">]><nvidia_smi_log>&b;</nvidia_smi_log>'
    (event,) = found("gpu_ecc", Evidence(now_ns=NOW_NS, outputs={"nvidia_smi": Output(bomb)}))
    assert event.could_not_run
    assert "entities" in event.words


def test_nvlink() -> None:
    healthy = {"nvlink_status": "nvlink_status_healthy.out", "nvlink_errors": "nvlink_errors_healthy.out"}
    assert told("gpu_nvlink", healthy) == [("ok", "", "")]
    down = {**healthy, "nvlink_status": "nvlink_status_faulty.out"}
    assert told("gpu_nvlink", down) == [("ok", "", "")], "a link that was never active may have no other end"
    assert told("gpu_nvlink", down, before=healthy) == [("high", "down", "gpu:GPU-aaaa")]
    noisy = {**healthy, "nvlink_errors": "nvlink_errors_faulty.out"}
    assert told("gpu_nvlink", noisy, before=healthy) == [("low", "errors", "gpu:GPU-aaaa")]
    (event,) = found("gpu_nvlink", Evidence(now_ns=NOW_NS, outputs=printed({"nvlink_status": "nvidia_smi_failed.out"})))
    assert event.could_not_run


def test_dcgm_of_both_formats() -> None:
    assert told("gpu_dcgm", {"dcgmi": "dcgmi_faulty.json"}) == [("high", "fail", "gpu:0"), ("warn", "warn", "gpu:1")]


def kernel(*records: KernelRecord | None, sequence: int = 0) -> Evidence:
    return Evidence(now_ns=NOW_NS, kernel=tuple(one for one in records if one is not None), kernel_sequence=sequence)


def test_xids_of_the_kernel_count_and_those_that_a_user_writes_do_not() -> None:
    records = [parse_kmsg(line.encode(), NOW_NS - 7200 * SECOND) for line in recorded("kmsg.out").splitlines()]
    events = found("gpu_xid", kernel(*records))
    assert [(one.severity, one.cause, one.part, one.user_made, one.at_once) for one in events] == [
        ("warn", "xid_31", "gpu:0000:3b:00.0", True, False),
        ("high", "xid_79", "gpu:0000:3b:00.0", False, True),
        ("warn", "sxid_12028", "nvswitch:3", False, False),
        ("high", "sxid_20034", "nvswitch:1", False, True),
    ]
    assert "2 times" in events[1].words
    assert "restart node" in events[1].words
    assert [(one.severity, one.cause, one.part, one.user_made) for one in found("kernel_errors", kernel(*records))] == [
        ("high", "block_io", "disk:nvme0n1", False),
        ("warn", "out_of_memory", "", True),
    ]


UNCORRECTED: Final = (
    "EDAC MC0: 1 UE memory read error on CPU_SrcID#0_MC#0_Chan#0_DIMM#0 (channel:0 slot:0 page:0x1f00a offset:0xc0 "
    "grain:32 - err_code:0x0001:0x0090)"
)


@pytest.mark.parametrize(
    "name",
    [
        "XFS (sda1): ",
        "XFS (a): Corrup",
        "EDAC MC0: 1 UE ",
        "I/O error, dev ",
        "EXT4-fs error (",
        "NVRM: Xid (PCI:0",
        "EDAC MC0: 1 UE",
        "I/O error, dev",
        "nvme 0000:01:00",
        "mlx5_core 0000:",
    ],
)
@pytest.mark.parametrize("file", ["Corruption", "a): Corruption ", "nvme0n1, sector 1", "shutdown"])
def test_what_the_kernel_says_of_a_users_process_is_no_error_of_a_device(name: str, file: str) -> None:
    for said in (
        f"{name}[4711]: segfault at 0 ip 00 sp 00 error 4 in {file}[400000+1000]",
        f"{name}[1] trap {file}",
        f"{name} invoked oom-killer: gfp_mask=0x140dca(GFP_HIGHUSER_MOVABLE), order=0, oom_score_adj=0",
        f"{name}: page allocation failure: order:5, mode:0x40cc0(GFP_KERNEL), nodemask=(null),cpuset={file}",
        f"{name} (4711): drop_caches: 3",
    ):
        for check in ("kernel_errors", "gpu_xid"):
            assert [one.severity for one in found(check, kernel(KernelRecord(9, NOW_NS, said)))] == ["ok"], said


@pytest.mark.parametrize(
    ("said", "part"),
    [
        ("XFS (nvme0n1p1): Metadata corruption detected at xfs_agf_read_verify+0x70/0xd0 [xfs]", "disk:nvme0n1p1"),
        (
            "XFS (dm-0): Corruption of in-memory data (0x8) detected at xfs_defer. Shutting down filesystem.",
            "disk:dm-0",
        ),
        ("XFS (sda1): xfs_do_force_shutdown(0x2) called from line 1234 of file fs/xfs/xfs_log.c", "disk:sda1"),
        ("XFS (sda1): Filesystem has been shut down due to log error (0x2).", "disk:sda1"),
        (UNCORRECTED, "memory:0"),
        ("EDAC MC12: 1 UE on mc#12 ( page:0x0 offset:0x0 grain:0)", "memory:12"),
    ],
)
def test_errors_in_the_kernels_own_words(said: str, part: str) -> None:
    (event,) = found("kernel_errors", kernel(KernelRecord(9, NOW_NS, said)))
    assert (event.severity, event.part) == ("high", part)


def test_only_the_transport_and_the_facility_of_the_kernel_count_in_the_journal() -> None:
    records = [parse_journal(line.encode()) for line in recorded("journal.out").splitlines()]
    assert [one.cause for one in found("gpu_xid", kernel(*records))] == ["xid_48"]


def test_records_that_the_kernel_has_overwritten_are_told() -> None:
    (event,) = found("gpu_xid", Evidence(now_ns=NOW_NS, kernel_lost=7))
    assert (event.severity, event.cause) == ("warn", "lost_records")
    assert "7 records" in event.words


def test_an_xid_is_told_once() -> None:
    policy = HealthPolicy()
    record = KernelRecord(9, NOW_NS, "NVRM: Xid (PCI:0000:3b:00): 48, DBE")
    checks = chosen_checks(policy, ["gpu_xid"])
    first = judge_round(checks, kernel(record, sequence=12), policy)
    assert [one.cause for one in first.events] == ["xid_48"]
    again = judge_round(checks, kernel(record, sequence=12), policy, first.counters)
    assert [one.severity for one in again.events] == ["ok"]
    newer = judge_round(checks, kernel(KernelRecord(13, NOW_NS, record.text)), policy, again.counters)
    assert [one.cause for one in newer.events] == ["xid_48"]


@pytest.mark.parametrize("said", ["NVRM: Xid (PCI:0000:3b:00): 94, Contained", UNCORRECTED])
def test_what_the_kernel_logs_is_an_event_and_no_state(said: str) -> None:
    checks = chosen_checks(POLICY, ["gpu_xid", "kernel_errors"])
    events = judge_round(checks, kernel(KernelRecord(9, NOW_NS, said)), POLICY).events
    assert [event.once for event in events if event.severity != "ok"] == [True]


def test_an_old_xid_does_not_count_in_the_first_round() -> None:
    record = KernelRecord(9, NOW_NS - 2 * HOUR_NS, "NVRM: Xid (PCI:0000:3b:00): 48, DBE")
    assert [one.severity for one in found("gpu_xid", kernel(record))] == ["ok"]


def test_all_checks_say_why_nothing_was_captured() -> None:
    policy = HealthPolicy()
    round_ = judge_round(CHECKS, Evidence(now_ns=NOW_NS), policy)
    assert {event.check for event in round_.events} == {check.name for check in CHECKS}
    assert not [event for event in round_.events if "the check failed" in event.words]


def test_users_fill_file_systems_and_memory_is_no_disk() -> None:
    full = recorded("df_healthy.out").replace("25276510208 25276510208", "25276510208 1")
    assert full.count(" 1 ") == 1
    evidence = Evidence(now_ns=NOW_NS, outputs={"df": Output(full)})
    assert [one.severity for one in found("disk_space", evidence)] == ["ok"]
    asked = HealthPolicy(disk_space=SpaceSettings(tmpfs=True))
    assert [(one.part, one.severity, one.user_made) for one in found("disk_space", evidence, asked)] == [
        ("mount:/dev/shm", "low", True)
    ]
    disk = Evidence(now_ns=NOW_NS, outputs=printed({"df": "df_faulty.out"}))
    assert [one.user_made for one in found("disk_space", disk)] == [True, True]


@pytest.mark.parametrize(
    ("output", "user_made"),
    [
        (Output(problem="nvidia-smi is not installed", missing=True), False),
        (Output(problem="nvidia-smi did not end within 30 s, and was killed", hung=True), True),
        (Output("NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.", 9), False),
        (Output("Failed to initialize NVML: Driver/library version mismatch", 18), False),
        (Output("NVIDIA-SMI couldn't find libnvidia-ml.so library in your system.", 12), False),
    ],
)
def test_a_driver_that_does_not_answer_is_a_fault_of_a_node_that_has_gpus(output: Output, user_made: bool) -> None:
    """A user can keep nvidia-smi from ending in time, so that costs no run."""
    evidence = Evidence(now_ns=NOW_NS, outputs={"nvidia_smi": output})
    (event,) = found("gpu_count", evidence, HealthPolicy(inventory=Inventory(gpus=8)))
    assert (event.severity, event.cause, event.at_once) == ("high", "driver", False)
    assert (event.could_not_run, event.user_made) == (False, user_made)
    assert (output.problem or output.text) in event.words
    (event,) = found("gpu_count", evidence)
    assert (event.severity, event.could_not_run) == ("ok", True), "a node without GPUs"


def test_a_report_that_is_too_long_says_nothing_of_the_driver() -> None:
    """Users choose how long the names of their processes are."""
    evidence = Evidence(now_ns=NOW_NS, outputs={"nvidia_smi": Output(problem="nvidia-smi printed more than 4 MiB")})
    (event,) = found("gpu_count", evidence, HealthPolicy(inventory=Inventory(gpus=8)))
    assert (event.severity, event.could_not_run) == ("ok", True)


def test_records_that_were_overwritten_between_two_rounds_are_told() -> None:
    checks = chosen_checks(POLICY, ["gpu_xid"])
    first = judge_round(checks, Evidence(now_ns=NOW_NS, kernel_oldest=5, kernel_sequence=20), POLICY)
    assert [one.severity for one in first.events] == ["ok"], "nobody has read before"
    for oldest, cause, words in ((12, "", "no new Xid"), (21, "", "no new Xid"), (30, "lost_records", "9 records")):
        evidence = Evidence(now_ns=NOW_NS, kernel_oldest=oldest, kernel_sequence=60)
        (event,) = judge_round(checks, evidence, POLICY, first.counters).events
        assert event.cause == cause
        assert words in event.words


def test_two_that_read_the_same_log_tell_a_record_once() -> None:
    checks = chosen_checks(POLICY, ["gpu_xid", "kernel_errors"])
    record = KernelRecord(9, NOW_NS, "NVRM: Xid (PCI:0000:3b:00): 48, DBE")
    seen = Evidence(now_ns=NOW_NS, boot="b", kernel=(record,), kernel_sequence=12)
    one = judge_round(checks, seen, POLICY)
    assert [event.cause for event in one.events] == ["xid_48", ""]
    for own in (None, judge_round(checks, Evidence(now_ns=NOW_NS, boot="b", kernel_sequence=3), POLICY).counters):
        merged = with_newest_record(own, one.counters, "b")
        assert [event.severity for event in judge_round(checks, seen, POLICY, merged).events] == ["ok", "ok"]
        assert last_record(merged) == 12
        assert with_newest_record(own, one.counters, "after a reboot") == own
    assert with_newest_record(one.counters, None, "b") == one.counters


@pytest.mark.parametrize(
    ("said", "severity", "user_made"),
    [
        ("I/O error, dev sda, sector 2048 op 0x0:(READ) flags 0x0", "high", False),
        ("I/O error, dev nvme0n1, sector 2048 op 0x0:(READ)", "high", False),
        ("EXT4-fs error (device dm-0): ext4_lookup:1850: inode #2", "high", False),
        ("blk_update_request: I/O error, dev fd0, sector 0", "warn", True),
        ("I/O error, dev sr0, sector 0 op 0x0:(READ)", "warn", True),
        ("EXT4-fs error (device loop3): ext4_lookup:1850: inode #2: bad extra_isize", "warn", True),
        ("XFS (loop0): Corruption detected. Unmount and run xfs_repair", "warn", True),
    ],
)
def test_an_empty_drive_or_an_image_of_a_user_is_no_fault_of_a_disk(said: str, severity: str, user_made: bool) -> None:
    (event,) = found("kernel_errors", kernel(KernelRecord(9, NOW_NS, said)))
    assert (event.severity, event.user_made) == (severity, user_made)
