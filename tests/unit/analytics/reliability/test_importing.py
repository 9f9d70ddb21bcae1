"""Logs and accounting become rows; what cannot be used is counted, and nothing raises."""

from __future__ import annotations

import contextlib
import gzip
import json
import os
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fireflyer.analytics.reliability.attribution import diagnose
from fireflyer.analytics.reliability.evidence import evidence_of
from fireflyer.analytics.reliability.importing import Imported, import_lines, import_run, import_sacct
from fireflyer.analytics.reliability.kernel_log import finding_of
from fireflyer.analytics.reliability.local_times import Clock, zone_of
from fireflyer.analytics.reliability.log_lines import (
    MAX_LOG_LINE_BYTES,
    Rejected,
    health_row,
    journal_row,
    kernel_row,
)
from fireflyer.analytics.reliability.node_lists import expand_node_list
from fireflyer.analytics.reliability.overlaps import NEXT
from fireflyer.analytics.reliability.rows import EventRow, JobRow
from fireflyer.analytics.reliability.signals import node_signals
from fireflyer.analytics.reliability.slurm import SacctColumns, jobcomp_row
from fireflyer.analytics.reliability.tables import open_tables
from fireflyer.base.errors import NotFound, UsageError
from fireflyer.base.events import (
    AttemptFailed,
    AttemptSized,
    AttemptStarted,
    CorruptionReport,
    JobFinished,
    JobStarted,
    Logged,
    NodeLost,
    RankExited,
)
from fireflyer.base.health_event import HealthEvent
from fireflyer.base.units import SECOND
from fireflyer.base.xids import XIDS
from fireflyer.validators.core.checks.evidence import KernelRecord
from fireflyer.validators.core.checks.kernel_log import xid_findings

CLOCK = Clock()
XID = "NVRM: Xid (PCI:0000:3b:00): 79, pid=1234, GPU has fallen off the bus."
SXID = "nvidia-nvswitch1: SXid (PCI:0000:06:00.0): 20034, Fatal, Link 30 LTSSM Fault Up"
PAGE = "(channel:0 slot:0 page:0x1f00a offset:0xc0 grain:32 - err_code:0x0001:0x0090)"
AT_NS = 1_700_000_000 * SECOND  # 2023-11-14T22:13:20Z
JOBCOMP = (
    "JobId=7 UserId=ada(1000) GroupId=ada(1000) Name=my job JobState=NODE_FAIL Partition=gpu TimeLimit=60 "
    "StartTime=2023-11-14T22:13:20 EndTime=2023-11-14T22:23:20 NodeList=gpu[1-4] NodeCnt=4 ProcCnt=4 WorkDir=/x "
    "Tres=cpu=4,gres/gpu=32 SubmitTime=2023-11-14T22:00:00 ExitCode=0:9"
)
HEADER = "JobID|User|State|Submit|Start|End|NNodes|NodeList|AllocTRES|ExitCode|SubmitLine\n"


