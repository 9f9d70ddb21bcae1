"""What docs/how-to/plan-cluster.md tells users to type works."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import msgspec
import pytest

from fireflyer.cli import main
from fireflyer.planning import CheckpointPart, ClusterPlan, StoragePart, TrainingPart

TEXT = (Path(__file__).parents[3] / "docs/how-to/plan-cluster.md").read_text()
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", TEXT, re.DOTALL | re.MULTILINE)


def test_the_commands_and_the_python_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for language, text in BLOCKS:
        if language == "toml":
            (tmp_path / text.split(maxsplit=2)[1]).write_text(text)
        if language == "json":
            (tmp_path / "config.json").write_text(text)
    commands = [shlex.split(line)[1:] for language, block in BLOCKS if language == "sh" for line in block.splitlines()]
    assert len(commands) == 2
    said = []
    for command in commands:
        assert main(command) == 0, command
        said.append(capsys.readouterr().out)
    for words in (
        "  GPU nodes: 512 with 4,096 GPUs; the run has 64 nodes",
        "  network rate of a node: 25 GB/s",
        "  with the whole rate: 10.016 s, ",
        "  simulated: 10.863 s; closed form with the whole rate: 10.016 s; 70,720 transfers",
        "  simulated while a checkpoint is written: 10.878 s; ",
        "  mean time to failure: 57 h 41 min to 93 h 45 min",
        "  best between checkpoints: ",
        "  failures per 1000 node-days: ",
        "  size: 182.2 GB",
        "  the run, rented: ",
    ):
        assert words in said[0], words
    page = (tmp_path / "page.html").read_text()
    assert "<svg" in page
    assert "leaf 0 to spine 0: " in page
    assert json.loads(said[1])["job_nodes"] == 64
    (code,) = (text for language, text in BLOCKS if language == "python")
    found: dict[str, Any] = {}
    exec(code, found)
    assert json.loads(msgspec.json.encode(found["answer"])) == json.loads(said[1]), "what the second command printed"
    python = capsys.readouterr().out
    assert "it suffices: True\n1: ETTR 0.9" in python
    assert len(python.splitlines()) == 4
    assert main(["plan", "cluster", "network.toml"]) == 2
    error = capsys.readouterr().err.strip()
    assert "\n" not in error
    assert "docs/how-to/plan-cluster.md" in error
    text = (tmp_path / "cluster.toml").read_text()
    (tmp_path / "cluster.toml").write_text(text.replace("write_bytes_per_s = 15e9", "write_bytes_per_s = 1e6"))
    assert main(["plan", "cluster", "cluster.toml", "--most-transfers", "0"]) == 1
    assert "add storage nodes, or save less often" in capsys.readouterr().out


def test_every_key_is_named() -> None:
    named = set(re.findall(r"^(?:# )?(\w+) = ", TEXT, re.MULTILINE)) | set(
        re.findall(r"^\[(\w+)\]", TEXT, re.MULTILINE)
    )
    for part in (ClusterPlan, TrainingPart, CheckpointPart, StoragePart):
        assert set(part.__struct_fields__) <= named, part
