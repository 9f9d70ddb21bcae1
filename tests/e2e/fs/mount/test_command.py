"""`ff fs mount` and `ff fs umount` as commands: what they refuse, and the figures of a mount."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.support.fs.clusters.local_cluster import LocalCluster
from tests.support.fs.mounts.mounting import mounted, needs_fuse
from tests.support.patience import allowed_s

pytestmark = [needs_fuse, pytest.mark.slow, pytest.mark.processes, pytest.mark.timeout(300)]
FF = [sys.executable, "-P", "-m", "fireflyer", "fs"]
LIMIT_S = 60.0
Figures = dict[tuple[str, str], float]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    cluster = LocalCluster(tmp_path_factory.mktemp("cluster"))
    cluster.ff("up", "--detach", "--nodes", "1", "--replicas", "1", "--targets-per-node", "1", "--relaxed")
    cluster.wait(cluster.whole)
    yield cluster
    cluster.close()


def _in_a_namespace(script: str, place: Path, cluster: LocalCluster) -> str:
    """What it printed; mounts that it made are gone."""
    command = ["unshare", "--mount", "--propagation", "private", "sh", "-c", script, "sh"]
    environment = {**os.environ, "FF": " ".join(FF), "PYTHON": sys.executable, "LC_ALL": "C"}
    done = subprocess.run(
        [*command, str(place), str(cluster.directory)],
        capture_output=True, text=True, timeout=allowed_s(120), check=False, env=environment,
    )  # fmt: skip
    return done.stdout


def test_other_file_systems_are_not_unmounted(cluster: LocalCluster, tmp_path: Path) -> None:
    script = """
        mount -t tmpfs other "$1" && touch "$1/kept"
        $FF umount "$1" 2>&1; $FF umount --lazy "$1" 2>&1
        cd "$1" && $FF umount "" 2>&1; $FF umount --lazy "" 2>&1
        ls "$1"
    """
    refused, lazily_refused, empty, lazily_empty, kept = _in_a_namespace(script, tmp_path, cluster).splitlines()
    assert (
        refused
        == lazily_refused
        == (f"error: {tmp_path} is not a mount of `ff fs mount`; `mount -t fuse.fireflyer` lists them")
    )
    assert empty == lazily_empty == "error: PLACE is an empty string; give the directory of a mount"
    assert kept == "kept"


def test_a_mount_is_not_covered_by_another_nor_waited_for_and_one_that_was_killed_is_unmounted(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    place = tmp_path / "a place"
    place.mkdir()
    (tmp_path / "link").symlink_to(place)
    script = """
        process=
        trap 'umount -l "$1" 2>/dev/null; [ -z "$process" ] || kill -9 "$process" 2>/dev/null' EXIT
        $FF mount "$1" --dir "$2" -d >/dev/null || exit 1
        timeout 60 $FF mount "$1" --dir "$2" 2>&1
        process=$($PYTHON -c 'import os, sys
print(os.getxattr(sys.argv[1], "user.fireflyer.process").split()[0].decode())' "$1")
        kill -STOP "$process"
        timeout 60 $FF mount "$1" --dir "$2" 2>&1
        timeout 60 $FF umount "$1" 2>&1
        kill -9 "$process"; while kill -0 "$process" 2>/dev/null; do :; done
        $FF mount "$1" --dir "$2" 2>&1
        $FF umount "$(dirname "$1")/link" && $FF umount "$1" 2>&1
    """
    covering, standing, no_answer, dead, unmounted, nothing = _in_a_namespace(script, place, cluster).splitlines()
    assert covering == standing == dead
    assert "is mounted by `ff fs mount` already, or its mount process has died" in covering
    assert "does not answer; end it" in no_answer
    assert unmounted == f"{tmp_path}/link is unmounted."
    assert "is not a mount of `ff fs mount`" in nothing


def test_a_mount_that_another_namespace_has_too_is_ended_all_the_same(cluster: LocalCluster, tmp_path: Path) -> None:
    """A container or a service that starts while it is mounted: the kernel tells its process nothing then."""
    script = """
        trap 'umount -l "$1" 2>/dev/null; kill $other 2>/dev/null' EXIT
        $FF mount "$1" --dir "$2" -d >/dev/null && echo stored > "$1/stored" || exit 1
        unshare --mount --propagation private sh -c 'echo; exec sleep 300' > "$2/other" & other=$!
        while [ ! -s "$2/other" ]; do :; done
        timeout 100 $FF umount "$1" 2>&1
    """
    assert _in_a_namespace(script, tmp_path, cluster) == f"{tmp_path} is unmounted.\n"
    assert cluster.ff("cat", "/stored") == "stored\n"


@pytest.mark.parametrize("writes", ["before", "after"])
def test_a_mount_under_which_the_cluster_was_ended_and_started_is_unmounted(
    cluster: LocalCluster, tmp_path: Path, writes: str
) -> None:
    """It ends by itself, leaves no mount and no process, and all that was written is there."""
    script = f"""
        outside="nsenter --mount=/proc/{os.getpid()}/ns/mnt --"
        process=
        trap 'umount -l "$1" 2>/dev/null; [ -z "$process" ] || kill -9 "$process" 2>/dev/null' EXIT
        $FF mount "$1" --dir "$2" -d >/dev/null && echo before > "$1/before" || exit 1
        process=$($PYTHON -c 'import os, sys
print(os.getxattr(sys.argv[1], "user.fireflyer.process").split()[0].decode())' "$1")
        $outside $FF down --dir "$2" >/dev/null && $outside $FF up --dir "$2" -d >/dev/null || exit 1
        [ {writes} = before ] || echo after > "$1/after"
        timeout 100 $FF umount "$1" 2>&1
        while kill -0 "$process" 2>/dev/null; do :; done
        grep -c " $1 " /proc/self/mountinfo
    """
    place = tmp_path / "place"
    place.mkdir()
    assert _in_a_namespace(script, place, cluster).splitlines() == [f"{place} is unmounted.", "0"]
    cluster.wait(cluster.whole)
    assert cluster.ff("cat", f"/{writes}") == f"{writes}\n"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--metrics", "here"], "is not understood; write it like"),
        (["--metrics", "192.0.2.1:1"], "for metrics: this machine does not have that address"),
        (["--log", "file"], "--log needs --detach"),
    ],
)
def test_what_is_refused_mounts_nothing(cluster: LocalCluster, tmp_path: Path, options: list[str], said: str) -> None:
    assert said in cluster.ff("mount", str(tmp_path), *options, code=2)
    assert not os.path.ismount(tmp_path)


def test_no_place_is_refused(cluster: LocalCluster) -> None:
    assert "PLACE is an empty string" in cluster.ff("mount", "", code=2)


def _figures(address: str) -> Figures:
    with urllib.request.urlopen(address, timeout=LIMIT_S) as answer:
        text = answer.read().decode()
    return {
        (sample.name.removeprefix("fireflyer_mount_"), next(iter(sample.labels.values()), "")): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def _until(address: str, true: Callable[[Figures], bool]) -> Figures:
    until_s = time.monotonic() + LIMIT_S
    while not true(found := _figures(address)):
        assert time.monotonic() < until_s, found
    return found


def test_figures_of_a_mount(cluster: LocalCluster, tmp_path: Path) -> None:
    command = [*FF, "mount", str(tmp_path), "--dir", str(cluster.directory), "--metrics", "127.0.0.1:0"]
    with mounted(command, str(tmp_path)) as mount:
        assert mount.process.stdout is not None
        name, address = mount.process.stdout.readline().split()
        assert name == "metrics:"
        before = _figures(address)
        path = Path(mount.path, "counted")  # which is not there yet: the kernel looks, then creates
        path.write_bytes(bytes(3_000_000))
        assert len(path.read_bytes()) == 3_000_000
        for _ in range(3):
            assert not Path(mount.path, "absent").exists()
        with pytest.raises(OSError, match="No data"):
            os.getxattr(path, "user.absent")
        with open(path, "rb") as one, open(path, "rb"), os.scandir(mount.path) as listing:
            next(listing)
            fcntl.flock(one, fcntl.LOCK_EX)
            waiting = subprocess.Popen(mount.command(["flock", "counted", "true"]))
            found = _until(address, lambda figures: figures["under_way", "flock"] == 1)
            assert found["open_files", ""] == 3
            assert found["inodes", ""] == found["open_directories", ""] == 1
            fcntl.flock(one, fcntl.LOCK_UN)
            assert waiting.wait(LIMIT_S) == 0
        after = _until(address, lambda figures: figures["open_files", ""] == figures["open_directories", ""] == 0)
    assert after["under_way", "flock"] == after["inodes", ""] == after["dirty_bytes", ""] == 0
    assert after["written_bytes_total", ""] - before["written_bytes_total", ""] == 3_000_000
    assert after["read_bytes_total", ""] - before["read_bytes_total", ""] == 3_000_000
    assert after["refusals_total", "ENOENT"] - before.get(("refusals_total", "ENOENT"), 0) == 4
    assert after["refusals_total", "ENODATA"] == 1
    assert after["requests_total", "create"] == 1
    assert after["requests_total", "write"] == 3
    assert after["requests_total", "release"] == after["requests_total", "open"] + 1
