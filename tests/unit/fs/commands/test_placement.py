"""`ff fs admin placement`: what is printed, and the line for what cannot be."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fireflyer.cli import main

Capture = pytest.CaptureFixture[str]
COMMAND = ["fs", "admin", "placement"]


def test_prints_chains_loads_and_ratios_beside_their_bounds(capsys: Capture) -> None:
    assert main([*COMMAND, "--nodes", "7", "--replicas", "3", "--targets-per-node", "6"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("14 chains of 3 on 7 nodes, in ")
    assert lines[2] == "chain  node of each replica, head first"
    assert lines[15] == "  ...  2 more; --all or --json prints them"
    assert "targets of nodes: 7 with 6" in lines
    assert "two nodes share 2 to 2 chains" in lines
    assert "  reads of a dead node      1.000   no table is below 1.000" in lines
    assert "  recovery of a dead node   1.000   no table is below 1.000" in lines


def test_json_has_the_whole_table(capsys: Capture) -> None:
    assert (
        main(
            [*COMMAND, "--nodes", "5", "--replicas", "2", "--targets-per-node", "4", "--disks-per-node", "2", "--json"]
        )
        == 0
    )
    found = json.loads(capsys.readouterr().out)
    assert len(found["chains"]) == 10
    assert sorted(disk for chain in found["chains"] for _, disk in chain) == [0] * 10 + [1] * 10
    assert found["quality"]["reads_ratio"] == 1.0
    assert found["nodes"][0] == {"id": 1, "slots": [2, 2], "domain": ""}


def test_all_prints_all_and_one_replica_has_no_ratio(capsys: Capture) -> None:
    assert main([*COMMAND, "--nodes", "3", "--replicas", "1", "--all"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert sum(line[:5].strip().isdigit() for line in lines) == 48
    assert lines[-1] == "1 replica: when a node is lost, its data are lost"


def test_domains_and_targets_come_from_a_file(capsys: Capture, tmp_path: Path) -> None:
    path = tmp_path / "racks.toml"
    path.write_text('domains = ["a", "a", "b", "b", "c", "c"]\ntargets = [4, 4, 4, 4, 8, 8]\n')
    assert main([*COMMAND, "--nodes", "6", "--domains", str(path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("8 chains of 3 on 6 nodes")
    assert "unused targets: 8; there are not 3 nodes with room for a further chain" in lines


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--nodes", "2"], "error: 3 replicas need 3 nodes with room for targets, and there are 2; add nodes"),
        (["--nodes", "two"], "error: Invalid value for '--nodes': 'two' is not a valid integer; see"),
        (["--nodes", "3", "--replicas", "0"], "error: Invalid value for '--replicas'"),
        (["--nodes", "3", "--disks-per-node", "17"], "error: 17 disks for 16 targets per node; each disk needs"),
        (["--nodes", "3", "--domains", "/nowhere"], "error: --domains '/nowhere' is not a file; give a TOML file"),
        ([], "error: Missing option '--nodes'"),
    ],
)
def test_wrong_flags_give_one_line(arguments: list[str], line: str, capsys: Capture) -> None:
    assert main([*COMMAND, *arguments]) == 2
    err = capsys.readouterr().err
    assert err.startswith(line)
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ('domains = ["a"]', "domains has 1 entries, and --nodes is 3"),
        ('domains = ["a", "b", "c"]\ntargets = [1]', "targets has 1 entries, and --nodes is 3"),
        ('domains = ["a", "b", "b"]', "3 replicas need 3 domains, and the nodes with room are in 2"),
        ("domains = 3", "domains: expected `array`, got `int`"),
        ("zones = []", "unknown field `zones`"),
        ("\xff", "can't decode byte 0xff"),
    ],
)
def test_a_wrong_file_gives_one_line(text: str, line: str, capsys: Capture, tmp_path: Path) -> None:
    path = tmp_path / "racks.toml"
    path.write_text(text, encoding="latin-1")
    assert main([*COMMAND, "--nodes", "3", "--domains", str(path)]) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ")
    assert line in err
    assert err.count("\n") == 1