@pytest.mark.parametrize(
    ("message", "symptom", "cause", "severity"),
    [
        (XID, "gpu_unavailable", "xid_79", "high"),
        ("NVRM: Xid (PCI:0000:af:00): 31, pid=9, MMU fault", "gpu_program", "xid_31", "warn"),
        ("NVRM: Xid (PCI:0000:af:00): 63, row remapping", "gpu_memory", "xid_63", "low"),
        ("NVRM: Xid (PCI:0000:af:00): 119, Timeout after 6s of waiting for RPC", "gpu_driver", "xid_119", "high"),
        ("mlx5_core 0000:98:00.0 ib0: Link down", "ib_link", "link_down", "high"),
        ("NVRM: Xid (PCI:0000:af:00): 109, pid=9, CTX SWITCH TIMEOUT", "gpu_program", "xid_109", "warn"),
        ("NVRM: Xid (PCI:0000:af:00): 9999, new", "gpu_driver", "xid_9999", "low"),
        (SXID, "nvlink", "sxid_20034", "high"),
        (SXID.replace("Fatal", "Non-fatal"), "nvlink", "sxid_20034", "warn"),
        (f"EDAC MC0: 1 UE memory read error on CPU_SrcID#0 {PAGE}", "main_memory", "memory", "high"),
        (f"EDAC MC1: 1 CE memory scrubbing error on unknown memory {PAGE}", "main_memory", "corrected", "warn"),
        ("pcieport 0000:3a:00.0: AER: Uncorrected (Fatal) error received: 0000:3b:00.0", "pcie", "pcie", "high"),
        ("nvidia 0000:3b:00.0: PCIe Bus Error: severity=Uncorrected (Fatal), type=", "pcie", "pcie", "high"),
        ("blk_update_request: I/O error, dev nvme0n1, sector 12", "block_device", "block_io", "high"),
        ("nfs: server store-1 not responding, timed out", "filesystem_mount", "not_responding", "high"),
        ("Out of memory: Killed process 41 (python)", "oom", "out_of_memory", "warn"),
        ("Memory cgroup out of memory: Killed process 41 (python)", "oom", "out_of_memory", "warn"),
        ("Kernel panic - not syncing: Fatal exception", "node_lost", "kernel_panic", "high"),
        ("NVRM: GPU 0000:3b:00.0: GPU has fallen off the bus.", "gpu_unavailable", "off_the_bus", "high"),
        ("igb 0000:02:00.0 eno1: igb: eno1 NIC Link is Down", "eth_link", "link_down", "low"),
        ("NETDEV WATCHDOG: eth0 (igb): transmit queue 0 timed out", "eth_link", "transmit_timeout", "low"),
        ("i40e 0000:18:00.0 eno1: NIC Link is Down", "eth_link", "link_down", "low"),
        ("watchdog: BUG: soft lockup - CPU#3 stuck for 22s!", "system_service", "soft_lockup", "high"),
    ],
)
def test_what_the_kernel_says_is_a_symptom(message: str, symptom: str, cause: str, severity: str) -> None:
    found = finding_of(message)
    assert found is not None
    assert (found.symptom, found.cause, found.severity) == (symptom, cause, severity)
    assert found.user_made == (symptom in ("gpu_program", "oom"))


OF_A_PROCESS = [
    f"python3[9]: {XID}",
    "Kernel panic[4711]: segfault at 0 ip 00 sp 00 error 4 in Kernel panic - not syncing",
    "Kernel panic invoked oom-killer: gfp_mask=0x140dca, order=0, oom_score_adj=0",
    "Kernel panic - : page allocation failure: order:5, mode:0x40cc0, nodemask=(null)",
    "watchdog: BUG: [7]: segfault at 0 ip 00 in soft lockup - CPU",
    "nfs: server x[7] trap not responding",
    "Kernel panic (7): drop_caches: 3",
    "mlx5_0 port 1 x[7]: segfault at 0 ip 00 sp 00 error 4 in link down[400000+1000]",
    "usb 1-1: Product: Kernel panic - not syncing",
]
"""Records of the kernel in which a name stands that a user, or a device, has chosen."""


@pytest.mark.parametrize(
    "line",
    [
        f"Nov 14 22:13:20 gpu7 eve: {XID}",
        f"Nov 14 22:13:20 gpu7 {XID}",
        f"Nov 14 22:13:20 gpu7 eve: {SXID}",
        f"Nov 14 22:13:20 gpu7 eve: kernel: {XID}",
        f"Nov 14 22:13:20 gpu7 eve[12]: [   12.345678] {XID}",
        f"Nov 14 22:13:20 gpu7 kernel[4711]: {XID}",
        f"2023-11-14T22:13:20.000000+00:00 gpu7 eve: {XID}",
        f"2023-11-14T22:13:20.000000+00:00 gpu7 eve: gpu7 kernel: {XID}",
        f"user  :err   : [Tue Nov 14 22:13:20 2023] {XID}",
        f"<11>[   12.500000] {XID}",
        "Nov 14 22:13:20 gpu7 systemd-networkd[9]: ib0: Lost carrier",
        *(f"Nov 14 22:13:20 gpu7 kernel: {text}" for text in OF_A_PROCESS),
    ],
)
def test_what_a_user_can_have_written_is_no_event(line: str) -> None:
    assert kernel_row(line.encode(), "gpu7", Clock(year=2023)) is None


@pytest.mark.parametrize("text", OF_A_PROCESS)
def test_the_name_of_a_process_in_the_journal_is_no_event(text: str) -> None:
    entry = {"__REALTIME_TIMESTAMP": "1700000000000000", "_TRANSPORT": "kernel", "SYSLOG_FACILITY": "0"}
    assert journal_row(json.dumps({**entry, "MESSAGE": text}).encode(), "n", CLOCK) is None


@pytest.mark.parametrize("number", [*XIDS, 9999])
def test_an_xid_means_the_same_in_a_log_and_in_a_check(number: int) -> None:
    text = f"NVRM: Xid (PCI:0000:3b:00): {number}, pid=7"
    imported = finding_of(text)
    assert imported is not None
    (told,) = xid_findings([KernelRecord(1, AT_NS, text)])
    assert imported[1:] == (told.cause, told.severity, told.part, told.user_made)
    assert (imported.symptom == "gpu_program") == told.user_made


