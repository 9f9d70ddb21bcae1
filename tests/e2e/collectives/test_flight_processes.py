"""Real ranks fail, the others leave dumps, and the dumps name the one that failed."""

from __future__ import annotations

import io
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.support.patience import allowed_s
from tests.support.ranks.processes import Ranks, ranks_running
from torch.distributed.flight_recorder import fr_trace

from fireflyer.base.units import MS, SECOND
from fireflyer.collectives.flight import Verdict, explain, find_dumps, read_dumps

pytestmark = pytest.mark.processes

TIMEOUT_NS = 1000 * MS
ONE_NODE, TWO_NODES = [0, 0, 0], [0, 0, 1, 1]


@contextmanager
def flights(
    tmp_path: Path, nodes: Sequence[int], scenario: str, *, timeout_ns: int = TIMEOUT_NS, **params: Any
) -> Iterator[Ranks]:
    with ranks_running(
        tmp_path / "job",
        nodes,
        scenario,
        timeout_ns=timeout_ns,
        module="tests.support.ranks.flight_ranks",
        dump_dir=str(tmp_path / "flight"),
        **params,
    ) as ranks:
        yield ranks


def verdict_of(tmp_path: Path) -> Verdict:
    return explain([dump for _, dump in read_dumps(find_dumps([str(tmp_path / "flight")]))])


def others(nodes: Sequence[int], culprit: int) -> list[int]:
    return [rank for rank in range(len(nodes)) if rank != culprit]


@pytest.mark.parametrize("nodes", [ONE_NODE, TWO_NODES], ids=["one node", "two nodes"])
@pytest.mark.parametrize("blow", [signal.SIGKILL, signal.SIGSTOP])
def test_a_rank_that_is_killed_or_stopped(tmp_path: Path, nodes: list[int], blow: signal.Signals) -> None:
    culprit = 2
    with flights(tmp_path, nodes, "endless", count=300_000) as ranks:
        ranks.wait_for("under way")
        ranks.send_signal(culprit, blow)
        ranks.wait_for("failed", others(nodes, culprit))
        verdict = verdict_of(tmp_path)
    assert [each.rank for each in verdict.culprits] == [culprit]
    assert verdict.culprits[0].certain
    # a stopped process lives: where the signal came between two sums, the others waited for it to enter the next one
    between = blow is signal.SIGSTOP and "has not entered" in verdict.summary
    assert verdict.kind == ("asleep" if between else "gone")
    assert between or "left no dump" in verdict.summary
    assert [row.dump for row in verdict.table] == [rank != culprit for rank in range(len(nodes))]


@pytest.mark.parametrize("nodes", [TWO_NODES], ids=["two nodes"])
def test_a_rank_that_was_stopped_and_goes_on_leaves_a_dump_too(tmp_path: Path, nodes: list[int]) -> None:
    with flights(tmp_path, nodes, "endless", count=300_000) as ranks:
        ranks.wait_for("under way")
        ranks.send_signal(1, signal.SIGSTOP)
        ranks.wait_for("failed", others(nodes, 1))
        ranks.send_signal(1, signal.SIGCONT)
        ranks.wait_for("failed")
        verdict = verdict_of(tmp_path)
    assert [each.rank for each in verdict.culprits] == [1]
    assert all(row.dump for row in verdict.table)


@pytest.mark.parametrize(("nodes", "how"), [(ONE_NODE, "other"), (TWO_NODES, "skip")])
def test_a_rank_that_calls_something_else(tmp_path: Path, nodes: list[int], how: str) -> None:
    program = {"operations": 8, "odd": 1, "at": 5, "how": how}
    with flights(tmp_path, nodes, "program", timeout_ns=20 * SECOND, **program) as ranks:
        ranks.wait_for("in it", others(nodes, 1))  # else it is one rank's word against another's
        ranks.say_to(1)
        ranks.wait_for("failed")
        verdict = verdict_of(tmp_path)
    assert verdict.kind == "mismatch"
    assert [each.rank for each in verdict.culprits] == [1]
    count = 7000 if how == "skip" else 6001
    assert f"called allreduce of {count} f32 at #5" in verdict.summary


@pytest.mark.parametrize("nodes", [ONE_NODE, TWO_NODES], ids=["one node", "two nodes"])
def test_a_rank_that_comes_too_late(tmp_path: Path, nodes: list[int]) -> None:
    with flights(tmp_path, nodes, "program", operations=8, odd=1, at=5, how="late") as ranks:
        ranks.wait_for("failed", others(nodes, 1))
        absent = verdict_of(tmp_path)
        ranks.say_to(1)
        ranks.wait_for("failed")
        late = verdict_of(tmp_path)
    assert [each.rank for each in absent.culprits] == [each.rank for each in late.culprits] == [1]
    assert late.kind == "absent"
    assert "only after it had failed on the others" in late.summary
    assert "missing ranks: {1}" in stock_analysis(tmp_path)


