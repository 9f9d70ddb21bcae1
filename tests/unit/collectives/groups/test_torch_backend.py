"""`import torch` learns of the backend, at almost no price, and survives when that fails; what its parts do alone."""

from __future__ import annotations

import subprocess
import sys
from contextlib import AbstractContextManager
from importlib.metadata import entry_points

import pytest
import torch
import torch.distributed as dist
from tests.support.collectives.thread_device import ThreadCopies
from tests.support.patience import allowed_s

from fireflyer.collectives.devices.copies import CopyEvent
from fireflyer.collectives.torch.completer import Completer
from fireflyer.collectives.torch.functions import barrier_failure
from fireflyer.collectives.torch.work import GroupWork
from fireflyer.torch_backend import register


def test_torch_loads_nothing_else_of_the_package() -> None:
    code = (
        "import sys, torch.distributed as d; print(d.Backend.HFREDUCE, *(m for m in sys.modules if 'fireflyer.' in m))"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=allowed_s(100), check=True
    )
    assert ended.stdout.split() == ["hfreduce", "fireflyer.torch_backend"]


def test_the_entry_point_is_what_the_package_declares() -> None:
    (entry,) = (entry for entry in entry_points(group="torch.backends") if entry.name == "fireflyer")
    assert entry.load() is register


def test_a_failure_to_register_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> bool:
        raise OSError("a library is missing")

    monkeypatch.setattr(dist, "is_available", fail)
    with pytest.warns(RuntimeWarning, match="could not register the backend hfreduce: a library is missing"):
        register()


@pytest.mark.parametrize(
    ("missing", "blamed", "name_all", "begin", "end"),
    [
        ([1], -1, False, "Rank 1 failed to pass monitoredBarrier: late; ", "; rank 1 has not called it"),
        ([1, 3], 3, False, "Rank 1 failed to pass monitoredBarrier: late; ", "; ranks 1, 3 have not called it"),
        ([1, 3], -1, True, "Ranks 1, 3 failed to pass monitoredBarrier: late; ", "; ranks 1, 3 have not called it"),
        ([], 2, True, "Rank 2 failed to pass monitoredBarrier: late", "late"),
        ([], -1, False, "late; no rank that this one can see is missing", "see the other ranks' errors"),
        ([*range(1, 100)], -1, True, "Ranks 1, 2, ", "64, ... have not called it"),
    ],
)
def test_a_monitored_barrier_fails_in_the_words_of_torch_and_ours(
    missing: list[int], blamed: int, name_all: bool, begin: str, end: str
) -> None:
    text = barrier_failure(missing, blamed, "late", name_all=name_all)
    assert text.startswith(begin)
    assert text.endswith(end)


class BrokenDevice(ThreadCopies):
    """Fails at whatever a work asks of it."""

    def aside(self) -> AbstractContextManager[object]:
        raise OSError("the device is gone")

    def here(self) -> CopyEvent:
        raise OSError("the device is gone")


@pytest.mark.parametrize("ended", [False, True])
def test_a_future_whose_device_fails_fails_too(ended: bool) -> None:
    """DDP waits without limit for one that nobody completes."""
    completer = Completer("test")
    work = GroupWork(completer, [], [torch.ones(1)])
    if ended:
        assert work.wait()
    work._place = BrokenDevice()
    try:
        with pytest.raises(RuntimeError, match="the device is gone"):
            work.get_future().wait()
    finally:
        completer.stop()
