"""A comparison runs what is not complete, and reads what is."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

import pytest
from tests.support.trainer.recipes import raw_recipe, write_tokens

from fireflyer.base.errors import JobFailed, UsageError
from fireflyer.recipes.trainer import compare
from fireflyer.recipes.trainer.core.comparison import PlannedRun, planned_runs, technique_of
from fireflyer.recipes.trainer.core.figures import EvaluationLine, StartLine
from fireflyer.recipes.trainer.core.recipe import resolved
from fireflyer.recipes.trainer.metrics_file import MetricsFile


def runs_in(directory: Path, epsilon: float = 1e-6) -> list[PlannedRun]:
    raw = raw_recipe(compare={"seeds": [4, 5]}) | {"technique": {"optimizer": {"epsilon": epsilon}}}
    baseline, technique = (resolved(one, str(directory)) for one in technique_of(raw))
    return planned_runs(baseline, technique, str(directory))


class Executed:
    """Stands for the processes: writes the metrics that a run would, and remembers which ran."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        losses: Mapping[str, float | None],
        held_out: Mapping[str, str] | None = None,
    ) -> None:
        """`held_out`: digest that a run writes down, by its name; none, as releases of before."""
        self.names: list[str] = []
        self._losses, self._held_out = losses, held_out or {}
        monkeypatch.setattr(compare, "_execute", self._execute)

    def _execute(self, run: PlannedRun) -> None:
        name = f"{run.arm}-{run.seed}"
        self.names.append(name)
        if name not in self._losses:
            raise JobFailed(f"{name} was killed")
        file = MetricsFile.open_for(run.recipe.metrics.file, resumed=True, identity="")
        digest = self._held_out.get(name)
        held_out = None if digest is None else {"held": digest}
        file.write(StartLine(step=0, checkpoint=None, recipe="", world_size=1, held_out=held_out))
        file.write(EvaluationLine(step=run.recipe.optimizer.steps, loss=self._losses[name], sources=()))
        file.close()


LOSSES = {"baseline-4": 2.0, "technique-4": 1.98, "baseline-5": 3.0, "technique-5": 2.97}


def test_pairs_are_compared_seed_by_seed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    executed = Executed(monkeypatch, LOSSES)
    said: list[str] = []
    result = compare.compare_runs(runs_in(tmp_path), said.append)
    assert executed.names == list(LOSSES)
    assert result.differences == pytest.approx((-0.01, -0.01))
    assert result.verdict == "better"
    assert said[:2] == ["run 1 of 4: baseline, seed 4", "baseline, seed 4: held-out loss 2.00000"]


def test_a_comparison_that_was_interrupted_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    incomplete = {name: loss for name, loss in LOSSES.items() if name != "baseline-5"}
    Executed(monkeypatch, incomplete)
    with pytest.raises(JobFailed, match="baseline-5 was killed"):
        compare.compare_runs(runs_in(tmp_path), lambda _: None)
    executed = Executed(monkeypatch, LOSSES)
    compare.compare_runs(runs_in(tmp_path), lambda _: None)
    assert executed.names == ["baseline-5", "technique-5"]


def test_a_comparison_that_was_killed_while_it_wrote_a_recipe_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Executed(monkeypatch, LOSSES)

    def killed(_: str, path: str) -> None:
        raise KeyboardInterrupt(path)

    with monkeypatch.context() as patch:
        patch.setattr("os.replace", killed)
        with pytest.raises(KeyboardInterrupt):
            compare.compare_runs(runs_in(tmp_path), lambda _: None)
    (first, *_) = runs_in(tmp_path)
    assert not (tmp_path / "baseline-4" / compare.RECIPE_NAME).exists()
    compare.compare_runs(runs_in(tmp_path), lambda _: None)
    assert (tmp_path / "baseline-4" / compare.RECIPE_NAME).read_text() == compare.recipe_text(first.recipe)


def test_runs_of_another_recipe_are_not_mixed_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Executed(monkeypatch, LOSSES)
    compare.compare_runs(runs_in(tmp_path), lambda _: None)
    with pytest.raises(UsageError, match="recipe of another comparison; give another --dir"):
        compare.compare_runs(runs_in(tmp_path, epsilon=1e-5), lambda _: None)


def test_a_run_that_diverged_is_named_and_not_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    executed = Executed(monkeypatch, LOSSES | {"technique-4": None})
    for _ in range(2):
        with pytest.raises(UsageError, match="technique, seed 4 diverged: its held-out loss is not finite"):
            compare.compare_runs(runs_in(tmp_path), lambda _: None)
    assert executed.names == ["baseline-4", "technique-4"]


def test_runs_on_other_held_out_data_are_not_mixed_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_tokens(tmp_path)
    (first, *_) = runs_in(tmp_path)
    (now,) = compare._held_out_now(first)
    Executed(monkeypatch, {"baseline-4": 2.0}, {"baseline-4": now})
    with pytest.raises(JobFailed, match="technique-4 was killed"):
        compare.compare_runs(runs_in(tmp_path), lambda _: None)
    shutil.rmtree(tmp_path / "held")
    write_tokens(tmp_path, ("held",))
    executed = Executed(monkeypatch, LOSSES)
    with pytest.raises(UsageError, match="technique, seed 4: the held-out data have changed since the runs before it"):
        compare.compare_runs(runs_in(tmp_path), lambda _: None)
    assert executed.names == [], "nothing runs that cannot be compared"


def test_data_that_change_while_runs_go_on_are_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_tokens(tmp_path)
    (now,) = compare._held_out_now(runs_in(tmp_path)[0])
    executed = Executed(monkeypatch, LOSSES, {"baseline-4": now, "technique-4": "changed"})
    with pytest.raises(UsageError, match="technique, seed 4: the held-out data have changed"):
        compare.compare_runs(runs_in(tmp_path), lambda _: None)
    assert executed.names == ["baseline-4", "technique-4"]
