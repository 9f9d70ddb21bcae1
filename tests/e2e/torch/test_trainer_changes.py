"""A run whose plan changes each time that it is started again, and what plans add to its metrics."""

from __future__ import annotations

import argparse
import signal
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
from tests.support.torch_ranks.processes import Ended, run_torch_ranks
from tests.support.trainer.recipes import raw_recipe
from tests.support.trainer.reports import reported_tokens

from fireflyer.data import RecordSetWriter
from fireflyer.recipes.trainer.core.figures import (
    ExpertsLine,
    MetricsLine,
    PipelineLine,
    QuantizationLine,
    StartLine,
    StepLine,
)
from fireflyer.recipes.trainer.metrics_file import read_metrics

pytestmark = [pytest.mark.processes, pytest.mark.slow]

STEPS, SAVED, DIES = 15, 5, 3
"""Of a run; between checkpoints; after a checkpoint."""
GPT: Final = {"kind": "gpt", "vocabulary": 256, "layers": 4, "heads": 2, "width": 16}
DEEPSEEK: Final = {"kind": "deepseek", "preset": "tiny", "vocabulary": 256}
ZBV: Final = {"pipeline": 2, "schedule": "zbv"}
ZERO_1: Final = {"pipeline": 2, "shard": 2, "zero": 1}
EXPERTS_ZERO_1: Final = {"shard": 4, "zero": 1, "expert": 2, "micro_batch": 1}
CHANGES: Final[dict[str, tuple[dict[str, Any], list[tuple[int, dict[str, Any]]]]]] = {
    "a V of stages, one rank, shards": (GPT, [(2, ZBV), (1, {}), (2, {"shard": 2, "zero": 3})]),
    "stages with zero 1, one rank, and back": (GPT, [(4, ZERO_1), (1, {}), (4, ZERO_1)]),
    "experts, with zero 1 on ranks by their loads, one rank": (
        DEEPSEEK,
        [(4, {"replicate": 4, "expert": 2, "micro_batch": 1}), (4, EXPERTS_ZERO_1), (1, {})],
    ),
    "stages, experts on ranks by their loads, one rank": (
        DEEPSEEK,
        [(2, {"pipeline": 2, "schedule": "1f1b"}), (2, {"replicate": 2, "expert": 2}), (1, {})],
    ),
}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Bytes of Python sources are the tokens."""
    directory = tmp_path_factory.mktemp("changes")
    text = np.frombuffer(Path(argparse.__file__).read_bytes(), dtype=np.uint8).astype("<u2")
    for name, part in (("a", text[:6000]), ("b", text[6000:9000]), ("held", text[9000:10000])):
        (directory / name).mkdir()
        writer = RecordSetWriter(str(directory / name))
        writer.add(part.tobytes())
        writer.commit()
    return directory


def run(base: Path, name: str, ranks: int, model: dict[str, Any], plan: dict[str, Any], **more: Any) -> list[Ended]:
    module = more.pop("module", "trainer_plans")
    raw = raw_recipe(
        metrics={"file": f"{name}.jsonl"},
        checkpoint={"directory": name, "period_steps": SAVED},
        plan={"precision": {"parameters": "fp32", "compute": "fp32"}, **plan},
        optimizer={"steps": STEPS},
        experts={"placement": "measured" if "expert" in plan else "fixed"},
    )
    recipe = {**raw, "model": model}
    return run_torch_ranks(f"tests.support.torch_ranks.{module}", [0] * ranks, recipe=recipe, base=str(base), **more)


def losses(lines: list[MetricsLine]) -> dict[int, float | None]:
    """Of each step, the last time that it was taken."""
    return {one.step: one.loss for one in lines if isinstance(one, StepLine)}


@pytest.mark.parametrize("name", CHANGES)
def test_a_run_goes_on_with_another_plan_as_one_process_would(base: Path, name: str) -> None:
    model, starts = CHANGES[name]
    alone = f"alone {model['kind']}"
    (only,) = run(base, alone, 1, model, {})
    assert only.code == 0, only.errors[-2000:]
    for number, (ranks, plan) in enumerate(starts):
        killed = number < len(starts) - 1
        more = {"dies": [ranks - 1, SAVED * (number + 1) + DIES]} if killed else {}
        last = run(base, name, ranks, model, plan, **more)[-1]
        assert last.code == (-signal.SIGKILL if killed else 0), last.errors[-2000:]
    lines = read_metrics(str(base / f"{name}.jsonl"))
    begun = [(one.step, one.world_size) for one in lines if isinstance(one, StartLine)]
    assert begun == [(SAVED * number, ranks) for number, (ranks, _) in enumerate(starts)]
    placed = [one for one in lines if isinstance(one, ExpertsLine)]
    assert [one.step for one in placed] == [SAVED] * (model["kind"] == "deepseek")
    assert all(any(layer.after < layer.before for layer in one.layers) for one in placed), "some were moved"
    found, expected = losses(lines), losses(read_metrics(str(base / f"{alone}.jsonl")))
    assert found.keys() == expected.keys() == set(range(1, STEPS + 1))
    assert list(found.values()) == pytest.approx(list(expected.values()), rel=1e-10)


def test_metrics_say_what_fp8_has_lost_and_how_a_pipeline_compares_with_its_simulation(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FF_RUN_DIR", str(tmp_path))
    precision = {"parameters": "fp32", "compute": "fp8"}
    plan = {"pipeline": 2, "schedule": "1f1b", "precision": precision}
    for rank in run(base, "fp8", 2, DEEPSEEK, plan, module="trainer"):
        assert rank.code == 0, rank.errors[-2000:]
    lines = read_metrics(str(base / "fp8.jsonl"))
    tokens = dict.fromkeys(range(1, STEPS + 1), 8 * 16)
    assert reported_tokens(tmp_path) == tokens, "stages together report each token once"
    lost = [one for one in lines if isinstance(one, QuantizationLine)]
    assert [one.step for one in lost] == [10, STEPS]
    operands = ["input", "weight", "gradient", "input_of_wgrad", "gradient_of_wgrad"]
    assert [one.operand for one in lost[0].operands] == operands
    for first, second in zip(lost[0].operands, lost[1].operands, strict=True):
        assert (first.saturated, first.nonfinite) == (0, 0)
        assert second.elements < first.elements, "counts begin anew"
        if first.operand not in ("input", "weight"):  # which evaluation quantizes, too
            assert second.elements * 10 == first.elements * (STEPS - 10)
    compared = [one for one in lines if isinstance(one, PipelineLine)]
    assert [one.step for one in compared] == [10, STEPS]
    for line in compared:
        assert 0 < line.predicted_bubble_s < line.predicted_s
        assert 0 < line.measured_bubble_s < line.measured_s
