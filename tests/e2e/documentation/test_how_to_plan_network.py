"""What docs/how-to/plan-network.md tells users to type works."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any, get_args

import pytest

from fireflyer.cli import main
from fireflyer.codesign.model.config import MODEL_TYPES
from fireflyer.planning import LengthClass, NetworkFile, NodePrice, PriceList, SourcedValue
from fireflyer.planning.network_file import Family

TEXT = (Path(__file__).parents[3] / "docs/how-to/plan-network.md").read_text()
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", TEXT, re.DOTALL | re.MULTILINE)


def blocks(language: str) -> list[str]:
    return [code for name, code in BLOCKS if name == language]


def test_the_commands_run(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    network, prices = blocks("toml")
    (tmp_path / "network.toml").write_text(network)
    (tmp_path / "prices.toml").write_text(prices)
    (tmp_path / "config.json").write_text(blocks("json")[0])
    monkeypatch.chdir(tmp_path)
    commands = [shlex.split(line)[1:] for block in blocks("sh") for line in block.splitlines()]
    assert len(commands) == 25
    said = []
    for command in commands:
        assert main(command) == 0, command
        said.append(capsys.readouterr().out)
    assert "switches: all 33, leaf 22, spine 11" in said[0]
    assert "routing ecmp, transfers 432, mean share of a link 0." in said[3]
    assert "cut off: 0" in said[5]
    assert "cut off: 2\n  cut off pairs: gpu0 to " in said[6]
    assert "storage reads: count 384" in said[7]
    assert "model: packets with back-pressure" in said[8]
    for place in (9, 10):
        assert "gigabytes per second of all nodes: " in said[place]
    assert "  gpu0-gpu9: links 1, between gpu0-leaf0" in said[11]
    assert "  cables by length:\n    copper: links 432, price of one 60 to 120, price " in said[12]
    assert "    optical: links 314, " in said[12]
    assert "    all cables: links 872, price " in said[12]
    assert "hours after which owning is cheaper: " in said[13]
    assert "parameters: 13,015,864,320" in said[15]
    assert "share of GPUs for prefill: 0." in said[16]
    assert "HFReduce, GB/s as flows over all links: 9.375" in said[17]
    assert "ring of 16 GPUs, GB/s as flows: 4.988" in said[17]
    assert "ring of 16 GPUs, GB/s as flows: 9.677" in said[18]
    assert "HFReduce, what binds: links between sockets" in said[19]
    assert "times as long for experts with a KV cache beside them: 1.6" in said[20]
    assert "depends on prices" in " ".join(said[23].split())


def test_every_key_and_family_is_named() -> None:
    named = set(re.findall(r"`([\w-]+)`", TEXT)) | set(re.findall(r"^(\w+) = ", TEXT, re.MULTILINE))
    structs = (NetworkFile, PriceList, NodePrice, LengthClass, SourcedValue)
    keys = {name for one in structs for name in one.__struct_fields__}
    for name in {*keys, *get_args(Family)}:
        assert name in named or any(table in TEXT for table in (f"[{name}.", f"[{name}]", f"[[{name}]]")), name


def test_every_type_of_model_is_named() -> None:
    table = TEXT[TEXT.index("| understood |") : TEXT.index("Of these types, too")]
    assert set(re.findall(r"`(\w+)`", table)) - {"model_type"} == set(MODEL_TYPES)


def test_the_python_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in zip(("network.toml", "prices.toml"), blocks("toml"), strict=True):
        (tmp_path / name).write_text(text)
    (tmp_path / "config.json").write_text(blocks("json")[0])
    monkeypatch.chdir(tmp_path)
    transfers, exports, networks, model, patterns, nodes = blocks("python")
    exec(transfers, {})
    assert capsys.readouterr().out == "[0.001 0.003]\n[0.00100449 0.00300898]\n11938 0.036 s\n"
    exec(exports, {})
    assert capsys.readouterr().out.startswith("a step of 8 pipelines: ")
    found: dict[str, Any] = {}
    exec(networks, found)
    costs, structure = found["costs"], found["structure"]
    said = capsys.readouterr().out
    assert said.startswith("33 220 (CutLinks(below='gpu0', above='leaf0', links=1),)\nUSD: network ")
    assert said.endswith("\none zone: 13.1 endpoints of a switch\ntwo-layer fat-tree: 21.3 endpoints of a switch\n")
    shown = printed(capsys, "network", "network.toml", "--prices", "prices.toml", "--nodes")
    assert shown["switches"]["all"] == structure.switches
    assert shown["most switches on a shortest path"] == structure.most_switches
    for name, value in (
        ("network", costs.network),
        ("total in 5 years", costs.ownership.total),
        ("GPU hour", costs.ownership.per_gpu_hour),
        ("hours after which owning is cheaper", costs.owning_is_cheaper_after_hours),
    ):
        assert shown["cost"][name] == list(value)
    exec(model, {})
    assert capsys.readouterr().out.startswith("13,015,864,320 parameters, 1.68 GB of cache for a sequence\n")
    exec(patterns, {})
    rates = re.findall(r"([0-9]+)%", said := capsys.readouterr().out)
    assert int(rates[0]) < int(rates[1]) <= 100
    assert re.search(r"last of 32 ends after 1\.[0-9]+ times its own time", said)
    exec(nodes, {})
    said = capsys.readouterr().out
    assert said.startswith("HFReduce 9.4 GB/s: bridge0 and socket0 is full first\nring of 16 GPUs 4.99 GB/s\n")
    assert "'v3-table-3: DF: cost'" in said
    shown = printed(capsys, "node", "h800", "--experts", "20MiB", "--cache", "200MiB")
    slower = shown["times as long for experts with a KV cache beside them"]
    assert f"experts beside a KV cache: {slower:.2f} times as long\n" in said


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main(["plan", *arguments, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found
