"""`ff up` with four agents: tasks of three users share the nodes, are interrupted, and finish with right results."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest
from tests.support.patience import allowed_s
from tests.support.platform.running import RunningPlatform, task_of, wait_for

from fireflyer.cluster.core.platform.views import TaskAnswer
from fireflyer.cluster.schema.tasks import Cause, Outcome, TaskState

pytestmark = [pytest.mark.processes, pytest.mark.slow]

SCRIPT: Final = """\
import os, sys, time
from fireflyer.cluster.sdk import get_whole_life_state, go_suspend, set_whole_life_state, should_suspend

results, name, steps = sys.argv[1], sys.argv[2], int(sys.argv[3])
rank = int(os.environ["RANK"])
step = get_whole_life_state() or 0
total = sum(range(step))
with open(f"{results}/{name}.log", "a") as log:
    log.write(f"{rank} begins at {step}\\n")
while step < steps:
    if should_suspend():
        if rank == 0:
            set_whole_life_state(step)
        go_suspend()
    while os.path.exists(f"{results}/{name}.hold") and step == steps - 1 and not should_suspend():
        open(f"{results}/{name}.{rank}.running", "w").close()  # at the last step, which it will go on with
        time.sleep(0.02)
    if should_suspend():
        continue
    total += step
    step += 1
    time.sleep(0.01)
with open(f"{results}/{name}.{rank}.result", "w") as result:
    result.write(str(total))
"""
STEPS: Final = 20
TRAINING: Final = """\
import os, sys, time
import torch
from fireflyer.checkpoint import TrainingLoop
from fireflyer.runtime import read_environment
from fireflyer.runtime.reporter import Reporter

results, steps = sys.argv[1], int(sys.argv[2])
torch.set_num_threads(1)
torch.manual_seed(0)
net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1))
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
reporter = Reporter.from_environment(read_environment())
with reporter, TrainingLoop(f"{results}/checkpoints", net, optimizer, period_steps=10**6, reporter=reporter) as loop:
    with open(f"{results}/begins", "a") as begins:
        begins.write(f"{loop.step}\\n")
    for step in loop.steps(steps):
        loss = (net(torch.full((2, 4), step / steps)) - 1).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if os.path.exists(f"{results}/slow"):
            time.sleep(0.05)
with open(f"{results}/weights", "wb") as weights:
    for parameter in net.parameters():
        weights.write(parameter.detach().numpy().tobytes())
"""
TRAINING_STEPS: Final = 2000


@pytest.fixture(scope="module")
def platform(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningPlatform]:
    directory = tmp_path_factory.mktemp("time-sharing") / "platform"
    with RunningPlatform(directory, nodes=4, users=("ada", "bob", "cyd")) as running:
        yield running


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return path


def check_account(answer: TaskAnswer) -> None:
    """All of a task's life is somewhere, to the nanosecond."""
    view = answer.task
    assert view.ended_ns is not None
    assert view.account.total_ns == view.ended_ns - view.submitted_ns


def test_three_users_share_four_nodes_and_the_most_important_comes_first(
    platform: RunningPlatform, script: Path, tmp_path: Path
) -> None:
    ada, bob, cyd = (platform.client(user) for user in ("ada", "bob", "cyd"))
    for name in ("first", "second"):
        (tmp_path / f"{name}.hold").touch()

    def submit(client: object, name: str, nodes: int, priority: int) -> int:
        spec = task_of(script, name, str(tmp_path), name, str(STEPS), nodes=nodes, priority=priority)
        return client.submit(spec, key=name)[0]  # type: ignore[attr-defined,no-any-return]

    first = submit(ada, "first", 2, 10)
    second = submit(bob, "second", 2, 10)
    wait_for(lambda: len(list(tmp_path.glob("*.running"))) == 4, "both run", limit_s=60)
    waiting = submit(bob, "waiting", 1, 5)
    assert ada.task(waiting).task.state is TaskState.QUEUED
    assert ada.task(waiting).why.text

    urgent = submit(cyd, "urgent", 3, 20)
    done = platform.finished(cyd, urgent)
    assert done.task.outcome is Outcome.SUCCEEDED
    assert [run.cause for run in done.runs] == [Cause.SUCCEEDED]
    for name in ("first", "second"):
        (tmp_path / f"{name}.hold").unlink()

    answers = [platform.finished(ada, task) for task in (first, second, waiting, urgent)]
    assert [answer.task.outcome for answer in answers] == [Outcome.SUCCEEDED] * 4
    interrupted = answers[:2]
    assert all([run.cause for run in answer.runs] == [Cause.SUSPENDED, Cause.SUCCEEDED] for answer in interrupted)
    for answer in answers:
        check_account(answer)
    for name, ranks in (("first", 2), ("second", 2), ("waiting", 1), ("urgent", 3)):
        results = [(tmp_path / f"{name}.{rank}.result").read_text() for rank in range(ranks)]
        assert results == [str(sum(range(STEPS)))] * ranks
    begins = (tmp_path / "first.log").read_text()
    assert f"begins at {STEPS - 1}" in begins, "it went on where it was"


