"""Plans that divide a model, from a recipe: the steps and the parameters of one process, also after a kill."""

from __future__ import annotations

import argparse
import signal
from collections import defaultdict
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
import torch
from tests.support.torch_ranks.processes import Ended, run_torch_ranks
from tests.support.trainer.plans import DEEPER, DEEPSEEK, write_deeper
from tests.support.trainer.recipes import raw_recipe

from fireflyer.checkpoint import CheckpointManager
from fireflyer.data import RecordSetWriter
from fireflyer.recipes.trainer.core.figures import EvaluationLine, ExchangeLine, MetricsLine, StepLine
from fireflyer.recipes.trainer.metrics_file import read_metrics

pytestmark = [pytest.mark.processes, pytest.mark.slow]

FP32: Final = {"parameters": "fp32", "compute": "fp32"}
STEPS, POISONED, SAVED, DIES = 20, 4, 10, 13
GPT: Final = {"kind": "gpt", "vocabulary": 256, "layers": 2, "heads": 2, "width": 16}
PIPELINED_EXPERTS: Final = {"pipeline": 2, "replicate": 2, "expert": 2, "micro_batch": 1}
ONE: Final = {"micro_batch": 2}
PLANS: Final[dict[str, tuple[dict[str, Any], dict[str, Any]]]] = {
    "pp2xdp2": (GPT, {"pipeline": 2, "replicate": 2, "schedule": "zb-h1"}),
    "pp2 with zero 1": (GPT, {"pipeline": 2, "shard": 2, "zero": 1, "schedule": "zb-h1", "micro_batch": 1}),
    "fsdp2xtp2": (GPT, {"shard": 2, "tensor": 2, "zero": 3}),
    "ep2xdp2": (DEEPSEEK, {"replicate": 4, "expert": 2}),
    "ep2xdp2 with zero 1": (DEEPSEEK, {"shard": 4, "zero": 1, "expert": 2, "micro_batch": 1}),
    "pp2xep2": (DEEPSEEK, {**PIPELINED_EXPERTS, "schedule": "1f1b"}),
    "pp2xep2, overlapped": (DEEPER, {**PIPELINED_EXPERTS, "schedule": "dualpipev"}),
    "pp2xep2, both ways": (DEEPSEEK, {**PIPELINED_EXPERTS, "schedule": "dualpipe"}),
}
OF_FSDP: Final = ("fsdp2xtp2",)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Bytes of Python sources are the tokens."""
    directory = tmp_path_factory.mktemp("plans")
    text = np.frombuffer(Path(argparse.__file__).read_bytes(), dtype=np.uint8).astype("<u2")
    for name, part in (("a", text[:6000]), ("b", text[6000:9000]), ("held", text[9000:11000])):
        (directory / name).mkdir()
        writer = RecordSetWriter(str(directory / name))
        writer.add(part.tobytes())
        writer.commit()
    write_deeper(directory)
    return directory


def run(base: Path, name: str, ranks: int, model: dict[str, Any], plan: dict[str, Any], **more: Any) -> list[Ended]:
    raw = raw_recipe(
        metrics={"file": f"{name}.jsonl"},
        checkpoint={"directory": name, "period_steps": SAVED},
        plan={"precision": FP32, **ONE, **plan},
        optimizer={"steps": STEPS},
        policy={"on_not_finite": "skip"},
    )
    return run_torch_ranks(
        "tests.support.torch_ranks.trainer_plans",
        [0] * ranks,
        recipe={**raw, "model": model},
        base=str(base),
        **more,
    )


def completed(ended: list[Ended]) -> None:
    assert [rank.code for rank in ended] == [0] * len(ended), [(rank.result, rank.errors[-2000:]) for rank in ended]


def steps(lines: list[MetricsLine]) -> dict[int, list[tuple[float, float]]]:
    """Loss and norm of each step, each time that it was taken; 0 where the step was skipped."""
    found = defaultdict(list)
    for one in lines:
        if isinstance(one, StepLine):
            found[one.step].append((one.loss or 0.0, one.norm or 0.0))
    return dict(found)


def parameters(base: Path, name: str) -> dict[str, torch.Tensor]:
    """Of the newest checkpoint, whole; the parts of a stacked matrix, which tensor parallelism divides, as one."""
    with CheckpointManager(str(base / name), rank=0, world_size=1, store=None) as manager:
        restored = manager.restore()
    assert restored is not None
    parts: dict[str, list[torch.Tensor]] = defaultdict(list)
    for stored, tensor in sorted(restored.shared.items()):
        before, number, behind = stored.partition(".parts.")
        if stored.startswith("model/"):
            parts[before + behind[1:] if number else stored].append(tensor)
    return {one: torch.cat(tensors) if len(tensors) > 1 else tensors[0] for one, tensors in parts.items()}


@pytest.mark.parametrize("name", PLANS)
def test_a_plan_trains_as_one_process_and_goes_on_bitwise_after_a_kill(base: Path, name: str) -> None:
    model, plan = PLANS[name]
    # The gradient of a rank of the first stage is not finite; FSDP takes gradients where no hook of a test sees them.
    poisoned = None if name in OF_FSDP else POISONED
    alone = f"alone {model.get('config', model['kind'])} {poisoned}"
    if not (base / alone).exists():
        completed(run(base, alone, 1, model, {}, poisoned=poisoned and [0, poisoned]))
    *survivors, last = run(base, name, 4, model, plan, dies=[3, DIES], poisoned=poisoned and [1, poisoned])
    assert last.code == -signal.SIGKILL
    assert all(one.result.startswith(("PeerFailed", "Timeout", "Aborted")) for one in survivors), survivors
    completed(run(base, name, 4, model, plan))

    taken, wanted = (read_metrics(str(base / f"{one}.jsonl")) for one in (name, alone))
    found, expected = steps(taken), steps(wanted)
    assert len(found[SAVED + 1]) == 2, "before the kill, and after it"
    assert found.keys() == expected.keys()
    assert [step for step, [(_, norm)] in expected.items() if norm == 0] == ([] if poisoned is None else [poisoned])
    for step, [figures] in expected.items():
        assert len(set(found[step])) == 1, step
        assert found[step][0] == pytest.approx(figures, rel=1e-10), step
    exchanges = [one for one in taken if isinstance(one, ExchangeLine)]
    assert bool(exchanges) == ("dualpipe" in str(plan.get("schedule")))
    assert all(0 < one.hidden_s <= one.exchange_s for one in exchanges)
    held_out = [[one.loss for one in lines if isinstance(one, EvaluationLine)] for lines in (taken, wanted)]
    assert held_out[0] == pytest.approx(held_out[1], rel=1e-10)

    own, others = parameters(base, name), parameters(base, alone)
    assert own.keys() == others.keys()
    for key, tensor in others.items():
        assert float((own[key] - tensor).norm()) <= 1e-10 * float(tensor.norm()), key
