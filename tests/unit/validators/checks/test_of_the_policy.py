"""What the policy lists of the machines of a group: versions, places, the state of the system. Else it is off."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

import msgspec
import pytest

from fireflyer.base.health_event import HealthEvent
from fireflyer.base.units import SECOND
from fireflyer.cli.health.policy_file import read_policy
from fireflyer.validators.checks.capture import capture
from fireflyer.validators.core.checks.catalogue import chosen_checks, sources_of
from fireflyer.validators.core.checks.evidence import Counters, Evidence, Output
from fireflyer.validators.core.checks.health_round import judge_round
from fireflyer.validators.core.checks.policy import HealthPolicy

RECORDED: Final = Path(__file__).parent / "recorded"
NOW_NS: Final = 1_709_546_400 * SECOND
HOUR_NS: Final = 3600 * SECOND
IB: Final = "sys/class/infiniband/mlx5_0"
PCI: Final = "sys/bus/pci/devices/0000:98:00.0"
CPUINFO: Final = "processor\t: 0\ncpu MHz\t\t: 3100.000\n\nprocessor\t: 1\ncpu MHz\t\t: 2900.123\n"
MEMINFO: Final = "MemTotal: 1056 kB\nMemAvailable:   104857600 kB\nSwapTotal:       8388608 kB\nSwapFree:  8388608 kB\n"
BUDDY: Final = (
    "Node 0, zone      DMA      0      0      0      0      0      0      0      0      1      1      2 \n"
    "Node 0, zone   Normal    600    400    200    100     50     20     10      5      9      4      7 \n"
    "Node 1, zone   Normal    600    400    200    100     50     20     10      5      0      0      0 \n"
)
INTERRUPTS: Final = (
    "           CPU0  CPU1\n NMI:  1  2  Non-maskable\n THR:  {thr}  0  Threshold APIC\n MCE:  1  0  Machine check\n"
)
PACKAGES: Final = "nvidia-driver\t550.54.15-1\tinstalled\nmunge\t0.5.15\tinstalled\nold\t1\tconfig-files\n"

SOUND: Final[Mapping[str, str]] = {
    "proc/sys/kernel/osrelease": "6.1.0-18-amd64\n",
    f"{IB}/fw_ver": "28.39.1002\n",
    f"{IB}/node_guid": "b83f:d203:0012:3456\n",
    f"{IB}/device/uevent": "DRIVER=mlx5_core\nPCI_SLOT_NAME=0000:98:00.0\nMODALIAS=pci\n",
    f"{PCI}/class": "0x020700\n",
    f"{PCI}/current_link_width": "16\n",
    f"{PCI}/current_link_speed": "32.0 GT/s PCIe\n",
    "proc/uptime": "86400.55 1000.11\n",
    "proc/modules": "nvidia_peermem 16384 0 - Live 0x0\nmlx5_core 1000000 1 mlx5_ib, Live 0x0\n",
    "etc/fireflyer/token": "x",
    "proc/meminfo": MEMINFO,
    "proc/buddyinfo": BUDDY,
    "proc/interrupts": INTERRUPTS.format(thr=5),
    "proc/cpuinfo": CPUINFO,
    "sys/devices/system/cpu/online": "0-1\n",
}
POLICY: Final = """
[processors]
least_mean_mhz = 2900
[versions]
kernel = ["6.1.0-18-amd64"]
driver = ["550.54.15"]
vbios = ["96.00.74.00.01"]
adapter_firmware = ["28.39.1002", "28.40.1000"]
[versions.packages]
munge = "0.5.15"
nvidia-driver = "550.54.15-1"
[places.adapters]
mlx5_0 = "0000:98:00.0"
[places.widths]
"0000:98:00.0" = 16
[places.speeds]
"0000:98:00.0" = 32.0
[system]
least_uptime_s = 600
modules = ["nvidia-peermem", "mlx5_core"]
paths = ["/etc/fireflyer/token"]
[memory_left]
least_available_gib = 64
least_swap_gib = 8
most_swap_used_share = 0.5
least_large_blocks = 10
[machine_checks]
most_per_day = 20
"""
CHECKS: Final = ("versions", "places", "system", "memory_left", "machine_checks", "processors")


@pytest.fixture
def rules(tmp_path: Path) -> HealthPolicy:
    path = tmp_path / "policy.toml"
    path.write_text(POLICY)
    return read_policy(str(path))


def tools(**changed: Output) -> dict[str, Output]:
    report = (
        (RECORDED / "nvidia_smi_healthy.xml")
        .read_text()
        .replace("<product_name>", "<vbios_version>96.00.74.00.01</vbios_version><product_name>")
    )
    sound = {"nvidia_smi": Output(report), "dpkg_query": Output(PACKAGES, 1)}
    return {**sound, "rpm_query": Output(problem="rpm is not installed", missing=True), **changed}


def found(
    rules: HealthPolicy, check: str, files: Mapping[str, str] = {}, earlier: Counters | None = None,
    outputs: Mapping[str, Output] | None = None, after_h: int = 0,
) -> tuple[list[HealthEvent], Counters]:  # fmt: skip
    """Of a sound machine, but for these files and tools."""
    evidence = Evidence(
        now_ns=NOW_NS + after_h * HOUR_NS, files={**SOUND, **files}, outputs=tools() if outputs is None else outputs
    )
    judged = judge_round(chosen_checks(rules, [check]), evidence, rules, earlier)
    return list(judged.events), judged.counters


def told(
    rules: HealthPolicy, check: str, files: Mapping[str, str] = {}, outputs: Mapping[str, Output] | None = None
) -> list[tuple[str, str, str]]:
    return [(one.severity, one.cause, one.part) for one in found(rules, check, files, None, outputs)[0]]


@pytest.mark.parametrize("check", CHECKS)
def test_a_machine_that_is_as_the_policy_says_is_well(rules: HealthPolicy, check: str) -> None:
    (event,) = found(rules, check)[0]
    assert (event.severity, event.could_not_run) == ("ok", False)
    assert event.words


@pytest.mark.parametrize("check", CHECKS[:-1])
def test_a_check_without_a_threshold_is_off_unless_it_is_required_or_asked_for(check: str, tmp_path: Path) -> None:
    names = [one.name for one in chosen_checks(HealthPolicy())]
    assert check not in names
    path = tmp_path / "policy.toml"
    path.write_text(f"[{check}]\nrequired = true\n")
    assert check in [one.name for one in chosen_checks(read_policy(str(path)))]
    assert told(HealthPolicy(), check, {"proc/interrupts": INTERRUPTS.format(thr=10**9)}) == [("ok", "", "")]


def test_nothing_is_run_or_read_for_what_the_policy_does_not_ask(rules: HealthPolicy) -> None:
    for policy, wanted in ((HealthPolicy(), set[str]()), (rules, {"dpkg_query", "rpm_query", "cpuinfo"})):
        checks = chosen_checks(policy, CHECKS)
        names = {source.name for source in sources_of(checks, policy)}
        assert names & {"dpkg_query", "rpm_query", "cpuinfo"} == wanted
        assert ("nvidia_smi" in names) == bool(wanted)


@pytest.mark.parametrize(
    ("check", "files", "expected"),
    [
        ("versions", {"proc/sys/kernel/osrelease": "5.10.0\n"}, [("warn", "kernel", "")]),
        ("versions", {f"{IB}/fw_ver": "20.1\n"}, [("warn", "adapter_firmware", "infiniband:mlx5_0")]),
        ("places", {f"{IB}/device/uevent": "PCI_SLOT_NAME=0000:99:00.0\n"}, [("low", "binding", "infiniband:mlx5_0")]),
        ("places", {f"{IB}/device/uevent": ""}, [("low", "binding", "infiniband:mlx5_0")]),
        ("places", {f"{PCI}/current_link_width": "8\n"}, [("low", "width", "pcie:0000:98:00.0")]),
        ("places", {f"{PCI}/current_link_speed": "16.0 GT/s PCIe\n"}, [("low", "speed", "pcie:0000:98:00.0")]),
        ("places", {f"{PCI}/current_link_speed": "Unknown\n"}, [("low", "speed", "pcie:0000:98:00.0")]),
        ("system", {"proc/uptime": "599.99 1.0\n"}, [("warn", "uptime", "")]),
        ("system", {"proc/modules": SOUND["proc/modules"].replace("mlx5_core", "x")},
         [("low", "module", "module:mlx5_core")]),
        ("memory_left", {"proc/meminfo": MEMINFO.replace("104857600", "1048576")}, [("warn", "available", "")]),
        ("memory_left", {"proc/meminfo": MEMINFO.replace("8388608", "0")}, [("warn", "swap", "")]),
        ("memory_left", {"proc/meminfo": MEMINFO.replace("SwapFree:  8388608", "SwapFree: 1")},
         [("warn", "swap_used", "")]),
        ("memory_left", {"proc/buddyinfo": BUDDY.replace("9      4      7", "9      0      0")},
         [("warn", "fragmented", "")]),
        ("processors", {"proc/cpuinfo": CPUINFO.replace("3100", "1100")}, [("low", "mean_frequency", "")]),
    ],
)  # fmt: skip
def test_what_differs_from_the_policy(
    rules: HealthPolicy, check: str, files: Mapping[str, str], expected: list[tuple[str, str, str]]
) -> None:
    assert told(rules, check, files) == expected


@pytest.mark.parametrize(
    ("check", "files"),
    [
        ("system", {"proc/uptime": "a day\n"}),
        ("system", {"proc/uptime": ""}),
        ("system", {"proc/modules": "\x00"}),
        ("memory_left", {"proc/meminfo": "MemTotal: 5 kB\n"}),
        ("memory_left", {"proc/buddyinfo": "Node 0, zone Normal a b c\n"}),
        ("machine_checks", {"proc/interrupts": " NMI: 1 2\n"}),
        ("machine_checks", {"proc/interrupts": " MCE: many\n"}),
        ("processors", {"proc/cpuinfo": "cpu MHz\t: fast\n"}),
    ],
)
def test_what_is_not_understood_could_not_be_judged(rules: HealthPolicy, check: str, files: Mapping[str, str]) -> None:
    (event,) = found(rules, check, files)[0]
    assert event.could_not_run
    assert "the check failed" not in event.words


def test_versions_of_gpus_and_packages(rules: HealthPolicy) -> None:
    report = tools()["nvidia_smi"].text
    other = tools(nvidia_smi=Output(report.replace("96.00.74.00.01", "96.00.1", 1).replace("550.54.15", "535.1", 1)))
    events = found(rules, "versions", outputs=other)[0]
    assert [(one.cause, one.part) for one in events] == [("driver", ""), ("vbios", "gpu:0000:1b:00.0")]
    assert events[1].serial, "its history follows the part"
    older = tools(dpkg_query=Output(PACKAGES.replace("0.5.15", "0.5.14")))
    assert told(rules, "versions", outputs=older) == [("warn", "package", "")]
    removed = tools(dpkg_query=Output(PACKAGES.replace("0.5.15\tinstalled", "0.5.15\tconfig-files"), 1))
    (event,) = found(rules, "versions", outputs=removed)[0]
    assert event.words == "package munge is not there; the policy says 0.5.15"
    missing = Output(problem="dpkg-query is not installed", missing=True)
    rpm = tools(dpkg_query=missing, rpm_query=Output(PACKAGES.replace("installed\nold\t1\tconfig-files", "installed")))
    assert told(rules, "versions", outputs=rpm) == [("ok", "", "")]
    for output in (missing, Output("\x00[[")):
        (event,) = found(rules, "versions", outputs=tools(dpkg_query=output))[0]
        assert event.could_not_run, "neither dpkg-query nor rpm"
    (event,) = found(rules, "versions", outputs=tools(nvidia_smi=Output("<a/>")))[0]
    assert event.could_not_run


NONE: Final = Output("dpkg-query: no packages found matching munge\n", 1)
RPM: Final = "nvidia-driver\t550.54.15-1\tinstalled\nmunge\t0.5.14\tinstalled\nmunge\t0.5.15\tinstalled\n"
BROKEN: Final = Output(problem="rpm did not end within 10 s, and was killed", hung=True)


def test_where_no_package_of_the_policy_is_installed_all_are_told(rules: HealthPolicy) -> None:
    events = found(rules, "versions", outputs=tools(dpkg_query=NONE))[0]
    assert [(one.severity, one.cause, one.could_not_run) for one in events] == [("warn", "package", False)] * 2
    (event,) = found(rules, "versions", outputs=tools(dpkg_query=NONE, rpm_query=BROKEN))[0]
    assert event.could_not_run, "that may be the tool of this machine"


@pytest.mark.parametrize("dpkg", [NONE, Output("")])
def test_the_tool_of_another_distribution_does_not_hide_what_the_own_one_knows(
    rules: HealthPolicy, dpkg: Output
) -> None:
    assert told(rules, "versions", outputs=tools(dpkg_query=dpkg, rpm_query=Output(RPM))) == [("ok", "", "")]


def test_one_of_the_versions_that_are_installed_beside_each_other_is_that_of_the_policy(rules: HealthPolicy) -> None:
    other = RPM.replace("0.5.15", "0.5.13") + "munge\t0.5.13\tinstalled\n"
    (event,) = found(rules, "versions", outputs=tools(dpkg_query=NONE, rpm_query=Output(other)))[0]
    assert event.words == "package munge is 0.5.14, 0.5.13; the policy says 0.5.15"


@pytest.mark.parametrize("name", ["munge", "munge:amd64"])
def test_a_package_may_be_named_with_its_architecture(name: str, tmp_path: Path) -> None:
    tool = tmp_path / "dpkg-query"
    tool.write_text(
        "#!/bin/sh\nprintf '%s' \"$3\" |"
        " /bin/sed 's/${Package}/munge/; s/${binary:Package}/munge:amd64/; s/${Version}/1/g;"
        ' s/${db:Status-Status}/installed/g\' > "${0%/*}/format"\nprintf "$(/bin/cat "${0%/*}/format")"\n'
    )
    tool.chmod(0o755)
    policy = tmp_path / "policy.toml"
    policy.write_text(f'[versions.packages]\n"{name}" = "1"\n')
    rules = read_policy(str(policy))
    seen = capture(
        sources_of(chosen_checks(rules, ["versions"]), rules), NOW_NS, root=str(tmp_path), tool_path=str(tmp_path)
    )
    assert told(rules, "versions", outputs=seen.outputs) == [("ok", "", "")]


def test_a_device_of_the_list_that_is_not_on_the_bus(rules: HealthPolicy) -> None:
    gone = {path: text for path, text in SOUND.items() if not path.startswith(PCI)}
    evidence = Evidence(now_ns=NOW_NS, files=gone)
    (event,) = judge_round(chosen_checks(rules, ["places"]), evidence, rules).events
    assert (event.cause, event.part) == ("missing", "pcie:0000:98:00.0")


def test_paths_that_must_be_there(tmp_path: Path) -> None:
    policy = tmp_path / "policy.toml"
    policy.write_text('[system]\npaths = ["/data/token", "/data", "/gone"]\n')
    rules = read_policy(str(policy))
    (tmp_path / "root/data").mkdir(parents=True)
    (tmp_path / "root/data/token").write_text("x")
    checks = chosen_checks(rules, ["system"])
    evidence = capture(sources_of(checks, rules), NOW_NS, root=str(tmp_path / "root"))
    assert [(one.cause, one.part) for one in judge_round(checks, evidence, rules).events] == [("path", "path:/gone")]


def test_machine_checks_are_counted_over_a_day(rules: HealthPolicy) -> None:
    counters: Counters | None = None
    seen = {}
    for hour in range(60):
        count = 5 + (15 if hour >= 10 else 0) + (10 if hour >= 30 else 0) + (30 if hour >= 50 else 0)
        files = {"proc/interrupts": INTERRUPTS.format(thr=count)}
        events, counters = found(rules, "machine_checks", files, counters, after_h=hour)
        seen[hour] = [event.severity for event in events]
    assert {hour for hour, severities in seen.items() if severities == ["warn"]} == {
        *range(30, 34), *range(50, 60)
    }, "25 within 24 h, and 30 or more"  # fmt: skip
    assert counters is not None
    assert len(counters.checks["machine_checks"].values) <= 26


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('[places.adapters]\nmlx5_0 = "98:00.0"\n', "places.adapters"),
        ('[system]\npaths = ["etc/x"]\n', "line 2"),
        ('[system]\npaths = ["/etc/*"]\n', "line 2"),
        ('[versions.packages]\n"-rf" = "1"\n', "versions"),
    ],
)
def test_a_list_that_is_wrong_is_refused(tmp_path: Path, text: str, reason: str) -> None:
    path = tmp_path / "policy.toml"
    path.write_text(text)
    with pytest.raises(ValueError, match=reason):
        read_policy(str(path))


def test_retired_pages_of_gpus() -> None:
    report = (RECORDED / "nvidia_smi_healthy.xml").read_text()
    pages = (
        "<retired_pages><multiple_single_bit_retirement><retired_count>{single}</retired_count>"
        "</multiple_single_bit_retirement><double_bit_retirement><retired_count>{double}</retired_count>"
        "</double_bit_retirement><pending_blacklist>{pending}</pending_blacklist></retired_pages><remapped_rows>"
    )
    for single, double, pending, causes in (
        ("N/A", "N/A", "N/A", [""]), ("5", "5", "No", [""]), ("6", "5", "No", ["many_pages"]),
        ("0", "1", "Yes", ["pending_page"]), ("x", "y", "z", [""]),
    ):  # fmt: skip
        text = report.replace("<remapped_rows>", pages.format(single=single, double=double, pending=pending), 1)
        assert text != report
        events, _ = found(HealthPolicy(), "gpu_rows", outputs={"nvidia_smi": Output(text)})
        assert [event.cause for event in events] == causes


def test_counters_of_a_drive_that_cannot_be(tmp_path: Path) -> None:
    policy = tmp_path / "policy.toml"
    policy.write_text("[disk_smart]\nrefuse_zeros = true\n")
    report = msgspec.json.decode((RECORDED / "smartctl_nvme_healthy.json").read_bytes())
    log = report["nvme_smart_health_information_log"]
    for changed, causes in (
        ({"power_cycles": 9, "data_units_read": 5, "data_units_written": 0}, [""]),
        ({"power_cycles": 0, "data_units_read": 5, "data_units_written": 5}, ["zeros"]),
        ({"power_cycles": 9, "data_units_read": 0, "data_units_written": 0}, ["zeros"]),
        ({"power_cycles": "0", "data_units_read": None, "data_units_written": []}, [""]),
    ):
        report["nvme_smart_health_information_log"] = {**log, **changed}
        outputs = {"smartctl:nvme0n1": Output(msgspec.json.encode(report).decode())}
        for rules, expected in ((read_policy(str(policy)), causes), (HealthPolicy(), [""])):
            events, _ = found(rules, "disk_smart", outputs=outputs)
            assert [event.cause for event in events] == expected
