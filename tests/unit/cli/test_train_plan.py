"""`ff train plan`: what it prints for plans of the papers, and the line for what cannot be."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from tests.support.model_configs import DEEPSEEK_MOE_16B, LLAMA_13B

from fireflyer.base.toml_text import to_toml
from fireflyer.cli import main

Capture = pytest.CaptureFixture[str]
PLAN = {"pipeline": 4, "shard": 16, "zero": 1, "sequence_tokens": 2048, "batch_sequences": 4096}


@pytest.fixture
def write(tmp_path: Path) -> Any:
    """Writes a model and a plan for it, and gives the path of the plan."""

    def written(plan: dict[str, Any], *, model: Any = LLAMA_13B, **tables: Any) -> str:
        (tmp_path / "config.json").write_text(json.dumps(model))
        path = tmp_path / "plan.toml"
        path.write_text(to_toml({"model": "config.json", "plan": plan, **tables}))
        return str(path)

    return written


def test_a_plan_is_shown_with_memory_links_step_and_limit(write: Any, capsys: Capture) -> None:
    path = write(PLAN | {"recompute": "operators"})
    assert main(["train", "plan", path, "--nodes", "8", "--node", "pcie-a100"]) == 0
    text = capsys.readouterr().out
    assert "llama: 13.02 B parameters, 13.02 B active" in text
    assert "pipeline 4 x replicate 1 x shard 16 x tensor 1 = 64 GPUs on 8 nodes of pcie-a100" in text
    assert "GPUs of the first node: 8 data-parallel ranks of stage 0" in text
    assert "host bridge, both directions" in text
    assert "limit: computation of stage 3" in text
    assert "memory: fits" in text


def test_experts_are_added_over_ranks_with_the_same_experts(write: Any, capsys: Capture) -> None:
    plan = {"shard": 16, "expert": 4, "zero": 1, "sequence_tokens": 4096, "batch_sequences": 64, "recompute": "blocks"}
    assert main(["train", "plan", write(plan, model=DEEPSEEK_MOE_16B), "--nodes", "2", "--node", "h800"]) == 0
    text = capsys.readouterr().out
    assert "gradients of experts: 2 on a node, over the 4 ranks of a stage with the same experts" in text


def test_pipelines_that_share_a_nic_have_the_fastest_layout_with_the_reason(write: Any, capsys: Capture) -> None:
    arguments = ["--nodes", "8", "--node", "pcie-a100"]
    path = write(PLAN | {"batch_sequences": 512})
    assert main(["train", "plan", path, *arguments]) in (0, 1)
    text = capsys.readouterr().out
    assert "layout of the 8 pipelines that share a NIC: offset takes 1.0" in text
    (lockstep,) = re.findall(
        r"planned only: the trainer starts all at once, as in lockstep, which takes (\S+) of", text
    )
    assert main(["train", "plan", path, *arguments, "--json"]) in (0, 1)
    layout = json.loads(capsys.readouterr().out)["pipeline_layout"]
    assert layout["layout"] == "offset"
    assert layout["slowdowns"]["offset"] < layout["slowdowns"]["lockstep"]
    assert lockstep == f"{layout['slowdowns']['lockstep']:.2f}"


def test_recomputation_by_memory_budget_is_shown_by_layer(write: Any, capsys: Capture) -> None:
    plan = PLAN | {"recompute": "budget", "micro_batch": 4}
    arguments = ["--nodes", "8", "--node", "pcie-a100"]
    assert main(["train", "plan", write(plan | {"recompute": "none"}), *arguments]) == 1
    capsys.readouterr()
    assert main(["train", "plan", write(plan), *arguments]) == 0
    text = capsys.readouterr().out
    assert "recompute, by layer: " in text
    assert "operators x" in text
    assert "memory: fits" in text
    assert main(["train", "plan", write(plan), *arguments, "--json"]) == 0
    modes = json.loads(capsys.readouterr().out)["plan"]["recompute"]
    assert len(modes) == 40
    assert main(["train", "plan", write(plan | {"recompute": modes}), *arguments]) == 0, "the list is a plan"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"schedule": "1f1b"}, None),
        ({"schedule": "dualpipev", "micro_batch": 2}, "recompute = 'blocks, operators' with schedule = 'dualpipev'"),
        ({"shard": 8, "tensor": 2}, "pipeline = 4 with tensor = 2"),
    ],
)
def test_a_budget_says_where_the_trainer_refuses_its_list(
    changes: dict[str, Any], words: str | None, write: Any, capsys: Capture
) -> None:
    precision = {"parameters": "fp32", "compute": "bf16", "gradients": "fp32"}
    plan = PLAN | {"recompute": "budget", "micro_batch": 4, "precision": precision, **changes}
    arguments = ["train", "plan", write(plan), "--nodes", "8", "--node", "pcie-a100"]
    assert main(arguments) == 0
    assert ("planned only: the trainer refuses" in (text := capsys.readouterr().out)) == (words is not None)
    assert main([*arguments, "--json"]) == 0
    refused = json.loads(capsys.readouterr().out)["trainer_refuses"]
    assert bool(refused) == (words is not None)
    assert words is None or any(one.startswith(words) for one in refused), refused
    assert all(one in text for one in refused)


def test_copies_of_experts_with_many_tokens_are_planned_from_measured_loads(write: Any, capsys: Capture) -> None:
    plan = {"shard": 16, "expert": 4, "zero": 1, "sequence_tokens": 4096, "batch_sequences": 64, "recompute": "blocks"}
    loads = [100] * 63 + [6400]
    experts = {"copies": 4, "tokens": {"gate": loads}}
    arguments = ["--nodes", "2", "--node", "h800"]
    assert main(["train", "plan", write(plan, model=DEEPSEEK_MOE_16B, experts=experts), *arguments]) == 0
    text = capsys.readouterr().out
    assert "4 copies on 4 ranks: 1 on each" in text
    assert "gate: load of the fullest rank 2.49 of the mean" in text
    assert "with copies of 63 (x4)" in text
    for wrong, message in (
        ({"copies": 4, "tokens": {"g": [1]}}, "[experts] tokens of 'g': 1 loads for 64 experts"),
        ({"copies": 3, "tokens": {"g": loads}}, "3 copies of experts do not divide over 4 ranks"),
        ({"copies": 4, "tokens": {"g": [-1, *loads[1:]]}}, "experts.tokens[...][0]: expected `int` >= 0"),
        ({"copies": 4, "tokens": {"g": [10**400, *loads[1:]]}}, "experts.tokens[...][0]"),
        ({"tokens": {f"g{one}": [1] for one in range(4097)}}, "of length <= 4096"),
    ):
        assert main(["train", "plan", write(plan, model=DEEPSEEK_MOE_16B, experts=wrong), *arguments]) == 2
        assert message in capsys.readouterr().err


def test_json_has_the_figures_of_the_tables(write: Any, capsys: Capture) -> None:
    path = write(PLAN | {"recompute": "operators"})
    assert (
        main(["train", "plan", path, "--nodes", "8", "--node", "pcie-a100", "--search", "--keep", "2", "--json"]) == 0
    )
    shown = json.loads(capsys.readouterr().out)
    assert shown["gradients_added_on_node"] == {"dense": 8, "experts": 8}
    assert shown["model"]["total"] == 13_015_864_320
    assert sum(shown["estimate"]["parts"].values()) == pytest.approx(shown["step_s"])
    assert len(shown["search"]["ranked"]) == 2
    assert shown["search"]["simulated"] > 2


def test_a_plan_that_does_not_fit_is_shown_and_fails(write: Any, capsys: Capture) -> None:
    path = write(PLAN | {"pipeline": 1, "shard": 64})
    assert main(["train", "plan", path, "--nodes", "8", "--node", "pcie-a100"]) == 1
    assert "memory: does not fit, " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("plan", "arguments", "code", "message"),
    [
        (PLAN, ["--nodes", "4"], 1, "= 64 ranks, but 4 nodes of 8 GPUs are 32"),
        (PLAN | {"pipeline": 0}, ["--nodes", "8"], 2, "pipeline is 0; use 1 to"),
        (PLAN | {"pipelines": 4}, ["--nodes", "8"], 2, "unknown field `pipelines`"),
        (
            PLAN,
            ["--nodes", "8", "--node", "b300"],
            2,
            "--node 'b300' is not a file; use h800, pcie-a100 or a TOML file",
        ),
    ],
)
def test_what_cannot_be_is_one_line(
    plan: dict[str, Any], arguments: list[str], code: int, message: str, write: Any, capsys: Capture
) -> None:
    assert main(["train", "plan", write(plan), "--node", "pcie-a100", *arguments]) == code
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ({"model_type": "mamba"}, "model_type 'mamba' is not known"),
        ([1], "is no JSON object"),
        ("x", "is no JSON object"),
    ],
)
def test_a_wrong_model_is_named(model: Any, message: str, write: Any, capsys: Capture) -> None:
    path = write(PLAN, model=model)
    assert main(["train", "plan", path, "--nodes", "8", "--node", "pcie-a100"]) == 2
    assert message in capsys.readouterr().err


def test_a_missing_model_is_named(tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "plan.toml"
    path.write_text(to_toml({"model": "nothing.json", "plan": PLAN}))
    assert main(["train", "plan", str(path), "--nodes", "8", "--node", "pcie-a100"]) == 2
    assert "nothing.json' is not a file; give the path of a config.json" in capsys.readouterr().err


def test_a_node_of_ones_own(write: Any, tmp_path: Path, capsys: Capture) -> None:
    from importlib.resources import files

    text = files("fireflyer.codesign.parallel").joinpath("nodes/pcie-a100.toml").read_text(encoding="utf-8")
    node = tmp_path / "node.toml"
    node.write_text(text.replace("nic_bytes_per_s = 25e9", "nic_bytes_per_s = 1e8"))
    assert main(["train", "plan", write(PLAN | {"recompute": "operators"}), "--nodes", "8", "--node", str(node)]) == 0
    assert "limit: NICs, one node" in capsys.readouterr().out
    node.write_text(text.replace("gpus = 8", "gpus = 0", 1))
    assert main(["train", "plan", write(PLAN), "--nodes", "8", "--node", str(node)]) == 2
    assert "gpus is 0; it must be more than 0" in capsys.readouterr().err
