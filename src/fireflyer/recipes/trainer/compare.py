"""Runs the pairs of a comparison on this machine, one run after the other, and reads what they show.

Each run is a process (or a job of `ff run`, where its plan has several ranks) with a recipe and a directory of its own.
Started again, a comparison goes on: runs that are complete are read, and the one that was interrupted resumes from its
checkpoint.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import msgspec

from fireflyer.base.errors import JobFailed, NotFound, UsageError
from fireflyer.base.os_errors import translate_os_error
from fireflyer.base.toml_text import to_toml
from fireflyer.data import RecordSet
from fireflyer.recipes.trainer.core.comparison import ARMS, PlannedRun
from fireflyer.recipes.trainer.core.figures import evaluation_of, held_out_of
from fireflyer.recipes.trainer.core.paired import PairedResult, paired_result
from fireflyer.recipes.trainer.core.recipe import Recipe
from fireflyer.recipes.trainer.metrics_file import read_metrics
from fireflyer.recipes.trainer.sources import identity_of_records
from fireflyer.runtime.processes.guarded import child_environment, start_with_parent_death_signal

__all__ = ["LOG_NAME", "RECIPE_NAME", "compare_runs", "recipe_text"]

RECIPE_NAME: Final = "recipe.toml"
LOG_NAME: Final = "log.txt"
_SHOWN_BYTES: Final = 4096


def compare_runs(runs: Sequence[PlannedRun], say: Callable[[str], object]) -> PairedResult:
    """Runs what is not complete yet, and compares the held-out losses after the last step.

    Raises `JobFailed` with the end of the log of a run that failed; `UsageError` where a directory has a run of another
    recipe, for held-out data that are not those of the runs that are complete, and for a run that diverged.
    """
    held_out: tuple[str, ...] | None = None
    losses: dict[str, list[float]] = {arm: [] for arm in ARMS}
    for number, run in enumerate(runs, 1):
        result = _result_of(run)
        if result is None:
            if held_out is not None:  # no run is begun that could not be compared
                _check_held_out(run, _held_out_now(run), held_out)
            say(f"run {number} of {len(runs)}: {run.arm}, seed {run.seed}")
            _execute(run)
            result = _result_of(run)
        if result is None:
            raise JobFailed(f"{run.directory}: the run ended without a held-out loss of its last step")
        if result.loss is None:
            raise UsageError(
                f"{run.arm}, seed {run.seed} diverged: its held-out loss is not finite, and cannot be compared; change "
                "the recipe, and give another --dir"
            )
        if result.held_out is not None:
            _check_held_out(run, result.held_out, held_out or result.held_out)
            held_out = result.held_out
        say(f"{run.arm}, seed {run.seed}: held-out loss {result.loss:.5f}")
        losses[run.arm].append(result.loss)
    settings = runs[0].recipe.compare
    return paired_result(losses["baseline"], losses["technique"], bound=settings.bound, confidence=settings.confidence)


class _Result(NamedTuple):
    loss: float | None
    """None where it is not finite."""
    held_out: tuple[str, ...] | None
    """Digests of what it was computed of; None where an earlier release did."""


def _held_out_now(run: PlannedRun) -> tuple[str, ...]:
    return tuple(identity_of_records(RecordSet(one.path)) for one in run.recipe.data.evaluation)


def _check_held_out(run: PlannedRun, found: tuple[str, ...], wanted: tuple[str, ...]) -> None:
    if found != wanted:
        raise UsageError(
            f"{run.arm}, seed {run.seed}: the held-out data have changed since the runs before it, so losses cannot be "
            "compared; give the data of before, or another --dir"
        )


def recipe_text(recipe: Recipe) -> str:
    """The recipe as TOML."""
    return to_toml(_given(msgspec.to_builtins(recipe)))


def _given(value: Any) -> Any:
    """Without what is None, which TOML does not have, and stands for what is left out."""
    if isinstance(value, dict):
        return {key: _given(one) for key, one in value.items() if one is not None}
    return [_given(one) for one in value] if isinstance(value, list | tuple) else value


def _result_of(run: PlannedRun) -> _Result | None:
    """The last held-out loss of a run that is complete. Raises `UsageError` where its directory is another run's."""
    path, text = os.path.join(run.directory, RECIPE_NAME), recipe_text(run.recipe)
    try:
        os.makedirs(run.directory, exist_ok=True)
        if os.path.exists(path):
            with open(path, encoding="utf-8") as file:
                if file.read(len(text) + 1) != text:
                    raise UsageError(f"{path!r} is the recipe of another comparison; give another --dir")
        else:
            with open(f"{path}.part", "w", encoding="utf-8") as file:
                file.write(text)
            os.replace(f"{path}.part", path)  # a part of it would be the recipe of another comparison
    except OSError as error:
        raise translate_os_error(error, path) from error
    try:
        lines = read_metrics(run.recipe.metrics.file)
    except NotFound:
        return None
    last = run.recipe.optimizer.steps
    evaluation = evaluation_of(lines, last)
    return None if evaluation is None else _Result(evaluation.loss, held_out_of(lines, last))


def _execute(run: PlannedRun) -> None:
    log = os.path.join(run.directory, LOG_NAME)
    with open(log, "ab") as output:
        process = start_with_parent_death_signal(
            _command(run), environment=child_environment({}), stdout=output.fileno(), stderr=output.fileno()
        )
        try:
            code = process.wait()
        finally:
            _end(process)
    if code != 0:
        raise JobFailed(f"{run.arm}, seed {run.seed} ended with exit code {code}; the end of {log}:\n{_tail(log)}")


def _command(run: PlannedRun) -> list[str]:
    program = [sys.executable, "-P", "-m", "fireflyer"]
    train = ["train", "run", os.path.join(run.directory, RECIPE_NAME)]
    ranks = run.recipe.plan.world_size
    if ranks == 1:
        return [*program, *train]
    # A directory of its own for each start: `ff run` takes none that was used.
    number = sum(name.startswith("job-") for name in os.listdir(run.directory)) + 1
    job = os.path.join(run.directory, f"job-{number}")
    return [*program, "run", "--ranks-per-node", str(ranks), "--run-dir", job, "-m", "fireflyer", "--", *train]


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.terminate()
        process.wait()


def _tail(path: str) -> str:
    with open(path, "rb") as file:
        file.seek(max(0, os.path.getsize(path) - _SHOWN_BYTES))
        return file.read(_SHOWN_BYTES).decode(errors="replace").strip()
