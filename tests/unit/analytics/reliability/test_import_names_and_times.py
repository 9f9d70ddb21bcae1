"""Names of nodes and local times of different sources meet; an archive that is cut gives what it has."""

from __future__ import annotations

import gzip
import json
import random
from datetime import datetime
from pathlib import Path
from zoneinfo import ZoneInfo

import pytest

from fireflyer.analytics.reliability.failures import prepare_failures
from fireflyer.analytics.reliability.importing import BLOCK_BYTES, import_lines, import_sacct
from fireflyer.analytics.reliability.local_times import Clock, zone_of
from fireflyer.analytics.reliability.log_lines import kernel_row
from fireflyer.analytics.reliability.rows import EventRow, JobRow
from fireflyer.analytics.reliability.slurm import SacctColumns, jobcomp_row
from fireflyer.analytics.reliability.tables import open_tables
from fireflyer.base.errors import UsageError
from fireflyer.base.units import SECOND
from fireflyer.cli.main import main

XID = "NVRM: Xid (PCI:0000:3b:00): 79, pid=1234, GPU has fallen off the bus."
HEADER = "JobID|State|Start|End|NNodes|NodeList\n"
END_S = 1_700_000_000
CHICAGO = Clock(zone_of("America/Chicago"))


def journal(path: Path, *hosts: str, at_s: int = END_S - 60) -> str:
    lines = [
        json.dumps({
            "__REALTIME_TIMESTAMP": str((at_s + number) * 1_000_000), "_HOSTNAME": host, "_TRANSPORT": "kernel",
            "SYSLOG_FACILITY": "0", "MESSAGE": XID,
        })
        for number, host in enumerate(hosts)
    ]  # fmt: skip
    path.write_text("".join(f"{line}\n" for line in lines))
    return str(path)


def sacct(path: Path, *lists: str) -> str:
    rows = (f"{n}|NODE_FAIL|{END_S - 900}|{END_S}|1|{nodes}\n" for n, nodes in enumerate(lists))
    path.write_text(HEADER + "".join(rows))
    return str(path)


def blamed(tables_at: Path) -> list[str]:
    with open_tables(str(tables_at)) as tables:
        prepare_failures(tables, gpus_per_node=8)
        return sorted(node for (node,) in tables.sql("SELECT culprit FROM failures").fetchall())


@pytest.mark.parametrize(
    ("host", "listed"),
    [("gpu7.cluster.example", "gpu7"), ("gpu7", "gpu7.cluster.example"), ("gpu7.a.example", "gpu7.a.example")],
)
def test_a_report_under_the_long_name_of_a_node_is_of_the_node_that_the_job_names(
    host: str, listed: str, tmp_path: Path
) -> None:
    import_sacct(sacct(tmp_path / "sacct", listed), str(tmp_path / "t"), clock=Clock())
    import_lines("journal", journal(tmp_path / "j", host), str(tmp_path / "t"), node="j", clock=Clock())
    assert blamed(tmp_path / "t") == [listed]


def test_names_that_two_nodes_could_mean_and_addresses_stay_as_they_are(tmp_path: Path) -> None:
    import_sacct(sacct(tmp_path / "sacct", "gpu7", "10"), str(tmp_path / "t"), clock=Clock())
    path = journal(tmp_path / "j", "gpu7.one", "gpu7.two", "10.0.0.1")
    import_lines("journal", path, str(tmp_path / "t"), node="j", clock=Clock())
    assert blamed(tmp_path / "t") == ["", ""]


