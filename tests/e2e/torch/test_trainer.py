"""Training runs from recipes on real ranks: killed and started again they take the steps of an undisturbed run."""

from __future__ import annotations

import math
import signal
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from tests.support.torch_ranks.processes import Ended, run_torch_ranks
from tests.support.trainer.recipes import raw_recipe, write_llama, write_tokens
from tests.support.trainer.reports import reported_tokens

from fireflyer.checkpoint import CheckpointManager
from fireflyer.recipes.trainer.core.figures import AnomalyLine, EvaluationLine, MetricsLine, StartLine, StepLine
from fireflyer.recipes.trainer.metrics_file import read_metrics

pytestmark = [pytest.mark.processes, pytest.mark.slow]

FP32: Final = {"parameters": "fp32", "compute": "fp32"}
DP2: Final = {"replicate": 2, "precision": FP32}
FSDP2: Final = {"shard": 2, "zero": 3, "precision": FP32}
TP2: Final = {"tensor": 2, "batch_sequences": 2, "precision": FP32}
LLAMA: Final = ("transformers.models.llama.modeling_llama",)


@pytest.fixture
def base(tmp_path: Path) -> Path:
    write_tokens(tmp_path)
    return tmp_path


def run(
    base: Path,
    name: str,
    ranks: int = 2,
    *,
    period_steps: int = 4,
    more: Any = None,
    imports: tuple[str, ...] = (),
    **tables: Any,
) -> list[Ended]:
    """With checkpoints and metrics of this name below `base`; `more` are arguments of the ranks."""
    checkpoint = {"directory": name, "period_steps": period_steps}
    raw = raw_recipe(metrics={"file": f"{name}.jsonl"}, checkpoint=checkpoint, **tables)
    arguments = {"recipe": raw, "base": str(base), **(more or {})}
    return run_torch_ranks("tests.support.torch_ranks.trainer", [0] * ranks, imports=imports, **arguments)


def completed(ended: list[Ended]) -> None:
    assert [rank.code for rank in ended] == [0] * len(ended), [(rank.result, rank.errors[-2000:]) for rank in ended]


def lines(base: Path, name: str) -> list[MetricsLine]:
    return read_metrics(str(base / f"{name}.jsonl"))


def steps(base: Path, name: str) -> dict[int, tuple[int, float, float | None]]:
    """Position, loss and norm of each step, of the last attempt that took it."""
    return {
        one.step: (one.position, math.nan if one.loss is None else one.loss, one.norm)
        for one in lines(base, name)
        if isinstance(one, StepLine)
    }


def parameters(base: Path, name: str) -> dict[str, torch.Tensor]:
    """Of the newest checkpoint."""
    with CheckpointManager(str(base / name), rank=0, world_size=1, store=None) as manager:
        restored = manager.restore()
    assert restored is not None
    return restored.shared


def evaluated(base: Path, name: str) -> list[tuple[int, float | None]]:
    return [(one.step, one.loss) for one in lines(base, name) if isinstance(one, EvaluationLine)]


