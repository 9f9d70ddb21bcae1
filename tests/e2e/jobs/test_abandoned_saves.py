"""A job that is suspended while its disk is too slow for one more checkpoint: it leaves in time without it."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path
from typing import Final

import pytest
from tests.support.jobs.launching import events_of, started_launcher, wait_until
from tests.support.patience import allowed_s

from fireflyer.base.events import RankExited, Suspended
from fireflyer.base.units import SECOND
from fireflyer.checkpoint import verify
from fireflyer.cluster.schema.job import JobSpec, Timeouts
from fireflyer.cluster.sdk import SUSPENDED_EXIT_CODE

pytestmark = [pytest.mark.processes, pytest.mark.slow, pytest.mark.timeout(800)]

TRAINING: Final = str(Path(__file__).parents[2] / "support" / "jobs" / "slow_disk_training.py")
GRACE_NS: Final = 16 * SECOND
"""Of which a save gets 12 s: each operation of the slow disk takes 2 s, and a checkpoint needs more than six."""
SAVED: Final = 200


def spec_of(directory: Path, last: int, ranks: int) -> JobSpec:
    directory.mkdir()
    args = (str(directory.parent / "saved"), str(directory.parent / "slow"), str(SAVED), str(last))
    return JobSpec(
        script=TRAINING, args=args, run_dir=str(directory / "run"), ranks_per_node=ranks, devices="cpu",
        suspend_grace_ns=GRACE_NS, timeouts=Timeouts(node_lost_ns=60 * SECOND),
    )  # fmt: skip


def printed(spec: JobSpec) -> str:
    return Path(spec.run_dir + ".out").read_text()


def test_a_save_that_the_grace_period_is_too_short_for_is_abandoned_and_the_one_before_is_kept(tmp_path: Path) -> None:
    saved, slow = tmp_path / "saved", tmp_path / "slow"
    spec = spec_of(tmp_path / "first", last=100_000, ranks=2)
    with started_launcher(spec) as launcher:
        wait_until(
            lambda: printed(spec).count(f"after {SAVED}") == 2 or launcher.poll() is not None,
            allowed_s(60),
            lambda: printed(spec),
        )
        slow.touch()
        launcher.send_signal(signal.SIGUSR1)
        code = launcher.wait(allowed_s(60))
    told = printed(spec)
    assert code == SUSPENDED_EXIT_CODE, told
    events = [entry.event for entry in events_of(os.path.join(spec.run_dir, "events.jsonl"))]
    (suspended,) = [event for event in events if isinstance(event, Suspended)]
    assert suspended.ended_ranks == 0, "they left by themselves, before their time was over"
    assert [event.exit_code for event in events if isinstance(event, RankExited)] == [SUSPENDED_EXIT_CODE] * 2
    assert suspended.horizon is not None
    given_up = f"checkpoint of step {suspended.horizon} took longer than the grace period and was given up"
    assert told.count(given_up) == 2, told
    assert suspended.horizon > SAVED
    assert [(info.step, info.problem) for info in verify(saved)] == [(SAVED, None)]
    assert list(saved.rglob(".tmp-*")), "the save had begun"

    slow.unlink()
    again = spec_of(tmp_path / "again", last=SAVED + 5, ranks=1)
    with started_launcher(again) as launcher:
        assert launcher.wait(allowed_s(60)) == 0, printed(again)
    assert re.findall(r"from (\d+)", printed(again)) == [str(SAVED)]
    assert [(info.step, info.problem) for info in verify(saved)] == [(SAVED + 5, None), (SAVED, None)]
    assert not list(saved.rglob(".tmp-*")), "what was begun is removed"
