"""Random calls by several users: the same results as on a local file system, and the same tree in the end."""

from __future__ import annotations

import itertools
from contextlib import ExitStack
from pathlib import Path
from typing import Final

import pytest
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test
from tests.support.campaigns.shards import campaign
from tests.support.fs.clusters.local_cluster import LocalCluster
from tests.support.posix.both import Both
from tests.support.posix.client import ClientPlace
from tests.support.posix.core import CorePlace
from tests.support.posix.local import LocalPlace
from tests.support.posix.machine import FileMachine
from tests.support.posix.places import Place
from tests.support.posix.real import SeveralMounts, mounted_place

_tops: Final = itertools.count(1)
TURNS: Final = [*campaign(expected_s=40), pytest.mark.rotates]


def run(
    model: LocalPlace,
    subject: Place,
    examples: int,
    steps: int,
    *,
    times: bool = False,
    close_to_open: bool = False,
) -> None:
    class Machine(FileMachine):
        def __init__(self) -> None:
            both = Both(model, subject, times=times)
            super().__init__(both, f"/random-{next(_tops)}", close_to_open=close_to_open)

    limits = settings(max_examples=examples, stateful_step_count=steps, deadline=None, print_blob=False)
    run_state_machine_as_test(Machine, settings=limits)


@pytest.fixture
def model(local: LocalPlace | str) -> LocalPlace:
    if isinstance(local, str):
        pytest.skip(f"no file system to compare with: {local}")
    return local


def test_a_few(model: LocalPlace) -> None:
    run(model, CorePlace(), examples=30, steps=40)


@pytest.mark.slow
@pytest.mark.parametrize("examples", [30, pytest.param(200, marks=campaign(expected_s=30))])
def test_many(model: LocalPlace, examples: int) -> None:
    run(model, CorePlace(), examples=examples, steps=80)


@pytest.mark.slow
def test_times(model: LocalPlace) -> None:
    """With every change of a time looked at."""
    run(model, CorePlace(), examples=20, steps=60, times=True)


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("examples", [12, pytest.param(100, marks=TURNS)])
def test_on_a_mount(model: LocalPlace, mount: LocalPlace, examples: int) -> None:
    run(model, mount, examples=examples, steps=50)


@pytest.mark.slow
@pytest.mark.processes
def test_on_several_mounts(model: LocalPlace, cluster: LocalCluster, tmp_path: Path) -> None:
    """Users who work through different ones find, when they open it, what the others have closed."""
    with ExitStack() as stack:
        mounts = [
            stack.enter_context(mounted_place(cluster, str(tmp_path / str(number)), kept=False)) for number in range(3)
        ]
        run(model, SeveralMounts(mounts), examples=10, steps=50, close_to_open=True)


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("examples", [10, pytest.param(100, marks=TURNS)])
def test_through_several_clients(model: LocalPlace, client: ClientPlace, examples: int) -> None:
    """What one has closed, the others find when they open it."""
    run(model, client, examples=examples, steps=50, close_to_open=True)