@pytest.mark.parametrize("plan", [DP2, FSDP2, TP2], ids=["dp2", "fsdp2", "tp2"])
def test_a_run_whose_rank_is_killed_goes_on_bitwise(
    base: Path, plan: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    small: dict[str, Any] = {"plan": plan, "model": {"layers": 1}, "optimizer": {"steps": 5}, "period_steps": 2}
    with monkeypatch.context() as patch:
        patch.setenv("FF_RUN_DIR", str(base / "reports"))
        completed(run(base, "whole", **small))
    whole = steps(base, "whole")
    assert whole[5][1] < whole[1][1], "it learns"
    tokens = 16 * plan.get("batch_sequences", 8)
    assert reported_tokens(base / "reports") == dict.fromkeys(whole, tokens), "ranks together report each token once"

    killed = run(base, "killed", more={"dies": [1, 4]}, **small)
    assert killed[1].code == -signal.SIGKILL
    assert killed[0].result.startswith(("PeerFailed", "Timeout")), killed[0]
    completed(run(base, "killed", **small))
    starts = [one for one in lines(base, "killed") if isinstance(one, StartLine)]
    assert [(one.step, one.checkpoint) for one in starts] == [(0, None), (2, "step-00000002")]
    assert steps(base, "killed") == whole
    assert evaluated(base, "killed") == evaluated(base, "whole")


def test_no_checkpoint_has_a_bit_that_flipped_between_two_looks_of_the_guard(base: Path) -> None:
    small: dict[str, Any] = {"plan": DP2, "model": {"layers": 1}, "guard": {"period_steps": 8}, "period_steps": 2}
    completed(run(base, "whole", **small))
    for rank, ended in enumerate(run(base, "flipped", more={"flips": [1, 5]}, **small)):
        assert "step 6, before save: ranks [0, 1] differ" in ended.result, (rank, ended)
    completed(run(base, "flipped", **small))
    starts = [one for one in lines(base, "flipped") if isinstance(one, StartLine)]
    assert [(one.step, one.checkpoint) for one in starts] == [(0, None), (4, "step-00000004")]
    assert steps(base, "flipped") == steps(base, "whole")
    whole, flipped = parameters(base, "whole"), parameters(base, "flipped")
    assert flipped.keys() == whole.keys()
    assert all(torch.equal(flipped[name], one) for name, one in whole.items())


def test_a_run_goes_on_with_replicas_where_it_had_shards(base: Path) -> None:
    completed(run(base, "whole", 1, plan={"precision": FP32}))
    killed = run(base, "divided", plan=FSDP2, more={"dies": [0, 6]}, guard={"period_steps": 0})
    assert killed[0].code == -signal.SIGKILL
    completed(run(base, "divided", plan=DP2, guard={"period_steps": 2}))
    whole, divided = steps(base, "whole"), steps(base, "divided")
    assert divided.keys() == whole.keys()
    for step, (position, loss, norm) in whole.items():
        found = divided[step]
        assert found[0] == position, step
        assert found[1] == pytest.approx(loss, rel=1e-5), step
        assert found[2] == pytest.approx(norm, rel=1e-4), step
    assert evaluated(base, "divided")[-1][1] == pytest.approx(evaluated(base, "whole")[-1][1], rel=1e-5)


def test_ranks_with_other_data_or_another_recipe_are_told_before_anything_starts(base: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    write_tokens(other, ("held", "b", "a"))
    for ended in run(base, "mixed", plan=DP2, more={"other_base": str(other)}):
        assert ended.code == 1
        assert "the data of source 'a' differs: ranks 1 have something else than rank 0" in ended.result
    raw = raw_recipe(plan=DP2, metrics={"file": "mixed.jsonl"}, optimizer={"epsilon": 1e-6})
    for ended in run(base, "mixed", plan=DP2, more={"other_recipe": raw}):
        assert "the recipe differs: ranks 1" in ended.result
    assert not (base / "mixed").exists()
    assert not (base / "mixed.jsonl").exists()


@pytest.mark.timeout(300)  # imports of transformers
def test_a_model_of_transformers_has_the_same_losses_on_two_replicas_as_on_one_rank(base: Path) -> None:
    common: dict[str, Any] = {"model": write_llama(base), "optimizer": {"steps": 3}, "imports": LLAMA}
    completed(run(base, "alone", 1, plan={"precision": FP32}, **common))
    completed(run(base, "divided", plan=DP2, **common))
    alone, divided = steps(base, "alone"), steps(base, "divided")
    assert len(alone) == 3
    for step, (position, loss, norm) in alone.items():
        found = divided[step]
        assert found[0] == position, step
        assert found[1] == pytest.approx(loss, rel=1e-5), step
        assert found[2] == pytest.approx(norm, rel=1e-4), step
    assert evaluated(base, "divided")[-1][1] == pytest.approx(evaluated(base, "alone")[-1][1], rel=1e-5)


# Batches of 8: that of step 3 ends at position 24, that of step 6 at 48.
BAD: Final = [{"position": 24, "rank": 1, "what": "gradient"}, {"position": 48, "rank": 1, "what": "loss"}]


def spoiled(plan: dict[str, Any]) -> dict[str, Any]:
    """The guard compares replicas bit for bit, after bad steps too; shards have none."""
    guard = {"period_steps": 1 if "replicate" in plan else 0}
    return {"plan": plan, "guard": guard, "model": {"layers": 1}, "more": {"bad": BAD}}


def anomalies(base: Path, name: str) -> list[tuple[int, str]]:
    return [(one.step, one.action) for one in lines(base, name) if isinstance(one, AnomalyLine)]


def test_all_ranks_stop_at_a_gradient_that_is_not_finite_on_one(base: Path) -> None:
    stopped = "PermanentError: step 3: the norm of the gradients is nan; the run stops as [policy] says"
    assert [one.result for one in run(base, "stops", **spoiled(FSDP2))] == [stopped, stopped]
    assert max(steps(base, "stops")) == 2


@pytest.mark.parametrize("plan", [DP2, FSDP2], ids=["dp2", "fsdp2"])
def test_all_ranks_skip_what_is_not_finite_on_one(base: Path, plan: dict[str, Any]) -> None:
    completed(run(base, "skips", policy={"on_not_finite": "skip"}, **spoiled(plan)))
    assert anomalies(base, "skips") == [(3, "skip"), (6, "skip")]
    found = steps(base, "skips")
    assert [step for step, (_, _, norm) in found.items() if norm is None] == [3, 6]
    assert [step for step, (_, loss, _) in found.items() if not math.isfinite(loss)] == [6]


@pytest.mark.parametrize("plan", [DP2, FSDP2], ids=["dp2", "fsdp2"])
def test_all_ranks_go_back_from_what_is_not_finite_on_one(base: Path, plan: dict[str, Any]) -> None:
    completed(run(base, "rewinds", policy={"on_not_finite": "rewind"}, period_steps=2, **spoiled(plan)))
    assert anomalies(base, "rewinds") == [(3, "rewind"), (5, "rewind")]
    taken = [(one.step, one.position) for one in lines(base, "rewinds") if isinstance(one, StepLine)]
    # From the checkpoints of steps 2 and 4 on, with the batches after the bad ones.
    assert taken == [(1, 8), (2, 16), (3, 32), (4, 40), (5, 56), (6, 64), (7, 72), (8, 80)]
