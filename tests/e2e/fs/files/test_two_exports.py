"""Two commands that make the same directory at once: real processes, in a directory and in a cluster."""

from __future__ import annotations

import secrets
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import save_file
from tests.support.checkpoints.states import save_all
from tests.support.fs.clusters.local_cluster import LocalCluster
from tests.support.patience import allowed_s

from fireflyer.base.units import SECOND
from fireflyer.checkpoint import describe, open_storage
from fireflyer.cli.main import main
from fireflyer.fs.client.files import disk as disk_of_3fs

pytestmark = pytest.mark.processes

Capture = pytest.CaptureFixture[str]
STOPS_BEFORE_ITS_END = """
import sys
from fireflyer.checkpoint import exporting, fresh, importing
from fireflyer.cli.main import main

def at_the_end(name):
    of = exporting if name == "commit" else importing
    done = getattr(of, name)
    def wait(*arguments):
        print("all is written", flush=True)
        sys.stdin.readline()
        done(*arguments)
    setattr(of, name, wait)

at_the_end("commit")
at_the_end("commit_manifest")
sys.exit(main(["ckpt", *sys.argv[1:]]))
"""


@contextmanager
def writing(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    """`ff ckpt` that has written everything, and ends what it does when it gets a line."""
    command = [sys.executable, "-c", STOPS_BEFORE_ITS_END, *arguments]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "all is written\n"
            yield process
        finally:
            process.kill()


def ended(process: subprocess.Popen[str]) -> int:
    process.communicate("go on\n", timeout=allowed_s(60))
    return process.returncode


@pytest.fixture(params=["local", "3FS"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Of a directory that nobody has made yet."""
    if request.param == "local":
        return str(tmp_path / "place")
    cluster: LocalCluster = request.getfixturevalue("shared_cluster")
    return cluster.url(f"/two-{secrets.token_hex(8)}")


def names(place: str) -> list[str]:
    disk, root, _ = open_storage(place)
    return disk.list(root)


def end_newest_session(place: str, request: pytest.FixtureRequest) -> None:
    """As a minute without a heartbeat does."""
    if place.startswith("ff://"):
        cluster: LocalCluster = request.getfixturevalue("shared_cluster")
        cluster.ff("admin", "end-session", str(max(clients(cluster))))


def test_the_second_of_two_exports_is_refused_and_the_first_one_ends_undisturbed(
    place: str, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_of_3fs, "_HOLDER_NS", SECOND)
    save_all(str(tmp_path / "run"), [10], disk=None)
    line = ("export", str(tmp_path / "run"), f"{place}/model")
    with writing(*line) as first:
        assert main(["ckpt", *line]) == 1
        err = capsys.readouterr().err
        assert err.endswith(f"another process is writing {place}/model; wait for it, or choose another directory\n")
        assert err.count("\n") == 1
        assert main(["ckpt", *line[:-1], f"{place}/other"]) == 0, "another name is free"
        assert ended(first) == 0
    assert names(place) == ["model", "other"]
    assert main(["ckpt", "import", f"{place}/model", f"{place}/again", "--step", "3"]) == 0
    assert main(["ckpt", *line]) == 2
    assert f"{place}/model exists already" in capsys.readouterr().err


def test_the_second_of_two_imports_is_refused_and_the_first_one_ends_undisturbed(
    place: str, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_of_3fs, "_HOLDER_NS", SECOND)
    save_file({"a": torch.ones(3)}, tmp_path / "a.safetensors")
    line = ("import", str(tmp_path / "a.safetensors"), place, "--step", "3")
    with writing(*line) as first:
        assert main(["ckpt", *line]) == 1
        assert f"another process is writing {place}/step-00000003;" in capsys.readouterr().err
        assert main(["ckpt", *line[:-1], "4"]) == 0, "another step is free"
        assert ended(first) == 0
    assert [(info.step, info.problem) for info in describe(place)] == [(4, None), (3, None)]
    assert names(place) == ["step-00000003", "step-00000004"]


def test_a_job_that_starts_beside_an_import_leaves_it_alone_and_removes_what_a_killed_one_has_left(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    monkeypatch.setattr(disk_of_3fs, "_HOLDER_NS", SECOND)
    save_file({"a": torch.ones(3)}, tmp_path / "a.safetensors")
    line = ("import", str(tmp_path / "a.safetensors"), place, "--step", "3")
    with writing(*line) as first:
        save_all(place, [10], disk=None)
        assert ended(first) == 0
    assert [(info.step, info.problem) for info in describe(place)] == [(10, None), (3, None)]
    with writing(*line[:-1], "4"):
        pass
    end_newest_session(place, request)
    assert [name for name in names(place) if name.startswith(".tmp-")]
    save_all(place, [20], disk=None)
    assert not [name for name in names(place) if name.startswith((".tmp-", ".lock-"))]


def test_what_a_killed_export_leaves_is_removed_by_the_next_one(
    place: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """In a cluster the next one waits until the session of the killed one is over."""
    save_all(str(tmp_path / "run"), [10], disk=None)
    line = ("export", str(tmp_path / "run"), f"{place}/model")
    storage = open_storage(place)  # before the other one opens its session
    with writing(*line) as first:
        first.send_signal(signal.SIGKILL)
        first.wait(allowed_s(60))
    assert len(names(place)) == 2, "its lock and its files"
    end_newest_session(place, request)
    assert main(["ckpt", *line]) == 0
    assert names(place) == ["model"]
    assert storage.disk.list(f"{storage.root}/model") == ["model.safetensors"]


@pytest.mark.slow
def test_a_command_that_waits_for_another_one_ends_at_ctrl_c(shared_cluster: LocalCluster, tmp_path: Path) -> None:
    place = shared_cluster.url(f"/two-{secrets.token_hex(8)}")
    save_file({"a": torch.ones(3)}, tmp_path / "a.safetensors")
    line = ("import", str(tmp_path / "a.safetensors"), place, "--step", "3")
    with writing(*line) as first:
        before = clients(shared_cluster)
        command = [sys.executable, "-P", "-m", "fireflyer", "ckpt", *line]
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as second:
            shared_cluster.wait(lambda _: clients(shared_cluster) > before)
            second.send_signal(signal.SIGINT)
            _, err = second.communicate(timeout=allowed_s(30))
        assert (second.returncode, err) == (130, "\nerror: interrupted\n")
        assert ended(first) == 0
    assert names(place) == ["step-00000003"]


def clients(cluster: LocalCluster) -> set[int]:
    """Numbers of the sessions of programs that read and write checkpoints."""
    sessions: list[dict[str, Any]] = msgspec.json.decode(cluster.ff("admin", "sessions", "--json"))
    return {one["client"] for one in sessions if one["name"] == "checkpoint"}
