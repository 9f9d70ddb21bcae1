"""Checkpoints while one of three storage nodes is absent: saves commit and loads give the same bytes all the same."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from typing import Any, Final

import pytest
import torch
from tests.support.checkpoints.places import disconnected
from tests.support.checkpoints.ranks import Ranks
from tests.support.fs.clusters.local_cluster import LocalCluster, wait_gone

from fireflyer.base.units import KIB, MIB
from fireflyer.checkpoint import State, dcp, verify

__all__ = ["disconnected"]

pytestmark = [pytest.mark.processes, pytest.mark.slow, pytest.mark.timeout(600)]

SIZES: Final = (1, 5 * KIB, 300 * KIB + 7, 4 * MIB, 20 * MIB + 1)
"""Of the shared tensors, bytes: less than a block, of one read, of several chunks; most end inside a block."""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    """Three nodes, each chain on two of them."""
    cluster = LocalCluster(tmp_path_factory.mktemp("cluster"))
    try:
        cluster.ff("up", "--detach", "--relaxed", "--failure-timeout", "2", "--targets-per-node", "2")
        yield cluster
    finally:
        cluster.close()


@contextlib.contextmanager
def absent(cluster: LocalCluster, number: int) -> Iterator[None]:
    """The process of the node is killed at the beginning, and none starts in its place before the end: what it is
    configured by is not there. Afterwards the file system has all replicas."""
    cluster.wait(cluster.whole)
    config = cluster.directory / f"node-{number}" / "storage.toml"
    aside = config.with_suffix(".aside")
    pid = cluster.process(f"node-{number}")
    config.rename(aside)
    try:
        os.kill(pid, signal.SIGKILL)
        wait_gone([pid])
        yield
        cluster.wait(lambda status: _lacks_one(status["summary"]))
    finally:
        aside.rename(config)
    cluster.wait(cluster.whole)


def _lacks_one(summary: dict[str, Any]) -> bool:
    """Also the chains of the node know that they lack a replica."""
    return bool(summary["alive"] == summary["nodes"] - 1 == 2 and summary["whole"] < summary["chains"])


def tensors(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    made = {f"t{size}": torch.randint(0, 255, (size,), dtype=torch.uint8, generator=generator) for size in SIZES}
    return {**made, "matrix": torch.rand(700, 333, generator=generator)}


def own_of(rank: int, step: int) -> dict[str, torch.Tensor]:
    return {"rng": torch.full((600,), 10 * step + rank, dtype=torch.int64)}


def check(found: dict[str, Any], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


def save(url: str, step: int) -> None:
    """By two ranks, each of which writes its part."""
    ranks = Ranks(url, 2, None, attempt=step)
    names = ranks.together(
        lambda ours: ours.save(
            step, State(tensors(step), own_of(ours.rank, step), {"step": step}), blocking=True
        ).result()
    )
    ranks.close()
    assert names == [f"step-{step:08d}"] * 2


def check_load(url: str, step: int) -> None:
    ranks = Ranks(url, 2, None, attempt=10 + step)
    for rank, restored in enumerate(ranks.together(lambda ours: ours.restore())):
        assert restored is not None
        assert (restored.step, restored.passed_over) == (step, ())
        check(restored.shared, tensors(step))
        assert restored.own is not None
        check(restored.own, own_of(rank, step))
    ranks.close()


def test_ranks_save_and_load_without_a_node_and_load_without_another_one(cluster: LocalCluster) -> None:
    url = cluster.url("/ckpt/run")
    with absent(cluster, 1):
        save(url, 1)
        check_load(url, 1)
    with absent(cluster, 2):
        check_load(url, 1)
        save(url, 2)
    check_load(url, 2)
    assert [(info.step, info.problem) for info in verify(url)] == [(2, None), (1, None)]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # one process saves, and DCP says so
def test_dcp_saves_and_loads_without_a_node_and_loads_without_another_one(cluster: LocalCluster) -> None:
    url, state = cluster.url("/ckpt/dcp"), {"model": tensors(3), "number": 7}

    def check_loaded() -> None:
        found: dict[str, Any] = {
            "model": {name: torch.zeros_like(one) for name, one in tensors(3).items()},
            "number": 0,
        }
        dcp.load(found, f"{url}/step-00000003", no_dist=True)
        check(found["model"], tensors(3))
        assert found["number"] == 7

    with absent(cluster, 3):
        dcp.save(state, url, step=3, no_dist=True)
        check_loaded()
    with absent(cluster, 1):
        check_loaded()
    assert [(info.step, info.problem) for info in verify(url)] == [(3, None)]
