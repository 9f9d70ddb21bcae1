"""Evidence from planted directories in place of /sys and /proc, and from faults that are planted into tests."""

from __future__ import annotations

import os
import socket
import threading
from pathlib import Path

import msgspec
import numpy as np
import pytest

from fireflyer.base.node_counters import LinkCounters, NodeCounters
from fireflyer.base.units import MIB
from fireflyer.runtime.node_counters import Mount, read_counters
from fireflyer.validators import __main__ as program
from fireflyer.validators import disk, gather
from fireflyer.validators.core.judge import judge
from fireflyer.validators.disk import distinct_directories, write_and_read_file
from fireflyer.validators.link import connect_to
from fireflyer.validators.memory import Block, write_and_read_memory

BOOT = "0b5e0b8e-2b0c-4e2c-9c43-0f6a4f4d3f11"
MOUNTS = """\
22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw,errors=remount-ro
23 22 8:2 / /var\\040x rw,nosuid - ext4 /dev/sda2 ro,errors=remount-ro
24 22 8:3 / /media ro - ext4 /dev/sdb1 ro
25 22 0:40 / /home rw - nfs4 head:/home rw,vers=4.2
26 22 7:0 / /snap rw - squashfs /dev/loop0 ro
"""


class Node:
    """Planted directories of a node."""

    def __init__(self, root: Path) -> None:
        self.sys, self.proc = root / "sys", root / "proc"
        self.write("proc/sys/kernel/random/boot_id", BOOT)
        self.write(
            "proc/meminfo",
            "MemTotal: 8388608 kB\nMemAvailable: 4194304 kB\nHugePages_Total:  0\nHardwareCorrupted: 0 kB",
        )
        self.write("proc/self/mountinfo", MOUNTS)
        for name, count in (("ue_count", 0), ("ce_count", 3)):
            self.write(f"sys/devices/system/edac/mc/mc0/{name}", count)
        self.write("sys/devices/system/edac/mc/power/control", "auto")
        self.write("sys/fs/ext4/sda1/errors_count", 0)
        self.write("sys/fs/ext4/features/lazy_itable_init", "supported")
        self.link("eth1")
        self.link("lo", device=False)

    def write(self, path: str, value: object) -> None:
        file = self.sys.parent / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{value}\n")

    def link(self, name: str, *, device: bool = True, carrier: int = 1, speed: int = 25_000, errors: int = 0) -> None:
        if device:
            self.write(f"sys/class/net/{name}/device/vendor", "0x15b3")
        values = {"carrier": carrier, "speed": speed, "statistics/rx_packets": 1000, "statistics/tx_packets": 500}
        for path, value in (values | {"statistics/rx_errors": errors, "statistics/tx_dropped": 2}).items():
            self.write(f"sys/class/net/{name}/{path}", value)

    def counters(self) -> NodeCounters:
        return read_counters(str(self.sys), str(self.proc))

    def check(self, before: NodeCounters | None, **changes: object) -> str:
        plan = gather.Plan(
            before=before,
            sys_root=str(self.sys),
            proc_root=str(self.proc),
            memory_bytes=MIB,
            **changes,  # type: ignore[arg-type]
        )
        return judge(gather.gather(plan)).verdict


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


def test_counters_are_read(node: Node) -> None:
    assert node.counters() == NodeCounters(
        boot=BOOT,
        uncorrected={"mc0": 0},
        corrected={"mc0": 3},
        file_system_errors={"sda1": 0},
        turned_read_only=("/var x",),
        links={"eth1": LinkCounters(carrier=True, speed_mbps=25_000, packets=1500, errors=0, drops=2)},
    )


def test_a_machine_without_any_of_it_has_no_counters(tmp_path: Path) -> None:
    assert read_counters(str(tmp_path), str(tmp_path)) == NodeCounters()


def test_counters_that_cannot_be_numbers_are_left_out(node: Node) -> None:
    node.write("sys/devices/system/edac/mc/mc0/ue_count", "²")
    node.write("sys/class/net/eth1/speed", -1)
    counters = node.counters()
    assert (counters.uncorrected, counters.links["eth1"].speed_mbps) == ({}, 0)


def test_what_happened_since_the_ranks_were_started_is_found(node: Node) -> None:
    before = node.counters()
    assert node.check(before).startswith("sound")
    node.write("sys/devices/system/edac/mc/mc0/ue_count", 1)
    assert node.check(before) == "suspect: memory: mc0 counts 1 uncorrected error since the ranks were started"
    node.write("sys/devices/system/edac/mc/mc0/ue_count", 0)
    node.link("eth1", speed=1000)
    assert node.check(before) == "suspect: link: eth1 has 1000 Mbit/s, and had 25000 before"
    node.link("eth1", carrier=0)
    assert node.check(before).startswith("suspect: link: eth1 has lost its carrier")
    node.link("eth1")
    node.write("proc/self/mountinfo", MOUNTS.replace("/dev/sda1 rw", "/dev/sda1 ro"))
    assert node.check(before) == "suspect: disk: / was turned read-only since the ranks were started"


def test_counters_of_another_boot_are_not_compared(node: Node) -> None:
    before = msgspec.structs.replace(node.counters(), boot="another", links={"eth9": LinkCounters(carrier=True)})
    assert node.check(before).startswith("sound")


