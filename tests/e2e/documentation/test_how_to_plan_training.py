"""What docs/how-to/plan-training.md tells users to type works."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import msgspec
import pytest
from tests.support.model_configs import LLAMA_13B

from fireflyer.cli import main
from fireflyer.codesign.parallel import MeasuredStep, NodeModel, ParallelPlan, Precision
from fireflyer.codesign.parallel.expert_replicas import ExpertLoads

TEXT = (Path(__file__).parents[3] / "docs/how-to/plan-training.md").read_text()
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", TEXT, re.DOTALL | re.MULTILINE)


def blocks(language: str) -> list[str]:
    return [code for name, code in BLOCKS if name == language]


def test_the_commands_run(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text(blocks("json")[0])
    (tmp_path / "plan.toml").write_text(blocks("toml")[0])
    monkeypatch.chdir(tmp_path)
    check, search = blocks("sh")
    assert main(shlex.split(check)[1:]) == 0
    text = capsys.readouterr().out
    for promised in ("predicted step: ", "limit: ", "memory: fits"):
        assert promised in text
    assert main(shlex.split(search)[1:]) == 0
    text = capsys.readouterr().out
    assert "refused by divisibility" in text
    assert "rank of this plan: " in text


def test_the_measured_step_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(blocks("json")[0])
    plan, _, measured = blocks("toml")
    (tmp_path / "plan.toml").write_text(plan + measured)
    assert main(["train", "plan", str(tmp_path / "plan.toml"), "--nodes", "8", "--node", "pcie-a100"]) == 0
    assert "measured: parts 19.90 s of a step of 19.926 s" in capsys.readouterr().out


def test_the_loads_of_experts_are_those_of_a_plan() -> None:
    found = msgspec.toml.decode(blocks("toml")[1], type=dict[str, ExpertLoads])["experts"]
    assert found.copies == 32
    assert list(found.tokens) == ["layers.3.mlp.gate"]


def test_the_model_is_the_one_of_the_paper() -> None:
    assert msgspec.json.decode(blocks("json")[0]) == LLAMA_13B


def test_every_key_is_named() -> None:
    named = set(re.findall(r"`(\w+)`", TEXT)) | set(re.findall(r"^(\w+) = ", TEXT, re.MULTILINE))
    for struct in (ParallelPlan, Precision, NodeModel, MeasuredStep, ExpertLoads):
        for name in struct.__struct_fields__:
            assert name in named or f"[{name}]" in TEXT, name


def test_the_python_runs() -> None:
    names: dict[str, object] = {}
    exec(blocks("python")[0], names)
    assert names["names"] == ("pipeline", "replicate", "shard", "tensor")
