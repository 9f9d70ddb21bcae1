"""How long a checkpoint of 3FS waits for data that no storage node serves: commands less long than jobs."""

from __future__ import annotations

from typing import Any

import pytest
from click.testing import CliRunner

from fireflyer.base.units import SECOND
from fireflyer.checkpoint import storage
from fireflyer.cli.checkpoints.command import PATIENCE_NS, command


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The patience of each connection that was asked for; none is made."""
    found: list[int] = []

    def connect(_target: str, *, options: Any, **_: Any) -> None:
        found.append(options.chunks.timeout_ns)

    monkeypatch.setattr("fireflyer.fs.connect", connect)
    monkeypatch.setattr(storage, "_disks", {})
    monkeypatch.setattr(storage, "_patience_ns", None)
    return found


def test_a_job_waits_five_minutes(asked: list[int]) -> None:
    storage.open_storage("ff://%2Fnowhere/ck")
    assert asked == [300 * SECOND]


def test_a_command_waits_one(asked: list[int]) -> None:
    CliRunner().invoke(command, ["ls", "ff://%2Fnowhere/ck"])
    assert asked == [PATIENCE_NS]
    assert PATIENCE_NS == 60 * SECOND


def test_an_import_waits_as_jobs_do(asked: list[int]) -> None:
    CliRunner().invoke(command, ["import", "ff://%2Fnowhere/source", "ff://%2Fnowhere/ck", "--step", "1"])
    assert asked[:1] == [300 * SECOND]
