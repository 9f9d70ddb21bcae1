"""The recipe: a run that was stopped and resumed has the losses of one that never was, bit for bit."""

from __future__ import annotations

import contextlib
import math
import resource
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from fireflyer.base.errors import NoSpace, PermanentError, UsageError
from fireflyer.base.events import CheckpointReport, ResumeReport, StepReport
from fireflyer.base.launch import RankEnvironment
from fireflyer.checkpoint import CheckpointManager
from fireflyer.cluster import Reporter
from fireflyer.recipes import train_gpt
from fireflyer.recipes.corpus import build_corpus
from fireflyer.runtime import RealDisk

ALONE = RankEnvironment()


class Recorder(Reporter):
    """Keeps what would be sent to a launcher."""

    def __init__(self) -> None:
        super().__init__(None, None, "test")
        self.steps: list[StepReport] = []
        self.resumes: list[ResumeReport] = []

    def step(self, report: StepReport) -> None:
        self.steps.append(report)

    def resume(self, report: ResumeReport) -> None:
        self.resumes.append(report)

    def checkpoint(self, report: CheckpointReport) -> None:
        assert report.error is None

    @property
    def losses(self) -> dict[int, float | None]:
        return {report.step: report.loss for report in self.steps}


@pytest.fixture(autouse=True)
def _torch_settings() -> Iterator[None]:
    """The recipe sets options of its process; here they are restored."""
    threads, deterministic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    yield
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(deterministic)


@pytest.fixture(scope="module")
def corpus_dir(tmp_path_factory: pytest.TempPathFactory) -> str:
    directory = str(tmp_path_factory.mktemp("corpus"))
    build_corpus(directory, vocab_size=300, max_bytes=100_000)
    return directory


def run(corpus_dir: str, checkpoint_dir: Path, *more: str, recorder: Recorder | None = None) -> Recorder:
    arguments = ["--preset", "tiny", "--sequence-length", "16", "--global-batch", "5", "--checkpoint-every", "3"]
    arguments += ["--corpus-dir", corpus_dir, "--checkpoint-dir", str(checkpoint_dir), *more]
    recorder = recorder or Recorder()
    with contextlib.ExitStack() as cleanup:
        job = train_gpt.build(train_gpt.parse_options(arguments, ALONE), ALONE, cleanup)
        job.reporter = recorder
        train_gpt.train(job, *train_gpt.restore(job))
        job.checkpoints.close()
    return recorder


def test_a_resumed_run_has_the_losses_of_an_undisturbed_one(corpus_dir: str, tmp_path: Path) -> None:
    undisturbed = run(corpus_dir, tmp_path / "a", "--steps", "9")
    assert list(undisturbed.losses) == list(range(1, 10))
    first = run(corpus_dir, tmp_path / "b", "--steps", "5")
    shutil.rmtree(tmp_path / "b" / "step-00000005")  # the crash: steps 4 and 5 were done and are lost
    second = run(corpus_dir, tmp_path / "b", "--steps", "9")
    assert [report.step for report in second.resumes] == [3]
    assert list(second.losses) == [4, 5, 6, 7, 8, 9]
    assert first.losses | second.losses == undisturbed.losses
    assert {step: first.losses[step] for step in (4, 5)} == {step: second.losses[step] for step in (4, 5)}


def test_the_loss_falls_and_depends_on_the_seed(corpus_dir: str, tmp_path: Path) -> None:
    losses = run(corpus_dir, tmp_path / "a", "--steps", "30").losses
    assert losses[1] == pytest.approx(5.7, abs=0.3)  # the logarithm of the vocabulary
    assert (losses[30] or 0) < 5
    assert run(corpus_dir, tmp_path / "b", "--steps", "1", "--seed", "1").losses[1] != losses[1]


def test_a_finished_run_has_nothing_left_to_do(corpus_dir: str, tmp_path: Path) -> None:
    run(corpus_dir, tmp_path, "--steps", "2")
    again = run(corpus_dir, tmp_path, "--steps", "2")
    assert (again.steps, [report.step for report in again.resumes]) == ([], [2])


def test_what_is_reported_adds_up(corpus_dir: str, tmp_path: Path) -> None:
    recorder = run(corpus_dir, tmp_path, "--steps", "4")
    assert all((report.samples, report.tokens) == (5, 80) for report in recorder.steps)
    assert all(report.productive_ns > 0 for report in recorder.steps)
    assert len({report.allreduce_bytes for report in recorder.steps}) == 1
    stalls = [report.checkpoint_ns for report in recorder.steps]
    assert [stall_ns > 0 for stall_ns in stalls] == [False, False, True, True]


def test_a_run_whose_last_state_could_not_be_stored_has_failed(corpus_dir: str, tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)

    class SmallFilesFromNowOn(Recorder):
        def resume(self, report: ResumeReport) -> None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, hard))

        def checkpoint(self, report: CheckpointReport) -> None:
            pass

    try:
        with pytest.raises(NoSpace, match="shard-00000"):
            run(corpus_dir, tmp_path, "--steps", "4", "--checkpoint-every", "2", recorder=SmallFilesFromNowOn())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list(tmp_path.glob("step-*")) == []


def test_a_run_that_diverged_stops_before_it_overwrites_good_checkpoints(
    corpus_dir: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(train_gpt, "learning_rate", lambda step, peak: peak if step < 5 else math.nan)
    with pytest.raises(PermanentError, match="the gradients of step 6 have norm nan"):
        run(corpus_dir, tmp_path, "--steps", "9")
    assert [path.name for path in tmp_path.glob("step-*")] == ["step-00000003"]


def test_a_checkpoint_of_another_run_is_refused(corpus_dir: str, tmp_path: Path) -> None:
    run(corpus_dir, tmp_path / "run", "--steps", "1")
    with pytest.raises(UsageError, match="seed"):
        run(corpus_dir, tmp_path / "run", "--steps", "2", "--seed", "1")
    build_corpus(str(tmp_path / "other"), vocab_size=300, max_bytes=90_000)
    with pytest.raises(UsageError, match="another corpus"):
        run(str(tmp_path / "other"), tmp_path / "run", "--steps", "2")


def test_a_checkpoint_directory_of_another_program_is_refused(corpus_dir: str, tmp_path: Path) -> None:
    plan = {"their": "plan"}
    CheckpointManager(
        str(tmp_path), rank=0, world_size=1, store=None, disk=RealDisk(), period_steps=1, job_plan=plan
    ).close()
    with pytest.raises(UsageError, match="not written by this script"):
        run(corpus_dir, tmp_path, "--steps", "1")


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--steps", "0"], "--steps 0"),
        (["--global-batch", "3"], "--global-batch 3 is less than the world size, 4"),
        (["--lr", "2"], "--lr 2"),
        (["--timeout", "soon"], "soon"),
    ],
)
def test_bad_options_are_named(arguments: list[str], named: str) -> None:
    env = RankEnvironment(rank=1, world_size=4, local_rank=1, local_world_size=4)
    with pytest.raises(UsageError, match=named):
        train_gpt.parse_options(arguments, env)


def test_an_error_is_one_line_and_an_exit_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "current.json").write_text("nonsense")
    assert train_gpt.main(["--corpus-dir", str(tmp_path), "--checkpoint-dir", str(tmp_path / "c")]) == 1
    captured = capsys.readouterr()
    assert captured.err.startswith("train_gpt: ")
    assert captured.err.count("\n") == 1
    assert captured.out == ""