@pytest.mark.parametrize(
    "line",
    [
        f"2023-11-14T22:13:20,000000+00:00 {XID}",
        f"2023-11-14T23:13:20.000000+01:00 gpu7 kernel: {XID}",
        f"2023-11-14T22:13:20+0000 gpu7 kernel: [ 12.5] {XID}",
        f"Nov 14 22:13:20 gpu7 kernel: [   12.345678] {XID}",
        f"[Tue Nov 14 22:13:20 2023] {XID}",
        f"kern  :err   : [Tue Nov 14 22:13:20 2023] {XID}",
        f"kern  :err   : 2023-11-14T22:13:20,000000+00:00 {XID}",
    ],
)
def test_lines_of_every_form_of_a_kernel_log_have_a_time(line: str) -> None:
    row = kernel_row(line.encode(), "gpu7", Clock(year=2023))
    assert isinstance(row, EventRow)
    assert (row.time_ns, row.node, row.part) == (AT_NS, "gpu7", "gpu:0000:3b:00.0")


def test_a_time_that_cannot_be_known_is_a_reason() -> None:
    for line, reason in (
        (f"[ 12.5] {XID}", "counts from the boot"),
        (f"<3>[   12.500000] {XID}", "counts from the boot"),
        (f"Nov 14 22:13:20 gpu7 kernel: {XID}", "give --year"),
        (f"2023-13-99T22:13:20 {XID}", "out of range"),
        (f"1950-01-01T00:00:00 {XID}", "out of range"),
        (f"1970-01-01T00:00:12 {XID}", "before 2000"),
        (XID, "has no time"),
    ):
        row = kernel_row(line.encode(), "n", CLOCK)
        assert isinstance(row, Rejected)
        assert reason in row.reason
    local = kernel_row(f"[Wed Nov 15 00:13:20 2023] {XID}".encode(), "n", Clock(zone_of("7200")))
    assert isinstance(local, EventRow)
    assert local.time_ns == AT_NS


