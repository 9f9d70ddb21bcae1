"""Runs of one rank, in this process: what counts when a run goes on, and what a bad step does."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.trainer.bad_batches import BadBatch, spoil
from tests.support.trainer.recipes import VOCABULARY, raw_recipe, write_llama, write_tokens

from fireflyer.base.errors import FireflyerError, PermanentError, UsageError
from fireflyer.base.units import SECOND
from fireflyer.checkpoint import CheckpointManager, describe
from fireflyer.recipes.trainer import building
from fireflyer.recipes.trainer import run as trainer
from fireflyer.recipes.trainer.arrangements import ArrangementBase
from fireflyer.recipes.trainer.core.course import learning_rate
from fireflyer.recipes.trainer.core.figures import AnomalyLine, StepLine
from fireflyer.recipes.trainer.core.parsing import recipe_of
from fireflyer.recipes.trainer.core.recipe import identity_of, resolved
from fireflyer.recipes.trainer.metrics_file import read_metrics
from fireflyer.recipes.trainer.models import BuiltModel, LossModel
from fireflyer.recipes.trainer.sources import open_training_data


@pytest.fixture(autouse=True)
def settings_of_torch() -> Iterator[None]:
    """A run is a process of its own otherwise, and leaves them as it needs them."""
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def base(tmp_path: Path) -> Path:
    write_tokens(tmp_path)
    return tmp_path


def run(base: Path, **tables: Any) -> None:
    recipe = recipe_of(raw_recipe(**tables))
    trainer.run_recipe(resolved(recipe, str(base)), identity_of(recipe))


def taken(base: Path) -> list[tuple[int, int]]:
    """Steps, and the positions after them."""
    return [(one.step, one.position) for one in read_metrics(str(base / "metrics.jsonl")) if isinstance(one, StepLine)]


def anomalies(base: Path) -> list[tuple[int, str]]:
    lines = read_metrics(str(base / "metrics.jsonl"))
    return [(one.step, one.action) for one in lines if isinstance(one, AnomalyLine)]


# Batches of 8 sequences: that of step 6 ends at position 48.
SIXTH = BadBatch(48)


@pytest.mark.parametrize("what", ["loss", "gradient"])
def test_a_bad_step_stops_a_run_or_is_skipped_or_gone_back_from(
    base: Path, monkeypatch: pytest.MonkeyPatch, what: Any
) -> None:
    spoil([SIXTH._replace(what=what)], monkeypatch.setattr)
    left: list[Any] = []
    monkeypatch.setattr(ArrangementBase, "__exit__", lambda _, kind, error, trace: left.append(kind))
    with pytest.raises(PermanentError, match=r"^step 6: the .* is nan; the run stops as \[policy\] says"):
        run(base, checkpoint={"period_steps": 100})
    assert left == [PermanentError], "what goes on beside the program is aborted"
    assert taken(base)[-1] == (5, 40)

    (base / "metrics.jsonl").unlink()
    run(base, policy={"on_not_finite": "skip"}, checkpoint={"directory": "skips"})
    assert taken(base) == [(step, 8 * step) for step in range(1, 9)]
    assert anomalies(base) == [(6, "skip")]

    (base / "metrics.jsonl").unlink()
    run(base, policy={"on_not_finite": "rewind"}, checkpoint={"directory": "rewinds"})
    assert anomalies(base) == [(6, "rewind")]
    # From the checkpoint of step 4 on, with the batch after the bad one.
    assert taken(base)[4:] == [(5, 40), (5, 56), (6, 64), (7, 72), (8, 80)]


def test_a_rewind_before_the_first_checkpoint_is_a_skip(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spoil([BadBatch(16), BadBatch(48)], monkeypatch.setattr)
    run(base, policy={"on_not_finite": "rewind"})
    assert anomalies(base) == [(2, "skip"), (6, "rewind")]
    assert taken(base)[:6] == [(1, 8), (2, 16), (3, 24), (4, 32), (5, 40), (5, 56)]


def test_a_trace_has_the_steps_that_were_taken_after_a_rewind(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spoil([SIXTH], monkeypatch.setattr)
    profile = {"first_step": 5, "last_step": 7, "file": "traces/trace.json"}
    run(base, policy={"on_not_finite": "rewind"}, metrics={"profile": profile})
    assert taken(base)[4:] == [(5, 40), (5, 56), (6, 64), (7, 72), (8, 80)]
    events = json.loads((base / "traces" / "trace.json").read_text())["traceEvents"]
    assert sum(event.get("name") == "Optimizer.step#AdamW.step" for event in events) == 3, "of steps 5 to 7"


def test_a_trace_that_cannot_be_written_is_told_before_anything_starts(base: Path) -> None:
    (base / "file").touch()
    with pytest.raises(FireflyerError, match=r"file/trace\.json"):
        run(base, metrics={"profile": {"first_step": 1, "last_step": 1, "file": "file/trace.json"}})
    assert not (base / "checkpoints").exists()


def test_a_run_goes_on_with_the_held_out_records_that_it_was_saved_with(base: Path) -> None:
    run(base, optimizer={"steps": 4})
    shutil.rmtree(base / "held")
    write_tokens(base, ("held",))
    before = (base / "metrics.jsonl").read_bytes()
    with pytest.raises(UsageError, match="held-out source 'held' has other records than when the run was saved"):
        run(base)
    assert (base / "metrics.jsonl").read_bytes() == before
    run(base, data={"evaluation": [{"name": "new", "path": "held"}]})
    assert taken(base)[-1] == (8, 64)


def test_a_recipe_says_which_checkpoints_stay_and_how_often_the_job_fails(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[tuple[Any, ...]] = []
    manager = CheckpointManager.from_environment

    def recorded(*positional: Any, **options: Any) -> CheckpointManager:
        opened.append((options["period_steps"], options["period_ns"], options["mttf_ns"], options["keep_every"]))
        return manager(*positional, **options)

    monkeypatch.setattr(CheckpointManager, "from_environment", recorded)
    table = {"period_steps": 4, "period": "auto", "mttf": "8h", "keep": 1, "keep_every": 4}
    run(base, checkpoint=table)
    assert opened == [(4, None, 8 * 3600 * SECOND, 4)]
    assert [one.step for one in describe(str(base / "checkpoints"))] == [8, 4]


def test_changed_settings_of_the_optimizer_count_from_the_next_start_on(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changed = {"weight_decay": 0.5, "beta1": 0.8, "beta2": 0.9, "epsilon": 1e-6, "learning_rate": 0.02}
    run(base, optimizer={"steps": 4})
    spoil([SIXTH], monkeypatch.setattr)
    used: list[tuple[int, Any]] = []
    commit = trainer._commit

    def committed(run: Any, step: int, loss: float) -> Any:
        (group,) = run.arrangement.optimizer.param_groups
        used.append((step, [group[key] for key in ("weight_decay", "betas", "eps", "lr")]))
        return commit(run, step, loss)

    monkeypatch.setattr(trainer, "_commit", committed)
    run(base, optimizer=changed, policy={"on_not_finite": "rewind"})
    wanted = [0.5, (0.8, 0.9), 1e-6, 0.02]
    assert used == [(step, wanted) for step in (5, 6, 5, 6, 7, 8)], "after the rewind from step 6, too"


def test_fp8_is_refused_where_matrices_would_stay_in_fp32() -> None:
    model = torch.nn.ModuleDict({"known": torch.nn.Linear(4, 4), "attention": torch.nn.MultiheadAttention(4, 2)})
    with pytest.raises(UsageError, match=r"'fp8': attention\.in_proj_weight are of layers that FP8 does not know"):
        building._convert(BuiltModel(LossModel(model), []))


@pytest.mark.slow  # imports of seconds
def test_a_model_of_transformers_is_trained_as_by_a_loop_of_ones_own(base: Path) -> None:
    """Its weights are drawn with the seed of the recipe."""
    import transformers  # takes seconds, and not every test needs it

    recipe = resolved(recipe_of(raw_recipe(model=write_llama(base))), str(base))
    trainer.run_recipe(recipe, identity_of(recipe))
    lines = read_metrics(str(base / "metrics.jsonl"))
    losses = [one.loss for one in lines if isinstance(one, StepLine) and one.loss is not None]

    torch.manual_seed(5)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig.from_pretrained(base / "llama"))
    data = open_training_data(recipe.data, sequence_tokens=16, batch_sequences=8, vocabulary=VOCABULARY)
    data.open(0, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    for step, found in enumerate(losses, 1):
        optimizer.param_groups[0]["lr"] = learning_rate(step, recipe.optimizer)
        inputs, targets = data.next_batch()
        logits = model(inputs, use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        assert found == pytest.approx(float(loss.detach()), rel=1e-5), step
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    data.close()
    assert len(losses) == 8
    assert losses[-1] < losses[0]