def test_the_node_that_is_given_wins_over_the_host_of_the_lines_of_a_file_of_one_host(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tables, path = str(tmp_path / "t"), journal(tmp_path / "j", "localhost", "dgx-0041", "dgx-0041.example")
    words = ["reliability", "import", tables, "--sacct", sacct(tmp_path / "sacct", "gpu7"), "--journal"]
    assert main([*words, f"gpu7={path}"]) == 0
    assert blamed(tmp_path / "t") == ["gpu7"]
    capsys.readouterr()
    assert main([*words, f"gpu7={journal(tmp_path / 'k', 'gpu7', 'gpu8')}"]) == 2
    assert "has lines of gpu7 and of gpu8; give it without gpu7=" in capsys.readouterr().err


def test_reports_of_nodes_that_no_job_names_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tables, path = str(tmp_path / "t"), journal(tmp_path / "j", "dgx-0041")
    words = ["--sacct", sacct(tmp_path / "sacct", "gpu7"), "--journal", path]
    assert main(["reliability", "import", tables, *words]) == 0
    for command in ("report", "lemons"):
        capsys.readouterr()
        assert main(["reliability", command, tables]) == 0
        said = capsys.readouterr()
        assert "No node that reported is in the node list of a job, as dgx-0041 and gpu7 show" in " ".join(
            (said.out + said.err).split()
        )


@pytest.mark.parametrize(
    ("start", "end", "ends_s"),
    [
        ("2026-01-15T10:00:00", "2026-01-15T12:00:00", 1_768_500_000),  # CST, 6 h behind UTC
        ("2026-07-15T10:00:00", "2026-07-15T12:00:00", 1_784_134_800),  # CDT, 5 h
        ("2026-11-01T01:50:00", "2026-11-01T01:10:00", 1_793_517_000),  # from the first 01 h to the second
    ],
)
def test_local_times_have_the_daylight_saving_of_their_zone(start: str, end: str, ends_s: int) -> None:
    line = (
        f"JobId=7 UserId=ada(1000) Name=x JobState=NODE_FAIL StartTime={start} EndTime={end} NodeList=gpu7 NodeCnt=1 "
        f"SubmitTime={start} ExitCode=0:9"
    )
    row = jobcomp_row(line.encode(), CHICAGO)
    assert isinstance(row, JobRow)
    assert row.end_ns == ends_s * SECOND
    columns = SacctColumns(HEADER.encode(), CHICAGO, name="sacct")
    rows = columns.read(f"8|NODE_FAIL|{start}|{end}|1|gpu7\n".encode())
    assert rows["end_ns"].to_pylist() == [ends_s * SECOND]
    assert columns.local_times == 0
    local = datetime.fromtimestamp(ends_s - 60, ZoneInfo("America/Chicago"))
    event = kernel_row(f"[{local:%a %b %d %H:%M:%S %Y}] {XID}".encode(), "gpu7", CHICAGO)
    assert isinstance(event, EventRow)
    assert event.time_ns == (ends_s - 60 - 3600 * local.fold) * SECOND, "a log does not say which of the two hours"


def test_local_times_without_a_zone_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "sacct").write_text(f"{HEADER}8|NODE_FAIL|2026-01-15T10:00:00|2026-01-15T12:00:00|1|gpu7\n")
    (tmp_path / "kern.log").write_text(f"[Thu Jan 15 11:59:00 2026] {XID}\n2026-01-15T11:59:00+00:00 {XID}\n")
    words = ["--sacct", str(tmp_path / "sacct"), "--kernel-log", f"gpu7={tmp_path / 'kern.log'}"]
    assert main(["reliability", "import", str(tmp_path / "t"), *words]) == 0
    said = capsys.readouterr().out
    assert "2 local times were read as UTC; say their zone with --utc-offset" in said
    assert "1 local times were read as UTC" in said
    for zone in ("America/Chicago", "-21600"):
        assert main(["reliability", "import", str(tmp_path / "u"), *words, "--utc-offset", zone]) == 0
        assert "as UTC" not in capsys.readouterr().out
    with open_tables(str(tmp_path / "u")) as tables:
        assert tables.sql("SELECT end_ns FROM jobs").fetchall() == [(1_768_500_000 * SECOND,)]
    assert main(["reliability", "import", str(tmp_path / "u"), *words, "--utc-offset", "Mars/Base"]) == 2
    assert "is no zone that this machine knows" in capsys.readouterr().err
    with pytest.raises(UsageError, match="more than a day"):
        zone_of("86400")


def test_an_archive_that_is_cut_gives_all_lines_before_the_cut(tmp_path: Path) -> None:
    drawn = random.Random(1)
    rows = "".join(
        f"{n}|COMPLETED|{END_S - 900}|{END_S + drawn.randrange(10**6)}|1|n{n}\n" for n in range(5000)
    ).encode()  # fmt: skip
    assert len(rows) < BLOCK_BYTES
    packed = gzip.compress(HEADER.encode() + rows)
    (tmp_path / "sacct.gz").write_bytes(packed[: len(packed) * 9 // 10])
    found = import_sacct(str(tmp_path / "sacct.gz"), str(tmp_path / "t"), clock=Clock())
    assert 4000 < found.jobs < 5000
    assert "cannot be decompressed any further" in found.cut
    assert not found.rejected, "the half of a line that is left of the last one is none"
    (tmp_path / "sacct.gz").write_bytes(packed[:20])
    with pytest.raises(UsageError, match="cannot be decompressed any further"):
        import_sacct(str(tmp_path / "sacct.gz"), str(tmp_path / "t"), clock=Clock())
    lines = "".join(f"2023-11-14T22:{n // 60:02}:{n % 60:02}+00:00 gpu{n} kernel: {XID}\n" for n in range(1000))
    (tmp_path / "kern.gz").write_bytes(gzip.compress(lines.encode())[:-4])
    cut = import_lines("kernel-log", str(tmp_path / "kern.gz"), str(tmp_path / "t"), node="n", clock=Clock())
    assert cut.events == 1000, "only the sum of the archive is gone"
    assert cut.cut
