"""The recipe under `ff run`: several ranks compute what one computes, also when their number changes on the way, and
when one of them is killed they compute what they would have computed."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.support.jobs import killed_gpt
from tests.support.patience import allowed_s

from fireflyer.base.events import ResumeReport, StepReport, decode_log
from fireflyer.checkpoint.core.manifest import Manifest, TensorRecord
from fireflyer.checkpoint.engine.loading import Sink, sink_of
from fireflyer.checkpoint.reader import choose
from fireflyer.recipes.corpus import build_corpus
from fireflyer.runtime.disk import RealDisk

pytestmark = pytest.mark.processes
UNSEEDED = re.compile("rng/(numpy|python)")
RECIPE = ("--module", "fireflyer.recipes.train_gpt", "--")


@dataclass(frozen=True)
class Job:
    resumed: list[int]
    """Steps done before, of each attempt."""
    curves: list[dict[int, float]]
    """Losses by step, of each attempt."""
    checkpoints: Path

    @property
    def losses(self) -> list[float]:
        """Of the steps that counted."""
        found = {step: loss for curve in self.curves for step, loss in curve.items()}
        return [found[step] for step in range(min(found), max(found) + 1)]

    def final_state(self) -> tuple[int, dict[str, object], dict[tuple[int, str], bytes]]:
        """Step, plain values and tensors (by the rank that saved them) of the newest checkpoint. Without the states of
        generators that the recipe neither seeds nor uses: each job has other ones."""
        tensors: dict[tuple[int, str], bytearray] = {}

        def make_sink(_manifest: Manifest) -> Sink:
            def place_of(rank: int, tensor: TensorRecord) -> memoryview:
                return memoryview(tensors.setdefault((rank, tensor.name), bytearray(tensor.size_bytes)))

            return sink_of(place_of)

        found, passed_over = choose(RealDisk(), str(self.checkpoints), make_sink)
        assert found is not None
        assert not passed_over
        known = {name: bytes(data) for name, data in tensors.items() if not UNSEEDED.search(name[1])}
        return found[0].step, found[1].values, known


def train(
    directory: Path,
    name: str,
    *,
    nodes: int,
    ranks: int,
    steps: int,
    checkpoints: str,
    program: tuple[str, ...] = RECIPE,
    restarts: int = 0,
) -> Job:
    script = ["--preset", "tiny", "--sequence-length", "16", "--global-batch", "6", "--checkpoint-every", "2"]
    script += ["--steps", str(steps), "--corpus-dir", str(directory / "corpus")]
    script += ["--checkpoint-dir", str(directory / checkpoints)]
    run = ["run", "--quiet", "--devices", "cpu", "--nodes", str(nodes), "--ranks-per-node", str(ranks)]
    run += ["--max-restarts", str(restarts), "--run-dir", str(directory / name), *program]
    done = subprocess.run(
        [sys.executable, "-m", "fireflyer", *run, *script],
        capture_output=True,
        text=True,
        timeout=allowed_s(100),
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    with (directory / name / "events.jsonl").open("rb") as file:
        events = [entry.event for entry in decode_log(file)]
    resumed = {(event.attempt, event.step) for event in events if isinstance(event, ResumeReport)}
    assert sorted(attempt for attempt, _ in resumed) == list(range(restarts + 1)), "all ranks resume at the same step"
    curves: dict[tuple[int, int], dict[int, float]] = {}
    for event in events:
        if isinstance(event, StepReport) and event.loss is not None:
            curves.setdefault((event.attempt, event.rank), {})[event.step] = event.loss
    assert len(curves) == nodes * ranks * (restarts + 1)
    for (attempt, _), curve in curves.items():
        first = curves[attempt, 0]
        known = curve.keys() if attempt == restarts else curve.keys() & first.keys()  # who is killed reports no more
        assert all(curve[step] == first.get(step) for step in known), "every rank knows the same loss, bit for bit"
    attempts = range(restarts + 1)
    return Job([step for _, step in sorted(resumed)], [curves[one, 0] for one in attempts], directory / checkpoints)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a corpus."""
    directory = tmp_path_factory.mktemp("jobs")
    build_corpus(str(directory / "corpus"), vocab_size=300, max_bytes=100_000)
    return directory


@pytest.mark.slow
def test_losses_are_those_of_one_process_whatever_the_number_of_ranks(place: Path) -> None:
    alone = train(place, "alone", nodes=1, ranks=1, steps=8, checkpoints="one")
    four = train(place, "four", nodes=2, ranks=2, steps=4, checkpoints="several")
    rest = train(place, "two", nodes=2, ranks=1, steps=8, checkpoints="several")
    assert (rest.resumed, len(rest.losses)) == ([4], 4)
    assert [*four.losses, *rest.losses] == pytest.approx(alone.losses, rel=1e-5)


def killed(place: Path, lost: str) -> Job:
    """Rank 1 dies before step 8."""
    name = f"lost-{lost.replace(' ', '-')}"
    program = (killed_gpt.__file__, "8", lost)
    job = train(place, name, nodes=1, ranks=2, steps=10, checkpoints=f"{name}-saved", program=program, restarts=1)
    assert job.resumed[0] == 0
    assert job.resumed[1] in (2, 4, 6), "a save that is due while another one is under way is skipped"
    return job


@pytest.fixture(scope="module")
def undisturbed(place: Path) -> Job:
    return train(place, "undisturbed", nodes=1, ranks=2, steps=10, checkpoints="undisturbed-saved")


@pytest.mark.slow
def test_a_job_of_which_a_rank_was_killed_ends_bitwise_as_one_that_was_never_disturbed(
    place: Path, undisturbed: Job
) -> None:
    job = killed(place, "nothing")
    assert job.losses == undisturbed.losses
    assert all(curve.items() <= undisturbed.curves[0].items() for curve in job.curves), "also of steps done twice"
    step, values, tensors = undisturbed.final_state()
    assert step == len(undisturbed.losses) == 10
    assert len(tensors) > 20
    assert job.final_state() == (step, values, tensors)


@pytest.mark.slow
@pytest.mark.campaign(expected_s=15)
@pytest.mark.rotates
@pytest.mark.timeout(900)
@pytest.mark.parametrize("lost", sorted({*killed_gpt.LOSSES} - {"nothing"}))
def test_whatever_a_resumed_job_has_lost_is_seen(place: Path, undisturbed: Job, lost: str) -> None:
    job = killed(place, lost)
    resumed = job.resumed[1]
    assert job.losses[:resumed] == undisturbed.losses[:resumed]
    assert job.losses[resumed:] != undisturbed.losses[resumed:] or lost == "one bit", "of a weight that was not used"
    assert job.final_state() != undisturbed.final_state()