def test_a_journal_gives_what_the_kernel_wrote() -> None:
    entry = {"__REALTIME_TIMESTAMP": str(AT_NS // 1000), "_HOSTNAME": "gpu7", "_TRANSPORT": "kernel", "MESSAGE": XID}
    entry["SYSLOG_FACILITY"] = "0"
    row = journal_row(json.dumps(entry).encode(), "other", CLOCK)
    assert isinstance(row, EventRow)
    assert (row.time_ns, row.node, row.source) == (AT_NS, "gpu7", "journal")
    as_bytes = journal_row(json.dumps({**entry, "MESSAGE": list(XID.encode())}).encode(), "other", CLOCK)
    assert as_bytes == row
    assert journal_row(json.dumps({**entry, "_TRANSPORT": "stdout"}).encode(), "n", CLOCK) is None
    assert isinstance(journal_row(json.dumps({**entry, "MESSAGE": [300]}).encode(), "n", CLOCK), Rejected)
    forged = {**entry, "_TRANSPORT": "syslog", "SYSLOG_IDENTIFIER": "kernel"}
    assert journal_row(json.dumps(forged).encode(), "n", CLOCK) is None, "`logger -t kernel` of any user"
    del forged["_TRANSPORT"]
    unknown = journal_row(json.dumps(forged).encode(), "n", CLOCK)
    assert isinstance(unknown, Rejected)
    assert "_TRANSPORT" in unknown.reason
    into_kmsg = {**entry, "SYSLOG_FACILITY": "1"}
    assert journal_row(json.dumps(into_kmsg).encode(), "n", CLOCK) is None, "what was written into /dev/kmsg"
    del into_kmsg["SYSLOG_FACILITY"]
    unknown = journal_row(json.dumps(into_kmsg).encode(), "n", CLOCK)
    assert isinstance(unknown, Rejected)
    assert "SYSLOG_FACILITY" in unknown.reason
    unset = journal_row(json.dumps({**entry, "__REALTIME_TIMESTAMP": "12000000"}).encode(), "n", CLOCK)
    assert isinstance(unset, Rejected), "its clock had not been set"


def test_a_health_event_keeps_its_check_and_severity() -> None:
    event = HealthEvent(check="gpu_xid", severity="high", cause="xid_74", seen_ns=AT_NS, part="gpu:0")
    row = health_row(msgspec.json.encode(event), "gpu7", CLOCK)
    assert isinstance(row, EventRow)
    assert (row.node, row.symptom, row.check, row.severity) == ("gpu7", "nvlink", "gpu_xid", "high")
    unable = HealthEvent(check="ib_link", severity="high", seen_ns=AT_NS, could_not_run=True)
    checked = health_row(msgspec.json.encode(unable), "n", CLOCK)
    assert isinstance(checked, EventRow)
    assert checked.severity == "ok"


@given(st.binary(max_size=300))
def test_no_line_raises(line: bytes) -> None:
    for row in (kernel_row, journal_row, health_row):
        assert isinstance(row(line, "n", CLOCK), EventRow | Rejected | type(None))
    jobcomp_row(line, CLOCK)


@settings(max_examples=30)
@given(st.lists(st.binary(max_size=120), max_size=20))
def test_no_block_of_sacct_raises_and_each_line_is_a_row_or_counted(lines: list[bytes]) -> None:
    whole = [line.replace(b"\n", b" ").replace(b"\r", b" ").replace(b"\0", b" ") for line in lines]
    columns = SacctColumns(HEADER.encode(), CLOCK, name="file")
    rows = columns.read(b"".join(line + b"\n" for line in whole))
    assert rows.num_rows + columns.steps + columns.rejected.total() == sum(line != b"" for line in whole)


def test_sacct_becomes_job_rows(tmp_path: Path) -> None:
    path = tmp_path / "sacct.txt"
    path.write_text(
        HEADER
        + "1|ada|COMPLETED|1700000000|1700000010|1700000110|2|gpu[001-002]|cpu=8,gres/gpu=16|0:0|sbatch -x gpu3 a.sh\n"
        + "1.batch||COMPLETED|1700000000|1700000010|1700000110|2|gpu[001-002]||0:0|\n"
        + "2|bob|CANCELLED by 1000|2023-11-14T22:13:20|Unknown|Unknown|1|None assigned||0:15|\n"
        + "3|bob|NODE_FAIL|1700000000|1700000010|1700000005|1|gpu4||1:0|\n"
        + "4|bob|WAT|1700000000|1700000010|1700000050|1|gpu4||1:0|\n"
        + "short|row\n"
    )
    found = import_sacct(str(path), str(tmp_path / "t"), clock=CLOCK)
    assert (found.jobs, found.steps, found.lines) == (2, 1, 6)
    assert found.rejected == {
        "it ends before it starts": 1,
        "its state is not known": 1,
        "it has another number of columns": 1,
    }
    with open_tables(str(tmp_path / "t")) as tables:
        rows = tables.sql("SELECT job, state, gpus, start_ns, exit_code, signal, excluded FROM jobs ORDER BY job")
        assert rows.fetchall() == [
            ("1", "COMPLETED", 16, 1_700_000_010 * SECOND, 0, 0, "gpu3"),
            ("2", "CANCELLED", None, None, 0, 15, ""),
        ]


def sacct(tmp_path: Path, *rows: str, clock: Clock = CLOCK) -> tuple[Imported, list[tuple[object, ...]]]:
    path = tmp_path / "sacct.txt"
    path.write_text(HEADER + "".join(f"{row}\n" for row in rows))
    found = import_sacct(str(path), str(tmp_path / "t"), clock=clock)
    with open_tables(str(tmp_path / "t")) as tables:
        return found, tables.sql("SELECT job, gpus, user, excluded FROM jobs ORDER BY job").fetchall()


def test_a_command_of_a_user_may_have_what_separates_columns(tmp_path: Path) -> None:
    found, rows = sacct(
        tmp_path,
        "1|ada|COMPLETED|1700000000|1700000010|1700000110|1|gpu1||0:0|sbatch -x gpu3 --wrap 'a | b | c'",
        "2|ada|COMPLETED|1700000000|1700000010|1700000110|1|gpu1||0:0|sbatch a.sh",
    )
    assert (found.jobs, found.rejected) == (2, {})
    assert rows == [("1", None, "ada", "gpu3"), ("2", None, "ada", "")]


@pytest.mark.parametrize(
    ("resources", "gpus"),
    [("", None), ("cpu=8,node=1", 0), ("cpu=8,gres/gpu=4", 4), ("gres/gpu:a100=4,gres/gpu:h100=2,node=1", 6),
     ("gres/gpu:a100=4,gres/gpu=4", 4), ("gres/gpumem=80,cpu=1", 0)],
)  # fmt: skip
def test_gpus_are_counted_by_type_too_and_none_are_not_unknown(
    resources: str, gpus: int | None, tmp_path: Path
) -> None:
    _, rows = sacct(tmp_path, f"1|ada|COMPLETED|1700000000|1700000010|1700000110|1|gpu1|{resources}|0:0|")
    assert rows == [("1", gpus, "ada", "")]


def test_a_list_of_nodes_has_as_many_as_the_job(tmp_path: Path) -> None:
    found, rows = sacct(
        tmp_path,
        "1|ada|COMPLETED|1700000000|1700000010|1700000110|2|gpu[0-99999]||0:0|",
        "2|ada|COMPLETED|1700000000|1700000010|1700000110|2|gpu[1-||0:0|",
        "3|ada|PENDING|1700000000|Unknown|Unknown|2|None assigned||0:0|",
    )
    assert [job for job, *_ in rows] == ["3"]
    assert found.rejected == {"its node list cannot be read, or has not as many nodes as it says": 2}


def test_times_after_the_import_are_of_a_wrong_clock(tmp_path: Path) -> None:
    clock = Clock(latest_ns=AT_NS)
    found, rows = sacct(
        tmp_path,
        "1|ada|COMPLETED|1600000000|1600000010|1600000110|1|gpu1||0:0|",
        "2|ada|COMPLETED|1600000000|1600000010|2000000000|1|gpu1||0:0|",
        "3|ada|COMPLETED|1600000000|1600000010|9999999999|1|gpu1||0:0|",
        "4|ada|COMPLETED|12|22|1600000110|1|gpu1||0:0|",
        clock=clock,
    )
    assert [job for job, *_ in rows] == ["1"]
    assert found.rejected == {"its times are out of range, before 2000 or in the future": 3}
    later_us = str((AT_NS + SECOND) // 1000)
    entry = {"__REALTIME_TIMESTAMP": later_us, "_HOSTNAME": "gpu7", "_TRANSPORT": "kernel", "MESSAGE": XID}
    entry["SYSLOG_FACILITY"] = "0"
    event = HealthEvent(check="gpu_xid", severity="high", seen_ns=AT_NS + SECOND)
    assert isinstance(journal_row(json.dumps(entry).encode(), "n", clock), Rejected)
    assert isinstance(health_row(msgspec.json.encode(event), "n", clock), Rejected)
    assert isinstance(kernel_row(f"2035-01-01T00:00:00+00:00 {XID}".encode(), "n", clock), Rejected)
    assert isinstance(jobcomp_row(JOBCOMP.replace("2023", "2035").encode(), clock), Rejected)
    for wall_time_s in (1e300, -1.0, float("nan"), 2e9):
        log = [Logged(0, JobStarted("train", ("x",), 2, 4, 3, wall_time_s))]
        with pytest.raises(UsageError, match="a clock was wrong"):
            import_run("run", log, str(tmp_path / "t"), clock=clock)


def test_what_a_terminal_would_obey_is_not_kept(tmp_path: Path) -> None:
    kernel = kernel_row(f"2023-11-14T22:13:20+00:00 gpu\x1b[2J7 kernel: {XID}".encode(), "n", CLOCK)
    entry = {
        "__REALTIME_TIMESTAMP": str(AT_NS // 1000),
        "_HOSTNAME": "a\x1b[2J",
        "_TRANSPORT": "kernel",
        "SYSLOG_FACILITY": "0",
        "MESSAGE": XID,
    }
    journal = journal_row(json.dumps(entry).encode(), "n", CLOCK)
    for row in (kernel, journal):
        assert isinstance(row, EventRow)
        assert row.node.isprintable()
    _, rows = sacct(
        tmp_path,
        "1|a\x1b[2J|COMPLETED|1700000000|1700000010|1700000110|1|gpu1||0:0|",
        "2|a\u202e\u009b|COMPLETED|1700000000|1700000010|1700000110|1|gpu1||0:0|",
    )
    assert [user for _, _, user, _ in rows] == ["a [2J", "a  "]


def test_a_file_without_the_columns_says_how_to_write_it(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_text("JobID|State\n1|COMPLETED\n")
    with pytest.raises(UsageError, match="has no column Start; write it with: SLURM_TIME_FORMAT=%s sacct"):
        import_sacct(str(path), str(tmp_path / "t"), clock=CLOCK)
    path.write_text("")
    with pytest.raises(UsageError, match="is empty"):
        import_sacct(str(path), str(tmp_path / "t"), clock=CLOCK)
    assert not list((tmp_path / "t").iterdir()), "nothing half-written stays"


def test_jobcomp_becomes_job_rows(tmp_path: Path) -> None:
    path = tmp_path / "jobcomp.log"
    path.write_text(f"{JOBCOMP}\nnonsense\n")
    found = import_lines("jobcomp", str(path), str(tmp_path / "t"), node="", clock=CLOCK)
    assert (found.jobs, found.rejected) == (1, {"its job has no number": 1})
    with open_tables(str(tmp_path / "t")) as tables:
        rows = tables.sql("SELECT job, user, state, nodes, gpus, start_ns, signal, node_list FROM jobs").fetchall()
    assert rows == [("7", "ada", "NODE_FAIL", 4, 32, AT_NS, 9, "gpu[1-4]")]


@pytest.mark.parametrize(("name", "kept"), [("x JobId=4711 UserId=eve(0)", True), ("x JobState=COMPLETED", False)])
def test_the_name_of_a_job_says_nothing_of_another(name: str, kept: bool) -> None:
    row = jobcomp_row(JOBCOMP.replace("my job", name).encode(), CLOCK)
    assert isinstance(row, Rejected) != kept
    if not isinstance(row, Rejected):
        assert (row.job, row.user, row.state) == ("7", "ada", "NODE_FAIL")


def test_jobcomp_writes_an_attempt_that_was_requeued_with_the_state_that_follows() -> None:
    line = (
        b"JobId=1 UserId=root(0) GroupId=root(0) Name=wrap JobState=PENDING Partition=test TimeLimit=UNLIMITED "
        b"StartTime=2026-11-27T20:30:58 EndTime=2026-11-27T20:31:00 NodeList=b NodeCnt=1 ProcCnt=1 "
        b"SubmitTime=2026-11-27T20:30:56 DerivedExitCode=0:0 ExitCode=0:0"
    )
    row = jobcomp_row(line, CLOCK)
    assert isinstance(row, JobRow)
    assert (row.state, row.node_list) == ("REQUEUED", "b")
    never = jobcomp_row(line.replace(b"StartTime=2026-11-27T20:30:58", b"StartTime=Unknown"), CLOCK)
    assert isinstance(never, JobRow)
    assert never.state == "PENDING"


def _kernel_log(path: Path, lines: int = 3) -> Path:
    path.write_text("".join(f"2023-11-14T22:13:2{number}+00:00 gpu7 kernel: {XID}\n" for number in range(lines)))
    return path


def _import(path: Path, directory: Path) -> Imported:
    return import_lines("kernel-log", str(path), str(directory), node="n", clock=CLOCK)


def test_a_source_that_is_imported_again_counts_once(tmp_path: Path) -> None:
    path = _kernel_log(tmp_path / "kern.log")
    for _ in range(2):
        assert _import(path, tmp_path / "t").events == 3
    with open_tables(str(tmp_path / "t")) as tables:
        assert tables.sql("SELECT count(*) FROM events").fetchall() == [(3,)]


def test_a_file_that_has_grown_and_one_that_overlaps_count_each_event_once(tmp_path: Path) -> None:
    path = _kernel_log(tmp_path / "kern.log")
    _import(path, tmp_path / "t")
    _kernel_log(path, lines=5)
    for _ in range(2):
        found = _import(path, tmp_path / "t")
        assert (found.events, found.known) == (2, 3)
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[2:]) + lines[4].replace(":24", ":59") * 2)
    found = _import(path, tmp_path / "t")
    assert (found.events, found.known) == (1, 4), "joined exports say in one file twice what was written once"
    with open_tables(str(tmp_path / "t")) as tables:
        assert tables.sql("SELECT count(*), count(DISTINCT time_ns) FROM events").fetchall() == [(6, 6)]


def test_attempts_of_a_later_export_replace_those_that_had_not_ended(tmp_path: Path) -> None:
    ended, late = "1700000110", "1700000220"
    states = [
        {1: "COMPLETED", 2: "RUNNING", 3: "PENDING", 4: "PENDING"},
        {1: "COMPLETED", 2: "COMPLETED", 3: "RUNNING", 4: "CANCELLED", 5: "NODE_FAIL"},
    ]
    found: dict[str, str] = {}
    for exported in (*states, states[0], states[1]):
        rows = []
        for number, state in exported.items():
            start = "Unknown" if state in ("PENDING", "CANCELLED") else "1700000010"
            end = "Unknown" if state in ("PENDING", "RUNNING") else ended if number == 1 else late
            rows.append(f"{number}|ada|{state}|1700000000|{start}|{end}|1|gpu1||0:0|")
        sacct(tmp_path, *rows)
        with open_tables(str(tmp_path / "t")) as tables:
            found = dict(tables.sql("SELECT job, state FROM jobs").fetchall())
            assert tables.sql("SELECT count(*) FROM jobs").fetchall() == [(len(found),)]
    assert found == {str(number): state for number, state in states[1].items()}
    assert not list((tmp_path / "t").glob("*.partial"))


def test_exports_that_overlap_in_one_file_count_each_attempt_once(tmp_path: Path) -> None:
    row = "1|{0}|{1}|1700000000|{2}|{3}|1|gpu1||0:0|"
    started, ended = "1700000010", "1700000110"
    pending, running = row.format("ada", "PENDING", "Unknown", "Unknown"), row.format("ada", "RUNNING", started, "")
    done, other = row.format("ada", "COMPLETED", started, ended), row.format("bob", "COMPLETED", started, ended)
    found, rows = sacct(tmp_path, pending, running, done, other, done)
    assert (found.jobs, found.known) == (2, 3)
    assert len(rows) == 2
    with open_tables(str(tmp_path / "t")) as tables:
        left = tables.sql('SELECT "user", state FROM jobs ORDER BY "user"').fetchall()
    assert left == [("ada", "COMPLETED"), ("bob", "COMPLETED")]


@pytest.mark.parametrize("placed", [0, 1, 2])
def test_an_import_that_is_killed_while_files_are_put_in_place_is_finished_by_who_comes_next(
    placed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = "1|ada|RUNNING|1700000000|1700000010|Unknown|1|gpu1||0:0|"
    done = "1|ada|COMPLETED|1700000000|1700000010|1700000110|1|gpu1||0:0|"
    sacct(tmp_path, running, running.replace("1|", "2|", 1))
    replace, left = os.replace, [placed]

    def killed(source: str, place: str) -> None:
        if source.endswith(NEXT) and "partial" not in source:
            if not left[0]:
                raise KeyboardInterrupt
            left[0] -= 1
        replace(source, place)

    monkeypatch.setattr("fireflyer.analytics.reliability.tables.os.replace", killed)
    with contextlib.suppress(KeyboardInterrupt):
        sacct(tmp_path, done)
    monkeypatch.undo()
    with open_tables(str(tmp_path / "t")) as tables:
        rows = tables.sql("SELECT job, state FROM jobs ORDER BY job").fetchall()
    assert rows == [("1", "COMPLETED"), ("2", "RUNNING")]
    suffixes = sorted(path.suffix for path in (tmp_path / "t").glob("*.*") if path.name != "import.lock")
    assert suffixes == [".parquet", ".parquet"]


def test_a_list_of_files_to_replace_that_is_damaged_is_one_line(tmp_path: Path) -> None:
    sacct(tmp_path, "1|ada|RUNNING|1700000000|1700000010|Unknown|1|gpu1||0:0|")
    for text in ("[", '{"a": 1}', '["../../x"]'):
        (tmp_path / "t" / "replacing.json").write_text(text)
        with pytest.raises(UsageError, match="is damaged"), open_tables(str(tmp_path / "t")):
            pass


def test_an_attempt_that_was_queued_again_is_another(tmp_path: Path) -> None:
    row = "1|ada|NODE_FAIL|{0}|1700000010|1700000110|1|gpu1||0:0|"
    sacct(tmp_path, row.format(1700000000))
    found, rows = sacct(tmp_path, row.format(1700000000), row.format(1700000005))
    assert (found.jobs, found.known, len(rows)) == (1, 1, 2)


def test_long_lines_and_damaged_archives_cost_themselves_only(tmp_path: Path) -> None:
    path = _kernel_log(tmp_path / "kern.log")
    text = path.read_bytes()
    later = text.replace(b"22:13", b"22:14")
    path.write_bytes(text + b"x" * (5 * MAX_LOG_LINE_BYTES * 100) + b"\n" + later)
    found = _import(path, tmp_path / "t")
    assert (found.events, found.rejected) == (6, {"longer than 64 KiB": 1})
    packed = tmp_path / "kern.log.gz"
    packed.write_bytes(gzip.compress(text * 1000)[:-20])
    cut = _import(packed, tmp_path / "t")
    assert "cannot be decompressed" in cut.cut
    packed.write_bytes(b"no archive")
    assert "cannot be decompressed" in _import(packed, tmp_path / "t").cut
    with pytest.raises(NotFound):
        _import(tmp_path / "absent", tmp_path / "t")


def test_ranks_that_differ_from_their_replicas_are_evidence_against_their_node(tmp_path: Path) -> None:
    def told(rank: int, attempt: int, suspects: tuple[int, ...], *, decided: bool) -> CorruptionReport:
        return CorruptionReport(rank, attempt, 12, suspects, decided, "step 12: ranks differ")

    log = [
        Logged(0, JobStarted("train", (), 3, 2, 3, 1_750_000_000.0)),
        Logged(1, AttemptStarted(0)),
        Logged(2, AttemptSized(0, 3, ("x", "y", "z"), (), (1, 2, 3))),
        *(Logged(3 + rank, told(rank, 0, (3, 4, 900), decided=True)) for rank in range(6)),
        Logged(14, AttemptFailed(0, "it ended", restarting=True, kind="user")),
        Logged(15, AttemptStarted(1)),
        Logged(16, told(0, 1, (0, 5), decided=False)),
        Logged(17, JobFinished(1, "it ended")),
    ]
    import_run("train", log, str(tmp_path), clock=CLOCK)
    with open_tables(str(tmp_path)) as tables:
        rows = tables.sql(
            "SELECT node, user_made FROM events WHERE symptom = 'corruption' ORDER BY time_ns, node"
        ).fetchall()
        diagnosis = diagnose(evidence_of(tables, "train", attempt=1))
        signals = {one.node: one for one in node_signals(tables)}
    assert diagnosis.hypotheses[0].title == "Replicas of the training state differ"
    assert (signals["z"].corruptions, signals["z"].incidents) == (1, 0), "it explains, and accuses alone of nothing"
    assert rows == [("", True), ("z", True), ("", True)], "each once; nobody where nothing says which is right"


def test_a_run_becomes_attempts_and_the_node_that_was_lost(tmp_path: Path) -> None:
    log = [
        Logged(0, JobStarted("train", ("x",), 2, 4, 3, 1_700_000_000.0)),
        Logged(1 * SECOND, AttemptStarted(0)),
        Logged(5 * SECOND, NodeLost(1, 0, "no heartbeat", host="gpu7")),
        Logged(6 * SECOND, AttemptFailed(0, "node 1 was lost", True, node=1, kind="infrastructure")),
        Logged(7 * SECOND, AttemptStarted(1)),
        Logged(8 * SECOND, RankExited(3, 1, 137)),
        Logged(9 * SECOND, AttemptFailed(1, "ValueError", False, node=0, kind="user")),
        Logged(9 * SECOND, JobFinished(1, "failed")),
    ]
    found = import_run(str(tmp_path / "run"), log, str(tmp_path / "t"), clock=CLOCK)
    assert (found.jobs, found.events) == (2, 2)
    with open_tables(str(tmp_path / "t")) as tables:
        jobs = tables.sql("SELECT job, state, gpus, exit_code, signal FROM jobs ORDER BY start_ns").fetchall()
        assert jobs == [("train", "NODE_FAIL", 8, -1, 0), ("train", "FAILED", 8, 137, 9)]
        assert tables.sql("SELECT node, symptom FROM events ORDER BY time_ns").fetchall() == [
            ("gpu7", "node_lost"),
            ("node-0", "program_error"),
        ]


def test_damaged_tables_are_one_line(tmp_path: Path) -> None:
    with pytest.raises(NotFound), open_tables(str(tmp_path / "absent")):
        pass
    with pytest.raises(NotFound, match="ff reliability import"), open_tables(str(tmp_path)):
        pass
    (tmp_path / "jobs-0123456789abcdef.parquet").write_bytes(b"PAR1 nothing")
    with pytest.raises(UsageError, match="is damaged"), open_tables(str(tmp_path)):
        pass


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("gpu7", ("gpu7",)),
        ("gpu[008-010,3],login1", ("gpu008", "gpu009", "gpu010", "gpu3", "login1")),
        ("r[1-2]n[1-2]", ("r1n1", "r1n2", "r2n1", "r2n2")),
        ("None assigned", ()),
    ],
)
def test_lists_of_nodes(text: str, names: tuple[str, ...]) -> None:
    assert expand_node_list(text) == names


@pytest.mark.parametrize("text", ["gpu[1-999999999]", "a[1-999]b[1-999]c[1-9]", "gpu[1-", "a[x]", "a[9-1]", ",,"])
def test_lists_that_are_none_or_endless_are_refused(text: str) -> None:
    with pytest.raises(UsageError):
        expand_node_list(text, limit=1000)
