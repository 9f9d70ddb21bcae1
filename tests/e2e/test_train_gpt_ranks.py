"""The recipe under `ff run`: several ranks compute what one computes, also when their number changes on the way."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from fireflyer.base.events import ResumeReport, StepReport, decode_log
from fireflyer.recipes.corpus import build_corpus

pytestmark = pytest.mark.processes


def train(
    directory: Path, name: str, *, nodes: int, ranks: int, steps: int, checkpoints: str
) -> tuple[int, list[float]]:
    """`(steps done before, losses)` of one job."""
    script = ["--preset", "tiny", "--sequence-length", "16", "--global-batch", "6", "--checkpoint-every", "2"]
    script += ["--steps", str(steps), "--corpus-dir", str(directory / "corpus")]
    script += ["--checkpoint-dir", str(directory / checkpoints)]
    run = ["run", "--quiet", "--devices", "cpu", "--nodes", str(nodes), "--ranks-per-node", str(ranks)]
    run += ["--max-restarts", "0", "--run-dir", str(directory / name), "--module", "fireflyer.recipes.train_gpt", "--"]
    done = subprocess.run(
        [sys.executable, "-m", "fireflyer", *run, *script], capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    with (directory / name / "events.jsonl").open("rb") as file:
        events = [entry.event for entry in decode_log(file)]
    resumed = {event.step for event in events if isinstance(event, ResumeReport)}
    curves: dict[int, dict[int, float]] = {}
    for event in events:
        if isinstance(event, StepReport) and event.loss is not None:
            curves.setdefault(event.rank, {})[event.step] = event.loss
    assert len(curves) == nodes * ranks
    assert all(curve == curves[0] for curve in curves.values()), "every rank knows the same loss, bit for bit"
    return resumed.pop(), [curves[0][step] for step in sorted(curves[0])]


def test_losses_are_those_of_one_process_whatever_the_number_of_ranks(tmp_path: Path) -> None:
    build_corpus(str(tmp_path / "corpus"), vocab_size=300, max_bytes=100_000)
    _, alone = train(tmp_path, "alone", nodes=1, ranks=1, steps=8, checkpoints="one")
    _, four = train(tmp_path, "four", nodes=2, ranks=2, steps=4, checkpoints="several")
    resumed, rest = train(tmp_path, "two", nodes=2, ranks=1, steps=8, checkpoints="several")
    assert (resumed, len(rest)) == (4, 4)
    assert [*four, *rest] == pytest.approx(alone, rel=1e-5)