def stock_analysis(tmp_path: Path) -> str:
    """What PyTorch's analyser says of the same job."""
    said = io.StringIO()
    handler = logging.StreamHandler(said)
    logger = logging.getLogger("Flight Recorder")
    logger.addHandler(handler)
    try:
        fr_trace.main([os.path.dirname(find_dumps([str(tmp_path)])[0])])
    finally:
        logger.removeHandler(handler)
    return said.getvalue()


def test_messages_in_a_circle(tmp_path: Path) -> None:
    with flights(tmp_path, ONE_NODE, "circle") as ranks:
        ranks.wait_for("failed")
        verdict = verdict_of(tmp_path)
    assert verdict.kind == "deadlock"
    assert [each.rank for each in verdict.culprits] == [0, 1, 2]
    assert "0 -> 1 -> 2 -> 0" in verdict.summary


@pytest.mark.parametrize(("nodes", "peer_memory"), [(ONE_NODE, True), (ONE_NODE, False), (TWO_NODES, True)])
def test_dumps_of_a_job_that_is_well(tmp_path: Path, nodes: list[int], peer_memory: bool) -> None:
    with flights(tmp_path, nodes, "program", operations=20, odd=-1, at=0, how="", peer_memory=peer_memory) as ranks:
        ranks.wait_for("dumped")
        assert ranks.exit_codes() == [0] * len(nodes)
        verdict = verdict_of(tmp_path)
        dumps = [dump for _, dump in read_dumps(find_dumps([str(tmp_path / "flight")]))]
    assert (verdict.kind, verdict.culprits) == ("nothing", ())
    for dump in dumps:
        records = dump.snapshot.records
        assert [record.seq for record in records] == list(range(21))
        assert all(record.state == "done" for record in records)
        assert all(0 < r.submitted_ns <= r.started_ns <= r.finished_ns <= dump.snapshot.monotonic_ns for r in records)
        big = [record for record in records if record.path not in ("small", "exchange")]
        expected = ["pipeline"] if max(nodes) else ["vm", "staged"] if peer_memory else ["staged"]
        assert big
        assert all(record.path in expected for record in big)
        assert all(record.chunks_done == record.chunks > 0 and record.progress_ns > 0 for record in big)
        cut = [record for record in big if record.path in ("pipeline", "staged")]
        assert all(
            record.chunk_bytes * (record.chunks - 1) < record.bytes <= record.chunk_bytes * record.chunks
            for record in cut
            if record.bytes
        )
        assert all(record.algorithm == ("double_binary_tree" if max(nodes) else "") for record in big)
        seen = {one.rank: one.entered for one in dump.snapshot.peer_progress}
        node = nodes[dump.rank]
        leads = nodes.index(node) == dump.rank
        assert set(seen) == {r for r in range(len(nodes)) if r != dump.rank and (leads or nodes[r] == node)}
        assert all(21 <= seen[rank] <= 22 for rank in seen if nodes[rank] == node)
        assert all(seen[rank] <= 22 for rank in seen)  # of another node: by its last heartbeat
    assert "missing" not in stock_analysis(tmp_path)


HANGS = """
import time
import numpy as np
from fireflyer.base.units import MS, SECOND
from fireflyer.collectives import Communicator
from fireflyer.runtime import read_environment

env = read_environment()
group = Communicator.from_environment(env, timeout_ns=1000 * MS)
for step in range(9):
    if env.rank == 1 and step == 4:
        time.sleep(600)
    group.allreduce(np.ones(100_000, "f4"))
"""


def test_a_run_says_how_to_find_the_rank_that_hung(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(HANGS, encoding="utf-8")
    ff = [sys.executable, "-m", "fireflyer"]
    run = [*ff, "run", "-q", "--nodes", "2", "--max-restarts", "0", "--run-dir", "out", "train.py"]
    ended = subprocess.run(run, cwd=tmp_path, capture_output=True, text=True, timeout=allowed_s(60), check=False)
    assert ended.returncode == 1
    hint, where = [line for line in ended.stderr.splitlines() if line.startswith("note: ")]
    assert where == "note: where a rank hung is in out/logs/attempt-0/rank-1.stacks".replace("out", f"{tmp_path}/out")
    stacks = (tmp_path / "out/logs/attempt-0/rank-1.stacks").read_text()
    assert f'train.py", line {HANGS.splitlines().index("        time.sleep(600)") + 1} in <module>' in stacks
    assert hint.endswith("ff collectives explain out/flight")
    explain_it = [*ff, *hint.split("ff ", 1)[1].split()]
    said = subprocess.run(explain_it, cwd=tmp_path, capture_output=True, text=True, timeout=allowed_s(60), check=True)
    assert "rank 1 (node 1, host " in said.stdout.splitlines()[1]
    # it was ended by the launcher, so it could leave no dump; the other watched its process while it waited
    assert said.stdout.startswith("ASLEEP ")
    assert "has not entered allreduce #4 for " in said.stdout.splitlines()[1]
