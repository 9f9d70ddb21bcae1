"""What docs/how-to/reliability.md tells users to type works."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import msgspec
import pytest

from fireflyer.base.health_event import HealthEvent
from fireflyer.base.units import SECOND
from fireflyer.cli import main

TEXT = (Path(__file__).parents[3] / "docs/how-to/reliability.md").read_text()
COMMANDS = [
    shlex.split(line)[1:]
    for block in re.findall(r"^```sh\n(.*?)^```$", TEXT, re.DOTALL | re.MULTILINE)
    for line in block.splitlines()
]
COLUMNS = "JobID|User|State|Submit|Start|End|NNodes|NodeList|AllocTRES|ExitCode|SubmitLine"
END_S = 1_700_100_000


def write_sources(directory: Path) -> None:
    (directory / "sacct.txt").write_text(
        f"{COLUMNS}\n"
        f"1|ada|COMPLETED|{END_S - 90_000}|{END_S - 90_000}|{END_S}|1|gpu1|gres/gpu=8|0:0|sbatch a.sh\n"
        f"2|bob|FAILED|{END_S - 90_000}|{END_S - 90_000}|{END_S}|2|gpu[6-7]|gres/gpu=16|1:0|sbatch b.sh\n"
    )
    xid = "NVRM: Xid (PCI:0000:3b:00): 79, pid=1234, GPU has fallen off the bus."
    (directory / "dmesg.txt").write_text(f"2023-11-16T01:59:00,000000+00:00 {xid}\n")
    entry = {
        "__REALTIME_TIMESTAMP": str((END_S - 70) * 1_000_000),
        "_HOSTNAME": "gpu7",
        "_TRANSPORT": "kernel",
        "SYSLOG_FACILITY": "0",
        "MESSAGE": "pcieport 0000:3a:00.0: AER: Uncorrected (Fatal) error received: 0000:3b:00.0",
    }
    (directory / "journal.json").write_text(json.dumps(entry) + "\n")
    timeout = HealthEvent(check="nccl_timeout", severity="low", seen_ns=(END_S - 5) * SECOND, words="30 s in allreduce")
    (directory / "health.jsonl").write_bytes(msgspec.json.encode(timeout) + b"\n")


def test_the_commands_run(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    write_sources(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert len(COMMANDS) == 9
    said = []
    for command in COMMANDS:
        assert main(command) == 0, command
        said.append(capsys.readouterr().out)
    assert "28.85 h" in said[0]
    assert "ETTR exact                0.9215" in said[1]
    assert said[2].count("does not follow") == 5, "as the page says"
    assert "sacct.txt: 2 jobs of 2 lines" in said[3]
    assert "journal.json: 1 events of 1 lines" in said[4]
    assert "PCIe error" in said[5]
    assert "The failure share of large runs falls by" in said[8]
    assert (tmp_path / "failures.html").stat().st_size > 5000
    assert "no node fails so much more often" in said[6]
    assert "most likely: PCIe bus: PCIe error and GPU unavailable together on gpu7" in said[7]
    assert "the timeout is a consequence" in said[7]


def test_every_source_and_option_of_the_page_is_there() -> None:
    from fireflyer.cli.reliability.command import command

    options = {name for one in command.commands.values() for option in one.params for name in option.opts}
    named = set(re.findall(r"`(--[a-z-]+)[ `]", TEXT)) - {"--duplicates", "--published", "--flight"}
    assert named <= options
    sources = {f"--{name}" for name in ("sacct", "jobcomp", "kernel-log", "journal", "health", "run")}
    assert sources <= set(re.findall(r"^\| `(--[a-z-]+)` \|", TEXT, re.MULTILINE))
