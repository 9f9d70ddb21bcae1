"""A checkpoint says with how many ranks, and by which plan, the job has come to it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.support.checkpoints.states import manager, newest, save_all, state_of

from fireflyer.base.errors import DataCorruption
from fireflyer.checkpoint import PlanRecord, stored_plans
from fireflyer.checkpoint.core.manifest import (
    MAX_PLANS,
    Manifest,
    continue_plans,
    decode_manifest,
    encode_manifest,
    plans_of,
)


def go_on(directory: Path, step: int, plan: dict[str, Any] | None) -> tuple[PlanRecord, ...]:
    """Restores, and saves `step`. Returns what is then stored."""
    with manager(directory, plan=plan, keep=100) as ours:
        ours.restore()
        ours.save(step, state_of(step), blocking=True).result()
    return stored_plans(str(directory))


def test_each_plan_is_recorded_with_the_step_from_which_it_holds(tmp_path: Path) -> None:
    assert stored_plans(str(tmp_path / "new")) == ()
    three, two = {"trees": [3]}, {"trees": [2]}
    assert go_on(tmp_path, 10, three) == (PlanRecord(1, 1, three),)
    assert go_on(tmp_path, 20, three) == (PlanRecord(1, 1, three),)
    assert go_on(tmp_path, 30, two) == (PlanRecord(1, 1, three), PlanRecord(21, 1, two))
    assert go_on(tmp_path, 40, three) == (PlanRecord(1, 1, three), PlanRecord(21, 1, two), PlanRecord(31, 1, three))
    assert newest(tmp_path).plans == stored_plans(str(tmp_path))


def test_the_steps_that_are_done_again_by_another_plan_are_not_recorded_as_of_the_old_one(tmp_path: Path) -> None:
    go_on(tmp_path, 10, {"a": 1})
    go_on(tmp_path, 20, {"a": 2})
    (tmp_path / "step-00000020" / "manifest.json").write_bytes(b"damaged")
    assert go_on(tmp_path, 30, {"a": 3}) == (PlanRecord(1, 1, {"a": 1}), PlanRecord(11, 1, {"a": 3}))


def test_of_a_checkpoint_that_records_none_its_own_size_and_plan_are_known(tmp_path: Path) -> None:
    save_all(tmp_path, [10], job_plan={"collectives": 7})
    path = tmp_path / "step-00000010" / "manifest.json"
    old = msgspec.structs.replace(decode_manifest(path.read_bytes()), plans=())
    path.write_bytes(encode_manifest(old))
    assert b"plans" not in path.read_bytes()
    assert stored_plans(str(tmp_path)) == (PlanRecord(10, 1, {"collectives": 7}),)
    assert go_on(tmp_path, 20, None) == (PlanRecord(10, 1, {"collectives": 7}), PlanRecord(11, 1))


@pytest.mark.parametrize(
    "plans",
    [
        (PlanRecord(5, 1), PlanRecord(4, 1)),
        (PlanRecord(-1, 1),),
        (PlanRecord(1, 0), PlanRecord(2, 1)),
        (PlanRecord(1, 2),),
        tuple(PlanRecord(step, 1) for step in range(MAX_PLANS + 1)),
    ],
    ids=["out of order", "negative", "no ranks", "of another size at last", "too many"],
)
def test_plans_that_cannot_be_are_damage(tmp_path: Path, plans: tuple[PlanRecord, ...]) -> None:
    save_all(tmp_path, [10])
    whole = decode_manifest((tmp_path / "step-00000010" / "manifest.json").read_bytes())
    with pytest.raises(DataCorruption, match=re.escape("plan")):
        decode_manifest(encode_manifest(msgspec.structs.replace(whole, plans=plans)))


def test_a_job_that_changes_without_end_forgets_the_oldest() -> None:
    plans: tuple[PlanRecord, ...] = ()
    for step in range(1, MAX_PLANS + 11):
        plans = continue_plans(plans, PlanRecord(step, 1 + step % 2))
    assert (len(plans), plans[0].step, plans[-1].step) == (MAX_PLANS, 11, MAX_PLANS + 10)
    assert plans_of(Manifest(1, 9, 0, 3, (), {})) == (PlanRecord(9, 3),)