def test_with_little_memory_available_the_node_is_suspect(node: Node) -> None:
    node.write("proc/meminfo", "MemTotal: 8388608 kB\nMemAvailable: 65536 kB")
    assert node.check(None).startswith("suspect: memory: only 64.0 MiB of 8.0 GiB are available")


def test_a_disk_that_does_not_answer_is_not_waited_for(
    node: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = threading.Event()
    monkeypatch.setattr(gather, "write_and_read_file", lambda *_: answers.wait())
    try:
        verdict = node.check(None, directories=(str(tmp_path),), disk_s=0.05)
    finally:
        answers.set()
    assert verdict.endswith("a small file was not written and read back in time")


@pytest.mark.parametrize("write", range(6))
def test_a_bit_that_flips_is_found_with_each_pattern(write: int) -> None:
    count = 0

    def flip(block: Block) -> None:
        nonlocal count
        if count == write:
            block[512 * 3] ^= np.uint64(1 << 17)
        count += 1

    found = write_and_read_memory(64 << 10, 60, block_bytes=64 << 10, disturb=flip)
    assert found.tested_bytes == 64 << 10
    assert found.wrong_words == (2 if write == 5 else 1), "that of the last pattern is read again"
    assert found.first.endswith(f"in bits {1 << 17:016x}")


def test_a_write_to_a_wrong_block_is_found() -> None:
    blocks: list[Block] = []

    def alias(block: Block) -> None:
        if not blocks or blocks[-1] is not block:
            blocks.append(block)
        if len(blocks) == 2:
            blocks[0][:8] = block[:8]

    assert write_and_read_memory(128 << 10, 60, block_bytes=64 << 10, disturb=alias).wrong_words == 8


def test_memory_within_a_share_is_sound_and_a_share_below_a_block_is_not_tested() -> None:
    assert write_and_read_memory(3 * MIB, 60, block_bytes=MIB).tested_bytes == 3 * MIB
    assert write_and_read_memory(MIB - 1, 60, block_bytes=MIB).tested_bytes == 0


def test_a_file_is_written_and_read_back(tmp_path: Path) -> None:
    mounts = [Mount("/", "ext4", frozenset(), frozenset()), Mount(str(tmp_path), "xfs", frozenset(), frozenset())]
    found = write_and_read_file(str(tmp_path), mounts)
    assert (found.kind, found.error, found.same, found.local) == ("xfs", "", True, True)
    assert found.free_bytes
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_is_read_back_otherwise_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "_read", lambda _: b"other")
    assert not write_and_read_file(str(tmp_path), []).same


def test_a_disk_that_fails_is_told_by_the_name_of_its_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(_: int) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "fsync", fails)
    assert write_and_read_file(str(tmp_path), []).error == "EIO"


def test_directories_of_other_machines_are_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "_write_and_read", None)
    for kind in ("nfs4", "fuse.ff", "lustre"):
        assert not write_and_read_file(str(tmp_path), [Mount("/", kind, frozenset(), frozenset())]).local


def test_one_directory_of_each_file_system_is_checked(tmp_path: Path) -> None:
    (tmp_path / "below").mkdir()
    paths = [str(tmp_path / "none"), str(tmp_path), str(tmp_path / "below"), "/proc"]
    assert distinct_directories(paths) == [str(tmp_path), "/proc"]


def test_a_node_that_refuses_a_connection_is_reached() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        assert connect_to(address).error == ""
    assert connect_to(address).error == ""
    assert connect_to("no port").error.startswith("address 'no port' is not understood")


def test_the_environment_of_the_contract_names_what_is_checked(node: Node) -> None:
    counters = node.counters()
    told = {
        "FF_RUN_DIR": "/run-7",
        "FF_NODE_PEERS": "a:1,b:2",
        "FF_NODE_COUNTERS": msgspec.json.encode(counters).decode(),
    }
    plan = gather.plan_of(told, "/work")
    assert (plan.before, plan.peers, plan.directories[:2]) == (counters, ("a:1", "b:2"), ("/run-7", "/work"))
    for text in ("", "{", '{"links": 3}', '"\\ud800"'):
        assert gather.plan_of({"FF_NODE_COUNTERS": text}, "/work").before is None


def test_the_program_shows_findings_and_exits_by_the_verdict(
    node: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FF_NODE_COUNTERS", msgspec.json.encode(node.counters()).decode())
    roots = ["--sys", str(node.sys), "--proc", str(node.proc), "--memory", "1MiB", "--directory", str(tmp_path)]
    assert program.main(roots) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("sound: ")
    node.write("proc/meminfo", "MemTotal: 8388608 kB\nMemAvailable: 4194304 kB\nHardwareCorrupted: 4 kB")
    assert program.main(roots) == 2
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == (
        "suspect: memory: the kernel has taken 4 KiB of bad memory out of use since the ranks were started"
    )
    assert "memory  fault  the kernel has taken" in "\n".join(lines)


def test_a_wrong_argument_does_not_blame_the_node(capsys: pytest.CaptureFixture[str]) -> None:
    assert program.main(["--quick"]) == 1
    assert capsys.readouterr().err.startswith("error: unrecognized arguments: --quick")
    assert program.main(["--memory", "much"]) == 1