def test_an_interrupted_training_goes_on_from_its_checkpoint_on_another_node(
    platform: RunningPlatform, script: Path, tmp_path: Path
) -> None:
    """The one that comes first must have its node, and holds it: only another one is left."""
    training = tmp_path / "training.py"
    training.write_text(TRAINING)
    ours, alone = tmp_path / "ours", tmp_path / "alone"
    for directory in (ours, alone):
        directory.mkdir()
    (ours / "slow").touch()
    ada, cyd = platform.client("ada"), platform.client("cyd")
    (task,) = ada.submit(task_of(training, "training", str(ours), str(TRAINING_STEPS)), key="training")
    wait_for((ours / "begins").exists, "it trains", limit_s=60)
    [node] = ada.task(task).task.nodes

    (tmp_path / "first.hold").touch()
    urgent = task_of(script, "first", str(tmp_path), "first", str(STEPS), priority=20, only=(node,))
    (first,) = cyd.submit(urgent, key="first-on-its-node")
    moved = platform.until(ada, task, lambda answer: bool(answer.runs[1:] and answer.task.nodes), "it runs again")
    assert moved.runs[0].cause is Cause.SUSPENDED
    assert moved.runs[0].nodes == (node,)
    assert node not in moved.task.nodes
    assert cyd.task(first).task.nodes == (node,), "which still has it"
    (ours / "slow").unlink()
    done = platform.finished(ada, task)
    (tmp_path / "first.hold").unlink()
    assert done.task.outcome is Outcome.SUCCEEDED
    check_account(done)
    began, went_on = (int(line) for line in (ours / "begins").read_text().split())
    assert began == 0 < went_on < TRAINING_STEPS, "it went on where it was"
    command = [sys.executable, str(training), str(alone), str(TRAINING_STEPS)]
    subprocess.run(command, check=True, cwd=alone, timeout=allowed_s(60))
    assert (ours / "weights").read_bytes() == (alone / "weights").read_bytes(), "bit for bit as if undisturbed"
    assert platform.finished(cyd, first).task.outcome is Outcome.SUCCEEDED


def test_a_task_that_its_user_suspends_waits_until_it_is_resumed(
    platform: RunningPlatform, script: Path, tmp_path: Path
) -> None:
    from fireflyer.cluster.core.platform.commands import ResumeTask, SuspendTask

    ada = platform.client("ada")
    (tmp_path / "held.hold").touch()
    spec = task_of(script, "held", str(tmp_path), "held", str(STEPS))
    (task,) = ada.submit(spec, key="held")
    wait_for(lambda: (tmp_path / "held.0.running").exists(), "it runs", limit_s=60)
    ada.command(SuspendTask(task))
    found = platform.until(ada, task, lambda answer: answer.task.state is TaskState.SUSPENDED, "it is suspended")
    assert found.runs[-1].cause is Cause.SUSPENDED
    (tmp_path / "held.hold").unlink()
    ada.command(ResumeTask(task))
    done = platform.finished(ada, task)
    assert done.task.outcome is Outcome.SUCCEEDED
    check_account(done)


def test_a_task_of_another_user_cannot_be_stopped_and_ones_own_can(
    platform: RunningPlatform, script: Path, tmp_path: Path
) -> None:
    from fireflyer.base.errors import PermissionDenied
    from fireflyer.cluster.core.platform.commands import StopTask

    ada, bob = platform.client("ada"), platform.client("bob")
    (tmp_path / "mine.hold").touch()
    (task,) = ada.submit(task_of(script, "mine", str(tmp_path), "mine", str(STEPS)), key="mine")
    wait_for(lambda: (tmp_path / "mine.0.running").exists(), "it runs", limit_s=60)
    with pytest.raises(PermissionDenied):
        bob.command(StopTask(task))
    ada.command(StopTask(task))
    done = platform.finished(ada, task)
    assert done.task.outcome is Outcome.STOPPED
    check_account(done)


def test_the_users_error_ends_the_task_and_is_told(platform: RunningPlatform, tmp_path: Path) -> None:
    ada = platform.client("ada")
    script = tmp_path / "broken.py"
    script.write_text("raise ValueError('bad batch shape (3, 4)')\n")
    (task,) = ada.submit(task_of(script, "broken"), key="broken")
    done = platform.finished(ada, task)
    assert done.task.outcome is Outcome.FAILED
    assert done.runs[-1].cause is Cause.PROGRAM
    assert "bad batch shape (3, 4)" in done.task.reason
    check_account(done)
