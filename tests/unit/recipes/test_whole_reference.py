"""The undisturbed losses: what they are kept under, and which runs and files prove nothing."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.support.jobs.job_logs import Break, JobScript, make_log
from tests.support.jobs.whole_facts import PLAN

from fireflyer.base.events import JobEvent, Logged, StepReport
from fireflyer.recipes.testbed.plan import TaskPlan
from fireflyer.recipes.testbed.reference import cache_key, code_digest, decode_cached, encode_cached, losses_of

TASK = TaskPlan(name="first", user="ada", steps=30, seed=1)
SCRIPT = JobScript(nodes=2, ranks_per_node=1, steps=30, checkpoint_every=10)
LOG = make_log(SCRIPT)[0]
SHARDS = {"shard-00000-of-00002.safetensors": "a" * 64, "shard-00001-of-00002.safetensors": "b" * 64}
change = msgspec.structs.replace


def key(**values: Any) -> str:
    given = {"code": "c", "releases": "torch 2", "processor": ["flags=avx2", "model=1"], "corpus": "f"} | values
    plan, task = given.pop("plan", PLAN), given.pop("task", TASK)
    return cache_key(plan, task, **given)


def test_the_key_covers_all_that_the_losses_depend_on() -> None:
    others = [
        key(code="d"),
        key(releases="torch 3"),
        key(processor=["flags=avx512", "model=1"]),
        key(corpus="g"),
        key(task=change(TASK, steps=31)),
        key(task=change(TASK, seed=2)),
        key(task=change(TASK, nodes=4)),
        key(plan=change(PLAN, global_batch=16)),
        key(plan=change(PLAN, sequence_length=64)),
        key(plan=change(PLAN, checkpoint_every=5)),
    ]
    assert len({key(), *others}) == len(others) + 1
    assert key() == key(processor=["model=1", "flags=avx2"])
    assert key() == key(task=change(TASK, user="ben", priority=20)), "who submits it changes no loss"


def test_the_digest_of_the_code_changes_with_any_module(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "one.py").write_text("1")
    (tmp_path / "notes.txt").write_text("1")
    before = code_digest([str(tmp_path)])
    (tmp_path / "notes.txt").write_text("2")
    assert code_digest([str(tmp_path)]) == before
    (tmp_path / "a" / "one.py").write_text("2")
    changed = code_digest([str(tmp_path)])
    (tmp_path / "a" / "one.py").rename(tmp_path / "a" / "two.py")
    assert len({before, changed, code_digest([str(tmp_path)])}) == 3


def test_what_is_kept_comes_back_bit_for_bit() -> None:
    losses = {1: math.pi, 2: 5e-324, 3: -0.0}
    found = decode_cached(encode_cached(losses, SHARDS), change(TASK, steps=3))
    assert found is not None
    assert {step: loss.hex() for step, loss in found.losses.items()} == {
        step: loss.hex() for step, loss in losses.items()
    }
    assert (found.shards, found.cached) == (SHARDS, True)


def test_a_kept_file_that_is_damaged_or_of_another_run_is_not_used() -> None:
    data = encode_cached({1: 1.5, 2: 1.25}, SHARDS)
    task = change(TASK, steps=2)
    assert decode_cached(data, task) is not None
    assert decode_cached(data, change(TASK, steps=3)) is None
    assert decode_cached(data, change(task, nodes=3)) is None
    assert decode_cached(encode_cached({1: 1.5, 3: 1.25}, SHARDS), task) is None
    assert decode_cached(b"", task) is None
    for at in range(len(data)):
        damaged = data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]
        assert decode_cached(damaged, task) is None, at


def test_an_undisturbed_run_gives_its_losses() -> None:
    losses = losses_of(LOG, TASK)
    assert isinstance(losses, dict)
    assert list(losses) == list(range(1, 31))


def without(log: list[Logged], rank: int, step: int) -> list[Logged]:
    def kept(event: JobEvent) -> bool:
        return not (isinstance(event, StepReport) and (event.rank, event.step) == (rank, step))

    return [entry for entry in log if kept(entry.event)]


def test_a_run_that_proves_nothing_is_refused() -> None:
    disturbed = make_log(change_script(breaks=(Break(after_step=15),)))[0]
    assert "in one attempt" in str(losses_of(disturbed, TASK))
    assert "did not end well" in str(losses_of(LOG[:-1], TASK))
    assert "reported 59 losses, not 60" in str(losses_of(without(LOG, 1, 30), TASK))
    assert "not 62" in str(losses_of(LOG, change(TASK, steps=31)))
    other = [
        Logged(entry.at_ns, change(entry.event, loss=math.nextafter(entry.event.loss or 0.0, 0.0)))
        if isinstance(entry.event, StepReport) and (entry.event.rank, entry.event.step) == (1, 9)
        else entry
        for entry in LOG
    ]
    assert "different losses at step 9" in str(losses_of(other, TASK))


def change_script(**values: Any) -> JobScript:
    return JobScript(nodes=2, ranks_per_node=1, steps=30, checkpoint_every=10, **values)


@pytest.mark.parametrize("steps", [1, 29])
def test_a_run_of_fewer_steps_is_no_reference(steps: int) -> None:
    assert isinstance(losses_of(make_log(JobScript(nodes=2, ranks_per_node=1, steps=steps))[0], TASK), str)
