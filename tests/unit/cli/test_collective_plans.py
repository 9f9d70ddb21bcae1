"""`ff collectives plan` and the topology file: what is printed, and the line for what cannot be."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from fireflyer.cli import main
from fireflyer.collectives import Plan
from fireflyer.collectives.planning.routing import default_plan

Capture = pytest.CaptureFixture[str]
TOPOLOGY = """
zones = [0, 0, 1, 1]
[speeds]
latency_ns = 6000
bytes_per_s = 22e9
[[routes]]
kind = "broadcast"
algorithm = "double_binary_tree"
chunk_bytes = 65536
"""


def written(directory: Path, text: str) -> str:
    (directory / "net.toml").write_text(text)
    return str(directory / "net.toml")


def test_shows_the_plan_its_reasons_the_times_and_the_memory(capsys: Capture, tmp_path: Path) -> None:
    topology = written(tmp_path, TOPOLOGY)
    assert main(["collectives", "plan", "--nodes", "4", "--ranks-per-node", "2", "--topology", topology]) == 0
    text = capsys.readouterr().out
    lines = text.splitlines()
    assert lines[0].startswith("8 ranks on 4 nodes, ")
    assert "broadcast, any size: chunks of 64.0 KiB; declared" in lines
    assert "double_binary_tree: 1 pair of nodes talks across zones: 0-2" in lines
    assert "line: 1 pair of nodes talks across zones: 0-2" in lines
    assert "allreduce of 186.0 MiB, predicted:" in lines
    table = lines[lines.index("allreduce of 186.0 MiB, predicted:") + 2 : -2]
    rows = {line.split()[0]: line for line in table}
    assert rows.keys() == {"double_binary_tree", "ring", "halving_doubling", "line"}
    assert sum("chosen" in row for row in rows.values()) == 1
    assert [name for name, row in rows.items() if "several pairs" in row] == ["ring", "halving_doubling"]
    assert lines[-1].startswith("memory: ")


def test_a_ring_that_is_asked_for_across_zones_says_that_it_comes_back(capsys: Capture, tmp_path: Path) -> None:
    topology = written(tmp_path, TOPOLOGY + '[[routes]]\nkind = "allgather"\nalgorithm = "ring"\nchunk_bytes = 65536\n')
    assert main(["collectives", "plan", "--nodes", "4", "--topology", topology]) == 0
    assert "ring: 2 pairs of nodes talk across zones: 0-2, 1-3" in capsys.readouterr().out.splitlines()
    assert main(["collectives", "plan", "--nodes", "4", "--topology", topology, "--json"]) == 0
    pairs = json.loads(capsys.readouterr().out)["pairs_across_zones"]
    assert pairs["ring"] == [[0, 2], [1, 3]]
    assert pairs["line"] == pairs["double_binary_tree"] == [[0, 2]]


def test_without_a_topology_it_is_what_a_job_does(capsys: Capture) -> None:
    assert main(["collectives", "plan", "--nodes", "16", "--ranks-per-node", "4", "--json", "--bytes", "1MiB"]) == 0
    found = json.loads(capsys.readouterr().out)
    plan = msgspec.convert(found["plan"], Plan)
    assert plan == default_plan([node for node in range(16) for _ in range(4)])
    assert [row["algorithm"] for row in found["predictions"] if row["chosen"]] == ["double_binary_tree"]
    assert all(row["ns"] > 0 for row in found["predictions"])
    assert found["slot_bytes_of_a_node"] == plan.window * 6 * plan.largest_chunk_bytes


def test_without_a_topology_no_algorithm_is_said_to_be_chosen(capsys: Capture) -> None:
    assert main(["collectives", "plan", "--nodes", "4"]) == 0
    text = capsys.readouterr().out
    assert "with --topology FILE the fastest on your network is chosen:" in text
    marks = [line.split()[-1] for line in text.splitlines() if line.startswith(("double_binary", "ring", "halving"))]
    assert sorted(mark for mark in marks if mark.isalpha()) == ["default"]


def test_one_node_needs_no_network(capsys: Capture) -> None:
    assert main(["collectives", "plan", "--nodes", "1", "--ranks-per-node", "8", "--operation", "broadcast"]) == 0
    text = capsys.readouterr().out
    assert "8 ranks on 1 node, " in text
    assert "shared memory" in text
    assert "nodes: up to 0" in text


WRONG = [
    (["--nodes", "2", "--bytes", "five"], None, "size 'five' is not understood"),
    (["--nodes", "2", "--operation", "gather"], None, "--operation 'gather' has no plan; use allreduce, "),
    (["--nodes", "0"], None, "0 is not in the range"),
    (["--nodes", "2000", "--ranks-per-node", "64"], None, "128000 ranks are more than the 65536 that a group can have"),
    (["--nodes", "2"], "zones = [0", "Unclosed array"),
    (["--nodes", "2"], "zones = [0]", "zones has 1 entries, --nodes is 2"),
    (["--nodes", "2"], "[zone_of_host]\na = 1", "zone_of_host has 1 hosts, --nodes is 2"),
    (["--nodes", "2"], "speed = 3", "unknown field `speed`"),
    (["--nodes", "2"], "[speeds]\nlatency_ns = nan", "latency_ns nan must be a positive number"),
    (["--nodes", "2"], "algorithms = ['star']", "algorithm 'star' is not known"),
]


@pytest.mark.parametrize(("arguments", "content", "text"), WRONG)
def test_what_is_wrong_is_said_in_one_line(
    arguments: list[str], content: str | None, text: str, tmp_path: Path, capsys: Capture
) -> None:
    topology = [] if content is None else ["--topology", written(tmp_path, content)]
    assert main(["collectives", "plan", *arguments, *topology]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert text in error
    assert error.count("\n") == 1


@pytest.mark.parametrize("command", [["collectives", "plan", "--nodes", "2"], ["run"]])
def test_a_file_that_is_none(command: list[str], tmp_path: Path, capsys: Capture) -> None:
    script = ["s.py"] if command == ["run"] else []
    (tmp_path / "s.py").touch()
    for path in (str(tmp_path), str(tmp_path / "none"), "/dev/zero"):
        assert main([*command, "--topology", path, *(str(tmp_path / name) for name in script)]) == 2
        assert f"--topology {path!r} is not a file" in capsys.readouterr().err
    assert main([*command, "--topology", "", *(str(tmp_path / name) for name in script)]) == 2
    assert "--topology '' is empty" in capsys.readouterr().err


def test_run_refuses_a_topology_of_other_nodes(tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "s.py").touch()
    topology = written(tmp_path, TOPOLOGY)
    assert main(["run", "--nodes", "2", "--topology", topology, str(tmp_path / "s.py")]) == 2
    assert "zones has 4 entries, --nodes is 2" in capsys.readouterr().err
