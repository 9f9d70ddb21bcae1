"""A part has one history, whichever check or record of the kernel tells of it: that of its serial number."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Final

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.health import Floor

from fireflyer.base.health_event import HealthEvent
from fireflyer.base.units import SECOND
from fireflyer.cluster.core.health.findings import findings_of
from fireflyer.cluster.core.health.records import RepairState
from fireflyer.cluster.core.health.remedies import Remedy
from fireflyer.validators.checks.rounds import HealthRounds
from fireflyer.validators.checks.state_file import StateFile
from fireflyer.validators.core.checks.evidence import MAX_SERIALS, Evidence, Finding, KernelRecord, Output
from fireflyer.validators.core.checks.part_serials import merged, part_serials, with_serial
from fireflyer.validators.core.checks.policy import HealthPolicy
from fireflyer.validators.core.validation.records import Found, NodeRecord
from fireflyer.validators.stress.run import events_of, gpu_serials

RECORDED: Final = Path(__file__).parent / "recorded"
FIRST, SECOND_GPU = "1650023000027", "1650023000059"
UUID: Final = "GPU-00000000-0000-0000-0000-000000000027"
BOOT_ID: Final = "proc/sys/kernel/random/boot_id"


class Node:
    """Whose `nvidia-smi` prints recorded output; its rounds, and the process that follows its log, are real."""

    def __init__(self, directory: Path, smi: str = "nvidia_smi_faulty.xml") -> None:
        self.directory = directory
        self.root = directory / "root"
        for path in (BOOT_ID, "proc/self/mountinfo"):
            self.write(path, Path("/", path).read_text())
        self.report = (RECORDED / smi).read_text()
        self.nvlink = "nvlink_status_healthy.out"

    def write(self, path: str, text: str) -> None:
        (self.root / path).parent.mkdir(parents=True, exist_ok=True)
        (self.root / path).write_text(text)

    @property
    def tools(self) -> str:
        tools = self.directory / "tools"
        tools.mkdir(exist_ok=True)
        (tools / "report.xml").write_text(self.report)
        links = (RECORDED / self.nvlink).read_text().replace("GPU-aaaa", UUID)
        (tools / "links").write_text(links)
        (tools / "errors").write_text((RECORDED / "nvlink_errors_healthy.out").read_text().replace("GPU-aaaa", UUID))
        smi = tools / "nvidia-smi"
        smi.write_text(
            f'#!/bin/sh\ncase "$*" in\n"-q -x") /bin/cat {tools}/report.xml;;\n"nvlink -s") /bin/cat {tools}/links;;\n'
            f'"nvlink -e") /bin/cat {tools}/errors;;\n*) exit 9;;\nesac\n'
        )
        smi.chmod(0o755)
        return str(tools)

    def round(self, *checks: str) -> list[HealthEvent]:
        rounds = HealthRounds(StateFile(str(self.directory / "state")), root=str(self.root), tool_path=self.tools)
        return [event for event in rounds.run(HealthPolicy(), checks) if event.severity != "ok"]

    def logs(self, text: str) -> list[HealthEvent]:
        """Told by the process that follows the log beside the rounds."""
        rounds = HealthRounds(StateFile(str(self.directory / "state"), only_log=True))
        return rounds.judge_log(HealthPolicy(), [KernelRecord(0, time.time_ns() + SECOND, text)])


def xid(number: int, address: str = "0000:1B:00") -> str:
    return f"NVRM: Xid (PCI:{address}): {number}, pid=7, name=python3"


def serials(events: list[HealthEvent]) -> set[str]:
    return {event.serial for event in events}


def says(floor: Floor, node: str, events: list[HealthEvent]) -> None:
    floor.says(node, *findings_of(tuple(msgspec.json.encode(event) for event in events), 0))


def test_an_xid_memory_errors_and_links_of_one_gpu_have_one_key(tmp_path: Path) -> None:
    node = Node(tmp_path)
    first = [event for event in node.round("gpu_ecc") if event.part == "gpu:0000:1b:00.0"]
    assert serials(first) == {FIRST}
    assert serials(node.logs(xid(79))) == {FIRST}
    assert serials(node.logs(xid(48, "0000:3b:00"))) == {SECOND_GPU}
    node.round("gpu_nvlink")
    node.nvlink = "nvlink_status_faulty.out"
    down = node.round("gpu_nvlink")
    assert [(event.cause, event.serial) for event in down] == [("down", FIRST)], "nvidia-smi nvlink knows UUIDs only"
    fault = Finding(severity="high", part="gpu:5", cause="wrong_byte", words="", serial=UUID)
    found = [Found(validator="gpu_memory", faults=(fault,))]
    record = NodeRecord(node="n1", model="m", seen_ns=1)
    (validated,) = events_of(found, record, (), 1, gpu_serials(tool_path=node.tools))
    assert validated.serial == FIRST
    pcie = HealthEvent(check="kernel_errors", severity="high", part="pcie:0000:1b:00.0", cause="pcie", seen_ns=1)
    kept = StateFile(str(tmp_path / "state")).load()[0]
    assert kept is not None
    assert with_serial(pcie, kept.serials).serial == FIRST


def test_an_xid_and_a_memory_error_of_one_gpu_count_together_towards_the_next_remedy(tmp_path: Path) -> None:
    node, floor = Node(tmp_path), Floor("n1")
    ecc = [event for event in node.round("gpu_ecc") if event.serial == FIRST]
    says(floor, "n1", ecc)
    assert floor.state("n1") is not RepairState.HEALTHY
    floor.repair("n1", Remedy.RESET)
    floor.pass_time(60 * SECOND)
    assert floor.state("n1") is RepairState.PROBATION
    says(floor, "n1", node.logs(xid(48)))
    (history,) = floor.parts.content.values()
    assert (history.key, len(history.faults_ns)) == (FIRST, 2)
    floor.pass_time(SECOND)
    assert floor.state("n1") is RepairState.REBOOT, "the first Xid 48 of a part takes a reset"


def test_a_gpu_that_moves_takes_its_history_along_and_another_one_in_its_place_has_none(tmp_path: Path) -> None:
    floor = Floor("n1", "n2", "n3", "n4", breaker_share=1.0)
    one, two = Node(tmp_path / "1"), Node(tmp_path / "2")
    one.round("gpu_count")
    says(floor, "n1", one.logs(xid(48)))
    two.report = one.report.replace("00000000:1B:00.0", "00000000:AA:00.0")  # the GPU is in another slot of n2
    two.round("gpu_count")
    says(floor, "n2", two.logs(xid(48, "0000:aa:00")))
    assert {key: len(row.faults_ns) for key, row in floor.parts.content.items()} == {FIRST: 2}
    one.report = one.report.replace(FIRST, "1650029999999").replace(UUID, UUID.replace("27", "99"))
    one.round("gpu_count")
    floor.repair("n1", Remedy.RESET)
    floor.pass_time(60 * SECOND)
    says(floor, "n1", one.logs(xid(48)))
    assert {key: len(row.faults_ns) for key, row in floor.parts.content.items()} == {FIRST: 2, "1650029999999": 1}


def test_a_gpu_that_the_driver_has_lost_is_known_from_the_round_before(tmp_path: Path) -> None:
    node = Node(tmp_path)
    node.round("gpu_count")
    node.report = (RECORDED / "nvidia_smi_lost.out").read_text()
    node.round("gpu_count")
    assert serials(node.logs(xid(79))) == {FIRST}


def test_serial_numbers_of_another_start_of_the_node_are_not_used(tmp_path: Path) -> None:
    node = Node(tmp_path)
    node.write(BOOT_ID, "of-before\n")
    node.round("gpu_count")
    assert serials(node.logs(xid(79))) == {""}, "a GPU may have been replaced meanwhile"


def test_a_gpu_without_a_serial_number_is_known_by_its_uuid(tmp_path: Path) -> None:
    node = Node(tmp_path)
    node.report = node.report.replace(FIRST, "N/A")
    node.round("gpu_count")
    assert serials(node.logs(xid(79))) == {UUID}


def test_two_gpus_of_one_board_have_two_keys(tmp_path: Path) -> None:
    node = Node(tmp_path)
    node.report = node.report.replace(SECOND_GPU, FIRST)
    found = node.round("gpu_ecc", "gpu_clocks", "gpu_rows")
    first, second = (serials([*node.logs(xid(79, address))]) for address in ("0000:1b:00", "0000:3b:00"))
    assert first == {UUID}
    assert second == {UUID.replace("27", "59")}
    assert serials([event for event in found if event.part == "gpu:0000:1b:00.0"]) == first, "whoever tells of it"


@pytest.mark.parametrize("serial", ["0", "[Unknown Error]", "[N/A]", "0000000000000", "To be filled by O.E.M."])
def test_a_placeholder_is_no_serial_number_of_a_gpu(tmp_path: Path, serial: str) -> None:
    node = Node(tmp_path)
    node.report = node.report.replace(FIRST, serial)
    found = node.round("gpu_ecc")
    assert serials([event for event in found if event.part == "gpu:0000:1b:00.0"]) == {UUID}
    assert serials(node.logs(xid(79))) == {UUID}


@pytest.mark.parametrize("serial", ["nvme_card", "N/A", "ffffffff", "0123456789"])
def test_a_drive_with_a_placeholder_is_known_by_its_place(tmp_path: Path, serial: str) -> None:
    node = Node(tmp_path)
    for name, number in (("nvme0", serial), ("nvme1", "S64GNE0R"), ("nvme2", "twin"), ("nvme3", "twin")):
        node.write(f"sys/class/nvme/{name}/serial", f"{number}\n")
        node.write(f"sys/class/nvme/{name}/state", "dead\n")
    found = node.round("nvme")
    assert {event.part: event.serial for event in found} == {
        "nvme:nvme0": "", "nvme:nvme1": "S64GNE0R", "nvme:nvme2": "", "nvme:nvme3": "",
    }  # fmt: skip


def test_a_drive_with_a_placeholder_does_not_inherit_the_number_of_the_one_before(tmp_path: Path) -> None:
    node = Node(tmp_path)
    node.write("sys/class/nvme/nvme0/state", "dead\n")
    for number, known in (("S64GNE0R", "S64GNE0R"), ("nvme_card", "")):
        node.write("sys/class/nvme/nvme0/serial", f"{number}\n")
        assert serials(node.round("nvme")) == {known}


def test_adapters_and_drives_have_one_key_too(tmp_path: Path) -> None:
    node = Node(tmp_path)
    for base, slot in (
        ("sys/class/infiniband/mlx5_0", "0000:98:00.0"),
        ("sys/class/net/ib0", "0000:98:00.0"),
        ("sys/class/net/eno1", "0000:18:00.0"),
        ("sys/class/net/eno2", "0000:18:00.1"),
        ("sys/class/nvme/nvme3", "0000:44:00.0"),
    ):
        node.write(f"{base}/device/uevent", f"DRIVER=x\nPCI_SLOT_NAME={slot}\nMODALIAS=y\n")
    node.write("sys/class/infiniband/mlx5_0/node_guid", "b83f:d203:0012:3456\n")
    for name, address, kind in (("ib0", "00:00:10:49", "0"), ("eno1", "3c:ec:ef:11:22:33", "0"), ("eno2", "aa", "3")):
        node.write(f"sys/class/net/{name}/address", f"{address}\n")
        node.write(f"sys/class/net/{name}/addr_assign_type", f"{kind}\n")
    node.write("sys/class/nvme/nvme3/serial", "S64GNE0R\n")
    node.round("time_offset")
    kept = StateFile(str(tmp_path / "state")).load()[0]
    assert kept is not None
    known = {
        part: with_serial(HealthEvent(check="c", severity="low", part=part, seen_ns=1), kept.serials).serial
        for part in (
            "infiniband:mlx5_0", "infiniband:mlx5_0/1", "infiniband:0000:98:00.0", "ethernet:ib0",
            "ethernet:0000:18:00.0", "ethernet:eno1", "ethernet:eno2", "nvme:nvme3", "disk:nvme3n1", "disk:nvme3n1p2",
            "pcie:0000:44:00.0", "nvme:nvme4", "",
        )
    }  # fmt: skip
    guid, mac, nvme = "b83f:d203:0012:3456", "3c:ec:ef:11:22:33", "S64GNE0R"
    assert list(known.values()) == [guid] * 4 + [mac, mac, "", nvme, nvme, nvme, nvme, "", ""]


def test_a_disk_is_known_by_the_number_that_smart_tells() -> None:
    report = (RECORDED / "smartctl_ata_healthy.json").read_text()
    number = msgspec.json.decode(report)["serial_number"]
    found = part_serials(Evidence(now_ns=1, outputs={"smartctl:sda": Output(report)}))
    event = HealthEvent(check="kernel_errors", severity="high", part="disk:sda3", seen_ns=1)
    assert with_serial(event, found).serial == number


@pytest.mark.parametrize("serial", ["", "a\x1b[2J", "xy" * 65])
def test_what_is_no_serial_number_is_not_taken(serial: str) -> None:
    report = msgspec.json.encode({"serial_number": serial}).decode()
    assert part_serials(Evidence(now_ns=1, outputs={"smartctl:sda": Output(report)})) == {}


@given(st.text(max_size=200))
def test_no_output_makes_serial_numbers_fail(text: str) -> None:
    outputs = dict.fromkeys(("nvidia_smi", "smartctl:sda"), Output(text))
    files = dict.fromkeys(("sys/class/infiniband/x/node_guid", "sys/class/net/x/device/uevent"), text)
    assert len(part_serials(Evidence(now_ns=1, outputs=outputs, files=files))) <= MAX_SERIALS


def test_so_many_numbers_are_remembered_and_the_newest_stay() -> None:
    known = merged({f"a{number}": "1" for number in range(MAX_SERIALS)}, {"new": "2", "a0": "3"})
    assert len(known) == MAX_SERIALS
    assert (known["new"], known["a0"]) == ("2", "3")
